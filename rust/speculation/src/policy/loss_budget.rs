//! What a draft model may lose against plain decoding, however wrong the predictions are: as in conservative bandits (Wu et al.,
//! 2016), a step drafts only while the budget is positive, and each decode step is charged what it really took. Steps that compute
//! prompts, too, are not charged.

/// Share of time that drafting may lose.
const SHARE: f64 = 1.0 / 256.0;
/// The most that may be saved up, and what there is at the start, in plain steps.
const RESERVE: f64 = 8.0;
/// What probes leave of it.
const KEPT: f64 = RESERVE / 2.0;
/// Share of it that is all, since times are noisy.
const FULL: f64 = 0.9;
/// Weight of the newest time in an average.
const NEW: f64 = 0.25;
/// Times are clipped to this factor of the average, and the first one to this factor of a plain step.
const OUTLIER: f64 = 2.0;
const FIRST_OUTLIER: f64 = 4.0;
/// Steps after which the time of a plain step is unknown.
const STALE: u64 = 256;

/// An average of times of one size of graphs.
#[derive(Clone, Copy, Debug, Default)]
struct Average {
    seconds: f64,
    /// Number of the last step; 0 if there was none.
    last: u64,
}

impl Average {
    fn is_known(&self, steps: u64) -> bool {
        self.last > 0 && steps - self.last < STALE
    }

    /// Records a time, and returns it clipped; `most` is that of the first one, and of one after a long time.
    fn record(&mut self, seconds: f64, most: f64, step: u64) -> f64 {
        let (most, weight) = if self.is_known(step) {
            (OUTLIER * self.seconds, NEW)
        } else {
            (most, 1.0)
        };
        let clipped = seconds.min(most);
        self.seconds += (clipped - self.seconds) * weight;
        self.last = step;
        clipped
    }
}

/// A decode step that has run.
#[derive(Clone, Copy, Debug)]
pub struct DecodeStep {
    /// Its requests, of at least one row each.
    pub requests: usize,
    /// Rows: those of requests, and drafts.
    pub rows: usize,
    /// Tokens that it gave.
    pub tokens: usize,
    /// It ran the draft model.
    pub ran_model: bool,
}

#[derive(Debug)]
pub(super) struct LossBudget {
    /// Sizes of graphs, and times of steps without and with the draft model.
    sizes: Vec<usize>,
    times: [Vec<Average>; 2],
    steps: u64,
    seconds: f64,
}

impl LossBudget {
    pub(super) fn new(graph_rows: &[usize]) -> Self {
        let times = vec![Average::default(); graph_rows.len()];
        Self {
            sizes: graph_rows.to_vec(),
            times: [times.clone(), times],
            steps: 0,
            // Until the first step this is not known in seconds.
            seconds: f64::MAX,
        }
    }

    fn size(&self, rows: usize) -> usize {
        self.sizes.partition_point(|&size| size < rows)
    }

    /// Whether a step of so many requests may draft: there is budget, and a recent time of plain steps to compare with.
    pub(super) fn allows(&self, requests: usize) -> bool {
        self.seconds > 0.0 && self.plain(requests).is_some()
    }

    /// Whether a probe may lose `seconds`. It follows a plain step like it, and if all is saved up it may cost more than that.
    pub(super) fn affords(&self, seconds: f64, requests: usize) -> bool {
        let size = self.size(requests);
        let before = self.times[0]
            .get(size)
            .filter(|plain| plain.last == self.steps);
        before.is_some_and(|plain| {
            let left = self.seconds / plain.seconds;
            seconds / plain.seconds <= left - KEPT || left > FULL * RESERVE
        })
    }

    /// Seconds of a plain step, lately.
    fn plain(&self, requests: usize) -> Option<f64> {
        let average = self.times[0].get(self.size(requests))?;
        average.is_known(self.steps).then_some(average.seconds)
    }

    /// Seconds that a plain step takes at least: those of the largest size up to its own that was ever timed; 0 if there is none.
    fn least(&self, requests: usize) -> f64 {
        let end = self.sizes.len().min(self.size(requests) + 1);
        let timed = self.times[0][..end]
            .iter()
            .rev()
            .find(|plain| plain.last > 0);
        timed.map_or(0.0, |plain| plain.seconds)
    }

    /// Charges a step of `seconds`, and returns these without an outlier.
    pub(super) fn record(&mut self, step: DecodeStep, seconds: f64) -> f64 {
        let size = self.size(step.rows);
        if size >= self.sizes.len() || seconds <= 0.0 {
            return seconds;
        }
        self.steps += 1;
        let plain = self.plain(step.requests);
        let most = plain.map_or(seconds, |plain| FIRST_OUTLIER * plain);
        let average = &mut self.times[usize::from(step.ran_model)][size];
        let seconds = average.record(seconds, most, self.steps);
        let plain = plain.unwrap_or_else(|| self.least(step.requests));
        self.seconds += SHARE * seconds;
        if step.ran_model || step.rows > step.requests {
            // What plain decoding needs for as many tokens.
            let worth = plain * step.tokens as f64 / step.requests.max(1) as f64;
            self.seconds += worth - seconds;
        }
        self.seconds = self.seconds.min(RESERVE * plain);
        seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(requests: usize, drafts: usize, tokens: usize) -> DecodeStep {
        DecodeStep {
            requests,
            rows: requests + drafts,
            tokens,
            ran_model: drafts > 0,
        }
    }

    #[test]
    fn drafts_of_a_size_without_a_plain_time_are_charged() {
        let sizes: Vec<usize> = (1..=32).collect();
        for timed in [None, Some(3), Some(5), Some(8)] {
            let mut budget = LossBudget::new(&sizes);
            if let Some(requests) = timed {
                budget.record(step(requests, 0, requests), 1.0);
            }
            let before = budget.seconds;
            // Nothing is accepted, and plain decoding would have taken a second at most.
            budget.record(step(5, 15, 5), 3.0);
            let most = timed.map_or(0.0, |_| before - 1.0);
            assert!(budget.seconds <= most, "{timed:?}: {}", budget.seconds);
        }
    }
}
