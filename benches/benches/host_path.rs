//! Frame to reply without the ring and the model.

use std::cell::RefCell;

use criterion::{Criterion, criterion_group, criterion_main};
use pie_benches::python::{Case, PythonPeer};
use pie_benches::report::Unit;
use pie_benches::timing::{self, Race};
use pie_benches::{
    Asked, Bytes, HostPath, TOKEN, asking_frame, decode_frame, mixed_frame, prefill_frame,
};
use pie_wire::{ForwardResponse, Reply, ResponseFrame, ResponsePayload};

const CONTEXT: u32 = 2048;
/// Steps of the same contexts in a row; every sixteenth adds a page to each.
const STEPS: u32 = 32;
/// Variants of `peers/numpy_plan.py`.
const PEERS: [&str; 3] = ["numpy_delta", "numpy_full_table", "numpy_rebuilt"];

/// Validating the decode frame of the largest batch, and of smaller ones.
fn access(criterion: &mut Criterion) {
    for (name, requests) in [("", 256), ("/64x2048", 64), ("/1x2048", 1)] {
        let bytes = Bytes::of(&decode_frame(requests, CONTEXT, 0));
        let access = || pie_wire::access_request(bytes.as_slice()).is_ok();
        assert!(access());
        Race::new(format!("wire/access{name}"), Unit::Ns, access).run(criterion);
    }
}

/// Encoding the answer to 256 requests of two tokens each, and the fast reply to 256 of one.
fn encode_reply(criterion: &mut Criterion) {
    let response = ResponseFrame {
        driver_id: 0,
        aborted: false,
        payload: ResponsePayload::Forward(ForwardResponse {
            num_requests: 256,
            tokens_indptr: (0..=256).map(|request| 2 * request).collect(),
            tokens: vec![TOKEN as u32; 512],
            ..ForwardResponse::default()
        }),
    };
    let mut buffer = vec![0_u64; 1024];
    let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
    let length = pie_wire::encode_response(&response, buffer).expect("it fits");
    assert_eq!(
        pie_wire::decode_response(&buffer[..length]).expect("valid"),
        response
    );
    let encode = || pie_wire::encode_response(&response, buffer).ok();
    Race::new("wire/encode_reply", Unit::Ns, encode).run(criterion);

    let tokens = [TOKEN as u32; 256];
    let mut buffer = [0; 2048];
    let length = pie_wire::encode_fast_tokens(0, &tokens, &mut buffer).expect("it fits");
    check_reply(&buffer[..length], 256);
    let encode = || pie_wire::encode_fast_tokens(0, &tokens, &mut buffer).ok();
    Race::new("wire/encode_reply/fast", Unit::Ns, encode).run(criterion);
}

fn plan(criterion: &mut Criterion) {
    for requests in [1_u32, 64, 256] {
        let frames = (0..STEPS).map(|step| decode_frame(requests, CONTEXT, step));
        race(
            criterion,
            &format!("plan/decode/{requests}x{CONTEXT}"),
            frames,
            requests as usize,
        );
    }
    race(criterion, "plan/mixed", (0..STEPS).map(mixed_frame), 64);
    race(criterion, "plan/prefill/8192", [prefill_frame(8192)], 1);
}

/// The largest decode batch with a probe, a logit mask, or both in each request.
fn plan_asked(criterion: &mut Criterion) {
    for (name, probes, masks) in [
        ("probes", true, false),
        ("masks", false, true),
        ("probes_masks", true, true),
    ] {
        let frames = (0..STEPS)
            .map(|step| Bytes::of(&asking_frame(256, CONTEXT, step, Asked { probes, masks })));
        let frames: Vec<Bytes> = frames.collect();
        let mut path = HostPath::default();
        for frame in &frames {
            let reply = pie_wire::decode_reply(path.run(frame.as_slice())).expect("a valid reply");
            assert_eq!(matches!(reply, Reply::Frame(_)), probes);
            assert!(path.answered().request_errors().is_empty());
        }
        let mut step = 0;
        let ours = || {
            step = (step + 1) % frames.len();
            path.run(frames[step].as_slice()).len()
        };
        Race::new(format!("plan/{name}/256x{CONTEXT}"), Unit::Ns, ours).run(criterion);
    }
}

/// Ours against numpy over the same frames in turn. Every request of every frame gets one token.
fn race(
    criterion: &mut Criterion,
    name: &str,
    frames: impl IntoIterator<Item = pie_wire::Frame>,
    requests: usize,
) {
    let frames: Vec<Bytes> = frames.into_iter().map(|frame| Bytes::of(&frame)).collect();
    let mut path = HostPath::default();
    for frame in &frames {
        check_reply(path.run(frame.as_slice()), requests);
    }
    let case = Case::write(name, &frames);
    // Started when they are first asked, so that a filtered run starts none.
    let [delta, full, rebuilt] = PEERS.map(|variant| {
        let peer = RefCell::new(None);
        let case = &case;
        move |operations, samples: &mut timing::Samples| {
            let mut peer = peer.borrow_mut();
            let peer = peer
                .get_or_insert_with(|| PythonPeer::start("numpy_plan.py", variant, case.folder()));
            peer.turn(operations, samples)
        }
    });
    let mut step = 0;
    let ours = || {
        step = (step + 1) % frames.len();
        path.run(frames[step].as_slice()).len()
    };
    Race::new(name, Unit::Ns, ours)
        .peer_turns(PEERS[0], delta)
        .peer_turns(PEERS[1], full)
        .peer_turns(PEERS[2], rebuilt)
        .run(criterion);
}

/// Every request must come back with the token that was sampled for it.
fn check_reply(reply: &[u8], requests: usize) {
    match pie_wire::decode_reply(reply).expect("a valid reply") {
        Reply::Tokens(tokens) => assert!(tokens.iter().eq((0..requests).map(|_| TOKEN as u32))),
        Reply::Frame(_) => panic!("one token each is answered by the fast reply"),
    }
}

criterion_group! {
    name = benches;
    config = timing::criterion();
    targets = access, encode_reply, plan, plan_asked
}
criterion_main!(benches);
