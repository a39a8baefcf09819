//! How much of their output requests are expected to produce; `SGLang`'s `new_token_ratio`.

/// Of what a request may produce, before anything is known.
const FIRST: f32 = 0.7;
/// The least, as a share of the first.
const LEAST: f32 = 0.14;
/// Steps from the first to the least.
const STEPS: f32 = 600.0;
/// Tokens that each request produces after a retraction, at least.
const AHEAD: f32 = 20.0;

/// Falls while all goes well; a retraction raises it.
#[derive(Debug)]
pub(crate) struct Ratio {
    first: f32,
    least: f32,
    now: f32,
}

impl Ratio {
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

    /// A step had no retraction.
    pub(crate) fn decay(&mut self) {
        self.now = (self.now - (self.first - self.least) / STEPS).max(self.least);
    }

    /// Requests were retracted; those that stay have produced so many tokens of so many that they may.
    pub(crate) fn retracted(&mut self, requests: usize, produced: u64, most: u64) {
        let expected = produced as f32 + AHEAD * requests as f32;
        self.now = (expected / (most as f32 + 1.0)).min(1.0);
    }

    /// Nothing runs.
    pub(crate) fn reset(&mut self) {
        self.now = self.first;
    }
}
