//! Replies: their form, verification, timings and buffers that are too small.

mod common;

use common::builder::{Encoded, GREEDY, ROOMY, Req, decode, frame};
use common::device::{Answer, DRIVER, Device, check_archive};
use common::naive::{Plan, Slot};
use pie_batch::{Limits, Planner, Probes, StageError};
use pie_wire::{ForwardRequest, RESPONSE_ROOT_LEN, Sampler, WireError, fast_tokens_len};
use proptest::collection::vec;
use proptest::prelude::*;

/// Gives the slots of each request the listed tokens.
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
fn a_probe_before_the_drafts_is_refused_and_an_embedding_means_greedy() {
    let probed = Req::new(16, 4, &[1], &[0])
        .sample(0, Sampler::Entropy)
        .sample(0, GREEDY)
        .verify(&[20]);
    let mut device = Device::new(ROOMY);
    let answer = device.run(&frame(&[probed, decode(9, 1, &[1])]), listed(&[&[], &[7]]));
    assert_eq!(answer.archive().tokens_indptr, [0, 0, 1]);
    assert_eq!(device.planner.faults()[0].1.kind(), "probe");
    // Input, draft and the other request: the keys and values are stored.
    assert_eq!(device.planner.token_count(), 3);

    let reserved = Req::new(16, 4, &[1], &[0])
        .sample(0, Sampler::Embedding)
        .verify(&[20]);
    let plan = device.compute(&frame(&[reserved]), listed(&[&[20, 21]]));
    assert!(
        plan.requests[0]
            .slots
            .iter()
            .all(|slot| slot.class == pie_batch::SamplerClass::Greedy)
    );
    assert_eq!(device.expected_tokens(), [[20, 21]]);
    let (answer, _) = device.reply(Probes::default(), 4096);
    assert_eq!(answer.expect("it fits").tokens(), [[20, 21]]);
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
    let (answer, _) = device.reply(probes, 4096);
    let answer = answer.expect("it fits");
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
    let (answer, _) = device.reply(Probes::default(), 4096);
    assert_eq!(answer.expect("it fits").archive().probe_sync_us, 0);
}

/// A request with `count` slots.
fn wide(page: u32, count: usize) -> Req {
    let mut request = decode(3, 1, &[page]);
    request.samplers = vec![(0, GREEDY); count];
    request
}

/// A device that has computed requests with the given numbers of slots.
fn computed(counts: &[usize]) -> Device {
    let mut device = Device::new(ROOMY);
    let requests: Vec<_> = counts
        .iter()
        .zip(0..)
        .map(|(&count, page)| wide(page, count))
        .collect();
    let mut next = 0;
    device.compute(&frame(&requests), |_, _| {
        next = (next + 1) % 1000;
        next
    });
    device
}

/// Bytes of an archive with this many requests and tokens.
const fn archive_len(requests: usize, tokens: usize) -> usize {
    RESPONSE_ROOT_LEN + 4 * (requests + 1 + tokens)
}

#[test]
fn too_many_tokens_empty_the_largest_requests() {
    let mut device = computed(&[2, 40, 1, 50, 0]);
    for (room, expected) in [
        (93, &[][..]),
        (92, &[3]),
        (43, &[3]),
        (42, &[1, 3]),
        (3, &[1, 3]),
    ] {
        let (answer, dropped) = device.reply(Probes::default(), archive_len(5, room));
        assert_eq!(dropped, expected, "room for {room} tokens");
        let mut tokens = device.expected_tokens();
        for &request in expected {
            tokens[request].clear();
        }
        let answer = answer.expect("it fits now");
        assert_eq!(answer.tokens(), tokens, "room for {room} tokens");
        check_archive(answer.archive(), 5);
    }
}

#[test]
fn a_buffer_below_the_empty_answer_is_an_error() {
    let mut device = computed(&[2, 3]);
    let enough = archive_len(2, 0);
    let (answer, dropped) = device.reply(Probes::default(), enough);
    assert_eq!(
        answer.expect("the empty answer fits").tokens(),
        [[], []] as [[u32; 0]; 2]
    );
    assert_eq!(dropped, [0, 1]);
    for capacity in [0, 19, RESPONSE_ROOT_LEN, enough - 1] {
        let (answer, _) = device.reply(Probes::default(), capacity);
        let error = answer.expect_err("it cannot fit");
        assert!(matches!(error, WireError::BufferTooSmall { needed, .. } if needed == enough));
    }
    // The failure costs nothing but itself.
    let (answer, dropped) = device.reply(Probes::default(), 4096);
    assert_eq!(answer.expect("it fits").tokens(), device.expected_tokens());
    assert!(dropped.is_empty());
    let answer = device.run(&frame(&[decode(3, 1, &[0])]), |_, _| 4);
    assert_eq!(answer, Answer::Fast(vec![4]));
}

#[test]
fn a_fast_reply_needs_less_room_than_the_archive() {
    let mut device = computed(&[1; 12]);
    let (answer, dropped) = device.reply(Probes::default(), fast_tokens_len(12));
    assert!(answer.expect("it fits").is_fast());
    assert!(dropped.is_empty());
    let (answer, _) = device.reply(Probes::default(), fast_tokens_len(12) - 1);
    answer.expect_err("the empty archive is longer still");
}

proptest! {
    /// Whatever the room: requests are whole or dropped, and dropped only from the largest on.
    #[test]
    fn every_capacity_keeps_what_it_can(counts in vec(0_usize..9, 1..8), capacity in 0_usize..500) {
        let mut device = computed(&counts);
        let (answer, mut dropped) = device.reply(Probes::default(), capacity);
        let mut tokens = device.expected_tokens();
        dropped.sort_by_key(|&request| std::cmp::Reverse(tokens[request].len()));
        let fast = counts.iter().all(|&count| count == 1) && fast_tokens_len(counts.len()) <= capacity;
        let Ok(answer) = answer else {
            prop_assert!(!fast && capacity < archive_len(counts.len(), 0));
            return Ok(());
        };
        prop_assert_eq!(answer.is_fast(), fast);
        let total = |tokens: &[Vec<u32>]| tokens.iter().map(Vec::len).sum::<usize>();
        for &request in &dropped {
            // Still too much, and nobody has more.
            prop_assert!(archive_len(counts.len(), total(&tokens)) > capacity);
            prop_assert!(!tokens[request].is_empty());
            prop_assert!(tokens.iter().all(|other| other.len() <= tokens[request].len()));
            tokens[request].clear();
        }
        prop_assert_eq!(answer.tokens(), tokens);
    }
}

/// A planner with one staged group of two slots, and the block.
fn staged() -> (Planner, Vec<u64>) {
    let mut planner = Planner::new(ROOMY, 0);
    let encoded = Encoded::new(DRIVER, &frame(&[wide(0, 2)]));
    planner
        .plan(DRIVER, encoded.forward())
        .expect("a sound frame");
    let mut block = vec![0_u64; planner.layout().bytes() / 8];
    let bytes = bytemuck::cast_slice_mut(&mut block);
    planner.stage(bytes).expect("it fits").expect("a pass");
    planner
        .stage_slots(bytes)
        .expect("it fits")
        .expect("a group");
    (planner, block)
}

#[test]
fn wrong_tokens_are_refused() {
    for (tokens, error) in [
        (
            &[1][..],
            StageError::TokenCount {
                found: 1,
                expected: 2,
            },
        ),
        (
            &[1, 2, 3],
            StageError::TokenCount {
                found: 3,
                expected: 2,
            },
        ),
        (
            &[1, -1],
            StageError::Token {
                token: -1,
                vocab_size: 1000,
            },
        ),
        (
            &[1000, 1],
            StageError::Token {
                token: 1000,
                vocab_size: 1000,
            },
        ),
        (
            &[1 << 32, 1],
            StageError::Token {
                token: 1 << 32,
                vocab_size: 1000,
            },
        ),
    ] {
        let (mut planner, _) = staged();
        assert_eq!(planner.put_tokens(tokens), Err(error));
    }
    let (mut planner, _) = staged();
    planner.put_tokens(&[1, 2]).expect("two tokens");
    let again = StageError::TokenCount {
        found: 2,
        expected: 0,
    };
    assert_eq!(planner.put_tokens(&[1, 2]), Err(again));
}

#[test]
fn unfit_blocks_are_refused_and_change_nothing() {
    let mut planner = Planner::new(ROOMY, 0);
    let encoded = Encoded::new(DRIVER, &frame(&[wide(0, 2)]));
    planner
        .plan(DRIVER, encoded.forward())
        .expect("a sound frame");
    let needed = planner.layout().bytes();
    let mut block = vec![0_u64; needed / 8 + 1];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
    let short = StageError::BlockSize {
        found: needed - 1,
        needed,
    };
    assert_eq!(planner.stage(&mut bytes[..needed - 1]), Err(short));
    assert!(matches!(
        planner.stage(&mut bytes[1..]),
        Err(StageError::Alignment(_))
    ));
    let pass = planner.stage(bytes).expect("it fits").expect("a pass");
    assert_eq!((pass.tokens, pass.updates, pass.slots), (1, 1, 2));
    assert_eq!(
        planner
            .stage_slots(&mut bytes[..8])
            .map_err(|error| error.to_string().is_empty()),
        Err(false)
    );
    assert!(planner.stage_slots(bytes).expect("it fits").is_some());
}
