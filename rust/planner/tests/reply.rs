//! Replies: their form, verification, timings and buffers that are too small.

use std::slice;

use pie_planner::{ForwardTimings, Limits, Outputs, Planner, RequestError, SlotClass};
use pie_wire::{ForwardRequest, RESPONSE_ROOT_LEN, Sampler};

use crate::common::answer::{Answer, answer};
use crate::common::builder::{Encoded, GREEDY, LARGE, Req, decode, frame};
use crate::common::device::{DRIVER, Device};
use crate::common::engine::{next_group, next_pass, put};
use crate::common::naive::{Plan, Slot};

/// Gives the token slots of each request the listed tokens.
fn listed(tokens: &[&[u32]]) -> impl FnMut(&Plan, &Slot) -> u32 {
    let tokens: Vec<Vec<u32>> = tokens.iter().map(|tokens| tokens.to_vec()).collect();
    move |_, slot| tokens[slot.request][slot.number]
}

/// The reply to a frame whose slots get the listed tokens.
pub(crate) fn run(requests: &[Req], tokens: &[&[u32]]) -> Answer {
    Device::new(LARGE).run(&frame(requests), listed(tokens))
}

/// A request of three inputs without samplers.
pub(crate) fn flush(page: u32) -> Req {
    Req::new(16, 0, &[1, 2, 3], &[page])
}

#[test]
fn one_token_each_is_fast() {
    let answer = run(&[decode(4, 1, &[0]), decode(9, 1, &[1])], &[&[17], &[18]]);
    assert_eq!(answer, Answer::Fast(vec![17, 18]));
    // A prompt that is sampled once is no different.
    let prompt = flush(3).sample(2, GREEDY);
    assert_eq!(run(&[prompt], &[&[5]]), Answer::Fast(vec![5]));
}

#[test]
fn requests_without_samplers_need_the_archive() {
    let answer = run(&[decode(4, 1, &[0]), flush(1)], &[&[17], &[]]);
    assert_eq!(answer.archive().tokens_indptr, [0, 1, 1]);
    assert_eq!(answer.archive().tokens, [17]);
    let answer = run(&[flush(1)], &[&[]]);
    assert_eq!(answer.archive().tokens_indptr, [0, 0]);
    // As many tokens as requests, but not one each.
    let twice = decode(4, 1, &[0]).sample(0, GREEDY);
    let answer = run(&[twice, flush(1)], &[&[17, 18], &[]]);
    assert_eq!(answer.archive().tokens_indptr, [0, 2, 2]);
    // Not even drafts make up for missing samplers.
    let unsampled = Req::new(16, 4, &[1], &[0]).verify(&[8]);
    let answer = run(&[unsampled], &[&[]]);
    assert_eq!(answer.archive().tokens_indptr, [0, 0]);
}

#[test]
fn several_samplers_answer_in_their_own_order() {
    let random = |temperature| Sampler::Multinomial {
        temperature,
        seed: 0,
    };
    let filtered = Sampler::TopK {
        temperature: 1.0,
        k: 2,
    };
    // The classes are staged apart, the answer is not.
    let scoring = flush(0)
        .sample(2, filtered.clone())
        .sample(0, GREEDY)
        .sample(0, random(0.5))
        .sample(1, filtered)
        .sample(2, random(0.0));
    let answer = run(
        &[scoring, decode(3, 1, &[4])],
        &[&[10, 11, 12, 13, 14], &[15]],
    );
    assert_eq!(answer.tokens(), [vec![10, 11, 12, 13, 14], vec![15]]);
}

#[test]
fn embedding_samplers_are_skipped() {
    let request = flush(0)
        .sample(0, GREEDY)
        .sample(1, Sampler::Embedding)
        .sample(2, GREEDY);
    assert_eq!(run(&[request], &[&[4, 5]]).tokens(), [[4, 5]]);
    let only = decode(2, 1, &[1]).sample(0, Sampler::Embedding);
    assert_eq!(run(&[only], &[&[6]]), Answer::Fast(vec![6]));
    let none = flush(0).sample(0, Sampler::Embedding);
    assert_eq!(run(&[none], &[&[]]).archive().tokens_indptr, [0, 0]);
}

#[test]
fn embedding_models_return_pooled_rows_and_nothing_else() {
    let mut planner = Planner::new(LARGE, 0).with_embeddings(3);
    let embed = |page| flush(page).sample(2, Sampler::Embedding);
    let requests = [
        embed(0),
        flush(1).sample(2, GREEDY),
        embed(2).sample(2, Sampler::RawLogits),
        embed(3),
        embed(4).verify(&[7]),
    ];
    let encoded = Encoded::new(DRIVER, &frame(&requests));
    let plan = planner
        .plan(DRIVER, encoded.forward())
        .expect("a sound frame");
    let refused = [1, 2, 4].map(|request| (request, RequestError::Embeds));
    assert_eq!(plan.request_errors(), refused);
    // No graph runs it.
    assert_eq!(plan.graph_size(256), None);
    let mut words = vec![0_u64; planner.layout().bytes().div_ceil(8)];
    let memory = bytemuck::cast_slice_mut(&mut words);
    let pass = next_pass(&mut planner, plan, memory).expect("a pass");
    let group = next_group(&planner, pass, memory).expect("a group");
    let outputs = Outputs {
        logits: &[0.5, 1.0, -2.0, 4.0, 8.0, 16.0],
        ..Outputs::default()
    };
    let rest = next_group(&planner, put(group, &outputs), memory).expect_err("one group");
    let mut computed = next_pass(&mut planner, rest, memory).expect_err("one pass");
    let mut reply = vec![0_u64; 1024];
    let buffer = bytemuck::cast_slice_mut(&mut reply);
    let length = planner
        .reply(&mut computed, ForwardTimings::default(), buffer)
        .expect("it fits");
    let answer = answer(&buffer[..length]);
    let found = answer.archive();
    assert_eq!(found.logits_req_indptr, [0, 1, 1, 1, 2, 2]);
    assert_eq!(found.logits_byte_indptr, [0, 12, 24]);
    let (words, _) = found.logits_bytes.as_chunks();
    let floats: Vec<f32> = words.iter().copied().map(f32::from_le_bytes).collect();
    assert_eq!(floats, outputs.logits);
    assert!(found.tokens.is_empty());
}

#[test]
fn verification_stops_at_the_first_wrong_draft() {
    let verify = || decode(4, 1, &[0]).verify(&[20, 21, 22]);
    for (sampled, expected) in [
        ([9, 21, 22, 23], &[9][..]),
        ([20, 9, 22, 23], &[20, 9]),
        ([20, 21, 9, 23], &[20, 21, 9]),
        ([20, 21, 22, 23], &[20, 21, 22, 23]),
        ([22, 21, 20, 20], &[22]),
    ] {
        let answer = run(&[verify(), decode(9, 1, &[1])], &[&sampled, &[7]]);
        assert_eq!(answer.tokens(), [expected.to_vec(), vec![7]]);
        assert_eq!(answer.is_fast(), expected.len() == 1);
    }
}

#[test]
fn verification_replaces_all_other_token_samplers() {
    let greedy = |seed| Sampler::Multinomial {
        temperature: 0.0,
        seed,
    };
    let several = flush(0)
        .sample(0, greedy(5))
        .sample(1, greedy(6))
        .sample(1, GREEDY)
        .verify(&[30, 31]);
    let answer = run(&[several], &[&[30, 8, 31]]);
    assert_eq!(answer.tokens(), [[30, 8]]);
}

#[test]
fn verification_spans_passes_and_groups() {
    let limits = Limits {
        chunk_tokens: 2,
        max_slots: 1,
        ..LARGE
    };
    let requests = [
        Req::new(16, 0, &[1, 2, 3], &[0])
            .sample(2, GREEDY)
            .verify(&[20, 21, 22]),
        decode(3, 1, &[1]),
    ];
    let answer = Device::new(limits).run(&frame(&requests), listed(&[&[20, 21, 7, 23], &[8]]));
    assert_eq!(answer.tokens(), [vec![20, 21, 7], vec![8]]);
}

#[test]
fn a_first_sampler_without_a_token_means_greedy_verification() {
    for first in [Sampler::Embedding, Sampler::Entropy, Sampler::RawLogits] {
        let request = Req::new(16, 4, &[1], &[0])
            .sample(0, first)
            .sample(0, GREEDY)
            .verify(&[20]);
        let mut device = Device::new(LARGE);
        device.run(&frame(slice::from_ref(&request)), listed(&[&[20, 21]]));
        assert_eq!(device.expected_tokens(), [[20, 21]]);
        let plan = device.compute(&frame(&[request]), listed(&[&[20, 21]]));
        let tokens = plan.requests[0].slots.iter().map(|slot| slot.class);
        let tokens: Vec<_> = tokens.filter(|class| class.is_token()).collect();
        assert_eq!(tokens, [SlotClass::Greedy; 2]);
    }
}

#[test]
fn probes_beside_drafts_are_answered_too() {
    let request = Req::new(16, 4, &[1, 2], &[0])
        .sample(1, GREEDY)
        .sample(0, Sampler::Entropy)
        .sample(1, Sampler::Logprob { token_id: 4 })
        .sample(0, GREEDY)
        .sample(1, Sampler::Entropy)
        .verify(&[20, 21]);
    let requests = [request, decode(9, 1, &[1])];
    let answer = run(&requests, &[&[20, 9, 8], &[7]]);
    let outputs = answer.outputs();
    assert_eq!(answer.tokens(), [vec![20, 9], vec![7]]);
    assert_eq!(
        (outputs[0].entropies.len(), outputs[0].logprobs.len()),
        (2, 1)
    );
    assert_eq!(
        (outputs[1].entropies.len(), outputs[1].logprobs.len()),
        (0, 0)
    );
}

#[test]
fn a_probe_keeps_the_fast_reply_away() {
    let probed = decode(4, 1, &[0]).sample(0, Sampler::Entropy);
    let answer = run(&[probed, decode(9, 1, &[1])], &[&[5], &[6]]);
    assert_eq!(answer.archive().tokens, [5, 6]);
    assert_eq!(answer.archive().entropies_indptr, [0, 1, 1]);
    // Not in the next frame.
    let mut device = Device::new(LARGE);
    let probed = decode(4, 1, &[0]).sample(0, Sampler::RawLogits);
    device.run(&frame(&[probed]), |_, _| 5);
    assert!(
        device
            .run(&frame(&[decode(5, 1, &[0])]), |_, _| 5)
            .is_fast()
    );
}

#[test]
fn entries_without_values_are_entries() {
    let none = |row| {
        let token_ids = Vec::new();
        (row, Sampler::Logprobs { token_ids })
    };
    let mut request = flush(0);
    request.samplers = vec![none(2), (0, Sampler::Logprob { token_id: 1 }), none(1)];
    let answer = run(&[request, flush(1)], &[&[], &[]]);
    assert_eq!(answer.archive().logprobs_req_indptr, [0, 3, 3]);
    assert_eq!(answer.archive().logprobs_val_indptr, [0, 0, 1, 1]);
}

#[test]
fn rejected_requests_leave_the_others_right() {
    let mut outside = decode(4, 1, &[2]);
    outside.pages = vec![999];
    let mut misplaced = decode(4, 1, &[3]);
    misplaced.samplers[0].0 = 1;
    let requests = [outside, decode(4, 1, &[0]), misplaced, decode(4, 1, &[1])];
    let answer = run(&requests, &[&[], &[11], &[], &[12]]);
    assert_eq!(answer.archive().tokens_indptr, [0, 0, 1, 1, 2]);
    assert_eq!(answer.archive().tokens, [11, 12]);
}

#[test]
fn no_requests_get_an_empty_response() {
    let mut device = Device::new(LARGE);
    for request in [frame(&[]), ForwardRequest::default()] {
        let answer = device.run(&request, |_, _| 0);
        assert_eq!(answer.archive().num_requests, 0);
        assert!(answer.archive().tokens.is_empty());
    }
}

#[test]
fn timings_come_back() {
    let mut device = Device::new(LARGE);
    device.compute(&frame(&[flush(0)]), |_, _| 0);
    let probes = ForwardTimings {
        wire_parse: 1,
        plan: 2,
        h2d: 3,
        kernel_launch: 4,
        sync: u32::MAX,
    };
    let answer = device.reply(probes).expect("it fits");
    let response = answer.archive();
    let found = [
        response.probe_wire_parse_us,
        response.probe_plan_us,
        response.probe_h2d_us,
        response.probe_kernel_launch_us,
        response.probe_sync_us,
    ];
    assert_eq!(found, [1, 2, 3, 4, u32::MAX]);
    assert!(response.probe_response_build_us < 1_000_000);
    // They do not stay.
    device.compute(&frame(&[flush(0)]), |_, _| 0);
    let answer = device.reply(ForwardTimings::default()).expect("it fits");
    assert_eq!(answer.archive().probe_sync_us, 0);
}

/// Bytes of an archive with this many requests and tokens.
pub(crate) const fn archive_len(requests: usize, tokens: usize) -> usize {
    RESPONSE_ROOT_LEN + 4 * (requests + 1 + tokens)
}

#[test]
fn only_a_frame_without_passes_is_computed_at_once() {
    let mut planner = Planner::new(LARGE, 0);
    let encoded = Encoded::new(DRIVER, &frame(&[decode(3, 1, &[0])]));
    let plan = planner.plan(DRIVER, encoded.forward());
    let plan = plan.expect("a sound frame").computed();
    assert_eq!(plan.expect_err("a pass is left").pass_count(), 1);
    let encoded = Encoded::new(DRIVER, &frame(&[]));
    let plan = planner.plan(DRIVER, encoded.forward());
    let computed = plan.expect("a sound frame").computed();
    assert_eq!(computed.expect("no pass is left").pass_count(), 0);
}
