//! A ring with a client and a responder.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use pie_driver::{Batch, DeviceTimes, Event, Job, LogLine, Responder, status};
use pie_planner::{Layout, Limits, Outputs, Planner, VisionConfig};
use pie_ring::{Client, ClientConfig, ExitGuard, RegionLayout, Server, ServerConfig, Wait};
use pie_wire::{
    AdapterBinding, ArchivedResponsePayload, CopyDirection, CopyRequest, CopyResource,
    ForwardRequest, Frame, NativeSlice, Payload, Reply, Sampler,
};

pub(crate) const LIMITS: Limits = Limits {
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

pub(crate) const HOST_PAGES: u32 = 4;

/// Two by two patches of one number are a row.
pub(crate) const VISION: VisionConfig = VisionConfig {
    patch_values: 1,
    merge_size: 2,
    max_side: 8,
};

/// What the client saw.
#[derive(Debug, PartialEq)]
pub(crate) enum Answer {
    Status(i32),
    Aborted,
    Tokens(Vec<Vec<u32>>),
}

pub(crate) fn decode(bytes: &[u8]) -> Answer {
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

pub(crate) fn encode(payload: Payload) -> Vec<u8> {
    let frame = Frame {
        driver_id: 3,
        payload,
    };
    let mut bytes = vec![0; pie_wire::request_len(&frame).unwrap()];
    pie_wire::encode_request(&frame, &mut bytes).unwrap();
    bytes
}

/// One request per entry: its number of tokens; page r holds request r. One greedy sampler each.
pub(crate) fn forward(tokens: &[u32]) -> ForwardRequest {
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

pub(crate) fn run(batch: &mut Batch) {
    let mut block = vec![0_u64; Layout::new(&LIMITS).bytes().div_ceil(8)];
    let block = bytemuck::cast_slice_mut(&mut block);
    while batch.stage(block).unwrap().is_some() {
        sample(batch, block);
    }
}

/// Answers the slots of the staged pass.
pub(crate) fn sample(batch: &mut Batch, block: &mut [u8]) {
    while let Some(group) = batch.stage_slots(block).unwrap() {
        let outputs = Outputs {
            tokens: &vec![7; group.len()],
            ..Outputs::default()
        };
        batch.put_outputs(&outputs).unwrap();
    }
}

/// Sends `requests` in order to a responder with `host_pages` and `states`; the engine does what `serve` says.
pub(crate) fn converse_with(
    (host_pages, states): (u32, u32),
    requests: &[Vec<u8>],
    serve: impl Fn(Job),
) -> (Vec<Answer>, Vec<LogLine>) {
    let planner = Planner::new(LIMITS, 1)
        .with_vision(VISION)
        .with_states(states);
    converse_by(planner, host_pages, requests, serve)
}

/// Of a ring of its own.
pub(crate) fn config() -> ServerConfig {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("/pie_serve_test_{}_{number}", std::process::id());
    let abort = pie_wire::abort_frame(0).to_vec();
    ServerConfig::new(&name, pie_wire::SCHEMA_HASH, abort)
}

pub(crate) fn converse_by(
    planner: Planner,
    host_pages: u32,
    requests: &[Vec<u8>],
    serve: impl Fn(Job),
) -> (Vec<Answer>, Vec<LogLine>) {
    let mut config = config();
    let name = config.name.clone();
    config.layout = RegionLayout::new(2, 1 << 16, 1 << 16).unwrap();
    let mut ring = Server::create(&config, &ExitGuard::inert()).unwrap();
    let client = Client::open(&name, pie_wire::SCHEMA_HASH, ClientConfig::default()).unwrap();
    let stop = ring.stop_handle();
    let responder = Responder::new(planner, host_pages, Wait::Park);
    let mut logged = Vec::new();
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
                Event::LogLines(log_lines) => logged.extend(log_lines),
                Event::Job(job) => serve(job),
                Event::Woken => unreachable!("no thread calls"),
                Event::Step(_) | Event::DeviceLost(_) => unreachable!("no graph path"),
            }
        }
        answers.join().unwrap()
    });
    (answers, logged)
}

/// [`converse_with`] a host pool; of the notes only the kinds.
pub(crate) fn converse(requests: &[Vec<u8>], serve: fn(Job)) -> (Vec<Answer>, Vec<&'static str>) {
    let (answers, log_lines) = converse_with((HOST_PAGES, 0), requests, serve);
    (
        answers,
        log_lines.iter().map(|log_line| log_line.kind).collect(),
    )
}

pub(crate) fn serve_all(job: Job) {
    match job {
        Job::Batch(mut batch) => {
            run(&mut batch);
            assert_eq!(batch.commit(DeviceTimes::default()), []);
        }
        Job::Copy(mut copy) => {
            assert_eq!(copy.direction(), CopyDirection::D2D);
            assert_eq!(copy.len(), 2);
            let groups: Vec<_> = copy.batches().collect();
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

pub(crate) fn must_not_be_called(_: Job) {
    panic!("this needs no model");
}

pub(crate) fn copy(
    dir: CopyDirection,
    srcs: &[u32],
    dsts: &[u32],
    resource: CopyResource,
) -> Vec<u8> {
    encode(Payload::Copy(CopyRequest {
        dir,
        srcs: srcs.to_vec(),
        dsts: dsts.to_vec(),
        resource,
    }))
}

/// One token for each id, bound to it.
pub(crate) fn bound(ids: &[i64]) -> Vec<u8> {
    let mut request = forward(&vec![1; ids.len()]);
    for (binding, &adapter_id) in request.adapter_bindings.iter_mut().zip(ids) {
        binding.adapter_id = adapter_id;
    }
    encode(Payload::Forward(request))
}

pub(crate) fn call(client: &Arc<Client>, request: Vec<u8>) -> thread::JoinHandle<Answer> {
    let client = Arc::clone(client);
    thread::spawn(move || client.call(&request, decode).unwrap())
}

pub(crate) fn next_batch(ring: &mut Server, responder: &Responder) -> Batch {
    match responder.next(ring).unwrap() {
        Event::Job(Job::Batch(batch)) => batch,
        _ => panic!("a batch"),
    }
}
