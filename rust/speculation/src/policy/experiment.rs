//! An A/B experiment: whether drafts gain what the cost model predicts, by tokens per second over whole cycles, from one output
//! to the next.
//!
//! The step time is not the whole cost of drafts: clients work on tokens, contexts get out of step, and learnt costs may be
//! wrong. So now and then batches get no drafts for a few cycles, then all worthwhile ones for as many, or in the opposite
//! order. From the ratio of predicted and measured gain follows the *threshold*: the least predicted gain for which drafts are
//! used.

/// Most cycles of an arm, and fewest if they vary little.
const CYCLES: u32 = 12;
const FEW_CYCLES: u32 = 4;
/// Variance of the log rate that is certain enough.
const CERTAIN: f64 = 1e-4;
/// Cycles that are skipped first, since earlier drafts are still in flight.
const SKIPPED: u32 = 4;
/// Fewest cycles before the first experiment, and between two.
const FIRST_PAUSE: u32 = 16;
const PAUSE: u32 = 64;
/// Cycles with drafts until the next experiment, whatever the last one cost: the time without drafts must stay known. Fewer
/// where times are noisy.
const MOST_TAKEN: u32 = 1024;
const MOST_TAKEN_BY_NOISE: u32 = 256;
/// Relative error of noisy times.
const NOISY: f64 = 0.01;
/// Share of time that experiments may waste.
const SHARE: f64 = 1.0 / 128.0;
/// Smallest predicted gain that an experiment can measure.
const LEAST_PROMISE: f64 = 1.02;
/// Cycles are clipped to this factor of the usual one.
const OUTLIER: f64 = 4.0;
/// Weight of the newest cycle.
const NEW: f64 = 0.05;
/// Initial variance of the result, and what each experiment adds, since results change.
const UNKNOWN: f64 = 0.25;
const DRIFT: f64 = 0.01;

/// The arm of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Arm {
    /// No experiment: drafts above the threshold.
    #[default]
    Usual,
    /// All worthwhile drafts.
    With,
    /// None.
    Without,
}

/// Measurements of an arm.
#[derive(Clone, Copy, Debug, Default)]
struct ArmStats {
    cycles: f64,
    tokens: f64,
    seconds: f64,
    /// Sums of squares of tokens and of seconds.
    squares: (f64, f64),
    /// Sum of the logs of predicted gains.
    promised: f64,
    /// Tokens and seconds, skipped cycles included.
    all: (f64, f64),
}

impl ArmStats {
    fn rate(&self) -> f64 {
        self.tokens / self.seconds
    }

    /// Seconds lost against the other's rate.
    fn wasted(&self, other: &Self) -> f64 {
        let (tokens, seconds) = self.all;
        (seconds - tokens / other.rate()).max(0.0)
    }

    /// Variance of the log rate.
    fn variance(&self) -> f64 {
        let relative =
            |sum: f64, squares: f64| (squares * self.cycles / (sum * sum) - 1.0).max(0.0);
        let tokens = relative(self.tokens, self.squares.0);
        (tokens + relative(self.seconds, self.squares.1)) / self.cycles
    }
}

#[derive(Debug)]
pub(super) struct Experiment {
    /// Arm and predicted gain of the current batch, and of the previous, whose cycle ends now.
    current: (Arm, f64),
    previous: (Arm, f64),
    /// Cycles of the current arm, and those with drafts.
    cycles: u32,
    taken: u32,
    /// Seconds that experiments have wasted, less [`SHARE`] of the time since.
    time_debt: f64,
    with: ArmStats,
    without: ArmStats,
    /// Number of experiments.
    trials: u32,
    /// Seconds of a usual cycle.
    usual_cycle: f64,
    /// Log ratio of measured to predicted gain, and its variance.
    log_ratio: f64,
    variance: f64,
}

impl Default for Experiment {
    fn default() -> Self {
        Self {
            current: (Arm::Usual, 1.0),
            previous: (Arm::Usual, 1.0),
            cycles: 0,
            taken: 0,
            time_debt: 0.0,
            with: ArmStats::default(),
            without: ArmStats::default(),
            trials: 0,
            usual_cycle: 0.0,
            log_ratio: 0.0,
            variance: UNKNOWN,
        }
    }
}

impl Experiment {
    /// Whether a batch uses its drafts, which are predicted to multiply its tokens per second by `predicted_gain`. `error` is
    /// the relative error of the costs.
    pub(super) fn uses_drafts(&mut self, predicted_gain: f64, error: f64) -> bool {
        self.previous = self.current;
        let done = self.is_done();
        let arm = match self.current.0 {
            Arm::Usual if predicted_gain >= LEAST_PROMISE && self.is_due(error) => {
                (self.with, self.without) = Default::default();
                self.first()
            }
            arm if arm == Arm::Usual || !done => arm,
            arm if arm == self.first() => match arm {
                Arm::With => Arm::Without,
                _ => Arm::With,
            },
            _ => {
                self.conclude();
                Arm::Usual
            }
        };
        if arm != self.current.0 {
            (self.cycles, self.taken) = (0, 0);
        }
        self.current = (arm, predicted_gain);
        let uses_drafts = match arm {
            Arm::Usual => predicted_gain > self.threshold(),
            Arm::With => true,
            Arm::Without => false,
        };
        self.taken += u32::from(uses_drafts && predicted_gain > 1.0);
        uses_drafts
    }

    /// The current batch uses drafts already in the cycle that begins now: a draft model runs in it.
    pub(super) fn starts_now(&mut self) {
        self.previous = self.current;
    }

    /// Whether the current batch is one of an experiment.
    pub(super) fn measures(&self) -> bool {
        self.current.0 != Arm::Usual
    }

    /// Whether the current arm has enough cycles.
    fn is_done(&self) -> bool {
        let stats = match self.current.0 {
            Arm::Usual => return false,
            Arm::With => &self.with,
            Arm::Without => &self.without,
        };
        let certain = stats.variance() <= CERTAIN;
        self.cycles >= SKIPPED + if certain { FEW_CYCLES } else { CYCLES }
    }

    fn is_due(&self, error: f64) -> bool {
        let most_taken = if error > NOISY {
            MOST_TAKEN_BY_NOISE
        } else {
            MOST_TAKEN
        };
        let pause = if self.trials == 0 { FIRST_PAUSE } else { PAUSE };
        self.cycles >= pause && (self.time_debt <= 0.0 || self.taken >= most_taken)
    }

    /// The first arm: alternating, so that drifts cancel out.
    fn first(&self) -> Arm {
        if self.trials.is_multiple_of(2) {
            Arm::Without
        } else {
            Arm::With
        }
    }

    /// The predicted gain above which drafts are used: 1, or more if drafts gain less than predicted.
    pub(super) fn threshold(&self) -> f64 {
        if self.trials == 0 {
            return 1.0;
        }
        (self.variance.sqrt() - self.log_ratio).exp().max(1.0)
    }

    /// Records the cycle that ends now.
    pub(super) fn answered(&mut self, tokens: usize, seconds: f64) {
        if !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        let most = if self.usual_cycle == 0.0 {
            seconds
        } else {
            OUTLIER * self.usual_cycle
        };
        let seconds = seconds.min(most);
        self.usual_cycle +=
            (seconds - self.usual_cycle) * if self.usual_cycle == 0.0 { 1.0 } else { NEW };
        let (arm, predicted_gain) = self.previous;
        self.cycles += u32::from(arm == self.current.0);
        let stats = match arm {
            Arm::Usual => {
                self.time_debt = (self.time_debt - SHARE * seconds).max(0.0);
                return;
            }
            Arm::With => &mut self.with,
            Arm::Without => &mut self.without,
        };
        stats.all.0 += tokens as f64;
        stats.all.1 += seconds;
        if arm == self.current.0 && self.cycles <= SKIPPED {
            return;
        }
        stats.cycles += 1.0;
        stats.tokens += tokens as f64;
        stats.seconds += seconds;
        stats.squares.0 += (tokens * tokens) as f64;
        stats.squares.1 += seconds * seconds;
        stats.promised += predicted_gain.ln();
    }

    /// Updates the result by a finished experiment.
    fn conclude(&mut self) {
        let (with, without) = (self.with, self.without);
        let won = (with.rate() / without.rate()).ln() - with.promised / with.cycles;
        if won.is_finite() {
            let noise = with.variance() + without.variance();
            let variance = self.variance + DRIFT;
            let weight = variance / (variance + noise);
            self.log_ratio += (won - self.log_ratio) * weight;
            self.variance = variance * (1.0 - weight);
        }
        let wasted = with.wasted(&without) + without.wasted(&with);
        self.time_debt += if wasted.is_finite() { wasted } else { 0.0 };
        self.trials += 1;
    }
}
