//! Log-linear histogram of durations, with 8 buckets for each power of two.

/// Buckets for each power of two.
const BUCKETS: u32 = 8;

/// Counts of durations in ns, with a relative error of at most 1/8.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    counts: Box<[u64]>,
    total: u64,
    sum: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        let buckets = u64::BITS * BUCKETS;
        Self {
            counts: vec![0; buckets as usize].into(),
            total: 0,
            sum: 0,
        }
    }
}

impl Histogram {
    pub(crate) fn add(&mut self, nanos: u64) {
        self.counts[bucket(nanos)] += 1;
        self.total += 1;
        self.sum += nanos;
    }

    /// Sum of all durations in ns.
    pub(crate) const fn sum(&self) -> u64 {
        self.sum
    }

    /// The quantile in ns, rounded up to the end of its bucket; 0 without durations.
    pub(crate) fn quantile(&self, quantile: f64) -> u64 {
        let rank = (self.total as f64 * quantile).ceil().max(1.0) as u64;
        let mut sum = 0;
        let found = self.counts.iter().position(|&count| {
            sum += count;
            sum >= rank
        });
        found.map_or(0, largest)
    }
}

/// Durations below [`BUCKETS`] have a bucket each.
fn bucket(nanos: u64) -> usize {
    let parts = u64::from(BUCKETS);
    if nanos < parts {
        return nanos as usize;
    }
    let shift = nanos.ilog2() - BUCKETS.ilog2();
    (shift * BUCKETS) as usize + (nanos >> shift) as usize
}

/// The longest duration of a bucket.
fn largest(bucket: usize) -> u64 {
    let (bucket, parts) = (bucket as u64, u64::from(BUCKETS));
    if bucket < 2 * parts {
        return bucket;
    }
    let shift = bucket / parts - 1;
    ((parts + bucket % parts + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_what_lies_between_the_largest_of_two() {
        for nanos in (0..5000).chain([1 << 20, (1 << 20) - 1, 123_456_789_012]) {
            let at = bucket(nanos);
            assert!(nanos <= largest(at), "{nanos} in {at}");
            assert!(at == 0 || nanos > largest(at - 1), "{nanos} in {at}");
            // An eighth, at most.
            assert!(largest(at) - nanos <= nanos / 8, "{nanos} in {at}");
        }
    }

    #[test]
    fn quantiles_are_of_all_durations() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(0.5), 0);
        for nanos in 1..=1000 {
            histogram.add(nanos);
        }
        assert_eq!(histogram.sum(), 500_500);
        for (share, exact) in [(0.5, 500), (0.99, 990), (1.0, 1000)] {
            let found = histogram.quantile(share);
            assert!((exact..exact + exact / 8).contains(&found), "{found}");
        }
    }
}
