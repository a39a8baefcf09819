//! A client against the responder, with an engine that samples token 7.

use std::cell::RefCell;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::UNIX_EPOCH;

use pie_driver::{
    Batch, BatchError, Counts, DIRECTIONS, DeviceTimes, Event, Job, Media, Note, Responder,
    WarmUpError, status,
};
use pie_planner::{Layout, Limits, Outputs, Planner, Vision, WARM_UP_ADAPTER};
use pie_ring::{Client, ClientConfig, ExitGuard, RegionLayout, Server, ServerConfig, Wait};
use pie_wire::{
    AdapterBinding, AdapterOp, AdapterRequest, ArchivedResponsePayload, CopyDirection, CopyRequest,
    CopyResource, ForwardRequest, Frame, NativeSlice, Payload, Reply, Sampler,
};

const LIMITS: Limits = Limits {
    page_size: 16,
    total_pages: 32,
    vocab_size: 100,
    max_positions: 256,
    row_pages: 16,
    max_requests: 8,
    chunk_tokens: 32,
    max_slots: 8,
    reply_bytes: 1 << 16,
};
const HOST_PAGES: u32 = 4;
/// Two by two patches of one number are a row.
const VISION: Vision = Vision {
    patch_values: 1,
    merge_size: 2,
    max_side: 8,
};

/// What the client saw.
#[derive(Debug, PartialEq)]
enum Answer {
    Status(i32),
    Aborted,
    Tokens(Vec<Vec<u32>>),
}

fn decode(bytes: &[u8]) -> Answer {
    match pie_wire::decode_reply(bytes).expect("a valid reply") {
        Reply::Tokens(tokens) => Answer::Tokens(tokens.iter().map(|token| vec![token]).collect()),
        Reply::Frame(frame) if frame.aborted => Answer::Aborted,
        Reply::Frame(frame) => match &frame.payload {
            ArchivedResponsePayload::Status(status) => Answer::Status(status.status.to_native()),
            ArchivedResponsePayload::Forward(forward) => {
                let tokens = forward.tokens.native();
                let range = |pair: &[u32]| tokens[pair[0] as usize..pair[1] as usize].to_vec();
                Answer::Tokens(
                    forward
                        .tokens_indptr
                        .native()
                        .windows(2)
                        .map(range)
                        .collect(),
                )
            }
        },
    }
}

fn encode(payload: Payload) -> Vec<u8> {
    let frame = Frame {
        driver_id: 3,
        payload,
    };
    let mut bytes = vec![0; pie_wire::request_len(&frame).unwrap()];
    pie_wire::encode_request(&frame, &mut bytes).unwrap();
    bytes
}

/// One request per entry: its number of tokens; page r holds request r. One greedy sampler each.
fn forward(tokens: &[u32]) -> ForwardRequest {
    let ends = |count: fn(u32) -> u32| -> Vec<u32> {
        let sums = tokens.iter().scan(0, |sum, &n| {
            *sum += count(n);
            Some(*sum)
        });
        [0].into_iter().chain(sums).collect()
    };
    let samplers = tokens.iter().filter(|&&n| n > 0).count();
    ForwardRequest {
        token_ids: tokens.iter().flat_map(|&n| 0..n).collect(),
        position_ids: tokens.iter().flat_map(|&n| 0..n).collect(),
        qo_indptr: ends(|n| n),
        kv_page_indices: (0..tokens.len() as u32).collect(),
        kv_page_indptr: (0..=tokens.len() as u32).collect(),
        kv_last_page_lens: tokens.iter().map(|&n| n.max(1)).collect(),
        sampling_indices: tokens.iter().filter(|&&n| n > 0).map(|&n| n - 1).collect(),
        sampling_indptr: ends(|n| n.min(1)),
        samplers: vec![
            Sampler::TopP {
                temperature: 0.0,
                p: 1.0
            };
            samplers
        ],
        sampler_indptr: ends(|n| n.min(1)),
        adapter_bindings: vec![AdapterBinding::NONE; tokens.len()],
        ..ForwardRequest::default()
    }
}

fn run(batch: &mut Batch) {
    let mut block = vec![0_u64; Layout::new(&LIMITS).bytes().div_ceil(8)];
    let block = bytemuck::cast_slice_mut(&mut block);
    while batch.stage(block).unwrap().is_some() {
        sample(batch, block);
    }
}

/// Answers the slots of the staged pass.
fn sample(batch: &mut Batch, block: &mut [u8]) {
    while let Some(group) = batch.stage_slots(block).unwrap() {
        let outputs = Outputs {
            tokens: &vec![7; group.len()],
            ..Outputs::default()
        };
        batch.put_outputs(&outputs).unwrap();
    }
}

/// Sends `requests` in order to a responder with `host_pages` and `states`; the engine does what `serve` says.
fn converse_with(
    (host_pages, states): (u32, u32),
    requests: &[Vec<u8>],
    serve: impl Fn(Job),
) -> (Vec<Answer>, Vec<Note>) {
    let planner = Planner::new(LIMITS, 1)
        .with_vision(VISION)
        .with_states(states);
    converse_by(planner, host_pages, requests, serve)
}

/// Of a ring of its own.
fn config() -> ServerConfig {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("/pie_serve_test_{}_{number}", std::process::id());
    let abort = pie_wire::abort_frame(0).to_vec();
    ServerConfig::new(&name, pie_wire::SCHEMA_HASH, abort)
}

fn converse_by(
    planner: Planner,
    host_pages: u32,
    requests: &[Vec<u8>],
    serve: impl Fn(Job),
) -> (Vec<Answer>, Vec<Note>) {
    let mut config = config();
    let name = config.name.clone();
    config.layout = RegionLayout::new(2, 1 << 16, 1 << 16).unwrap();
    let mut ring = Server::create(&config, &ExitGuard::inert()).unwrap();
    let client = Client::open(&name, pie_wire::SCHEMA_HASH, ClientConfig::default()).unwrap();
    let stop = ring.stop_handle();
    let responder = Responder::new(planner, host_pages, Wait::Park);
    let mut noted = Vec::new();
    let answers = thread::scope(|scope| {
        let answers = scope.spawn(move || {
            let answers = requests
                .iter()
                .map(|bytes| client.call(bytes, decode).unwrap());
            let answers: Vec<Answer> = answers.collect();
            stop.stop();
            answers
        });
        loop {
            match responder.next(&mut ring).unwrap() {
                Event::Stopped => break,
                Event::Notes(notes) => noted.extend(notes),
                Event::Job(job) => serve(job),
                Event::Called => unreachable!("no thread calls"),
                Event::Step(_) | Event::Lost(_) => unreachable!("no graph path"),
            }
        }
        answers.join().unwrap()
    });
    (answers, noted)
}

/// [`converse_with`] a host pool; of the notes only the kinds.
fn converse(requests: &[Vec<u8>], serve: fn(Job)) -> (Vec<Answer>, Vec<&'static str>) {
    let (answers, notes) = converse_with((HOST_PAGES, 0), requests, serve);
    (answers, notes.iter().map(|note| note.kind).collect())
}

fn serve_all(job: Job) {
    match job {
        Job::Batch(mut batch) => {
            run(&mut batch);
            assert_eq!(batch.commit(DeviceTimes::default()), []);
        }
        Job::Copy(mut copy) => {
            assert_eq!(copy.direction(), CopyDirection::D2D);
            assert_eq!(copy.len(), 2);
            let groups: Vec<_> = copy.groups().collect();
            assert_eq!(groups, [(&[1, 2][..], &[3, 4][..])]);
            assert_eq!(copy.commit(status::OK), None);
            assert_eq!(
                copy.commit(status::FAILED),
                None,
                "a second answer is nothing"
            );
        }
        Job::Load(_) => panic!("adapters are off"),
    }
}

fn must_not_be_called(_: Job) {
    panic!("this needs no model");
}

fn copy(dir: CopyDirection, srcs: &[u32], dsts: &[u32], resource: CopyResource) -> Vec<u8> {
    encode(Payload::Copy(CopyRequest {
        dir,
        srcs: srcs.to_vec(),
        dsts: dsts.to_vec(),
        resource,
    }))
}

#[test]
fn batches_and_copies_reach_the_engine() {
    let requests = [
        encode(Payload::Forward(forward(&[1, 1]))),
        encode(Payload::Forward(forward(&[16, 0, 16, 16]))),
        copy(CopyDirection::D2D, &[1, 2], &[3, 4], CopyResource::Kv),
    ];
    let (answers, kinds) = converse(&requests, serve_all);
    let sevens = |counts: &[usize]| Answer::Tokens(counts.iter().map(|&n| vec![7; n]).collect());
    assert_eq!(
        answers,
        [
            sevens(&[1, 1]),
            sevens(&[1, 0, 1, 1]),
            Answer::Status(status::OK)
        ]
    );
    assert!(kinds.is_empty(), "{kinds:?}");
}

#[test]
fn what_needs_no_model_is_answered_alone() {
    let adapter = |op| adapter(op, 1, "");
    let mut broken = forward(&[1]);
    broken.position_ids.clear();
    let requests = [
        encode(Payload::Health),
        adapter(AdapterOp::Load),
        adapter(AdapterOp::GenerateAudio),
        copy(CopyDirection::D2D, &[], &[], CopyResource::Kv),
        copy(CopyDirection::D2D, &[1], &[], CopyResource::Kv),
        copy(CopyDirection::D2D, &[32], &[1], CopyResource::Kv),
        copy(CopyDirection::D2H, &[1], &[4], CopyResource::Kv),
        copy(CopyDirection::D2D, &[1], &[1], CopyResource::Rs),
        vec![0xA5; 1000],
        encode(Payload::Forward(broken)),
        encode(Payload::Forward(ForwardRequest::default())),
        encode(Payload::Forward(forward(&[0, 0, 0]))),
    ];
    let (answers, kinds) = converse(&requests, must_not_be_called);
    let codes = [0, 4, -1, 0, 2, 3, 3, 4, 2, 2].map(Answer::Status);
    assert_eq!(answers[..codes.len()], codes);
    let empty = [Answer::Tokens(vec![]), Answer::Tokens(vec![vec![]; 3])];
    assert_eq!(answers[codes.len()..], empty);
    let copies = ["copy"; 4];
    let expected = [&["adapter"; 2][..], &copies, &["malformed"; 2]].concat();
    assert_eq!(kinds, expected);
}

fn adapter(op: AdapterOp, adapter_id: u64, path: &str) -> Vec<u8> {
    encode(Payload::Adapter(AdapterRequest {
        op,
        adapter_id,
        path: path.to_owned(),
    }))
}

/// One token for each id, bound to it.
fn bound(ids: &[i64]) -> Vec<u8> {
    let mut request = forward(&vec![1; ids.len()]);
    for (binding, &adapter_id) in request.adapter_bindings.iter_mut().zip(ids) {
        binding.adapter_id = adapter_id;
    }
    encode(Payload::Forward(request))
}

/// Sends requests to an engine with room for two adapters: a load fails that asks for `broken`, one is dropped that
/// asks for `lost`, and adapter 3 is lost whenever it is needed.
fn converse_adapters(requests: &[Vec<u8>]) -> (Vec<Answer>, Vec<String>) {
    let planner = Planner::new(LIMITS, 1).with_adapters(2.try_into().unwrap());
    let (answers, notes) = converse_by(planner, 0, requests, |job| match job {
        Job::Load(mut load) => {
            assert!((1..i64::MAX).contains(&load.id()));
            match load.path() {
                "lost" => {}
                "broken" => assert_eq!(load.commit(status::FAILED, "it has no weights"), None),
                _ => assert_eq!(load.commit(status::OK, ""), None),
            }
        }
        Job::Batch(mut batch) => {
            if batch.next_adapters().contains(&3) {
                batch.drop_adapter(3, "it is gone").unwrap();
            }
            run(&mut batch);
            let texts = batch.commit(DeviceTimes::default());
            assert!(texts.iter().all(|note| note.kind.starts_with("adapter")));
        }
        Job::Copy(_) => panic!("there is no copy"),
    });
    (answers, notes.into_iter().map(|note| note.text).collect())
}

#[test]
fn adapters_can_be_bound_once_they_are_loaded() {
    let requests = [
        bound(&[1, -1]),
        adapter(AdapterOp::Load, 1, "broken"),
        adapter(AdapterOp::Load, 1, "lost"),
        bound(&[1, -1]),
        adapter(AdapterOp::Load, 1, "a"),
        bound(&[1, -1]),
        adapter(AdapterOp::Load, 1, "broken"),
        adapter(AdapterOp::Load, i64::MAX as u64 - 1, "b"),
        adapter(AdapterOp::Load, 3, "c"),
        bound(&[3, 1, i64::MAX - 1, 2, i64::MAX, -1, 0]),
    ];
    let (answers, _) = converse_adapters(&requests);
    let sevens = |counts: &[usize]| Answer::Tokens(counts.iter().map(|&n| vec![7; n]).collect());
    let expected = [
        sevens(&[0, 1]),
        Answer::Status(status::FAILED),
        Answer::Aborted,
        sevens(&[0, 1]),
        Answer::Status(status::OK),
        sevens(&[1, 1]),
        Answer::Status(status::FAILED),
        Answer::Status(status::OK),
        Answer::Status(status::OK),
        sevens(&[0, 1, 1, 0, 0, 1, 0]),
    ];
    assert_eq!(answers, expected);
}

/// A ring with two slots, and a responder for an engine with adapters.
fn with_adapters() -> (Server, Arc<Client>, Responder) {
    let mut config = config();
    config.layout = RegionLayout::new(2, 1 << 16, 1 << 16).unwrap();
    let ring = Server::create(&config, &ExitGuard::inert()).unwrap();
    let client = Client::open(&config.name, pie_wire::SCHEMA_HASH, ClientConfig::default());
    let planner = Planner::new(LIMITS, 1).with_adapters(2.try_into().unwrap());
    let responder = Responder::new(planner, 0, Wait::Park);
    (ring, Arc::new(client.unwrap()), responder)
}

fn call(client: &Arc<Client>, request: Vec<u8>) -> thread::JoinHandle<Answer> {
    let client = Arc::clone(client);
    thread::spawn(move || client.call(&request, decode).unwrap())
}

fn next_batch(ring: &mut Server, responder: &Responder) -> Batch {
    match responder.next(ring).unwrap() {
        Event::Job(Job::Batch(batch)) => batch,
        _ => panic!("a batch"),
    }
}

/// While an adapter is read the engine serves others, and may answer the load at any time.
#[test]
fn a_load_that_ends_within_a_batch_is_known_behind_it() {
    let (mut ring, client, responder) = with_adapters();
    let loading = call(&client, adapter(AdapterOp::Load, 1, "a"));
    let Event::Job(Job::Load(mut load)) = responder.next(&mut ring).unwrap() else {
        panic!("a load")
    };
    let early = call(&client, bound(&[1, -1]));
    let mut batch = next_batch(&mut ring, &responder);
    assert_eq!(load.commit(status::OK, ""), None);
    assert_eq!(loading.join().unwrap(), Answer::Status(status::OK));
    run(&mut batch);
    let notes = batch.commit(DeviceTimes::default());
    assert_eq!(notes.len(), 1, "what was planned before is not bound");
    assert_eq!(early.join().unwrap(), Answer::Tokens(vec![vec![], vec![7]]));
    let late = call(&client, bound(&[1, -1]));
    let mut batch = next_batch(&mut ring, &responder);
    assert_eq!(batch.next_adapters(), [1]);
    run(&mut batch);
    assert_eq!(batch.commit(DeviceTimes::default()), []);
    assert_eq!(late.join().unwrap(), Answer::Tokens(vec![vec![7]; 2]));
}

/// The same of a batch that fails, and of one that is dropped.
#[test]
fn a_load_that_ends_within_a_lost_batch_is_known_behind_it() {
    let (mut ring, client, responder) = with_adapters();
    for id in [1, 2] {
        let loading = call(&client, adapter(AdapterOp::Load, id, "a"));
        let Event::Job(Job::Load(mut load)) = responder.next(&mut ring).unwrap() else {
            panic!("a load")
        };
        let lost = call(&client, bound(&[-1]));
        let mut batch = next_batch(&mut ring, &responder);
        assert_eq!(load.commit(status::OK, ""), None);
        if id == 1 {
            batch.fail();
        }
        drop(batch);
        assert_eq!(lost.join().unwrap(), Answer::Aborted);
        assert_eq!(loading.join().unwrap(), Answer::Status(status::OK));
        let served = call(&client, bound(&[id as i64]));
        let batch = next_batch(&mut ring, &responder);
        assert_eq!(batch.next_adapters(), [id as i64]);
        drop(batch);
        served.join().unwrap();
    }
}

/// Requests go on while a load is open, and a thread that has read an adapter calls.
#[test]
fn a_call_comes_between_requests() {
    for wait in [Wait::Park, Wait::Spin] {
        let (mut ring, client, _) = with_adapters();
        let responder = Responder::new(Planner::new(LIMITS, 1), 0, wait);
        let waker = ring.waker();
        let caller = thread::spawn({
            let (waker, client) = (waker.clone(), Arc::clone(&client));
            move || {
                let health = encode(Payload::Health);
                let answer = client.call(&health, decode).unwrap();
                waker.wake();
                answer
            }
        });
        assert!(matches!(responder.next(&mut ring).unwrap(), Event::Called));
        assert_eq!(caller.join().unwrap(), Answer::Status(status::OK));
        let before = call(&client, encode(Payload::Forward(forward(&[1]))));
        drop(next_batch(&mut ring, &responder));
        // A server that spins may owe a wake until it comes back.
        assert!(ring.poll().is_none());
        before.join().unwrap();
        // It comes before the requests that wait, and once.
        waker.wake();
        waker.wake();
        let waiting = call(&client, encode(Payload::Forward(forward(&[1]))));
        assert!(matches!(responder.next(&mut ring).unwrap(), Event::Called));
        drop(next_batch(&mut ring, &responder));
        assert!(ring.poll().is_none());
        waiting.join().unwrap();
        ring.stop_handle().stop();
        assert!(matches!(responder.next(&mut ring).unwrap(), Event::Stopped));
    }
}

#[test]
fn adapter_operations_that_ask_for_nothing_are_refused() {
    let load = |id, path| adapter(AdapterOp::Load, id, path);
    let requests = [
        load(0, "a"),
        load(i64::MAX as u64, "a"),
        load(u64::MAX, "a"),
        load(1, ""),
        load(1, "a\0b"),
        adapter(AdapterOp::Save, 1, "a"),
        adapter(AdapterOp::ZoInit, 1, ""),
        adapter(AdapterOp::ZoUpdate, 0, ""),
        adapter(AdapterOp::GenerateAudio, 0, "{}"),
    ];
    let (answers, texts) = converse_adapters(&requests);
    let codes = [2, 2, 2, 2, 2, 4, 4, 4, -1].map(Answer::Status);
    assert_eq!(answers, codes);
    assert_eq!(texts.len(), codes.len());
    let (answers, texts) = converse_with((0, 0), &[load(1, "a"), load(0, "")], must_not_be_called);
    assert_eq!(answers, [4, 4].map(Answer::Status));
    assert!(texts.iter().all(|note| note.text.contains("enable_lora")));
}

/// Only warm-up may bind an adapter that was not loaded.
#[test]
fn warm_ups_have_an_adapter_of_their_own() {
    let planner = Planner::new(LIMITS, 1).with_adapters(2.try_into().unwrap());
    let responder = Responder::new(planner, 0, Wait::Park);
    let mut batch = responder.warm_up(&bound(&[WARM_UP_ADAPTER, -1])).unwrap();
    assert_eq!(batch.next_adapters(), [WARM_UP_ADAPTER]);
    let mut block = vec![0_u64; Layout::new(&LIMITS).bytes().div_ceil(8)];
    let block = bytemuck::cast_slice_mut(&mut block);
    batch.stage(block).unwrap().expect("one pass");
    assert_eq!(batch.pass_adapters(), Some(vec![WARM_UP_ADAPTER, -1]));
    sample(&mut batch, block);
    run(&mut batch);
    assert_eq!(batch.commit(DeviceTimes::default()), []);
    assert!(batch.next_adapters().is_empty());
}

#[test]
fn recurrent_state_is_copied_on_the_device_alone() {
    const STATES: u32 = 40;
    fn serve(job: Job) {
        let Job::Copy(mut copy) = job else {
            panic!("a copy")
        };
        let groups: Vec<_> = copy.groups().collect();
        let expected = [(&[39][..], &[3][..]), (&[3][..], &[4][..])];
        assert_eq!((copy.states(), groups), (true, expected.to_vec()));
        assert_eq!(copy.commit(status::OK), None);
    }
    // There are fewer pages than slots, of the host too.
    const { assert!(LIMITS.total_pages < STATES && HOST_PAGES < STATES) };
    let requests = [
        copy(CopyDirection::D2D, &[39, 3], &[3, 4], CopyResource::Rs),
        copy(CopyDirection::D2D, &[40], &[3], CopyResource::Rs),
        copy(CopyDirection::D2D, &[3], &[40], CopyResource::Rs),
        copy(CopyDirection::D2H, &[1], &[1], CopyResource::Rs),
        copy(CopyDirection::D2D, &[39], &[3], CopyResource::Kv),
    ];
    let (answers, _) = converse_with((HOST_PAGES, STATES), &requests, serve);
    assert_eq!(answers, [0, 3, 3, 4, 3].map(Answer::Status));
}

#[test]
fn floods_without_tokens_never_reach_the_engine() {
    let requests = vec![encode(Payload::Forward(forward(&[0; 8]))); 2000];
    let (answers, kinds) = converse(&requests, must_not_be_called);
    assert!(
        answers
            .iter()
            .all(|answer| *answer == Answer::Tokens(vec![vec![]; 8]))
    );
    assert!(kinds.is_empty());
}

#[test]
fn a_dropped_job_aborts_its_request_and_the_next_is_served() {
    let requests = [
        encode(Payload::Forward(forward(&[2]))),
        copy(CopyDirection::D2D, &[1, 2], &[3, 4], CopyResource::Kv),
        encode(Payload::Health),
    ];
    let (answers, _) = converse(&requests, drop);
    assert_eq!(
        answers,
        [Answer::Aborted, Answer::Aborted, Answer::Status(status::OK)]
    );
}

#[test]
fn many_bad_requests_of_a_kind_are_one_note() {
    // Of eight requests some name a token that there is not, and some a position that does not follow.
    for (tokens, positions) in [(8, 0), (4, 4), (5, 3), (1, 1), (0, 5), (0, 0)] {
        let mut request = forward(&[1; 8]);
        request.token_ids[..tokens].fill(LIMITS.vocab_size);
        let bad = tokens..tokens + positions;
        request.position_ids[bad.clone()].fill(u32::MAX);
        let frame = encode(Payload::Forward(request));
        let noted = Mutex::new(Vec::new());
        let (answers, unasked) = converse_with((0, 0), &[frame], |job| {
            let Job::Batch(mut batch) = job else {
                panic!("a batch")
            };
            run(&mut batch);
            noted
                .lock()
                .unwrap()
                .extend(batch.commit(DeviceTimes::default()));
        });
        let notes = [noted.into_inner().unwrap(), unasked].concat();
        let each = |index: usize| {
            let tokens = usize::from(index >= bad.end);
            vec![7; tokens]
        };
        assert_eq!(answers, [Answer::Tokens((0..8).map(each).collect())]);
        for (kind, first, count) in [("token-id", 0, tokens), ("position", tokens, positions)] {
            let texts = notes.iter().filter(|note| note.kind == kind);
            let texts: Vec<&str> = texts.map(|note| note.text.as_str()).collect();
            let expected = if count > 4 { 1 } else { count };
            assert_eq!(texts.len(), expected, "{count} of {kind}: {texts:?}");
            for (index, text) in (first..).zip(&texts) {
                let start = match count {
                    0..=4 => format!("request {index} emptied: "),
                    _ => format!("request {index} emptied, and {} more alike: ", count - 1),
                };
                assert!(text.starts_with(&start), "{text}");
            }
        }
    }
}

/// The time of the answer is what the client finds in its slot.
#[test]
fn an_answer_is_published_before_its_notes_are_made() {
    const REASON: usize = 16 << 20;
    let name = format!("/pie_serve_test_{}_notes", std::process::id());
    let mut config = ServerConfig::new(&name, pie_wire::SCHEMA_HASH, Vec::new());
    config.layout = RegionLayout::new(1, 1 << 16, 1 << 16).unwrap();
    let mut ring = Server::create(&config, &ExitGuard::inert()).unwrap();
    let region = File::open(format!("/dev/shm{name}")).unwrap();
    let client = Client::open(&name, pie_wire::SCHEMA_HASH, ClientConfig::default()).unwrap();
    let mut planner = Planner::new(LIMITS, 1).with_adapters(2.try_into().unwrap());
    planner.add_adapter(3);
    let responder = Responder::new(planner, 0, Wait::Park);
    let frame = bound(&[3; 4]);
    let mut request = client.request();
    request.write(0, &frame).unwrap();
    let sent = request.send(frame.len()).unwrap();
    let Ok(Event::Job(Job::Batch(mut batch))) = responder.next(&mut ring) else {
        panic!("a batch")
    };
    batch.drop_adapter(3, &"x".repeat(REASON)).unwrap();
    run(&mut batch);
    let notes = batch.commit(DeviceTimes::default());
    let returned = UNIX_EPOCH.elapsed().unwrap().as_micros() as u64;
    let bytes: usize = notes.iter().map(|note| note.text.len()).sum();
    assert!(notes.len() == 4 && bytes > 4 * REASON);
    assert_eq!(
        sent.receive(decode).unwrap(),
        Answer::Tokens(vec![vec![]; 4])
    );
    let mut responded = [0; 8];
    region.read_exact_at(&mut responded, 64 + 40).unwrap();
    let after = returned - u64::from_le_bytes(responded);
    // So many bytes are not written faster than at 30 GB/s.
    assert!(
        after > 2000,
        "the notes were made {after} µs after the answer"
    );
}

#[test]
fn one_bad_request_is_emptied_with_its_reason() {
    fn serve(job: Job) {
        let Job::Batch(mut batch) = job else {
            panic!("a batch")
        };
        run(&mut batch);
        let notes = batch.commit(DeviceTimes::default());
        assert_eq!(
            notes.iter().map(|note| note.kind).collect::<Vec<_>>(),
            ["token-id"]
        );
        assert!(notes[0].text.contains("request 1") && notes[0].text.contains("100"));
    }
    let mut request = forward(&[1, 1]);
    request.token_ids[1] = 100;
    let (answers, _) = converse(&[encode(Payload::Forward(request))], serve);
    assert_eq!(answers, [Answer::Tokens(vec![vec![7], vec![]])]);
}

#[test]
fn warm_ups_plan_any_forward_frame_at_any_address() {
    let responder = Responder::new(Planner::new(LIMITS, 1), 0, Wait::Park);
    let bytes = [vec![0], encode(Payload::Forward(forward(&[3, 1])))].concat();
    let mut batch = responder.warm_up(&bytes[1..]).unwrap();
    assert!(matches!(
        responder.warm_up(&bytes[1..]),
        Err(WarmUpError::Busy)
    ));
    run(&mut batch);
    assert_eq!(batch.commit(DeviceTimes::default()), []);
    let health = encode(Payload::Health);
    assert!(matches!(
        responder.warm_up(&health),
        Err(WarmUpError::NotForward)
    ));
    assert!(matches!(
        responder.warm_up(b"short"),
        Err(WarmUpError::Wire(_))
    ));
    let mut broken = forward(&[1]);
    broken.kv_last_page_lens.clear();
    let broken = encode(Payload::Forward(broken));
    assert!(matches!(
        responder.warm_up(&broken),
        Err(WarmUpError::Frame(_))
    ));
    drop(responder.warm_up(&bytes[1..]).unwrap());
    assert!(responder.warm_up(&bytes[1..]).is_ok());
}

#[test]
fn a_call_out_of_order_is_an_error_and_changes_nothing() {
    let responder = Responder::new(Planner::new(LIMITS, 1), 0, Wait::Park);
    // 33 tokens are two passes.
    let bytes = encode(Payload::Forward(forward(&[16, 16, 1])));
    let mut batch = responder.warm_up(&bytes).unwrap();
    let mut block = vec![0_u64; Layout::new(&LIMITS).bytes().div_ceil(8)];
    let block: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
    let outputs = |tokens| Outputs {
        tokens,
        ..Outputs::default()
    };
    assert_eq!(batch.put_outputs(&outputs(&[7])), Err(BatchError::NoGroup));
    assert_eq!(batch.stage_slots(block), Ok(None));
    assert!(matches!(
        batch.stage(&mut block[..8]),
        Err(BatchError::Stage(_))
    ));
    assert_eq!(batch.stage(block).unwrap().unwrap().tokens, 32);
    assert_eq!(batch.stage(block), Err(BatchError::PassOpen));
    assert_eq!(batch.drop_adapter(1, ""), Err(BatchError::PassOpen));
    assert_eq!(batch.stage_slots(block).unwrap().unwrap().len(), 2);
    assert_eq!(batch.stage_slots(block), Err(BatchError::GroupOpen));
    assert_eq!(batch.stage(block), Err(BatchError::PassOpen));
    let short = batch.put_outputs(&outputs(&[7]));
    assert!(matches!(short, Err(BatchError::Stage(_))));
    assert_eq!(batch.put_outputs(&outputs(&[7, 7])), Ok(()));
    assert_eq!(batch.stage(block), Err(BatchError::PassOpen));
    assert_eq!(batch.stage_slots(block), Ok(None));
    run(&mut batch);
    assert_eq!(
        (batch.stage(block), batch.stage_slots(block)),
        (Ok(None), Ok(None))
    );
    assert_eq!(batch.commit(DeviceTimes::default()), []);
}

#[test]
fn a_batch_without_all_outputs_is_aborted() {
    let notes = RefCell::new(Vec::new());
    let requests = [2, 2].map(|tokens| encode(Payload::Forward(forward(&[tokens]))));
    let (answers, _) = converse_with((0, 0), &requests, |job| {
        let Job::Batch(mut batch) = job else { return };
        let mut block = vec![0_u64; Layout::new(&LIMITS).bytes().div_ceil(8)];
        let staged = batch.stage(bytemuck::cast_slice_mut(&mut block));
        // The block table is not relied on afterwards.
        assert_eq!(staged.unwrap().unwrap().updates, 1);
        notes
            .borrow_mut()
            .extend(batch.commit(DeviceTimes::default()));
    });
    assert_eq!(answers, [Answer::Aborted, Answer::Aborted]);
    let kinds: Vec<_> = notes.borrow().iter().map(|note| note.kind).collect();
    assert_eq!(kinds, ["order", "order"]);
}

/// Two requests of two rows: an image of 2 x 2 patches and one token. The pixels of both are `first..first + 32`.
fn with_images(first: u8) -> ForwardRequest {
    ForwardRequest {
        token_ids: vec![0, 5, 0, 5],
        image_indptr: vec![0, 1, 2],
        image_grids: vec![1, 2, 2, 1, 2, 2],
        image_anchor_rows: vec![0, 2],
        image_anchor_positions: vec![0, 0],
        image_pixels: (first..first + 32).collect(),
        image_pixel_indptr: vec![0, 16, 32],
        image_mrope_indptr: vec![0, 0, 0],
        ..forward(&[2, 2])
    }
}

/// The pixels of each image of a batch of one pass, and what holds them.
fn pixels(batch: &mut Batch) -> Option<(Vec<Vec<u8>>, Arc<Media>)> {
    let mut block = vec![0_u64; Layout::new(&LIMITS).bytes().div_ceil(8)];
    let block = bytemuck::cast_slice_mut(&mut block);
    batch.stage(block).unwrap().expect("one pass");
    let (images, media) = batch.pass_images()?;
    let pixels = |range: &Range<usize>| media.pixels()[range.clone()].to_vec();
    let pixels = images.spans.iter().map(|span| pixels(&span.pixels));
    Some((pixels.collect(), Arc::clone(media)))
}

#[test]
fn pixels_stay_as_they_were_sent() {
    let mut faulty = with_images(100);
    faulty.image_grids[0] = 3;
    let frames = [with_images(0), forward(&[2]), faulty, with_images(50)];
    let requests = frames.map(|frame| encode(Payload::Forward(frame)));
    let kept = RefCell::new(Vec::new());
    converse_with((0, 0), &requests, |job| {
        let Job::Batch(mut batch) = job else { return };
        kept.borrow_mut().push(pixels(&mut batch));
        batch.commit(DeviceTimes::default());
    });
    let image = |first: u8| (first..first + 16).collect::<Vec<u8>>();
    let expected = [
        (Some(vec![image(0), image(16)]), 0),
        (None, 0),
        // The first request was emptied, the second image is where it was.
        (Some(vec![image(116)]), 100),
        (Some(vec![image(50), image(66)]), 50),
    ];
    let kept = kept.into_inner();
    assert_eq!(kept.len(), expected.len());
    for (kept, (pixels, first)) in kept.into_iter().zip(expected) {
        assert_eq!(kept.as_ref().map(|(pixels, _)| pixels), pixels.as_ref());
        if let Some((_, media)) = kept {
            // Later requests have not touched it, and no other has it.
            assert_eq!(media.pixels(), (first..first + 32).collect::<Vec<u8>>());
            assert!(Arc::into_inner(media).is_some());
        }
    }
}

#[test]
fn warm_ups_have_images_too() {
    let planner = Planner::new(LIMITS, 1).with_vision(VISION);
    let responder = Responder::new(planner, 0, Wait::Park);
    let bytes = encode(Payload::Forward(with_images(7)));
    let mut batch = responder.warm_up(&bytes).unwrap();
    let (seen, _) = pixels(&mut batch).expect("images");
    assert_eq!(seen.concat(), (7..39).collect::<Vec<u8>>());
}

/// What each direction reads and writes: the size of its source pool and of its target pool.
const POOLS: [(CopyDirection, u32, u32); 4] = [
    (CopyDirection::D2H, LIMITS.total_pages, HOST_PAGES),
    (CopyDirection::H2D, HOST_PAGES, LIMITS.total_pages),
    (CopyDirection::D2D, LIMITS.total_pages, LIMITS.total_pages),
    (CopyDirection::H2H, HOST_PAGES, HOST_PAGES),
];

/// A direction, and the sources and targets of each part.
type Seen = (CopyDirection, Vec<(Vec<u32>, Vec<u32>)>);

/// Sends copies; every one that reaches the engine is done. Returns what the engine saw, too.
fn converse_copies(host_pages: u32, requests: &[Vec<u8>]) -> (Vec<Seen>, Vec<Answer>, Vec<String>) {
    let seen = RefCell::new(Vec::new());
    let (answers, notes) = converse_with((host_pages, 0), requests, |job| {
        let Job::Copy(mut copy) = job else { return };
        let groups = copy.groups();
        let groups: Vec<_> = groups
            .map(|(from, to)| (from.to_vec(), to.to_vec()))
            .collect();
        let pairs = groups.iter().map(|(sources, _)| sources.len()).sum();
        if copy.len() == pairs {
            seen.borrow_mut().push((copy.direction(), groups));
            copy.commit(status::OK);
        }
    });
    let texts = notes.into_iter().map(|note| note.text).collect();
    (seen.into_inner(), answers, texts)
}

#[test]
fn every_direction_has_its_own_bounds() {
    for (direction, source_limit, target_limit) in POOLS {
        let send =
            |sources: &[u32], targets: &[u32]| copy(direction, sources, targets, CopyResource::Kv);
        let (last_source, last_target) = (source_limit - 1, target_limit - 1);
        let requests = [
            send(&[last_source, 0], &[last_target, 1]),
            send(&[], &[]),
            send(&[0, source_limit], &[1, 2]),
            send(&[0, 1], &[target_limit, u32::MAX]),
            send(&[0, 1], &[2]),
            send(&[], &[u32::MAX]),
        ];
        let (seen, answers, texts) = converse_copies(HOST_PAGES, &requests);
        let group = (vec![last_source, 0], vec![last_target, 1]);
        assert_eq!(seen, [(direction, vec![group])]);
        let codes = [0, 0, 3, 3, 2, 2].map(Answer::Status);
        assert_eq!(answers, codes, "{direction:?}");
        let outside = |role, limit| {
            let noun = if limit == HOST_PAGES {
                "host slot"
            } else {
                "device page"
            };
            format!("names {role} {noun} {limit}, but there are only {limit}; answered status 3")
        };
        let expected = [
            outside("source", source_limit),
            outside("target", target_limit),
            "names 2 sources and 1 targets; answered status 2".to_owned(),
            "names 0 sources and 1 targets; answered status 2".to_owned(),
        ];
        assert_eq!(
            texts,
            expected.map(|text| format!("{direction:?} copy of Kv {text}"))
        );
    }
}

#[test]
fn without_a_host_pool_only_the_device_copies() {
    let kv = |direction, pages: &[u32]| copy(direction, pages, pages, CopyResource::Kv);
    let requests = [
        kv(CopyDirection::D2H, &[0]),
        kv(CopyDirection::H2D, &[0]),
        kv(CopyDirection::H2H, &[0]),
        kv(CopyDirection::D2H, &[]),
        kv(CopyDirection::D2D, &[1]),
    ];
    let (seen, answers, texts) = converse_copies(0, &requests);
    assert_eq!(answers, [4, 4, 4, 4, 0].map(Answer::Status));
    assert_eq!(seen.len(), 1);
    assert_eq!(texts.len(), 4);
    assert!(
        texts
            .iter()
            .all(|text| text.contains("cpu_mem_budget_in_gb"))
    );
}

#[test]
fn overlapping_lists_come_in_parts() {
    let group = |sources: &[u32], targets: &[u32]| (sources.to_vec(), targets.to_vec());
    for (direction, _, _) in POOLS {
        let request = copy(direction, &[0, 1, 2, 3], &[1, 2, 0, 2], CopyResource::Kv);
        let (seen, answers, _) = converse_copies(HOST_PAGES, &[request]);
        let groups = match direction {
            // Pages 1 and 2 are read after they were written.
            CopyDirection::D2D | CopyDirection::H2H => vec![
                group(&[0], &[1]),
                group(&[1], &[2]),
                group(&[2, 3], &[0, 2]),
            ],
            // The target 2 is written twice.
            CopyDirection::D2H | CopyDirection::H2D => {
                vec![group(&[0, 1, 2], &[1, 2, 0]), group(&[3], &[2])]
            }
        };
        assert_eq!(seen, [(direction, groups)]);
        assert_eq!(answers, [Answer::Status(status::OK)]);
    }
}

#[test]
fn what_was_served_is_counted() {
    let (mut ring, client, responder) = with_adapters();
    let started = responder.counts();
    assert_eq!(started.since(&started), started);
    assert_eq!(started.since(&Counts::default()), started);
    assert_eq!((started.steps(), started.requests), (0, 0));
    let mut drafted = forward(&[1, 16, 1]);
    drafted.spec_token_ids = vec![7, 8, 9];
    drafted.spec_position_ids = vec![1, 2, 3];
    drafted.spec_indptr = vec![0, 3, 3, 3];
    drafted.kv_last_page_lens[0] = 4;
    drafted.context_ids = vec![11, 12, 13];
    // No page has this number, so the third request is refused.
    drafted.kv_page_indices = vec![1, 1, 99];
    let answer = call(&client, encode(Payload::Forward(drafted)));
    let mut batch = next_batch(&mut ring, &responder);
    let mut block = vec![0_u64; Layout::new(&LIMITS).bytes().div_ceil(8)];
    let block = bytemuck::cast_slice_mut(&mut block);
    while batch.stage(block).unwrap().is_some() {
        sample(&mut batch, block);
    }
    let notes = batch.commit(DeviceTimes::default());
    assert!(
        notes[0]
            .text
            .starts_with("request 2 of context 13 emptied: "),
        "{notes:?}"
    );
    // The first of three drafts came true.
    let expected = Answer::Tokens(vec![vec![7, 7], vec![7], vec![]]);
    assert_eq!(answer.join().unwrap(), expected);
    let first = responder.counts();
    assert_eq!((first.graph_steps, first.python_steps), (0, 1));
    assert_eq!((first.requests, first.last_requests), (3, 3));
    assert_eq!((first.computed_tokens, first.prompt_tokens), (20, 16));
    assert_eq!(first.generated_tokens, 3);
    assert_eq!((first.drafts, first.accepted_drafts), (3, 1));
    assert_eq!(first.used_pages, 1, "a page that two requests name");
    assert_eq!(first.refused, [("page-id", 1)].into());
    assert_eq!((first.host.count(), first.step.count()), (1, 1));
    assert!(first.host.sum_ns() <= first.step.sum_ns());

    // A batch that fails, a batch that needs no model, and one that none of these is.
    let lost = call(&client, encode(Payload::Forward(forward(&[1]))));
    drop(next_batch(&mut ring, &responder));
    assert_eq!(lost.join().unwrap(), Answer::Aborted);
    let served = thread::spawn({
        let client = Arc::clone(&client);
        move || {
            let idle = encode(Payload::Forward(forward(&[0])));
            client.call(&idle, decode).unwrap();
            let broken = [0xA5; 100];
            client.call(&broken, decode).unwrap();
            let next = encode(Payload::Forward(forward(&[1, 1])));
            client.call(&next, decode).unwrap()
        }
    });
    let mut batch = loop {
        match responder.next(&mut ring).unwrap() {
            Event::Job(Job::Batch(batch)) => break batch,
            Event::Notes(notes) => assert_eq!(notes[0].kind, "malformed"),
            _ => panic!("a batch"),
        }
    };
    run(&mut batch);
    batch.commit(DeviceTimes::default());
    assert_eq!(served.join().unwrap(), Answer::Tokens(vec![vec![7]; 2]));
    let now = responder.counts().since(&first);
    assert_eq!((now.steps(), now.requests, now.generated_tokens), (1, 2, 2));
    assert_eq!((now.aborted_batches, now.abandoned), (1, 0));
    assert_eq!(now.refused, [("malformed", 1)].into());
    assert_eq!(now.prompt_tokens, 0, "decodes");
}

#[test]
fn copies_are_counted_by_direction() {
    let mut config = config();
    config.layout = RegionLayout::new(2, 1 << 16, 1 << 16).unwrap();
    let mut ring = Server::create(&config, &ExitGuard::inert()).unwrap();
    let client = Client::open(&config.name, pie_wire::SCHEMA_HASH, ClientConfig::default());
    let client = Arc::new(client.unwrap());
    let responder = Responder::new(Planner::new(LIMITS, 1), HOST_PAGES, Wait::Park);
    for (direction, code) in [
        (CopyDirection::D2H, status::OK),
        (CopyDirection::D2H, status::OK),
        (CopyDirection::H2D, status::OK),
        (CopyDirection::H2D, status::FAILED),
    ] {
        let answer = call(&client, copy(direction, &[1, 2], &[3, 0], CopyResource::Kv));
        let Event::Job(Job::Copy(mut job)) = responder.next(&mut ring).unwrap() else {
            panic!("a copy")
        };
        job.commit(code);
        assert_eq!(answer.join().unwrap(), Answer::Status(code));
    }
    let found = responder.counts().copied_pages;
    let named: Vec<_> = DIRECTIONS.into_iter().zip(found).collect();
    assert_eq!(
        named,
        [
            (CopyDirection::D2H, 4),
            (CopyDirection::H2D, 2),
            (CopyDirection::D2D, 0),
            (CopyDirection::H2H, 0),
        ]
    );
}
