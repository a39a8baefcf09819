//! Replies: their form, verification, timings and buffers that are too small.

use std::slice;

use crate::common::builder::{Encoded, GREEDY, ROOMY, Req, decode, frame};
use crate::common::device::{Answer, DRIVER, Device};
use crate::common::engine::{memory, next_group, next_pass, put};
use crate::common::naive::{Plan, Slot};
use pie_planner::{
    Computed, Limits, Outputs, Planner, Probes, ReplyError, RequestFault, SlotClass, StageError,
    StagedGroup, StagedPass,
};
use pie_wire::{ForwardRequest, RESPONSE_ROOT_LEN, Sampler, WireError, fast_tokens_len};
use proptest::collection::vec;
use proptest::prelude::*;

/// Gives the token slots of each request the listed tokens.
fn listed(tokens: &[&[u32]]) -> impl FnMut(&Plan, &Slot) -> u32 {
    let tokens: Vec<Vec<u32>> = tokens.iter().map(|tokens| tokens.to_vec()).collect();
    move |_, slot| tokens[slot.request][slot.number]
}

/// The reply to a frame whose slots get the listed tokens.
fn run(requests: &[Req], tokens: &[&[u32]]) -> Answer {
    Device::new(ROOMY).run(&frame(requests), listed(tokens))
}

/// A request of three inputs without samplers.
fn flush(page: u32) -> Req {
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
        ..ROOMY
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
        let mut device = Device::new(ROOMY);
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
    let mut device = Device::new(ROOMY);
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
fn emptied_requests_leave_the_others_right() {
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
    let mut device = Device::new(ROOMY);
    for request in [frame(&[]), ForwardRequest::default()] {
        let answer = device.run(&request, |_, _| 0);
        assert_eq!(answer.archive().num_requests, 0);
        assert!(answer.archive().tokens.is_empty());
    }
}

#[test]
fn timings_come_back() {
    let mut device = Device::new(ROOMY);
    device.compute(&frame(&[flush(0)]), |_, _| 0);
    let probes = Probes {
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
    let answer = device.reply(Probes::default()).expect("it fits");
    assert_eq!(answer.archive().probe_sync_us, 0);
}

/// A request with `count` slots.
fn wide(page: u32, count: usize) -> Req {
    let mut request = decode(3, 1, &[page]);
    request.samplers = vec![(0, GREEDY); count];
    request
}

/// The frame of requests with the given numbers of slots.
fn widths(counts: &[usize]) -> ForwardRequest {
    let counts = counts.iter().zip(0..);
    let requests: Vec<_> = counts.map(|(&count, page)| wide(page, count)).collect();
    frame(&requests)
}

/// A device with room for replies of so many bytes.
fn room(reply_bytes: usize) -> Device {
    Device::new(Limits {
        reply_bytes: reply_bytes as u32,
        ..ROOMY
    })
}

/// Numbers that tell slots apart.
fn counted() -> impl FnMut(&Plan, &Slot) -> u32 {
    let mut next = 0;
    move |_, _| {
        next = (next + 1) % 1000;
        next
    }
}

/// Bytes of an archive with this many requests and tokens.
const fn archive_len(requests: usize, tokens: usize) -> usize {
    RESPONSE_ROOT_LEN + 4 * (requests + 1 + tokens)
}

/// The emptied requests and the bytes that they would have taken; their faults name the limit.
fn emptied(device: &Device) -> Vec<(usize, usize)> {
    let limits = *device.planner.limits();
    let faults = device.faults().iter();
    faults
        .map(|(index, fault)| match fault {
            RequestFault::Oversize { bytes, limit } if *limit == limits.reply_bytes as usize => {
                (*index, *bytes)
            }
            other => panic!("{other}"),
        })
        .collect()
}

#[test]
fn too_many_tokens_empty_the_largest_requests() {
    for (tokens, expected) in [
        (93, &[][..]),
        (92, &[(3, 200)]),
        (43, &[(3, 200)]),
        (42, &[(1, 160), (3, 200)]),
        (3, &[(1, 160), (3, 200)]),
        (2, &[(0, 8), (1, 160), (3, 200)]),
    ] {
        let mut device = room(archive_len(5, tokens));
        let answer = device.run(&widths(&[2, 40, 1, 50, 0]), counted());
        assert_eq!(emptied(&device), expected, "room for {tokens} tokens");
        let counts = answer.tokens().iter().map(Vec::len).collect::<Vec<_>>();
        let mut left = [2, 40, 1, 50, 0];
        for &(request, _) in expected {
            left[request] = 0;
        }
        assert_eq!(counts, left, "room for {tokens} tokens");
        // Their tokens are computed and stored all the same.
        assert_eq!(device.last().token_count(), 5);
    }
}

#[test]
fn equal_requests_are_emptied_from_the_last_on() {
    let mut device = room(archive_len(3, 4));
    device.run(&widths(&[2, 2, 2]), counted());
    assert_eq!(emptied(&device), [(2, 8)]);
}

#[test]
fn room_for_less_than_the_empty_answer_is_an_error() {
    let enough = archive_len(2, 0);
    let mut device = room(enough);
    let answer = device.run(&widths(&[2, 3]), counted());
    assert_eq!(answer.tokens(), [[], []] as [[u32; 0]; 2]);
    assert_eq!(emptied(&device), [(0, 8), (1, 12)]);
    for reply_bytes in [1, 19, RESPONSE_ROOT_LEN, enough - 1] {
        let mut device = room(reply_bytes);
        device.compute(&widths(&[2, 3]), counted());
        let error = device.reply(Probes::default()).expect_err("it cannot fit");
        assert!(matches!(
            error,
            ReplyError::Wire(WireError::BufferTooSmall { needed, .. }) if needed == enough
        ));
    }
}

#[test]
fn a_reply_that_fails_costs_nothing_but_itself() {
    let mut device = Device::new(ROOMY);
    device.compute(&widths(&[2, 3]), counted());
    for capacity in [0, 19, archive_len(2, 5) - 1] {
        let mut words = vec![0_u64; capacity.div_ceil(8)];
        let buffer = &mut bytemuck::cast_slice_mut(&mut words)[..capacity];
        let computed = device.computed.as_mut().expect("a frame");
        let error = device.planner.reply(computed, Probes::default(), buffer);
        error.expect_err("it was planned for more");
    }
    let answer = device.reply(Probes::default()).expect("it fits");
    assert_eq!(answer.outputs(), device.expected());
    let answer = device.run(&frame(&[decode(3, 1, &[0])]), |_, _| 4);
    assert_eq!(answer, Answer::Fast(vec![4]));
}

#[test]
fn a_fast_reply_needs_less_room_than_the_archive() {
    let mut device = room(fast_tokens_len(12));
    assert!(device.run(&widths(&[1; 12]), counted()).is_fast());
    let mut device = room(fast_tokens_len(12) - 1);
    assert!(device.try_run(&widths(&[1; 12]), counted()).is_none());
    assert_eq!(device.faults().len(), 12);
}

/// A request with outputs of one kind, three as large as one in `size`.
fn sized(page: u32, kind: usize, size: u32) -> Req {
    let labels = |count| Sampler::Logprobs {
        token_ids: (0..count).collect(),
    };
    let dist = |num_tokens| Sampler::Dist {
        temperature: 1.0,
        num_tokens,
    };
    let request = Req::new(16, 3, &[1], &[page]);
    let times = |sampler: &Sampler| Req {
        samplers: vec![(0, sampler.clone()); size as usize],
        ..request.clone()
    };
    match kind {
        0 => times(&GREEDY),
        1 => request.sample(0, dist(size)),
        2 => times(&Sampler::RawLogits),
        3 => request.sample(0, labels(size)),
        4 => times(&Sampler::Logprob { token_id: 2 }),
        5 => times(&Sampler::Entropy),
        6 => times(&dist(0)),
        _ => request.sample(0, GREEDY).verify(&vec![7; size as usize]),
    }
}

#[test]
fn the_limit_is_exact_for_every_kind() {
    for kind in 0..8 {
        let requests = [1, 3, 2].map(|size| sized(size, kind, size));
        let run = |reply_bytes| {
            let mut device = room(reply_bytes);
            // All drafts are accepted.
            device.run(&frame(&requests), |_, _| 7);
            device
        };
        let full = run(1 << 20);
        assert!(emptied(&full).is_empty());
        let exact = run(full.reply_len);
        assert_eq!(emptied(&exact), [], "kind {kind}");
        assert_eq!(exact.reply_len, full.reply_len, "kind {kind}");
        let short = run(full.reply_len - 1);
        let saved = full.reply_len - short.reply_len;
        assert_eq!(emptied(&short), [(1, saved)], "kind {kind}");
    }
}

#[test]
fn drafts_count_as_accepted() {
    let requests = [decode(3, 1, &[0]).verify(&[7; 5]), decode(3, 1, &[1])];
    for (tokens, expected) in [(7, &[][..]), (6, &[(0, 24)])] {
        let mut device = room(archive_len(2, tokens));
        // None of them is.
        device.run(&frame(&requests), |_, _| 9);
        assert_eq!(emptied(&device), expected);
    }
}

proptest! {
    /// Whatever the room: requests are whole or emptied, and emptied only from the largest on.
    #[test]
    fn every_room_keeps_what_it_can(counts in vec(0_usize..9, 1..8), reply_bytes in 1_usize..500) {
        let mut device = room(reply_bytes);
        let answer = device.try_run(&widths(&counts), counted());
        let mut gone = emptied(&device);
        gone.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        let fast = counts.iter().all(|&count| count == 1) && fast_tokens_len(counts.len()) <= reply_bytes;
        let Some(answer) = answer else {
            prop_assert!(!fast && reply_bytes < archive_len(counts.len(), 0));
            return Ok(());
        };
        prop_assert_eq!(answer.is_fast(), fast);
        let mut left = counts.clone();
        for (request, _) in gone {
            // Still too much, and no request has more.
            prop_assert!(archive_len(counts.len(), left.iter().sum()) > reply_bytes);
            prop_assert!(left[request] > 0 && left.iter().all(|&other| other <= left[request]));
            left[request] = 0;
        }
        prop_assert_eq!(answer.tokens().iter().map(Vec::len).collect::<Vec<_>>(), left);
    }
}

/// A planner that has staged the first group of a frame, the group and the block.
fn staged(requests: &[Req]) -> (Planner, StagedGroup, Vec<u64>) {
    let mut planner = Planner::new(ROOMY, 0);
    let encoded = Encoded::new(DRIVER, &frame(requests));
    let plan = planner.plan(DRIVER, encoded.forward());
    let plan = plan.expect("a sound frame");
    let mut block = memory(planner.layout());
    let bytes = bytemuck::cast_slice_mut(&mut block);
    let pass = next_pass(&mut planner, plan, bytes).expect("a pass");
    let group = next_group(&planner, pass, bytes).expect("a group");
    (planner, group, block)
}

/// The frame, whose last group has its outputs now.
fn finish(planner: &Planner, pass: StagedPass, block: &mut [u64]) -> Computed {
    let plan = next_group(planner, pass, bytemuck::cast_slice_mut(block)).expect_err("one group");
    plan.computed().expect("one pass")
}

/// A request with a slot of every class.
fn every_class() -> Req {
    let dist = Sampler::Dist {
        temperature: 1.0,
        num_tokens: 2,
    };
    let labels = Sampler::Logprobs {
        token_ids: vec![1, 2, 3],
    };
    [Sampler::Entropy, dist, Sampler::RawLogits, labels]
        .into_iter()
        .fold(wide(0, 2), |request, sampler| request.sample(0, sampler))
}

/// Right outputs for [`every_class`].
const RIGHT: Outputs<'static> = Outputs {
    tokens: &[1, 2],
    dist_ids: &[3, 4],
    dist_probs: &[0.5; 2],
    logits: &[0.25; 1000],
    logprobs: &[-1.0; 3],
    entropies: &[0.5],
    place_words: &[],
};

#[test]
fn outputs_of_a_wrong_length_are_refused() {
    let long = [0.0; 1001];
    for (array, wrong, found, expected) in [
        (
            "tokens",
            Outputs {
                tokens: &[1],
                ..RIGHT
            },
            1,
            2,
        ),
        (
            "tokens",
            Outputs {
                tokens: &[1; 3],
                ..RIGHT
            },
            3,
            2,
        ),
        (
            "dist_ids",
            Outputs {
                dist_ids: &[1; 3],
                ..RIGHT
            },
            3,
            2,
        ),
        (
            "dist_probs",
            Outputs {
                dist_probs: &[0.0],
                ..RIGHT
            },
            1,
            2,
        ),
        (
            "logits",
            Outputs {
                logits: &long,
                ..RIGHT
            },
            1001,
            1000,
        ),
        (
            "logits",
            Outputs {
                logits: &[],
                ..RIGHT
            },
            0,
            1000,
        ),
        (
            "logprobs",
            Outputs {
                logprobs: &[0.0; 2],
                ..RIGHT
            },
            2,
            3,
        ),
        (
            "entropies",
            Outputs {
                entropies: &[0.0; 2],
                ..RIGHT
            },
            2,
            1,
        ),
    ] {
        let (mut planner, group, mut block) = staged(&[every_class()]);
        let error = StageError::OutputCount {
            array,
            found,
            expected,
        };
        let (group, found) = group.put_outputs(&wrong).expect_err(array);
        assert_eq!(found, error);
        assert!(error.to_string().contains(array));
        // Nothing of it was taken, so the right ones are welcome.
        let mut computed = finish(&planner, put(group, &RIGHT), &mut block);
        let mut words = vec![0_u64; 1 << 10];
        let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let length = planner.reply(&mut computed, Probes::default(), buffer);
        let length = length.expect("it fits");
        let answer = crate::common::device::answer(&buffer[..length]);
        assert_eq!(answer.archive().entropies, RIGHT.entropies);
        assert_eq!(answer.archive().dists_ids, [3, 4]);
        assert_eq!(answer.archive().logits_bytes.len(), 4000);
    }
}

#[test]
fn tokens_outside_the_vocabulary_empty_their_request_alone() {
    for token in [-1, 1000, 1 << 32, i64::MIN, i64::MAX, i64::from(u32::MAX)] {
        let probed = wide(0, 2).sample(0, Sampler::Entropy);
        let (mut planner, group, mut block) = staged(&[wide(1, 1), probed, wide(2, 1)]);
        let outputs = Outputs {
            tokens: &[0, 5, token, 999],
            entropies: &[0.5],
            ..Outputs::default()
        };
        let mut computed = finish(&planner, put(group, &outputs), &mut block);
        assert_eq!(computed.faults(), [(1, RequestFault::Logits)]);
        let mut words = vec![0_u64; 100];
        let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let length = planner.reply(&mut computed, Probes::default(), buffer);
        let length = length.expect("it fits");
        let answer = crate::common::device::answer(&buffer[..length]);
        assert_eq!(answer.tokens(), [vec![0], vec![], vec![999]], "{token}");
        assert!(answer.archive().entropies.is_empty());
    }
}

#[test]
fn a_request_is_spoilt_once_and_for_all() {
    // Its slots lie in several groups and passes, after and before it other requests have faults.
    let limits = Limits {
        chunk_tokens: 2,
        max_slots: 1,
        ..ROOMY
    };
    let long = flush(0)
        .sample(0, GREEDY)
        .sample(0, GREEDY)
        .sample(1, Sampler::Entropy)
        .sample(2, GREEDY);
    let outside = decode(3, 1, &[64]);
    let requests = [outside.clone(), long, outside, decode(3, 1, &[3])];
    let mut device = Device::new(limits);
    device.run(&frame(&requests), |_, slot| match slot.request {
        1 => 1000 + slot.number as u32,
        _ => 5,
    });
    let expected = [(0, "page-id"), (1, "logits"), (2, "page-id")];
    assert_eq!(kinds(&device), expected);
}

/// The faults of the last frame by their kinds.
fn kinds(device: &Device) -> Vec<(usize, &'static str)> {
    let faults = device.faults().iter();
    faults
        .map(|(index, fault)| (*index, fault.kind()))
        .collect()
}

/// Three decodes of one token, a group or a pass each where the limits say so; the first one's logits are NaN.
fn first_of_three_is_spoilt(limits: Limits) -> (Device, Option<Vec<Vec<u32>>>) {
    let mut device = Device::new(limits);
    let answer = device.try_run(&widths(&[1; 3]), |_, slot| match slot.request {
        0 => 1000,
        request => request as u32,
    });
    (device, answer.map(|answer| answer.tokens()))
}

#[test]
fn a_spoilt_request_costs_others_where_only_the_fast_reply_fits() {
    for (max_slots, max_requests) in [(64, 16), (1, 16), (1, 1)] {
        let limits = |reply_bytes: usize| Limits {
            max_slots,
            max_requests,
            reply_bytes: reply_bytes as u32,
            ..ROOMY
        };
        // The archive that now is the answer still has room for what is left.
        let (device, tokens) = first_of_three_is_spoilt(limits(archive_len(3, 2)));
        assert_eq!(kinds(&device), [(0, "logits")]);
        assert_eq!(tokens, Some(vec![vec![], vec![1], vec![2]]));
        let (device, tokens) = first_of_three_is_spoilt(limits(archive_len(3, 2) - 1));
        assert_eq!(kinds(&device), [(0, "logits"), (2, "oversize")]);
        assert_eq!(tokens, Some(vec![vec![], vec![1], vec![]]));
        // Without room for an empty archive there is no answer, and a fault for every request.
        let (device, tokens) = first_of_three_is_spoilt(limits(archive_len(3, 0) - 1));
        let all = [(0, "logits"), (1, "oversize"), (2, "oversize")];
        assert_eq!((kinds(&device).as_slice(), tokens), (all.as_slice(), None));
    }
}

proptest! {
    /// Requests that are spoilt in any order leave an answer that fits and keeps what it can.
    #[test]
    fn every_room_takes_what_spoilt_requests_leave(
        spoilt in vec(any::<bool>(), 1..9),
        more in 0_usize..48,
        (max_slots, max_requests) in (1_u32..4, 1_u32..4),
    ) {
        let limits = Limits {
            max_slots,
            max_requests,
            reply_bytes: (RESPONSE_ROOT_LEN + more) as u32,
            ..ROOMY
        };
        let tokens = spoilt.iter().zip(0..);
        let tokens: Vec<u32> = tokens.map(|(&spoilt, own)| if spoilt { 1000 } else { own }).collect();
        let counts = vec![1; tokens.len()];
        Device::new(limits).try_run(&widths(&counts), |_, slot| tokens[slot.request]);
    }
}

#[test]
fn unfit_blocks_are_refused_and_change_nothing() {
    let mut planner = Planner::new(ROOMY, 0);
    let encoded = Encoded::new(DRIVER, &frame(&[wide(0, 2)]));
    let plan = planner.plan(DRIVER, encoded.forward());
    let plan = plan.expect("a sound frame");
    let needed = planner.layout().bytes();
    let mut block = vec![0_u64; needed / 8 + 1];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
    let short = StageError::BlockSize {
        found: needed - 1,
        needed,
    };
    let refused = planner.block(&mut bytes[..needed - 1]);
    assert_eq!(refused.expect_err("too short"), short);
    let refused = planner.block(&mut bytes[1..]).expect_err("misaligned");
    assert!(matches!(refused, StageError::Alignment(_)));
    let staged = next_pass(&mut planner, plan, bytes).expect("a pass");
    let pass = staged.pass();
    assert_eq!((pass.tokens, pass.updates, pass.slots), (1, 1, 2));
}

#[test]
fn only_a_frame_without_passes_is_computed_at_once() {
    let mut planner = Planner::new(ROOMY, 0);
    let encoded = Encoded::new(DRIVER, &frame(&[decode(3, 1, &[0])]));
    let plan = planner.plan(DRIVER, encoded.forward());
    let plan = plan.expect("a sound frame").computed();
    assert_eq!(plan.expect_err("a pass is left").pass_count(), 1);
    let encoded = Encoded::new(DRIVER, &frame(&[]));
    let plan = planner.plan(DRIVER, encoded.forward());
    let computed = plan.expect("a sound frame").computed();
    assert_eq!(computed.expect("no pass is left").pass_count(), 0);
}
