//! Token samplers, with their parameters brought into range.

use pie_wire::SamplerView;

/// How a slot is sampled; slots of one class lie together in a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SamplerClass {
    /// Arg-max, lowest id on ties.
    Greedy,
    /// The whole tempered distribution.
    Plain,
    /// Top-k, top-p or min-p restrict it.
    Filtered,
}

/// A token sampler's parameters, clamped as the Pie driver protocol asks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenSampler {
    /// Temperature; 0 = arg-max.
    pub temperature: f32,
    /// Keep the k most probable; `vocab_size` = all.
    pub top_k: u32,
    /// Keep the smallest head of the distribution with at least this mass; 1 = all, 0 = one.
    pub top_p: f32,
    /// Keep ids with at least this share of the largest probability; 0 = all.
    pub min_p: f32,
    /// Caller's seed; `None` = fresh randomness.
    pub seed: Option<u32>,
}

/// Temperatures up to this one mean arg-max.
const GREEDY_TEMPERATURE: f32 = 1e-5;

impl TokenSampler {
    /// The arg-max sampler.
    #[must_use]
    pub const fn greedy(vocab_size: u32) -> Self {
        Self {
            temperature: 0.0,
            top_k: vocab_size,
            top_p: 1.0,
            min_p: 0.0,
            seed: None,
        }
    }

    /// Reads a sampler off the wire.
    ///
    /// # Errors
    /// The name of the sampler when it does not sample a token.
    pub fn from_wire(sampler: SamplerView<'_>, vocab_size: u32) -> Result<Self, &'static str> {
        let base = |temperature: f32| Self {
            temperature: clamp_temperature(temperature),
            ..Self::greedy(vocab_size)
        };
        Ok(match sampler {
            SamplerView::Multinomial { temperature, seed } => {
                // 1 is the draw count that the SDKs put into this field.
                let seed = Some(seed).filter(|&seed| seed > 1);
                Self {
                    seed,
                    ..base(temperature)
                }
            }
            SamplerView::TopK { temperature, k } => Self {
                top_k: clamp_k(k, vocab_size),
                ..base(temperature)
            },
            SamplerView::TopP { temperature, p } => Self {
                top_p: clamp_share(p, 1.0),
                ..base(temperature)
            },
            SamplerView::MinP { temperature, p } => Self {
                min_p: clamp_share(p, 0.0),
                ..base(temperature)
            },
            SamplerView::TopKTopP { temperature, k, p } => Self {
                top_k: clamp_k(k, vocab_size),
                top_p: clamp_share(p, 1.0),
                ..base(temperature)
            },
            SamplerView::Embedding => return Err("Embedding"),
            SamplerView::Dist { .. } => return Err("Dist"),
            SamplerView::RawLogits => return Err("RawLogits"),
            SamplerView::Logprob { .. } => return Err("Logprob"),
            SamplerView::Logprobs { .. } => return Err("Logprobs"),
            SamplerView::Entropy => return Err("Entropy"),
        })
    }

    /// The class that the parameters put the slot in.
    #[must_use]
    pub fn class(&self, vocab_size: u32) -> SamplerClass {
        if self.temperature == 0.0 {
            SamplerClass::Greedy
        } else if self.top_k < vocab_size || self.top_p < 1.0 || self.min_p > 0.0 {
            SamplerClass::Filtered
        } else {
            SamplerClass::Plain
        }
    }
}

fn clamp_temperature(temperature: f32) -> f32 {
    // The comparison is false for NaN, which therefore counts as 0.
    if temperature > GREEDY_TEMPERATURE {
        temperature.min(f32::MAX)
    } else {
        0.0
    }
}

const fn clamp_k(k: u32, vocab_size: u32) -> u32 {
    if k == 0 || k > vocab_size {
        vocab_size
    } else {
        k
    }
}

const fn clamp_share(p: f32, if_nan: f32) -> f32 {
    if p.is_nan() {
        if_nan
    } else {
        p.clamp(0.0, 1.0)
    }
}
