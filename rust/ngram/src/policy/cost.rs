//! What a step costs by its number of rows, in seconds.
//!
//! A step runs in the smallest graph that has its rows, so the cost is that of a rung of the ladder. Each rung that was
//! visited lately has a moving average; these are made monotone by pooling neighbours, and rungs between them are
//! interpolated. Above the highest one that is known only the next may be tried, at the same cost: so a ladder is
//! explored rung by rung, each for one step, and again when what is known of it is out of date. Below the lowest one rungs
//! cost in proportion to their rows, so that steps without drafts are tried, too.
//!
//! All rungs share a *pace*: a device that other processes use, or whose contexts grow, is slower in every step. It follows
//! quickly what the averages, which then need not be quick, have in common: a rung that was visited in a busy minute can be
//! compared with one that was visited later. The noisier the times, the more of them an average is of.

/// Most and least weight of the newest time in a rung's average.
const NEW: (f64, f64) = (0.1, 0.01);
/// The same in the pace, of all rungs.
const NEW_PACE: f64 = 0.1;
/// The same in the spread of times.
const NEW_SPREAD: f64 = 0.02;
/// Relative error of an average that is striven for.
const ERROR: f64 = 0.03;
/// A rung that was not visited for so many steps is not known any more.
const STALE: u64 = 2000;
/// A time counts as at most this much more than expected, or less: steps are held up by other things than rows.
const OUTLIER: f64 = 2.0;

#[derive(Clone, Debug)]
struct Rung {
    rows: usize,
    mean: f64,
    visits: u64,
    last: u64,
}

impl Rung {
    fn is_known(&self, steps: u64) -> bool {
        self.visits > 0 && steps - self.last < STALE
    }
}

#[derive(Debug)]
pub(super) struct Cost {
    rungs: Vec<Rung>,
    /// The monotone cost of every rung up to the highest known one.
    curve: Vec<f64>,
    /// Blocks of rungs that are pooled: mean, weight, how many known rungs.
    blocks: Vec<(f64, f64, usize)>,
    steps: u64,
    /// What the averages are multiplied by, for the present.
    pace: f64,
    /// How far times lie from what was expected, as the mean of their logarithms' distance.
    spread: f64,
}

impl Cost {
    pub(super) fn new(rungs: &[usize]) -> Self {
        let mut rows = rungs.to_vec();
        rows.sort_unstable();
        rows.dedup();
        let rung = |rows| Rung {
            rows,
            mean: 0.0,
            visits: 0,
            last: 0,
        };
        Self {
            rungs: rows.into_iter().map(rung).collect(),
            curve: Vec::new(),
            blocks: Vec::new(),
            steps: 0,
            pace: 1.0,
            spread: 0.0,
        }
    }

    /// Whether nothing is known at all.
    pub(super) fn is_empty(&self) -> bool {
        self.curve.is_empty()
    }

    fn rung(&self, rows: usize) -> usize {
        self.rungs.partition_point(|rung| rung.rows < rows)
    }

    /// The cost of a step with so many rows, of which `base` are needed anyway. `None` if it cannot run, or nothing is
    /// known of it.
    pub(super) fn of(&self, rows: usize, base: usize) -> Option<f64> {
        let (rung, highest) = (self.rung(rows), self.curve.len().checked_sub(1)?);
        let reachable = highest.max(self.rung(base)) + 1;
        if rung >= self.rungs.len() || rung > reachable {
            return None;
        }
        Some(self.curve[rung.min(highest)] * self.pace)
    }

    /// The same if one would rather not be surprised: rungs above the known ones cost in proportion to their rows.
    pub(super) fn at_most(&self, rows: usize, base: usize) -> Option<f64> {
        let cost = self.of(rows, base)?;
        let known = self.rungs[self.curve.len() - 1].rows;
        let rows = self.rungs[self.rung(rows)].rows;
        Some(cost * (rows as f64 / known.max(1) as f64).max(1.0))
    }

    pub(super) fn learn(&mut self, rows: usize, seconds: f64) {
        let number = self.rung(rows);
        if number >= self.rungs.len() || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        self.steps += 1;
        let expected = self.at_most(rows, rows);
        let most = expected.map_or(seconds, |expected| seconds.min(OUTLIER * expected));
        let newest = self.weight();
        let rung = &mut self.rungs[number];
        if rung.is_known(self.steps) {
            let ratio = seconds / (rung.mean * self.pace);
            let ratio = ratio.clamp(1.0 / OUTLIER, OUTLIER);
            self.spread += (ratio.ln().abs() - self.spread) * NEW_SPREAD;
            rung.visits += 1;
            // Averages of logarithms, both of them: else one would drift away from the other.
            rung.mean *= ratio.powf(newest.max(1.0 / rung.visits as f64));
            self.pace *= ratio.powf(NEW_PACE);
        } else {
            (rung.visits, rung.mean) = (1, most / self.pace);
        }
        rung.last = self.steps;
        self.draw();
    }

    /// Relative error that an average of many times has all the same.
    pub(super) fn error(&self) -> f64 {
        self.spread * (self.weight() / 2.0).sqrt()
    }

    /// Weight of the newest time in an average: as much as its error allows.
    fn weight(&self) -> f64 {
        let error = ERROR / self.spread.max(f64::MIN_POSITIVE);
        (error * error).clamp(NEW.1, NEW.0)
    }

    /// Draws the curve through the known rungs.
    fn draw(&mut self) {
        self.blocks.clear();
        for rung in self.rungs.iter().filter(|rung| rung.is_known(self.steps)) {
            let mut block = (rung.mean, rung.visits.min(20) as f64, 1);
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
        let known = (0..self.rungs.len()).filter(|&number| self.rungs[number].is_known(self.steps));
        let mut before: Option<(usize, f64)> = None;
        for (number, cost) in known.zip(costs) {
            let rows = |number: usize| self.rungs[number].rows as f64;
            let (start, low) = before.map_or((0.0, 0.0), |(start, low)| (rows(start), low));
            while self.curve.len() < number {
                let way = (rows(self.curve.len()) - start) / (rows(number) - start);
                self.curve.push(low + (cost - low) * way);
            }
            self.curve.push(cost);
            before = Some((number, cost));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LADDER: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

    fn near(found: Option<f64>, wanted: f64) {
        assert!(
            found.is_some_and(|found| (found - wanted).abs() < 1e-9),
            "{found:?}, not {wanted}"
        );
    }

    #[test]
    fn a_ladder_is_climbed_rung_by_rung() {
        let mut cost = Cost::new(&[8, 1, 4, 2, 2]);
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
    fn rungs_between_known_ones_are_interpolated() {
        let mut cost = Cost::new(&LADDER);
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
        let mut cost = Cost::new(&LADDER);
        for (rows, seconds) in [(1, 3.0), (2, 1.0), (4, 2.0), (8, 2.5), (16, 2.1)] {
            (0..10).for_each(|_| cost.learn(rows, seconds));
        }
        for (rows, wanted) in [(1, 2.0), (2, 2.0), (4, 2.0), (8, 2.3), (16, 2.3)] {
            near(cost.of(rows, rows), wanted);
        }
    }

    #[test]
    fn an_outlier_does_not_close_a_rung() {
        let mut cost = Cost::new(&LADDER);
        (0..10).for_each(|_| cost.learn(1, 1.0));
        cost.learn(2, 1000.0);
        near(cost.of(2, 1), 4.0);
        for useless in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            cost.learn(1, useless);
            near(cost.of(1, 1), 1.0);
        }
    }

    #[test]
    fn what_was_not_seen_for_long_is_not_known() {
        let mut cost = Cost::new(&LADDER);
        cost.learn(2, 9.0);
        (0..STALE).for_each(|_| cost.learn(1, 1.0));
        near(cost.of(2, 1), 1.0);
        cost.learn(2, 1.5);
        near(cost.of(2, 1), 1.5);
    }
}
