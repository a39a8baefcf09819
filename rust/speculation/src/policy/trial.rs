//! Whether drafts gain what the costs of steps promise, by the tokens of whole cycles: from one answer to the next.
//!
//! The step's time is not the whole cost of drafts. Clients work on the tokens that they get, contexts that get different
//! numbers of tokens fall out of step with each other, and learnt costs may be wrong. So now and then batches get no drafts
//! for a few cycles, and then all that seem worthwhile for as many, or in the opposite order. The ratio of the promised
//! gain to the measured one is the *toll*: drafts are taken where they promise more than that.

/// Cycles of either kind that a trial compares: most, and fewest if they vary little.
const CYCLES: u32 = 12;
const FEW_CYCLES: u32 = 4;
/// A rate is certain enough if its logarithm has this variance.
const CERTAIN: f64 = 1e-4;
/// Cycles before these that are left out, since earlier drafts are still under way.
const SKIPPED: u32 = 4;
/// Fewest cycles before the first trial, and between two of them later on.
const FIRST_PAUSE: u32 = 16;
const PAUSE: u32 = 64;
/// Cycles with drafts until the next trial, whatever the last one cost: the time of steps without drafts must stay known.
/// Fewer where times are noisy, since that time may be wrong then.
const MOST_TAKEN: u32 = 1024;
const MOST_TAKEN_BY_NOISE: u32 = 256;
/// Times with a larger relative error are noisy.
const NOISY: f64 = 0.01;
/// Share of the time that trials may waste.
const SHARE: f64 = 1.0 / 128.0;
/// A smaller promise shows in no trial.
const LEAST_PROMISE: f64 = 1.02;
/// A cycle counts as at most this many times the usual one.
const OUTLIER: f64 = 4.0;
/// Weight of the newest cycle in the usual one.
const NEW: f64 = 0.05;
/// Variance of the result before the first trial, and what each trial adds to it, since results change.
const UNKNOWN: f64 = 0.25;
const DRIFT: f64 = 0.01;

/// The drafts that a batch gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Arm {
    /// Those that promise more than the toll.
    #[default]
    Usual,
    /// Those that promise any gain.
    With,
    /// None.
    Without,
}

/// Cycles of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct Stretch {
    cycles: f64,
    tokens: f64,
    seconds: f64,
    /// Sums of the squares of the tokens and of the seconds of single cycles.
    squares: (f64, f64),
    /// Sum of the logarithms of the promises.
    promised: f64,
    /// Tokens and seconds, including the cycles that were left out.
    all: (f64, f64),
}

impl Stretch {
    fn rate(&self) -> f64 {
        self.tokens / self.seconds
    }

    /// Seconds that this took longer than at the other's rate.
    fn wasted(&self, other: &Self) -> f64 {
        let (tokens, seconds) = self.all;
        (seconds - tokens / other.rate()).max(0.0)
    }

    /// Variance of the logarithm of the rate.
    fn variance(&self) -> f64 {
        let relative =
            |sum: f64, squares: f64| (squares * self.cycles / (sum * sum) - 1.0).max(0.0);
        let tokens = relative(self.tokens, self.squares.0);
        (tokens + relative(self.seconds, self.squares.1)) / self.cycles
    }
}

#[derive(Debug)]
pub(super) struct Trial {
    /// Arm and promise of the current batch, and of the one before, whose cycle ends now.
    given: (Arm, f64),
    before: (Arm, f64),
    /// Cycles of the present arm, and how many of them had drafts.
    cycles: u32,
    taken: u32,
    /// Seconds that trials have wasted, less [`SHARE`] of the time since.
    debt: f64,
    with: Stretch,
    without: Stretch,
    /// Trials so far.
    trials: u32,
    /// Seconds of a usual cycle.
    usual: f64,
    /// Logarithm of the ratio of the measured gain to the promised one, and its variance.
    found: f64,
    variance: f64,
}

impl Default for Trial {
    fn default() -> Self {
        Self {
            given: (Arm::Usual, 1.0),
            before: (Arm::Usual, 1.0),
            cycles: 0,
            taken: 0,
            debt: 0.0,
            with: Stretch::default(),
            without: Stretch::default(),
            trials: 0,
            usual: 0.0,
            found: 0.0,
            variance: UNKNOWN,
        }
    }
}

impl Trial {
    /// Whether a batch gets its drafts, which promise to multiply its tokens per second by `promise`. `error` is the relative
    /// error of the costs that this follows from.
    pub(super) fn takes(&mut self, promise: f64, error: f64) -> bool {
        self.before = self.given;
        let done = self.is_done();
        let arm = match self.given.0 {
            Arm::Usual if promise >= LEAST_PROMISE && self.is_due(error) => {
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
        if arm != self.given.0 {
            (self.cycles, self.taken) = (0, 0);
        }
        self.given = (arm, promise);
        let takes = match arm {
            Arm::Usual => promise > self.toll(),
            Arm::With => true,
            Arm::Without => false,
        };
        self.taken += u32::from(takes && promise > 1.0);
        takes
    }

    /// Whether the present arm has had enough cycles.
    fn is_done(&self) -> bool {
        let stretch = match self.given.0 {
            Arm::Usual => return false,
            Arm::With => &self.with,
            Arm::Without => &self.without,
        };
        let certain = stretch.variance() <= CERTAIN;
        self.cycles >= SKIPPED + if certain { FEW_CYCLES } else { CYCLES }
    }

    fn is_due(&self, error: f64) -> bool {
        let most_taken = if error > NOISY {
            MOST_TAKEN_BY_NOISE
        } else {
            MOST_TAKEN
        };
        let pause = if self.trials == 0 { FIRST_PAUSE } else { PAUSE };
        self.cycles >= pause && (self.debt <= 0.0 || self.taken >= most_taken)
    }

    /// The arm that a trial begins with: in turns, so that changes over time cancel out.
    fn first(&self) -> Arm {
        if self.trials.is_multiple_of(2) {
            Arm::Without
        } else {
            Arm::With
        }
    }

    /// The promise above which drafts are taken: 1, or more if drafts gain less than they promise.
    pub(super) fn toll(&self) -> f64 {
        if self.trials == 0 {
            return 1.0;
        }
        (self.variance.sqrt() - self.found).exp().max(1.0)
    }

    /// Learns the tokens and seconds of the cycle that ends now.
    pub(super) fn answered(&mut self, tokens: usize, seconds: f64) {
        if !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        let most = if self.usual == 0.0 {
            seconds
        } else {
            OUTLIER * self.usual
        };
        let seconds = seconds.min(most);
        self.usual += (seconds - self.usual) * if self.usual == 0.0 { 1.0 } else { NEW };
        let (arm, promise) = self.before;
        self.cycles += u32::from(arm == self.given.0);
        let stretch = match arm {
            Arm::Usual => {
                self.debt = (self.debt - SHARE * seconds).max(0.0);
                return;
            }
            Arm::With => &mut self.with,
            Arm::Without => &mut self.without,
        };
        stretch.all.0 += tokens as f64;
        stretch.all.1 += seconds;
        if arm == self.given.0 && self.cycles <= SKIPPED {
            return;
        }
        stretch.cycles += 1.0;
        stretch.tokens += tokens as f64;
        stretch.seconds += seconds;
        stretch.squares.0 += (tokens * tokens) as f64;
        stretch.squares.1 += seconds * seconds;
        stretch.promised += promise.ln();
    }

    /// Learns from a trial.
    fn conclude(&mut self) {
        let (with, without) = (self.with, self.without);
        let won = (with.rate() / without.rate()).ln() - with.promised / with.cycles;
        if won.is_finite() {
            let noise = with.variance() + without.variance();
            let variance = self.variance + DRIFT;
            let weight = variance / (variance + noise);
            self.found += (won - self.found) * weight;
            self.variance = variance * (1.0 - weight);
        }
        let wasted = with.wasted(&without) + without.wasted(&with);
        self.debt += if wasted.is_finite() { wasted } else { 0.0 };
        self.trials += 1;
    }
}
