//! Bit strings: ranges and causality of any runs equal what the bits say, one by one.

use std::iter::repeat_n;

use arbitrary::{Arbitrary, Unstructured};
use pie_wire::brle;

/// A buffer of runs and the questions about it.
#[derive(Debug, Arbitrary)]
struct Case {
    limit: Number,
    visible: Number,
    runs: Vec<Number>,
}

/// Small numbers mostly, so that limits meet runs.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Number {
    Small(u8),
    Word(u32),
    Long(u64),
}

impl Number {
    fn get(self) -> u64 {
        match self {
            Self::Small(value) => value.into(),
            Self::Word(value) => value.into(),
            Self::Long(value) => value,
        }
    }
}

/// Bytes of a [`Case`], then the bits of a string.
pub(crate) fn check(data: &[u8]) {
    let mut input = Unstructured::new(data);
    if let Ok(case) = Case::arbitrary(&mut input) {
        let runs: Vec<u32> = case.runs.iter().map(|run| run.get() as u32).collect();
        check_runs(&runs, case.limit.get(), case.visible.get());
    }
    let bits: Vec<bool> = data
        .iter()
        .flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1))
        .collect();
    let encoded = brle::encode(bits.iter().copied());
    assert_eq!(encoded.total_size, bits.len() as u64);
    let runs = encoded.buffer.iter().enumerate();
    let spelled = runs.flat_map(|(number, &run)| repeat_n(number % 2 == 1, run as usize));
    assert!(spelled.eq(bits));
}

/// One bit of the string, counted from its start.
fn bit(runs: &[u32], index: u64) -> bool {
    let mut end = 0;
    for (number, &run) in runs.iter().enumerate() {
        end += u64::from(run);
        if index < end {
            return number % 2 == 1;
        }
    }
    false
}

fn check_runs(runs: &[u32], limit: u64, visible: u64) {
    let ranges: Vec<_> = brle::true_ranges(runs, limit).collect();
    assert!(
        ranges
            .iter()
            .all(|range| range.start < range.end && range.end <= limit)
    );
    assert!(
        ranges.windows(2).all(|pair| pair[0].end < pair[1].start),
        "{ranges:?}"
    );
    // Between two of these bits nothing changes.
    let edges = runs.iter().scan(0_u64, |end, &run| {
        *end += u64::from(run);
        Some(*end)
    });
    let around = edges
        .chain([0, limit, visible])
        .flat_map(|at| [at.saturating_sub(1), at, at.saturating_add(1)]);
    let mut causal = true;
    for at in around.filter(|&at| at < limit) {
        let value = bit(runs, at);
        assert_eq!(
            ranges.iter().any(|range| range.contains(&at)),
            value,
            "bit {at}"
        );
        causal &= value == (at < visible);
    }
    assert_eq!(brle::is_causal(runs, visible, limit), causal);
}
