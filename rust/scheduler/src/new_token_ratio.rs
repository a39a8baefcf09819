//! The expected share of `max_tokens` that running requests generate; `SGLang`'s `new_token_ratio`.

/// The initial ratio at conservativeness 1.
const FIRST: f32 = 0.7;
/// The smallest ratio, as a share of the initial one.
const LEAST: f32 = 0.14;
/// Steps of decay from the initial to the smallest ratio.
const STEPS: f32 = 600.0;
/// Tokens that each request generates at least after a retraction.
const AHEAD: f32 = 20.0;

/// Decays with each step; raised by retractions.
#[derive(Debug)]
pub(crate) struct NewTokenRatio {
    first: f32,
    least: f32,
    now: f32,
}

impl NewTokenRatio {
    pub(crate) fn new(conservativeness: f32) -> Self {
        let first = (FIRST * conservativeness).min(1.0);
        Self {
            first,
            least: first * LEAST,
            now: first,
        }
    }

    pub(crate) fn now(&self) -> f32 {
        self.now
    }

    /// A step without retraction.
    pub(crate) fn decay(&mut self) {
        self.now = (self.now - (self.first - self.least) / STEPS).max(self.least);
    }

    /// Requests were retracted; the remaining ones have generated `produced` of at most `most` tokens.
    pub(crate) fn retracted(&mut self, requests: usize, produced: u64, most: u64) {
        let expected = produced as f32 + AHEAD * requests as f32;
        self.now = (expected / (most as f32 + 1.0)).min(1.0);
    }

    /// The scheduler is idle.
    pub(crate) fn reset(&mut self) {
        self.now = self.first;
    }
}
