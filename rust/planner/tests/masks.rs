//! Packed logit masks: bit by bit those of the runs, for vocabularies that end anywhere in a word.

use crate::common::builder::{Encoded, GREEDY, LARGE, Req, decode, frame};
use crate::common::device::{DRIVER, Device};
use crate::common::engine::{memory, next_group, next_pass};
use crate::common::generate::logit_mask;
use pie_planner::{Limits, Planner, SlotClass};
use pie_wire::Sampler;
use proptest::collection::vec;
use proptest::prelude::*;

fn sized(vocab_size: u32) -> Limits {
    Limits {
        vocab_size,
        ..LARGE
    }
}

/// A vocabulary and masks for it.
fn masks() -> impl Strategy<Value = (u32, Vec<Vec<u32>>)> {
    let sizes = prop_oneof![
        Just(1_u32),
        Just(31),
        Just(32),
        Just(33),
        Just(50),
        Just(64),
        Just(1000)
    ];
    sizes.prop_flat_map(|size| {
        let long = vec(
            prop_oneof![Just(0), 1..=size.div_ceil(3), 30_u32..35],
            0..40,
        );
        let runs = prop_oneof![logit_mask(size), long];
        (Just(size), vec(runs, 1..6))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// The device compares every bit of what is staged with the expanded runs.
    #[test]
    fn packed_masks_equal_the_expanded_runs((vocab_size, masks) in masks()) {
        let requests: Vec<_> = masks
            .iter()
            .map(|runs| decode(3, 0, &[0]).sample(0, Sampler::Entropy).allow(runs))
            .collect();
        Device::new(sized(vocab_size)).run(&frame(&requests), |_, _| 0);
    }
}

/// Plans and stages a frame; returns the classes' counts, the staged masks and each slot's mask, -1 = none.
fn staged(requests: &[Req]) -> ([usize; SlotClass::COUNT], usize, Vec<i32>) {
    let mut planner = Planner::new(sized(50), 0);
    let encoded = Encoded::new(DRIVER, &frame(requests));
    let plan = planner.plan(DRIVER, encoded.forward());
    let mut block = memory(planner.layout());
    let block: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
    let pass = next_pass(&mut planner, plan.expect("a sound frame"), block).expect("a pass");
    let group = next_group(&planner, pass, block).expect("a group");
    let group = group.group();
    let rows = planner.layout().field(pie_planner::FieldId::SlotMasks);
    let entries: &[[i32; 2]] = bytemuck::cast_slice(&block[rows.offset..][..8 * group.len()]);
    let mut firsts: Vec<i32> = Vec::new();
    let rows = entries.iter().map(|&[first, edges]| {
        if edges == 0 {
            return -1;
        }
        if !firsts.contains(&first) {
            firsts.push(first);
        }
        let row = firsts.iter().position(|&known| known == first);
        row.expect("it is there") as i32
    });
    let rows = rows.collect();
    (group.counts, group.masks, rows)
}

#[test]
fn neighbours_share_one_mask() {
    let masked = |runs: &[u32]| decode(3, 1, &[0]).allow(runs);
    let requests = [
        masked(&[3, 9]),
        masked(&[3, 9]),
        decode(3, 1, &[0]),
        masked(&[3, 9]).sample(0, GREEDY),
        masked(&[4, 9]),
        masked(&[3, 9]),
    ];
    let (_, masks, rows) = staged(&requests);
    assert_eq!((masks, rows), (3, vec![0, 0, -1, 0, 0, 1, 2]));
}

#[test]
fn a_mask_that_forbids_everything_leaves_the_unmasked_arg_max() {
    let random = Sampler::TopK {
        temperature: 0.8,
        k: 4,
    };
    for runs in [&[50][..], &[0], &[50, 9], &[u32::MAX], &[0, 0, 0]] {
        let request = Req::new(16, 3, &[1], &[0])
            .sample(0, random.clone())
            .sample(0, Sampler::Entropy)
            .allow(runs);
        let verified = request.clone().verify(&[5, 6]);
        let (counts, masks, rows) = staged(&[request, verified]);
        assert_eq!(counts, [4, 0, 0, 0, 0, 0, 2, 0], "{runs:?}");
        assert_eq!((masks, rows), (0, vec![-1; 6]), "{runs:?}");
    }
}

#[test]
fn an_empty_mask_forbids_nothing() {
    let random = Sampler::TopK {
        temperature: 0.8,
        k: 4,
    };
    let request = Req::new(16, 3, &[1], &[0]).sample(0, random).allow(&[]);
    let (counts, masks, rows) = staged(&[request]);
    assert_eq!(
        (counts[SlotClass::Filtered as usize], masks, rows),
        (1, 0, vec![-1])
    );
}

#[test]
fn each_group_stages_the_masks_that_it_needs() {
    let limits = Limits {
        max_slots: 2,
        ..sized(50)
    };
    let masked = |runs: &[u32]| decode(3, 1, &[0]).sample(0, Sampler::Entropy).allow(runs);
    let requests = [
        masked(&[1, 1]),
        masked(&[2, 2]),
        masked(&[1, 1]),
        decode(3, 1, &[0]),
    ];
    Device::new(limits).run(&frame(&requests), |_, _| 0);
}
