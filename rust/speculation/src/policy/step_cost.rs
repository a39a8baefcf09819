//! The step cost model: seconds by number of rows.
//!
//! A step runs in the smallest captured graph that has its rows, so costs are kept by graph size, as moving averages. These are
//! made monotone by pooling neighbours (isotonic regression) and interpolated. Above the largest known size only the next one
//! may be tried, at the same cost, so sizes are explored one by one, and again once their averages are stale; any may be where
//! a budget limits what that loses. Below the smallest known size the cost is proportional to rows, so that steps without
//! drafts are tried, too.
//!
//! All sizes share a *load factor*: a device that other processes use, or whose contexts grow, is slower in every step. It
//! follows such changes quickly, so averages of different minutes are comparable. The noisier the times, the longer the
//! averages.

/// Most and least weight of the newest time in an average.
const NEW: (f64, f64) = (0.1, 0.01);
/// Weight of the newest time in the load factor.
const NEW_LOAD_FACTOR: f64 = 0.1;
/// Weight of the newest time in the spread.
const NEW_SPREAD: f64 = 0.02;
/// Target relative error of averages.
const ERROR: f64 = 0.03;
/// Steps after which an unused size is unknown.
const STALE: u64 = 2000;
/// Times are clipped to this factor around the expected one.
const OUTLIER: f64 = 2.0;

#[derive(Clone, Debug)]
struct GraphSize {
    rows: usize,
    mean: f64,
    visits: u64,
    last: u64,
}

impl GraphSize {
    fn is_known(&self, steps: u64) -> bool {
        self.visits > 0 && steps - self.last < STALE
    }
}

#[derive(Debug)]
pub(super) struct StepCost {
    sizes: Vec<GraphSize>,
    /// The monotone cost of every size up to the largest known one.
    curve: Vec<f64>,
    /// Pooled blocks: mean, weight, number of known sizes.
    blocks: Vec<(f64, f64, usize)>,
    steps: u64,
    /// Sizes above the largest known one that may be tried.
    reach: usize,
    /// The load factor.
    load_factor: f64,
    /// Mean absolute log ratio of time to expected time.
    spread: f64,
}

impl StepCost {
    pub(super) fn new(graph_rows: &[usize]) -> Self {
        let mut rows = graph_rows.to_vec();
        rows.sort_unstable();
        rows.dedup();
        let size = |rows| GraphSize {
            rows,
            mean: 0.0,
            visits: 0,
            last: 0,
        };
        Self {
            sizes: rows.into_iter().map(size).collect(),
            curve: Vec::new(),
            blocks: Vec::new(),
            steps: 0,
            reach: 1,
            load_factor: 1.0,
            spread: 0.0,
        }
    }

    /// Every size may be tried from now on.
    pub(super) fn reach_all(&mut self) {
        self.reach = self.sizes.len();
    }

    /// Whether no cost is known.
    pub(super) fn is_empty(&self) -> bool {
        self.curve.is_empty()
    }

    fn size(&self, rows: usize) -> usize {
        self.sizes.partition_point(|size| size.rows < rows)
    }

    /// The cost of a step with `rows` rows, of which `base` are not drafts. `None`: no graph is as large, or its cost is
    /// unknown.
    pub(super) fn of(&self, rows: usize, base: usize) -> Option<f64> {
        let (size, highest) = (self.size(rows), self.curve.len().checked_sub(1)?);
        let reachable = highest.max(self.size(base)) + self.reach;
        if size >= self.sizes.len() || size > reachable {
            return None;
        }
        Some(self.curve[size.min(highest)] * self.load_factor)
    }

    /// An upper estimate: sizes above the known ones cost proportionally to their rows.
    pub(super) fn at_most(&self, rows: usize, base: usize) -> Option<f64> {
        let cost = self.of(rows, base)?;
        let known = self.sizes[self.curve.len() - 1].rows;
        let rows = self.sizes[self.size(rows)].rows;
        Some(cost * (rows as f64 / known.max(1) as f64).max(1.0))
    }

    /// The same of a step that has run: below the smallest known size it costs no more than that.
    fn expected_at_most(&self, rows: usize) -> Option<f64> {
        let smallest = self.sizes.iter().position(|size| size.is_known(self.steps));
        let least = smallest.map_or(0.0, |number| self.curve[number] * self.load_factor);
        let cost = self.at_most(rows, rows)?;
        Some(if smallest > Some(self.size(rows)) {
            cost.max(least)
        } else {
            cost
        })
    }

    pub(super) fn learn(&mut self, rows: usize, seconds: f64) {
        let number = self.size(rows);
        if number >= self.sizes.len() || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        self.steps += 1;
        let expected = self.expected_at_most(rows);
        let most = expected.map_or(seconds, |expected| seconds.min(OUTLIER * expected));
        let newest = self.weight();
        let size = &mut self.sizes[number];
        if size.is_known(self.steps) {
            let ratio = seconds / (size.mean * self.load_factor);
            let ratio = ratio.clamp(1.0 / OUTLIER, OUTLIER);
            self.spread += (ratio.ln().abs() - self.spread) * NEW_SPREAD;
            size.visits += 1;
            // Both average logarithms; otherwise one would drift.
            size.mean *= ratio.powf(newest.max(1.0 / size.visits as f64));
            self.load_factor *= ratio.powf(NEW_LOAD_FACTOR);
        } else {
            (size.visits, size.mean) = (1, most / self.load_factor);
        }
        size.last = self.steps;
        self.fit_curve();
    }

    /// Remaining relative error of an average.
    pub(super) fn error(&self) -> f64 {
        self.spread * (self.weight() / 2.0).sqrt()
    }

    /// Weight of the newest time, as large as [`ERROR`] allows.
    fn weight(&self) -> f64 {
        let error = ERROR / self.spread.max(f64::MIN_POSITIVE);
        (error * error).clamp(NEW.1, NEW.0)
    }

    /// Fits the curve through the known sizes.
    fn fit_curve(&mut self) {
        self.blocks.clear();
        for size in self.sizes.iter().filter(|size| size.is_known(self.steps)) {
            let mut block = (size.mean, size.visits.min(20) as f64, 1);
            while let Some(&(mean, weight, count)) = self.blocks.last()
                && mean > block.0
            {
                let both = weight + block.1;
                block = (
                    (mean * weight + block.0 * block.1) / both,
                    both,
                    count + block.2,
                );
                self.blocks.pop();
            }
            self.blocks.push(block);
        }
        self.curve.clear();
        let costs = self
            .blocks
            .iter()
            .flat_map(|&(mean, _, count)| std::iter::repeat_n(mean, count));
        let known = (0..self.sizes.len()).filter(|&number| self.sizes[number].is_known(self.steps));
        let mut before: Option<(usize, f64)> = None;
        for (number, cost) in known.zip(costs) {
            let rows = |number: usize| self.sizes[number].rows as f64;
            let (start, low) = before.map_or((0.0, 0.0), |(start, low)| (rows(start), low));
            while self.curve.len() < number {
                let fraction = (rows(self.curve.len()) - start) / (rows(number) - start);
                self.curve.push(low + (cost - low) * fraction);
            }
            self.curve.push(cost);
            before = Some((number, cost));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

    fn near(found: Option<f64>, wanted: f64) {
        assert!(
            found.is_some_and(|found| (found - wanted).abs() < 1e-9),
            "{found:?}, not {wanted}"
        );
    }

    #[test]
    fn sizes_are_explored_one_by_one() {
        let mut cost = StepCost::new(&[8, 1, 4, 2, 2]);
        assert_eq!(cost.of(1, 1), None);
        cost.learn(1, 1.0);
        near(cost.of(1, 1), 1.0);
        near(cost.of(2, 1), 1.0);
        near(cost.at_most(2, 1), 2.0);
        assert_eq!(cost.of(3, 1), None, "not yet");
        cost.learn(2, 1.5);
        near(cost.of(3, 1), 1.5);
        near(cost.of(5, 3), 1.5);
        assert_eq!(cost.of(9, 9), None, "no graph is that large");
    }

    #[test]
    fn sizes_between_known_ones_are_interpolated() {
        let mut cost = StepCost::new(&SIZES);
        cost.learn(4, 1.0);
        cost.learn(32, 1.7);
        near(cost.of(1, 1), 0.25);
        near(cost.of(8, 8), 1.1);
        near(cost.of(9, 8), 1.3);
        near(cost.of(17, 8), 1.7);
        near(cost.of(33, 8), 1.7);
    }

    #[test]
    fn costs_never_fall_with_rows() {
        let mut cost = StepCost::new(&SIZES);
        for (rows, seconds) in [(1, 3.0), (2, 1.0), (4, 2.0), (8, 2.5), (16, 2.1)] {
            (0..10).for_each(|_| cost.learn(rows, seconds));
        }
        for (rows, wanted) in [(1, 2.0), (2, 2.0), (4, 2.0), (8, 2.3), (16, 2.3)] {
            near(cost.of(rows, rows), wanted);
        }
    }

    #[test]
    fn an_outlier_does_not_close_a_size() {
        let mut cost = StepCost::new(&SIZES);
        (0..10).for_each(|_| cost.learn(1, 1.0));
        cost.learn(2, 1000.0);
        near(cost.of(2, 1), 4.0);
        for useless in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            cost.learn(1, useless);
            near(cost.of(1, 1), 1.0);
        }
    }

    #[test]
    fn a_smaller_size_may_cost_as_much_as_the_smallest_known_one() {
        let mut cost = StepCost::new(&SIZES);
        cost.learn(128, 1.0);
        near(cost.of(1, 1), 1.0 / 128.0);
        cost.learn(1, 0.9);
        near(cost.of(1, 1), 0.9);
    }

    #[test]
    fn a_size_not_used_for_long_is_not_known() {
        let mut cost = StepCost::new(&SIZES);
        cost.learn(2, 9.0);
        (0..STALE).for_each(|_| cost.learn(1, 1.0));
        near(cost.of(2, 1), 1.0);
        cost.learn(2, 1.5);
        near(cost.of(2, 1), 1.5);
    }
}
