//! Frames that are large in one direction, and numbers at the ends of their types.
//!
//! The time limits are far above what linear work takes and far below what quadratic work would.

use std::time::{Duration, Instant};

use crate::common::answer::answer;
use crate::common::builder::{Encoded, GREEDY, LARGE, Req, decode, frame};
use crate::common::device::DRIVER;
use crate::common::engine::{self, Engine, put};
use pie_planner::{
    ComputedPlan, ForwardTimings, LimitError, Limits, Outputs, Planner, RequestError, StagedGroup,
};
use pie_wire::{ForwardRequest, Sampler};

/// Runs a frame from plan to reply with token 1 everywhere; returns the frame and the tokens of each request.
fn run(limits: Limits, request: &ForwardRequest, capacity: usize) -> (ComputedPlan, Vec<Vec<u32>>) {
    let limits = Limits {
        reply_bytes: capacity as u32,
        ..limits
    };
    limits.check().expect("sound limits");
    let encoded = Encoded::new(DRIVER, request);
    let mut planner = Planner::new(limits, 0);
    let mut block = vec![0_u64; planner.layout().bytes() / 8];
    let mut words = vec![0_u64; capacity / 8];
    let (block, buffer) = (
        bytemuck::cast_slice_mut(&mut block),
        bytemuck::cast_slice_mut(&mut words),
    );
    let started = Instant::now();
    let plan = planner.plan(DRIVER, encoded.forward());
    let plan = plan.expect("a sound frame");
    let mut computed = Engine::default().run(&mut planner, plan, block);
    let length = planner.reply(&mut computed, ForwardTimings::default(), buffer);
    let length = length.expect("it fits");
    let elapsed = started.elapsed();
    assert!(elapsed < Duration::from_secs(20), "{elapsed:?}");
    (computed, answer(&buffer[..length]).tokens())
}

#[test]
fn a_hundred_thousand_requests_without_tokens() {
    let idle = Req::new(16, 5, &[], &[0]);
    let mut requests = vec![idle; 100_000];
    requests[50_000] = decode(3, 1, &[0]);
    let (computed, tokens) = run(LARGE, &frame(&requests), 1 << 20);
    assert_eq!(
        (computed.request_count(), computed.token_count()),
        (100_000, 1)
    );
    assert_eq!(tokens.iter().filter(|tokens| !tokens.is_empty()).count(), 1);
    assert_eq!(tokens[50_000], [1]);
}

#[test]
fn a_hundred_thousand_faults() {
    let mut outside = decode(3, 1, &[64]);
    outside.masks = Vec::new();
    let (computed, _) = run(LARGE, &frame(&vec![outside; 100_000]), 1 << 20);
    assert_eq!(computed.request_errors().len(), 100_000);
    assert_eq!(computed.pass_count(), 0);
}

#[test]
fn a_hundred_thousand_samplers_on_one_row() {
    let mut request = decode(3, 1, &[0]);
    request.samplers = vec![(0, GREEDY); 100_000];
    let (_, tokens) = run(LARGE, &frame(&[request.clone()]), 1 << 20);
    assert_eq!(tokens, [vec![1; 100_000]]);
    // All in one group, and in a reply that they do not fit.
    let limits = Limits {
        max_slots: 100_000,
        ..LARGE
    };
    let (_, tokens) = run(limits, &frame(&[request]), 1 << 16);
    assert_eq!(tokens, [[]] as [[u32; 0]; 1]);
}

#[test]
fn a_hundred_thousand_probes_of_every_kind() {
    let labels = Sampler::Logprobs {
        token_ids: vec![2; 9],
    };
    let dist = Sampler::Dist {
        temperature: 0.0,
        num_tokens: 3,
    };
    let kinds = [Sampler::Entropy, dist, Sampler::RawLogits, labels, GREEDY];
    let mut request = decode(3, 1, &[0]);
    request.samplers = (0..100_000).map(|n| (0, kinds[n % 5].clone())).collect();
    let limits = Limits {
        vocab_size: 50,
        ..LARGE
    };
    let (computed, tokens) = run(limits, &frame(&[request]), 1 << 23);
    assert!(computed.request_errors().is_empty());
    assert_eq!(tokens, [vec![1; 20_000]]);
}

#[test]
fn a_hundred_thousand_requests_for_logits_that_do_not_fit() {
    let mut request = decode(3, 1, &[0]);
    request.samplers = vec![(0, Sampler::RawLogits)];
    let (computed, _) = run(LARGE, &frame(&vec![request; 100_000]), 1 << 20);
    // Offsets of all requests twice, and what is left for rows of 1000.
    assert_eq!(computed.request_errors().len(), 100_000 - 62);
    assert!(
        computed
            .request_errors()
            .is_sorted_by_key(|(request, _)| *request)
    );
    assert_eq!(computed.token_count(), 100_000);
}

#[test]
fn a_hundred_thousand_spoilt_requests() {
    let requests = vec![decode(3, 1, &[0]); 100_000];
    let encoded = Encoded::new(DRIVER, &frame(&requests));
    let mut planner = Planner::new(LARGE, 0);
    let mut block = vec![0_u64; planner.layout().bytes() / 8];
    let block = bytemuck::cast_slice_mut(&mut block);
    let started = Instant::now();
    let plan = planner.plan(DRIVER, encoded.forward());
    let plan = plan.expect("a sound frame");
    let spoil = |group: StagedGroup, _: &[u8]| {
        let tokens = vec![-1; group.group().len()];
        let outputs = Outputs {
            tokens: &tokens,
            ..Outputs::default()
        };
        put(group, &outputs)
    };
    let computed = engine::run(&mut planner, plan, block, |_, _| {}, spoil);
    assert_eq!(computed.request_errors().len(), 100_000);
    let elapsed = started.elapsed();
    assert!(elapsed < Duration::from_secs(20), "{elapsed:?}");
}

#[test]
fn a_logit_mask_for_each_of_a_hundred_thousand_requests() {
    let requests: Vec<_> = (0..100_000)
        .map(|r| decode(3, 1, &[0]).allow(&[r % 900, 1 + r % 7]))
        .collect();
    let (computed, tokens) = run(LARGE, &frame(&requests), 1 << 20);
    assert_eq!(
        (computed.request_errors().len(), tokens.len()),
        (0, 100_000)
    );
}

#[test]
fn a_long_logit_mask_is_packed() {
    let mut runs = vec![0; 1_000_000];
    runs[999_999] = 4;
    let requests = vec![decode(3, 1, &[0]).allow(&runs); 3];
    let (computed, tokens) = run(LARGE, &frame(&requests), 1 << 12);
    assert_eq!(
        (computed.request_errors().len(), tokens),
        (0, vec![vec![1]; 3])
    );
}

#[test]
fn every_row_of_a_long_prompt_is_sampled() {
    let count = 100_000;
    let pages: Vec<u32> = (0..count / 16).collect();
    let mut request = Req::new(16, 0, &vec![1; count as usize], &pages);
    request.samplers = (0..count).map(|row| (row, GREEDY)).collect();
    let limits = Limits {
        total_pages: count,
        row_pages: count / 16,
        max_positions: count,
        ..LARGE
    };
    let (computed, tokens) = run(limits, &frame(&[request]), 1 << 20);
    assert_eq!(computed.pass_count(), 391);
    assert_eq!(tokens[0].len(), count as usize);
}

#[test]
fn a_million_pages() {
    let limits = Limits {
        page_size: 1,
        total_pages: 1 << 20,
        row_pages: 1 << 20,
        max_requests: 2,
        max_positions: u32::MAX,
        ..LARGE
    };
    let pages: Vec<u32> = (0..1 << 20).rev().collect();
    let mut request = Req::new(1, (1 << 20) - 600, &[1; 600], &pages).sample(599, GREEDY);
    request.positions[0] = u32::MAX - 1;
    let (computed, tokens) = run(limits, &frame(&[request.clone(), request]), 1 << 16);
    assert_eq!((computed.pass_count(), tokens), (5, vec![vec![1]; 2]));
}

#[test]
fn many_drafts_are_counted_without_wrapping() {
    // 100 000 drafts on one page, on pages that hold them, and with the last page's length at its ends.
    let drafts = vec![1; 100_000];
    let limits = Limits {
        total_pages: 10_000,
        row_pages: 8000,
        max_positions: 1 << 20,
        ..LARGE
    };
    for last_page_len in [1, 16] {
        let mut request = Req::new(16, 0, &[1], &[0])
            .sample(0, GREEDY)
            .verify(&drafts);
        request.last_page_len = last_page_len;
        let (computed, _) = run(limits, &frame(&[request]), 1 << 20);
        assert!(matches!(
            computed.request_errors(),
            [(
                0,
                RequestError::Geometry {
                    tokens: 100_001,
                    capacity: 1 | 16
                }
            )]
        ));
    }
    let pages: Vec<u32> = (0..6251).collect();
    let request = Req::new(16, 0, &[1], &pages)
        .sample(0, GREEDY)
        .verify(&drafts);
    let (computed, tokens) = run(limits, &frame(&[request]), 1 << 20);
    assert_eq!(computed.token_count(), 100_001);
    assert_eq!(tokens, [vec![1; 100_001]]);
}

#[test]
fn consecutive_draft_positions_do_not_wrap() {
    let limits = Limits {
        max_positions: u32::MAX,
        ..LARGE
    };
    let mut request = decode(3, 1, &[0]).verify(&[1, 2, 3]);
    request.positions[0] = u32::MAX - 2;
    request.draft_positions.clear();
    let (computed, _) = run(limits, &frame(&[request]), 1 << 12);
    assert!(matches!(
        computed.request_errors(),
        [(
            0,
            RequestError::Position {
                position: u32::MAX,
                ..
            }
        )]
    ));
}

#[test]
fn a_long_mask_row_is_read_once() {
    let mut request = decode(3, 1, &[0]);
    let mut runs = vec![0; 1_000_000];
    runs[1] = 4;
    request = request.masked([&runs]);
    let mut request = frame(&[request]);
    request.has_user_mask = true;
    let (computed, tokens) = run(LARGE, &request, 1 << 12);
    assert_eq!(
        (computed.request_errors().len(), tokens),
        (0, vec![vec![1]])
    );
}

#[test]
fn limits_of_zero_are_named() {
    for (name, zero) in [
        (
            "page_size",
            Limits {
                page_size: 0,
                ..LARGE
            },
        ),
        (
            "total_pages",
            Limits {
                total_pages: 0,
                ..LARGE
            },
        ),
        (
            "vocab_size",
            Limits {
                vocab_size: 0,
                ..LARGE
            },
        ),
        (
            "max_positions",
            Limits {
                max_positions: 0,
                ..LARGE
            },
        ),
        (
            "row_pages",
            Limits {
                row_pages: 0,
                ..LARGE
            },
        ),
        (
            "max_requests",
            Limits {
                max_requests: 0,
                ..LARGE
            },
        ),
        (
            "chunk_tokens",
            Limits {
                chunk_tokens: 0,
                ..LARGE
            },
        ),
        (
            "max_slots",
            Limits {
                max_slots: 0,
                ..LARGE
            },
        ),
        (
            "reply_bytes",
            Limits {
                reply_bytes: 0,
                ..LARGE
            },
        ),
    ] {
        assert_eq!(zero.check(), Err(LimitError::Zero(name)));
    }
}

#[test]
fn limits_that_overflow_are_refused() {
    for large in [
        Limits {
            total_pages: u32::MAX,
            page_size: u32::MAX,
            ..LARGE
        },
        Limits {
            total_pages: (1 << 27) - 1,
            ..LARGE
        },
        Limits {
            row_pages: 1 << 27,
            ..LARGE
        },
        Limits {
            max_requests: u32::MAX,
            row_pages: u32::MAX,
            ..LARGE
        },
        Limits {
            vocab_size: 1 << 31,
            ..LARGE
        },
        Limits {
            chunk_tokens: 1 << 31,
            ..LARGE
        },
        // 32 words for each mask.
        Limits {
            max_slots: 1 << 26,
            ..LARGE
        },
        Limits {
            reply_bytes: 1 << 31,
            ..LARGE
        },
    ] {
        assert!(
            matches!(large.check(), Err(LimitError::TooLarge { .. })),
            "{large:?}"
        );
    }
    let largest = Limits {
        total_pages: (1 << 27) - 2,
        ..LARGE
    };
    largest.check().expect("2^31 - 16 storage slots");
    assert_eq!(
        largest.first_slot(largest.total_pages - 1),
        i32::MAX as u32 - 31
    );
}
