//! Outputs of the engine: wrong lengths, NaN logits.

use pie_planner::{
    ComputedPlan, ForwardTimings, Limits, Outputs, Planner, RequestError, StageError, StagedGroup,
    StagedPass,
};
use pie_wire::{RESPONSE_ROOT_LEN, Sampler};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::capacity::{wide, widths};
use crate::common::builder::{Encoded, GREEDY, LARGE, Req, decode, frame};
use crate::common::device::{DRIVER, Device};
use crate::common::engine::{memory, next_group, next_pass, put};
use crate::reply::{archive_len, flush};

/// A planner that has staged the first group of a frame, the group and the block.
pub(crate) fn staged(requests: &[Req]) -> (Planner, StagedGroup, Vec<u64>) {
    let mut planner = Planner::new(LARGE, 0);
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
fn finish(planner: &Planner, pass: StagedPass, block: &mut [u64]) -> ComputedPlan {
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
    logprob_words: &[],
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
        let length = planner.reply(&mut computed, ForwardTimings::default(), buffer);
        let length = length.expect("it fits");
        let answer = crate::common::answer::answer(&buffer[..length]);
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
        assert_eq!(computed.request_errors(), [(1, RequestError::Logits)]);
        let mut words = vec![0_u64; 100];
        let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let length = planner.reply(&mut computed, ForwardTimings::default(), buffer);
        let length = length.expect("it fits");
        let answer = crate::common::answer::answer(&buffer[..length]);
        assert_eq!(answer.tokens(), [vec![0], vec![], vec![999]], "{token}");
        assert!(answer.archive().entropies.is_empty());
    }
}

#[test]
fn a_request_is_spoilt_once_and_for_all() {
    // Its slots lie in several groups and passes, after and before it other requests have errors.
    let limits = Limits {
        chunk_tokens: 2,
        max_slots: 1,
        ..LARGE
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

/// The errors of the last frame by their kinds.
fn kinds(device: &Device) -> Vec<(usize, &'static str)> {
    let errors = device.request_errors().iter();
    errors
        .map(|(index, error)| (*index, error.kind()))
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
            ..LARGE
        };
        // The archive that now is the answer still has room for what is left.
        let (device, tokens) = first_of_three_is_spoilt(limits(archive_len(3, 2)));
        assert_eq!(kinds(&device), [(0, "logits")]);
        assert_eq!(tokens, Some(vec![vec![], vec![1], vec![2]]));
        let (device, tokens) = first_of_three_is_spoilt(limits(archive_len(3, 2) - 1));
        assert_eq!(kinds(&device), [(0, "logits"), (2, "oversize")]);
        assert_eq!(tokens, Some(vec![vec![], vec![1], vec![]]));
        // Without room for an empty archive there is no answer, and an error for every request.
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
            ..LARGE
        };
        let tokens = spoilt.iter().zip(0..);
        let tokens: Vec<u32> = tokens.map(|(&spoilt, own)| if spoilt { 1000 } else { own }).collect();
        let counts = vec![1; tokens.len()];
        Device::new(limits).try_run(&widths(&counts), |_, slot| tokens[slot.request]);
    }
}

#[test]
fn unfit_blocks_are_refused_and_change_nothing() {
    let mut planner = Planner::new(LARGE, 0);
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
