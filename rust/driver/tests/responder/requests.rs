//! Which requests are answered, and which become jobs.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::UNIX_EPOCH;

use pie_driver::{BatchError, DeviceTimes, Event, Job, Responder, WarmUpError, status};
use pie_planner::{Layout, Outputs, Planner};
use pie_ring::{Client, ClientConfig, ExitGuard, RegionLayout, Server, ServerConfig, Wait};
use pie_wire::{AdapterOp, CopyDirection, CopyResource, ForwardRequest, Payload};

use crate::adapters::{adapter, with_adapters};
use crate::common::{
    Answer, LIMITS, bound, call, converse, converse_with, copy, decode, encode, forward,
    must_not_be_called, next_batch, run, serve_all,
};

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

/// Requests continue while a load is open, and a thread that has read an adapter calls.
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
        assert!(matches!(responder.next(&mut ring).unwrap(), Event::Woken));
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
        assert!(matches!(responder.next(&mut ring).unwrap(), Event::Woken));
        drop(next_batch(&mut ring, &responder));
        assert!(ring.poll().is_none());
        waiting.join().unwrap();
        ring.stop_handle().stop();
        assert!(matches!(responder.next(&mut ring).unwrap(), Event::Stopped));
    }
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
        let logged = Mutex::new(Vec::new());
        let (answers, unasked) = converse_with((0, 0), &[frame], |job| {
            let Job::Batch(mut batch) = job else {
                panic!("a batch")
            };
            run(&mut batch);
            logged
                .lock()
                .unwrap()
                .extend(batch.commit(DeviceTimes::default()));
        });
        let log_lines = [logged.into_inner().unwrap(), unasked].concat();
        let each = |index: usize| {
            let tokens = usize::from(index >= bad.end);
            vec![7; tokens]
        };
        assert_eq!(answers, [Answer::Tokens((0..8).map(each).collect())]);
        for (kind, first, count) in [("token-id", 0, tokens), ("position", tokens, positions)] {
            let texts = log_lines.iter().filter(|log_line| log_line.kind == kind);
            let texts: Vec<&str> = texts.map(|log_line| log_line.text.as_str()).collect();
            let expected = if count > 4 { 1 } else { count };
            assert_eq!(texts.len(), expected, "{count} of {kind}: {texts:?}");
            for (index, text) in (first..).zip(&texts) {
                let start = match count {
                    0..=4 => format!("request {index} rejected: "),
                    _ => format!("request {index} rejected, and {} more like it: ", count - 1),
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
    let mut request = client.acquire_slot();
    request.write(0, &frame).unwrap();
    let sent = request.send(frame.len()).unwrap();
    let Ok(Event::Job(Job::Batch(mut batch))) = responder.next(&mut ring) else {
        panic!("a batch")
    };
    batch.drop_adapter(3, &"x".repeat(REASON)).unwrap();
    run(&mut batch);
    let log_lines = batch.commit(DeviceTimes::default());
    let returned = UNIX_EPOCH.elapsed().unwrap().as_micros() as u64;
    let bytes: usize = log_lines.iter().map(|log_line| log_line.text.len()).sum();
    assert!(log_lines.len() == 4 && bytes > 4 * REASON);
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
fn one_bad_request_is_rejected_with_its_reason() {
    fn serve(job: Job) {
        let Job::Batch(mut batch) = job else {
            panic!("a batch")
        };
        run(&mut batch);
        let log_lines = batch.commit(DeviceTimes::default());
        assert_eq!(
            log_lines
                .iter()
                .map(|log_line| log_line.kind)
                .collect::<Vec<_>>(),
            ["token-id"]
        );
        assert!(log_lines[0].text.contains("request 1") && log_lines[0].text.contains("100"));
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
    let log_lines = RefCell::new(Vec::new());
    let requests = [2, 2].map(|tokens| encode(Payload::Forward(forward(&[tokens]))));
    let (answers, _) = converse_with((0, 0), &requests, |job| {
        let Job::Batch(mut batch) = job else { return };
        let mut block = vec![0_u64; Layout::new(&LIMITS).bytes().div_ceil(8)];
        let staged = batch.stage(bytemuck::cast_slice_mut(&mut block));
        // The block table is not relied on afterwards.
        assert_eq!(staged.unwrap().unwrap().updates, 1);
        log_lines
            .borrow_mut()
            .extend(batch.commit(DeviceTimes::default()));
    });
    assert_eq!(answers, [Answer::Aborted, Answer::Aborted]);
    let kinds: Vec<_> = log_lines
        .borrow()
        .iter()
        .map(|log_line| log_line.kind)
        .collect();
    assert_eq!(kinds, ["order", "order"]);
}
