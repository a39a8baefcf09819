//! Durations, counted by size: what p50 and p99 are read from.

use std::sync::atomic::{AtomicU64, Ordering};

/// Each octave is cut into so many buckets, as a power of 2: a bucket is at most 1/8 wider than its lower end.
const FINE: u32 = 3;
const PARTS: usize = 1 << FINE;
/// Durations of 2^37 ns (137 s) and more share the last bucket.
const BUCKETS: usize = (37 - FINE as usize + 1) * PARTS;

/// Durations that one thread at a time adds, and any thread reads.
pub(crate) struct Durations {
    counts: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

impl Durations {
    pub(crate) const fn new() -> Self {
        Self {
            counts: [const { AtomicU64::new(0) }; BUCKETS],
            sum_ns: AtomicU64::new(0),
        }
    }

    /// Adds a duration. Only one thread at a time may do so.
    pub(crate) fn add(&self, ns: u64) {
        raise(&self.counts[bucket(ns)], 1);
        raise(&self.sum_ns, ns);
    }

    pub(crate) fn read(&self) -> Histogram {
        Histogram {
            counts: self.counts.iter().map(load).collect(),
            sum_ns: load(&self.sum_ns),
        }
    }
}

/// Raises a count that no other thread writes: cheaper than an atomic addition.
pub(crate) fn raise(count: &AtomicU64, by: u64) {
    count.store(load(count).wrapping_add(by), Ordering::Relaxed);
}

pub(crate) fn load(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}

/// Durations as they were when they were read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Histogram {
    /// Of each bucket; as many in all histograms, or none at all.
    counts: Vec<u64>,
    sum_ns: u64,
}

impl Histogram {
    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their sum, in nanoseconds.
    #[must_use]
    pub const fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// How many are shorter than `2^exponent` nanoseconds, for an exponent of 3 or more.
    #[must_use]
    pub fn below_power(&self, exponent: u32) -> u64 {
        let end = exponent.saturating_sub(FINE - 1) as usize * PARTS;
        self.counts.iter().take(end).sum()
    }

    /// The duration that a share of them does not exceed, in nanoseconds, to a sixteenth of its value; `None` if there are
    /// none.
    #[must_use]
    pub fn quantile_ns(&self, share: f64) -> Option<f64> {
        let count = self.count();
        let rank = ((count as f64 * share).ceil() as u64).clamp(1, count.max(1));
        let mut seen = 0;
        let index = self.counts.iter().position(|&count| {
            seen += count;
            seen >= rank
        })?;
        Some(f64::midpoint(
            lower_end(index) as f64,
            (lower_end(index + 1) - 1) as f64,
        ))
    }

    /// What came after `earlier` was read.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let before = |index: usize| earlier.counts.get(index).copied().unwrap_or(0);
        let counts = self.counts.iter().enumerate();
        Self {
            counts: counts
                .map(|(index, count)| count.saturating_sub(before(index)))
                .collect(),
            sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns),
        }
    }
}

/// The bucket of a duration.
fn bucket(ns: u64) -> usize {
    if ns < PARTS as u64 {
        return ns as usize;
    }
    let octave = ns.ilog2();
    let part = (ns >> (octave - FINE)) as usize & (PARTS - 1);
    ((octave - FINE + 1) as usize * PARTS + part).min(BUCKETS - 1)
}

/// The shortest duration of a bucket.
fn lower_end(bucket: usize) -> u64 {
    if bucket < PARTS {
        return bucket as u64;
    }
    let octave = bucket / PARTS - 1;
    ((PARTS + bucket % PARTS) as u64) << octave
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn histogram(durations: &[u64]) -> Histogram {
        let all = Durations::new();
        for &ns in durations {
            all.add(ns);
        }
        all.read()
    }

    #[test]
    fn buckets_join_and_hold_what_they_say() {
        assert_eq!(lower_end(0), 0);
        for index in 0..BUCKETS - 1 {
            let (low, high) = (lower_end(index), lower_end(index + 1));
            assert!(low < high && (index < PARTS || high - low <= low / 8));
            assert_eq!((bucket(low), bucket(high - 1)), (index, index));
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn without_durations_there_is_no_quantile() {
        assert_eq!(histogram(&[]).quantile_ns(0.5), None);
        assert_eq!(Histogram::default().quantile_ns(0.5), None);
    }

    proptest! {
        #[test]
        fn it_is_the_sorted_list(
            mut durations in prop::collection::vec(0_u64..1 << 36, 1..200),
            share in 0.0_f64..=1.0,
            exponent in 3_u32..37,
        ) {
            let found = histogram(&durations);
            durations.sort_unstable();
            prop_assert_eq!(found.count(), durations.len() as u64);
            prop_assert_eq!(found.sum_ns(), durations.iter().sum::<u64>());
            let below = durations.partition_point(|&ns| ns < 1 << exponent);
            prop_assert_eq!(found.below_power(exponent), below as u64);
            let rank = ((durations.len() as f64 * share).ceil() as usize).max(1);
            let exact = durations[rank - 1] as f64;
            let found = found.quantile_ns(share).unwrap();
            prop_assert!((found - exact).abs() <= exact / 16.0, "{} for {}", found, exact);
        }

        #[test]
        fn a_difference_is_what_came_between(
            before in prop::collection::vec(0_u64..1 << 40, 0..50),
            after in prop::collection::vec(0_u64..1 << 40, 0..50),
        ) {
            let earlier = histogram(&before);
            let all: Vec<u64> = before.iter().chain(&after).copied().collect();
            prop_assert_eq!(histogram(&all).since(&earlier), histogram(&after));
            prop_assert_eq!(earlier.since(&Histogram::default()), earlier.clone());
        }
    }
}
