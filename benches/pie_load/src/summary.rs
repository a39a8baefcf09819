//! Percentiles and means.

use serde::Serialize;

/// Microseconds of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) mean: f64,
}

impl Summary {
    /// Of nanoseconds; zeros for an empty series.
    pub(crate) fn of(samples: &[u64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable();
        Self {
            p50: micros(percentile(&sorted, 50)),
            p90: micros(percentile(&sorted, 90)),
            p99: micros(percentile(&sorted, 99)),
            mean: mean(samples.iter().map(|&sample| micros(sample))),
        }
    }
}

/// The smallest sample that `percent` of all are not above; 0 for an empty series.
fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

/// 0 for an empty series.
pub(crate) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (count, sum) = values.fold((0_u64, 0.0), |(count, sum), value| (count + 1, sum + value));
    if count == 0 { 0.0 } else { sum / count as f64 }
}

/// The middle one; the mean of the two in the middle of an even number.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let upper = sorted.get(sorted.len() / 2)?;
    Some(f64::midpoint(sorted[(sorted.len() - 1) / 2], *upper))
}

pub(crate) fn micros(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median([3.0, 1.0, 9.0].into_iter()), Some(3.0));
        assert_eq!(median([3.0, 1.0, 9.0, 5.0].into_iter()), Some(4.0));
        assert_eq!(median([].into_iter()), None);
    }

    #[test]
    fn percentiles_are_samples() {
        let samples: Vec<u64> = (1..=200).rev().map(|n| n * 1000).collect();
        let expected = Summary {
            p50: 100.0,
            p90: 180.0,
            p99: 198.0,
            mean: 100.5,
        };
        assert_eq!(Summary::of(&samples), expected);
        assert_eq!(Summary::of(&[3000, 1000, 2000]).p50, 2.0);
        assert_eq!(Summary::of(&[7000]).p99, 7.0);
        assert_eq!(Summary::of(&[]), Summary::default());
    }
}
