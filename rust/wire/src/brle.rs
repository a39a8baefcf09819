//! Bit strings as run lengths (§5.8).
//!
//! A buffer of runs alternates false, true, false, … and always starts with
//! false. Its sum is the length of the string; bits at and beyond it are
//! false. Runs may have length 0 anywhere and may be as long as `u32::MAX`
//! (an idiom for "all the rest"). So sums are taken in 64 bits and ranges are
//! clamped to a limit given by the caller.
//!
//! ```
//! use pie_wire::brle;
//!
//! // An attention sink of 4 tokens and a window of 64.
//! let runs = [0, 4, 252, 64];
//! assert!(brle::true_ranges(&runs, 1 << 20).eq([0..4, 256..320]));
//! assert!(!brle::is_causal(&runs, 320, 320));
//! ```

use std::ops::Range;

use crate::schema::Brle;

/// The maximal ranges of true bits below `limit`, in order.
///
/// Ranges are never empty and never touch: an empty false run joins its
/// neighbours.
pub fn true_ranges(runs: &[u32], limit: u64) -> TrueRanges<'_> {
    TrueRanges {
        runs,
        position: 0,
        limit,
    }
}

/// The iterator of [`true_ranges`].
#[derive(Debug, Clone)]
pub struct TrueRanges<'a> {
    /// Runs left, the first of them false.
    runs: &'a [u32],
    /// First bit of the runs left.
    position: u64,
    limit: u64,
}

impl TrueRanges<'_> {
    /// Takes a false run and the true run after it; returns the latter.
    fn next_pair(&mut self) -> Option<Range<u64>> {
        let [skipped, taken, rest @ ..] = self.runs else {
            return None;
        };
        let start = self.position.saturating_add(u64::from(*skipped));
        self.position = start.saturating_add(u64::from(*taken));
        self.runs = rest;
        Some(start..self.position)
    }
}

impl Iterator for TrueRanges<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        while self.position < self.limit {
            let Range { start, mut end } = self.next_pair()?;
            if start >= self.limit {
                break;
            }
            if start == end {
                continue;
            }
            while let ([0, _, ..], true) = (self.runs, end < self.limit) {
                end = self.next_pair()?.end;
            }
            return Some(start..end.min(self.limit));
        }
        self.runs = &[];
        None
    }
}

impl std::iter::FusedIterator for TrueRanges<'_> {}

/// Whether the true bits below `limit` are exactly those of `0..visible_end`.
///
/// Both sides are cut at `limit`, so a `visible_end` beyond it asks for all
/// bits below `limit`.
pub fn is_causal(runs: &[u32], visible_end: u64, limit: u64) -> bool {
    let visible_end = visible_end.min(limit);
    let mut ranges = true_ranges(runs, limit);
    if visible_end == 0 {
        return ranges.next().is_none();
    }
    ranges.next() == Some(0..visible_end) && ranges.next().is_none()
}

/// Encodes a bit string in its shortest form.
///
/// Runs longer than `u32::MAX` are split by an empty run.
pub fn encode(bits: impl IntoIterator<Item = bool>) -> Brle {
    let mut buffer = Vec::new();
    let mut total_size = 0;
    let (mut value, mut run) = (false, 0_u32);
    for bit in bits {
        total_size += 1;
        if bit != value {
            buffer.push(run);
            (value, run) = (bit, 0);
        } else if run == u32::MAX {
            buffer.extend([run, 0]);
            run = 0;
        }
        run += 1;
    }
    if run > 0 {
        buffer.push(run);
    }
    Brle { buffer, total_size }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The bits of a buffer, spelled out.
    fn naive(runs: &[u32]) -> Vec<bool> {
        let mut bits = Vec::new();
        for (index, &run) in runs.iter().enumerate() {
            bits.extend(std::iter::repeat_n(index % 2 == 1, run as usize));
        }
        bits
    }

    /// The maximal true ranges of spelled-out bits.
    fn naive_ranges(bits: &[bool]) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for index in (0..bits.len()).filter(|&index| bits[index]) {
            let index = index as u64;
            match ranges.last_mut() {
                Some(last) if last.end == index => last.end += 1,
                _ => ranges.push(index..index + 1),
            }
        }
        ranges
    }

    /// Short buffers with many empty runs.
    fn buffers() -> impl Strategy<Value = Vec<u32>> {
        proptest::collection::vec(prop_oneof![2 => Just(0), 3 => 0_u32..6], 0..12)
    }

    proptest! {
        #[test]
        fn true_ranges_match_the_model(runs in buffers(), limit in 0_usize..40) {
            let mut bits = naive(&runs);
            bits.truncate(limit);
            let ranges: Vec<_> = true_ranges(&runs, limit as u64).collect();
            prop_assert_eq!(ranges, naive_ranges(&bits));
        }

        #[test]
        fn causality_matches_the_model(
            runs in prop_oneof![buffers(), (0_u32..9).prop_map(|n| vec![0, n])],
            visible in 0_usize..12,
            limit in 0_usize..12,
        ) {
            let bits = naive(&runs);
            let model = (0..limit)
                .all(|index| bits.get(index).copied().unwrap_or(false) == (index < visible));
            prop_assert_eq!(is_causal(&runs, visible as u64, limit as u64), model);
        }

        #[test]
        fn encoding_returns_the_bits(bits in proptest::collection::vec(any::<bool>(), 0..64)) {
            let brle = encode(bits.iter().copied());
            prop_assert_eq!(brle.total_size, bits.len() as u64);
            prop_assert!(brle.buffer.iter().skip(1).all(|&run| run > 0));
            prop_assert_eq!(naive(&brle.buffer), bits);
        }
    }

    #[test]
    fn encodes_the_documented_examples() {
        let encoded = |bits: &str| encode(bits.bytes().map(|byte| byte == b'T')).buffer;
        assert_eq!(encoded("FFTTTF"), [2, 3, 1]);
        assert_eq!(encoded("TTF"), [0, 2, 1]);
        assert_eq!(encoded("FFF"), [3]);
        assert_eq!(encoded("TTT"), [0, 3]);
        assert!(encoded("").is_empty());
    }

    #[test]
    fn sums_do_not_overflow() {
        let runs = [0, u32::MAX, 0, u32::MAX, u32::MAX, 5];
        let max = u64::from(u32::MAX);
        assert!(true_ranges(&runs, u64::MAX).eq([0..2 * max, 3 * max..3 * max + 5]));
        assert!(true_ranges(&runs, 10).eq(std::iter::once(0..10)));
        assert!(is_causal(&runs, 2 * max, 3 * max));
        assert!(!is_causal(&runs, 2 * max, 3 * max + 1));
    }

    #[test]
    fn without_visible_bits_only_zeros_are_causal() {
        assert!(is_causal(&[], 0, 7));
        assert!(!is_causal(&[], 1, 7));
        assert!(is_causal(&[], 1, 0));
        assert!(is_causal(&[0, 9], 12, 9));
    }
}
