//! First inputs for the fuzzer: payloads of every kind and random frames.

use pie_planner::Limits;
use pie_ring::RegionLayout;
use pie_wire::{
    ForwardRequest, LogprobOptions, LogprobRows, LogprobShape, PromptLogprobs, RequestExtension,
    SCHEMA_HASH,
};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use crate::common::builder::Encoded;
use crate::common::device::DRIVER;
use crate::common::generate;
use crate::{gateway, plan, samples, serve};

/// Inputs for the targets that are fed with payloads; the others start from nothing.
#[must_use]
pub fn of(target: &str) -> Vec<Vec<u8>> {
    match target {
        "wire_request" => payloads(true)
            .chain(random().into_iter().flat_map(|(_, frames)| frames))
            .collect(),
        "wire_response" => payloads(false).collect(),
        "extension" => extensions(),
        "plan_bytes" => random()
            .into_iter()
            .map(|(limits, frames)| plan::join(&limits, &frames))
            .collect(),
        "region_header" => vec![header()],
        "serve" => serve_seeds(),
        "gateway" => gateway::seeds(noise()),
        "answer" | "front" | "grammar" | "radix" | "pages" => noise(),
        _ => Vec::new(),
    }
}

fn payloads(requests: bool) -> impl Iterator<Item = Vec<u8>> {
    let samples = samples::all().into_iter().map(|(_, message)| message);
    samples
        .filter(move |message| (message.kind() == "request") == requests)
        .map(|message| message.encode().to_vec())
}

/// Extensions without their magic numbers: of a request with every list, and of an answer.
fn extensions() -> Vec<Vec<u8>> {
    let row = RequestExtension {
        biases: vec![(7, 1.5)],
        suppressed: vec![2, 3],
        history: vec![4; 3],
        mask: vec![u32::MAX; 2],
        ..RequestExtension::default()
    };
    let mut answer = LogprobRows::default();
    let shape = LogprobShape {
        top: 1,
        given: 1,
        hidden: 0,
    };
    let position = [
        (-1.0_f32).to_bits(),
        3,
        (-0.5_f32).to_bits(),
        (-2.0_f32).to_bits(),
    ];
    answer.push(1, shape, (1, 2), [position; 3].into_iter().flatten());
    let rows = [(0, &row), (2, &row)];
    let mut request = vec![0; pie_wire::extension_len(rows)];
    let mut reply = vec![0; answer.bytes()];
    let wrote = pie_wire::append_extension(rows, &mut request, 0).is_ok()
        && answer.append(&mut reply, 0).is_ok();
    assert!(wrote, "the buffers are as long as needed");
    for bytes in [&mut request, &mut reply] {
        bytes.truncate(bytes.len() - pie_wire::EXTENSION_MAGIC.len());
    }
    vec![request, reply, Vec::new()]
}

/// Sequences of random frames with the limits that they were made for.
fn random() -> Vec<(Limits, Vec<Vec<u8>>)> {
    let mut runner = TestRunner::deterministic();
    let sequence = generate::sequence();
    let mut draw = || {
        sequence
            .new_tree(&mut runner)
            .expect("nothing is filtered")
            .current()
    };
    let encode = |frame: &ForwardRequest| Encoded::new(DRIVER, frame).bytes().to_vec();
    (0..200)
        .map(|_| draw())
        .map(|(limits, frames)| (limits, frames.iter().map(encode).collect()))
        .collect()
}

/// Bytes of any kind, which are steps of any kind.
fn noise() -> Vec<Vec<u8>> {
    let mut runner = TestRunner::deterministic();
    let bytes = proptest::collection::vec(proptest::num::u8::ANY, 32..400);
    let mut draw = || {
        bytes
            .new_tree(&mut runner)
            .expect("nothing is filtered")
            .current()
    };
    (0..40).map(|_| draw()).collect()
}

fn header() -> Vec<u8> {
    let layout = RegionLayout::default();
    let mut bytes = layout.encode_header(SCHEMA_HASH).to_vec();
    bytes.extend((layout.total_bytes() as u64).to_be_bytes());
    bytes
}

/// A request, and after it what its first requests ask of log-probabilities.
fn asked(payload: &[u8]) -> Vec<u8> {
    let row = RequestExtension {
        logprobs: Some(LogprobOptions {
            hidden: 0,
            scaled: true,
            top: 2,
            token_ids: vec![3, 4],
            prompt: Some(PromptLogprobs {
                from: 1,
                end: 40,
                next: 5,
            }),
        }),
        ..RequestExtension::default()
    };
    let rows = [(0, &row), (1, &row)];
    let mut bytes = payload.to_vec();
    bytes.resize(payload.len() + pie_wire::extension_len(rows), 0);
    let written = pie_wire::append_extension(rows, &mut bytes, payload.len());
    assert!(written.is_ok(), "the buffer is as long as needed");
    bytes
}

fn serve_seeds() -> Vec<Vec<u8>> {
    let frames = random()
        .into_iter()
        .filter_map(|(_, frames)| frames.into_iter().next());
    let payloads: Vec<_> = payloads(true).chain(frames).collect();
    let asked: Vec<_> = payloads.iter().map(|payload| asked(payload)).collect();
    let payloads = payloads.into_iter().chain(asked).enumerate();
    payloads
        .map(|(number, payload)| serve::join(number as u8, &payload))
        .collect()
}
