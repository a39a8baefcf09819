//! Latency histogram with log-linear buckets, as `HdrHistogram`: recorded without locks or allocation, read by any thread.

use std::sync::atomic::{AtomicU64, Ordering};

/// log2 of the buckets per power of 2: a relative width of at most 1/8.
const SUB_BUCKET_BITS: u32 = 3;
const SUB_BUCKETS: usize = 1 << SUB_BUCKET_BITS;
/// The last bucket also has all durations from 2^37 ns (137 s) on.
const BUCKETS: usize = (37 - SUB_BUCKET_BITS as usize + 1) * SUB_BUCKETS;

/// A histogram with one writer at a time and any number of readers.
pub(crate) struct AtomicHistogram {
    counts: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

impl AtomicHistogram {
    pub(crate) const fn new() -> Self {
        Self {
            counts: [const { AtomicU64::new(0) }; BUCKETS],
            sum_ns: AtomicU64::new(0),
        }
    }

    /// Records a duration. Only one thread at a time may call it.
    pub(crate) fn add(&self, ns: u64) {
        increment(&self.counts[bucket(ns)], 1);
        increment(&self.sum_ns, ns);
    }

    pub(crate) fn read(&self) -> Histogram {
        Histogram {
            counts: self.counts.iter().map(load).collect(),
            sum_ns: load(&self.sum_ns),
        }
    }
}

/// Adds to a counter with a single writer, without an atomic read-modify-write.
pub(crate) fn increment(count: &AtomicU64, by: u64) {
    count.store(load(count).wrapping_add(by), Ordering::Relaxed);
}

pub(crate) fn load(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}

/// A snapshot of an [`AtomicHistogram`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Histogram {
    /// Count of each bucket; empty by default.
    counts: Vec<u64>,
    sum_ns: u64,
}

impl Histogram {
    /// Number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum in nanoseconds.
    #[must_use]
    pub const fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Number of durations below `2^exponent` nanoseconds, exact for exponents from 3 on.
    #[must_use]
    pub fn count_below_power_of_two(&self, exponent: u32) -> u64 {
        let end = exponent.saturating_sub(SUB_BUCKET_BITS - 1) as usize * SUB_BUCKETS;
        self.counts.iter().take(end).sum()
    }

    /// Quantile in nanoseconds, with a relative error of at most 1/16; `None` if empty.
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

    /// The difference to an earlier snapshot.
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
    if ns < SUB_BUCKETS as u64 {
        return ns as usize;
    }
    let octave = ns.ilog2();
    let part = (ns >> (octave - SUB_BUCKET_BITS)) as usize & (SUB_BUCKETS - 1);
    ((octave - SUB_BUCKET_BITS + 1) as usize * SUB_BUCKETS + part).min(BUCKETS - 1)
}

/// The shortest duration of a bucket.
fn lower_end(bucket: usize) -> u64 {
    if bucket < SUB_BUCKETS {
        return bucket as u64;
    }
    let octave = bucket / SUB_BUCKETS - 1;
    ((SUB_BUCKETS + bucket % SUB_BUCKETS) as u64) << octave
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn histogram(durations: &[u64]) -> Histogram {
        let all = AtomicHistogram::new();
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
            assert!(low < high && (index < SUB_BUCKETS || high - low <= low / 8));
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
            prop_assert_eq!(found.count_below_power_of_two(exponent), below as u64);
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
