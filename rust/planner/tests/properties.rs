//! The planner equals a naive one, pass by pass and frame by frame.

use std::cell::Cell;
use std::collections::HashSet;

use crate::common::answer::Answer;
use crate::common::builder::{Encoded, GREEDY, LARGE, Req, decode, frame};
use crate::common::device::{DRIVER, Device};
use crate::common::engine::memory;
use crate::common::generate::{self, VOCAB};
use crate::common::naive::{Plan, Slot};
use pie_planner::{Layout, Limits, Planner, StageError, StepMemory};
use pie_wire::{ForwardRequest, ForwardResponse, Sampler};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Tokens for slots: drafts are accepted more often than not, other tokens tell neighbours apart, few are none.
fn pick(salt: u32) -> impl FnMut(&Plan, &Slot) -> u32 {
    let mut calls = salt;
    move |plan, slot| {
        calls = calls.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let draft = plan.requests[slot.request].drafts.get(slot.number);
        match draft {
            Some(&draft) if calls >> 30 != 0 => draft,
            _ if calls >> 25 == 0 => VOCAB + (calls >> 23),
            _ => (calls >> 8) % VOCAB,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    /// Faults, staged arrays, slots and replies of every frame; one planner sees them all.
    #[test]
    fn planner_equals_the_naive_one(
        (limits, frames) in generate::sequence(),
        lost in 0_usize..8,
        salt in any::<u32>(),
    ) {
        let mut device = Device::new(limits);
        for (number, frame) in frames.iter().enumerate() {
            if number == lost {
                device.lose_table();
            }
            device.try_run(frame, pick(salt.wrapping_add(number as u32)));
        }
    }

    /// What a planner saw before does not show in what it answers.
    #[test]
    fn frames_do_not_depend_on_their_predecessors(
        (limits, frames) in generate::sequence(),
        salt in any::<u32>(),
    ) {
        let mut device = Device::new(limits);
        for (number, frame) in frames.iter().enumerate() {
            let answer = device.try_run(frame, pick(salt.wrapping_add(number as u32)));
            let alone = Device::new(limits).try_run(frame, pick(salt.wrapping_add(number as u32)));
            let tokens = |answer: Option<Answer>| answer.map(|answer| answer.tokens());
            prop_assert_eq!(tokens(answer), tokens(alone));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    /// The same with adapters: passes hold as many as they can, and those of lost ones are dropped.
    #[test]
    fn planner_with_adapters_equals_the_naive_one(
        (limits, mut frames) in generate::sequence(),
        slots in 1_usize..4,
        ids in prop::collection::vec(prop_oneof![Just(-1_i64), 1_i64..6], 42),
        salt in any::<u32>(),
    ) {
        let mut device = Device::with_adapters(limits, slots, 4);
        let bindings = frames.iter_mut().flat_map(|frame| &mut frame.adapter_bindings);
        for (binding, id) in bindings.zip(ids) {
            binding.adapter_id = id;
        }
        for (number, frame) in frames.iter().enumerate() {
            device.try_run(frame, pick(salt.wrapping_add(number as u32)));
        }
    }
}

/// Drafts change nothing else, come only where they are asked for, and name tokens and positions that there are.
#[test]
fn planner_with_drafts_equals_the_naive_one() {
    let drafted = Cell::new(0);
    let asks = prop::collection::vec(prop::bool::weighted(0.8), 42);
    let strategy = (generate::sequence(), asks, any::<u32>());
    let config = ProptestConfig {
        cases: 1500,
        ..ProptestConfig::default()
    };
    let run = TestRunner::new(config).run(&strategy, |((limits, mut frames), asks, salt)| {
        let mut device = Device::with_drafts(limits);
        let flags = frames
            .iter_mut()
            .flat_map(|frame| &mut frame.output_spec_flags);
        for (flag, asks) in flags.zip(asks) {
            *flag = asks;
        }
        // Few different tokens, so that texts repeat themselves.
        let tokens = frames.iter_mut().flat_map(|frame| &mut frame.token_ids);
        for token in tokens.filter(|token| **token < VOCAB) {
            *token %= 3;
        }
        for frame in &frames {
            let answer = device.try_run(frame, |_, slot| (salt >> slot.number) % 3);
            if let Some(Answer::Archive(response)) = answer {
                check_drafts(&response, frame, &limits)?;
                drafted.set(drafted.get() + response.spec_tokens.len());
            }
        }
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{error}"));
    assert!(drafted.get() > 1000, "only {} drafts", drafted.get());
}

#[test]
fn only_a_token_behind_the_last_input_is_continued() {
    let drafts = |slots: &[(u32, Sampler)]| {
        let mut device = Device::with_drafts(LARGE);
        let tokens: Vec<u32> = (0..20).map(|position| 1 + position % 7).collect();
        let mut request = Req::new(16, 0, &tokens, &[1, 2]);
        request.samplers = slots.to_vec();
        let mut frame = frame(&[request]);
        frame.output_spec_flags.fill(true);
        let answer = device.run(&frame, |_, slot| 1 + (slot.row as u32 + 1) % 7);
        answer.drafts()
    };
    assert!(drafts(&[(19, GREEDY)]) > 0);
    assert!(drafts(&[(3, Sampler::Entropy), (19, GREEDY)]) > 0);
    assert_eq!(drafts(&[(3, GREEDY)]), 0);
    assert_eq!(drafts(&[(3, GREEDY), (19, Sampler::Entropy)]), 0);
    assert_eq!(drafts(&[(19, Sampler::Entropy)]), 0);
}

fn check_drafts(
    response: &ForwardResponse,
    frame: &ForwardRequest,
    limits: &Limits,
) -> Result<(), TestCaseError> {
    for (index, ends) in response.spec_indptr.windows(2).enumerate() {
        let own = ends[0] as usize..ends[1] as usize;
        let (flag, context) = (
            frame.output_spec_flags.get(index),
            frame.context_ids.get(index),
        );
        let asked = flag == Some(&true) && context.is_some_and(|&id| id != 0);
        prop_assert!(own.is_empty() || asked);
        prop_assert!(own.len() <= 3);
        let (mut tokens, mut positions) = (
            response.spec_tokens[own.clone()].iter(),
            response.spec_positions[own].iter(),
        );
        prop_assert!(tokens.all(|&token| token < limits.vocab_size));
        prop_assert!(positions.all(|&position| position < limits.max_positions));
    }
    Ok(())
}

fn plain(seed: u32) -> Sampler {
    Sampler::Multinomial {
        temperature: 1.0,
        seed,
    }
}

/// A decode request with `count` slots of one sampler.
fn slots(prefix: u32, page: u32, count: usize, sampler: &Sampler) -> Req {
    let mut request = Req::new(16, prefix, &[1], &[page]);
    request.samplers = vec![(0, sampler.clone()); count];
    request
}

/// The bits of the uniforms of the last frame.
fn bits(device: &Device) -> Vec<u32> {
    device
        .uniforms
        .values()
        .map(|uniform| uniform.to_bits())
        .collect()
}

#[test]
fn seeded_uniforms_depend_on_seed_position_and_slot_alone() {
    let mut first = Device::with_seed(LARGE, 1);
    first.run(&frame(&[slots(5, 0, 3, &plain(42))]), |_, _| 0);
    let mut second = Device::with_seed(LARGE, 2);
    for _ in 0..3 {
        let greedy = slots(9, 2, 2, &GREEDY);
        second.run(
            &frame(&[greedy, decode(3, 1, &[7]), slots(5, 4, 3, &plain(42))]),
            |_, _| 0,
        );
    }
    for number in 0..3 {
        assert_eq!(
            first.uniforms[&(0, number)].to_bits(),
            second.uniforms[&(2, number)].to_bits()
        );
    }
    // Another position, another seed, another slot.
    let mut all: HashSet<_> = bits(&first).into_iter().collect();
    for (prefix, seed) in [(6, 42), (5, 43), (5, 2), (5, u32::MAX)] {
        second.run(&frame(&[slots(prefix, 0, 3, &plain(seed))]), |_, _| 0);
        all.extend(bits(&second));
    }
    assert_eq!(all.len(), 5 * 3);
}

#[test]
fn seeded_position_is_the_rotary_one() {
    let mut device = Device::new(LARGE);
    device.run(&frame(&[slots(5, 0, 1, &plain(9))]), |_, _| 0);
    let expected = bits(&device);
    let mut moved = slots(30, 3, 1, &plain(9));
    moved.pages = vec![3, 4];
    moved.positions = vec![5];
    device.run(&frame(&[moved]), |_, _| 0);
    assert_eq!(bits(&device), expected);
}

#[test]
fn fresh_uniforms_differ_between_slots_frames_and_planners() {
    let fresh = [
        plain(0),
        plain(1),
        Sampler::TopP {
            temperature: 0.7,
            p: 0.9,
        },
        Sampler::TopK {
            temperature: 0.7,
            k: 3,
        },
    ];
    let requests: Vec<_> = (0..12)
        .map(|r| slots(5, r, 5, &fresh[r as usize % 4]))
        .collect();
    let mut all = HashSet::new();
    for seed in [0, 1, u64::MAX] {
        let mut device = Device::with_seed(LARGE, seed);
        for _ in 0..3 {
            device.run(&frame(&requests), |_, _| 0);
            all.extend(bits(&device));
        }
    }
    assert_eq!(all.len(), 3 * 3 * 60);
}

#[test]
fn fresh_uniforms_do_not_meet_seeded_ones() {
    // Frame 1, slot 0 of a planner whose random seed ends like a caller's seed.
    for random_seed in [42, (1 << 63) + 42] {
        let mut device = Device::with_seed(LARGE, random_seed);
        device.run(&frame(&[slots(1, 0, 1, &plain(0))]), |_, _| 0);
        let fresh = bits(&device);
        device.run(&frame(&[slots(1, 0, 1, &plain(42))]), |_, _| 0);
        assert_ne!(fresh, bits(&device), "random seed {random_seed:#x}");
    }
}

#[test]
fn verify_rows_share_the_first_samplers_seed_but_not_its_draw() {
    let request = Req::new(16, 4, &[1], &[0])
        .sample(0, plain(8))
        .sample(0, GREEDY)
        .verify(&[2, 3]);
    let mut device = Device::new(LARGE);
    let plan = device.compute(&frame(&[request]), |_, _| 0);
    let keys: Vec<_> = plan.requests[0].slots.iter().map(|slot| slot.key).collect();
    assert_eq!(keys, [Some((8, 4, 0)), Some((8, 5, 0)), Some((8, 6, 0))]);
    assert_eq!(bits(&device).into_iter().collect::<HashSet<_>>().len(), 3);
}

#[test]
fn only_changed_table_entries_travel() {
    let limits = Limits {
        chunk_tokens: 4,
        ..LARGE
    };
    let mut device = Device::new(limits);
    let updates = |device: &mut Device, requests: &[Req]| {
        device.compute(&frame(requests), |_, _| 0);
        device.last_updates.clone()
    };
    let long = |last| decode(40, 1, &[5, 6, last]);
    assert_eq!(updates(&mut device, &[long(7)]), [3]);
    assert_eq!(updates(&mut device, &[long(7)]), [0]);
    assert_eq!(updates(&mut device, &[long(8)]), [1]);
    // A shorter list leaves the rest of the row as it is.
    assert_eq!(updates(&mut device, &[decode(4, 1, &[5])]), [0]);
    assert_eq!(updates(&mut device, &[long(8)]), [0]);
    // The passes of a long prompt name the same pages.
    let prompt = Req::new(16, 0, &[1; 10], &[9]);
    assert_eq!(updates(&mut device, &[prompt]), [1, 0, 0]);
    device.lose_table();
    assert_eq!(updates(&mut device, &[long(8)]), [3]);
}

#[test]
fn a_context_keeps_its_entries_when_its_place_changes() {
    let mut device = Device::new(LARGE);
    let requests: Vec<_> = (0..8).map(|r| decode(40, 1, &[r, r + 8, r + 16])).collect();
    let run = |device: &mut Device, order: &[usize]| {
        let chosen: Vec<_> = order.iter().map(|&r| requests[r].clone()).collect();
        let mut frame = frame(&chosen);
        frame.context_ids = order.iter().map(|&r| 100 + r as u64).collect();
        device.compute(&frame, |_, _| 0);
        device.last_updates[0]
    };
    assert_eq!(run(&mut device, &[0, 1, 2, 3]), 12);
    assert_eq!(run(&mut device, &[3, 1, 0]), 0);
    assert_eq!(run(&mut device, &[5, 2, 1, 0, 3]), 3);
    // An id that changed hands is no promise.
    let mut other = frame(&[requests[7].clone()]);
    other.context_ids = vec![103];
    device.compute(&other, |_, _| 0);
    assert_eq!(device.last_updates, [3]);
}

#[test]
fn what_was_planned_but_not_staged_is_not_on_the_device() {
    let mut device = Device::new(LARGE);
    let request = frame(&[decode(40, 1, &[5, 6, 7])]);
    let encoded = Encoded::new(DRIVER, &request);
    let planned = device.planner.plan(DRIVER, encoded.forward());
    let stale = planned.expect("a sound frame");
    device.compute(&request, |_, _| 0);
    assert_eq!(device.last_updates, [3]);
    // And it cannot be staged any more.
    let mut memory = memory(device.planner.layout());
    let memory = bytemuck::cast_slice_mut(&mut memory);
    let mut block = device.planner.block(memory).expect("it fits");
    let staged = device.planner.stage(stale, &mut block);
    assert!(matches!(staged, Err(StageError::Superseded { frame: 1 })));
}

#[test]
fn a_plan_is_not_staged_against_a_table_that_was_forgotten() {
    let mut planner = Planner::new(LARGE, 0);
    let encoded = Encoded::new(DRIVER, &frame(&[decode(40, 1, &[5, 6, 7])]));
    let mut memory = memory(planner.layout());
    let memory = bytemuck::cast_slice_mut(&mut memory);
    let plan = planner.plan(DRIVER, encoded.forward());
    planner.invalidate_block_table();
    let mut block = planner.block(memory).expect("it fits");
    let staged = planner.stage(plan.expect("a sound frame"), &mut block);
    assert!(matches!(staged, Err(StageError::Superseded { frame: 1 })));
    let layout = Layout::graph(1);
    let mut step = vec![0_u64; layout.bytes() / 8];
    let plan = planner.plan(DRIVER, encoded.forward());
    planner.invalidate_block_table();
    let memory = StepMemory {
        block: bytemuck::cast_slice_mut(&mut step),
        mask_words: &mut [],
    };
    let staged = planner.stage_graph(plan.expect("a sound frame"), &layout, memory, 1);
    assert!(matches!(staged, Err(StageError::Superseded { frame: 2 })));
}
