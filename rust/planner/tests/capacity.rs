//! Responses that do not fit their buffer.

use pie_planner::{ForwardTimings, Limits, ReplyError, RequestError};
use pie_wire::{ForwardRequest, RESPONSE_ROOT_LEN, Sampler, WireError, fast_tokens_len};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::answer::Answer;
use crate::common::builder::{GREEDY, LARGE, Req, decode, frame};
use crate::common::device::Device;
use crate::common::naive::{Plan, Slot};
use crate::reply::archive_len;

/// A request with `count` slots.
pub(crate) fn wide(page: u32, count: usize) -> Req {
    let mut request = decode(3, 1, &[page]);
    request.samplers = vec![(0, GREEDY); count];
    request
}

/// The frame of requests with the given numbers of slots.
pub(crate) fn widths(counts: &[usize]) -> ForwardRequest {
    let counts = counts.iter().zip(0..);
    let requests: Vec<_> = counts.map(|(&count, page)| wide(page, count)).collect();
    frame(&requests)
}

/// A device with room for replies of so many bytes.
pub(crate) fn device_with(reply_bytes: usize) -> Device {
    Device::new(Limits {
        reply_bytes: reply_bytes as u32,
        ..LARGE
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

/// The rejected requests and the bytes that they would have taken; their errors name the limit.
fn rejected(device: &Device) -> Vec<(usize, usize)> {
    let limits = *device.planner.limits();
    let errors = device.request_errors().iter();
    errors
        .map(|(index, error)| match error {
            RequestError::Oversize { bytes, limit } if *limit == limits.reply_bytes as usize => {
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
        let mut device = device_with(archive_len(5, tokens));
        let answer = device.run(&widths(&[2, 40, 1, 50, 0]), counted());
        assert_eq!(rejected(&device), expected, "room for {tokens} tokens");
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
fn equal_requests_are_rejected_from_the_last_on() {
    let mut device = device_with(archive_len(3, 4));
    device.run(&widths(&[2, 2, 2]), counted());
    assert_eq!(rejected(&device), [(2, 8)]);
}

#[test]
fn room_for_less_than_the_empty_answer_is_an_error() {
    let enough = archive_len(2, 0);
    let mut device = device_with(enough);
    let answer = device.run(&widths(&[2, 3]), counted());
    assert_eq!(answer.tokens(), [[], []] as [[u32; 0]; 2]);
    assert_eq!(rejected(&device), [(0, 8), (1, 12)]);
    for reply_bytes in [1, 19, RESPONSE_ROOT_LEN, enough - 1] {
        let mut device = device_with(reply_bytes);
        device.compute(&widths(&[2, 3]), counted());
        let error = device
            .reply(ForwardTimings::default())
            .expect_err("it cannot fit");
        assert!(matches!(
            error,
            ReplyError::Wire(WireError::BufferTooSmall { needed, .. }) if needed == enough
        ));
    }
}

#[test]
fn a_reply_that_fails_costs_nothing_but_itself() {
    let mut device = Device::new(LARGE);
    device.compute(&widths(&[2, 3]), counted());
    for capacity in [0, 19, archive_len(2, 5) - 1] {
        let mut words = vec![0_u64; capacity.div_ceil(8)];
        let buffer = &mut bytemuck::cast_slice_mut(&mut words)[..capacity];
        let computed = device.computed.as_mut().expect("a frame");
        let error = device
            .planner
            .reply(computed, ForwardTimings::default(), buffer);
        error.expect_err("it was planned for more");
    }
    let answer = device.reply(ForwardTimings::default()).expect("it fits");
    assert_eq!(answer.outputs(), device.expected());
    let answer = device.run(&frame(&[decode(3, 1, &[0])]), |_, _| 4);
    assert_eq!(answer, Answer::Fast(vec![4]));
}

#[test]
fn a_fast_reply_needs_less_room_than_the_archive() {
    let mut device = device_with(fast_tokens_len(12));
    assert!(device.run(&widths(&[1; 12]), counted()).is_fast());
    let mut device = device_with(fast_tokens_len(12) - 1);
    assert!(device.try_run(&widths(&[1; 12]), counted()).is_none());
    assert_eq!(device.request_errors().len(), 12);
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
            let mut device = device_with(reply_bytes);
            // All drafts are accepted.
            device.run(&frame(&requests), |_, _| 7);
            device
        };
        let full = run(1 << 20);
        assert!(rejected(&full).is_empty());
        let exact = run(full.reply_len);
        assert_eq!(rejected(&exact), [], "kind {kind}");
        assert_eq!(exact.reply_len, full.reply_len, "kind {kind}");
        let short = run(full.reply_len - 1);
        let saved = full.reply_len - short.reply_len;
        assert_eq!(rejected(&short), [(1, saved)], "kind {kind}");
    }
}

#[test]
fn drafts_count_as_accepted() {
    let requests = [decode(3, 1, &[0]).verify(&[7; 5]), decode(3, 1, &[1])];
    for (tokens, expected) in [(7, &[][..]), (6, &[(0, 24)])] {
        let mut device = device_with(archive_len(2, tokens));
        // None of them is.
        device.run(&frame(&requests), |_, _| 9);
        assert_eq!(rejected(&device), expected);
    }
}

proptest! {
    /// Whatever the limit: requests are whole or rejected, and rejected only from the largest on.
    #[test]
    fn every_room_keeps_what_it_can(counts in vec(0_usize..9, 1..8), reply_bytes in 1_usize..500) {
        let mut device = device_with(reply_bytes);
        let answer = device.try_run(&widths(&counts), counted());
        let mut gone = rejected(&device);
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
