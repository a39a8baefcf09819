//! How long something took, over a whole life, in little memory.

/// Parts of a doubling.
const PARTS: u32 = 8;

/// Counts of times by their length, each known to an eighth.
#[derive(Clone, Debug)]
pub(crate) struct Times {
    counts: Box<[u64]>,
    total: u64,
    sum: u64,
}

impl Default for Times {
    fn default() -> Self {
        let buckets = u64::BITS * PARTS;
        Self {
            counts: vec![0; buckets as usize].into(),
            total: 0,
            sum: 0,
        }
    }
}

impl Times {
    pub(crate) fn add(&mut self, nanos: u64) {
        self.counts[bucket(nanos)] += 1;
        self.total += 1;
        self.sum += nanos;
    }

    /// All times together, in ns.
    pub(crate) const fn sum(&self) -> u64 {
        self.sum
    }

    /// The time in ns that this share of all times does not exceed, rounded up; 0 when there are none.
    pub(crate) fn quantile(&self, share: f64) -> u64 {
        let rank = (self.total as f64 * share).ceil().max(1.0) as u64;
        let mut sum = 0;
        let found = self.counts.iter().position(|&count| {
            sum += count;
            sum >= rank
        });
        found.map_or(0, largest)
    }
}

/// Times below [`PARTS`] have a bucket each; then each doubling has that many.
fn bucket(nanos: u64) -> usize {
    let parts = u64::from(PARTS);
    if nanos < parts {
        return nanos as usize;
    }
    let shift = nanos.ilog2() - PARTS.ilog2();
    (shift * PARTS) as usize + (nanos >> shift) as usize
}

/// The longest time of a bucket.
fn largest(bucket: usize) -> u64 {
    let (bucket, parts) = (bucket as u64, u64::from(PARTS));
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
    fn quantiles_are_of_all_times() {
        let mut times = Times::default();
        assert_eq!(times.quantile(0.5), 0);
        for nanos in 1..=1000 {
            times.add(nanos);
        }
        assert_eq!(times.sum(), 500_500);
        for (share, exact) in [(0.5, 500), (0.99, 990), (1.0, 1000)] {
            let found = times.quantile(share);
            assert!((exact..exact + exact / 8).contains(&found), "{found}");
        }
    }
}
