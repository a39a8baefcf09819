//! Sampler parameters, clamped to their ranges.

pub(crate) mod logits_processors;
pub(crate) mod params;
pub(crate) mod random;

use pie_wire::{CombinedSampler, SamplerView};

/// The output kind of a sampling slot. A sampling group is sorted by class, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum SlotClass {
    /// A token: arg-max, lowest id on ties.
    Greedy,
    /// A token sampled with temperature only.
    Plain,
    /// A token sampled with top-k, top-p or min-p.
    Filtered,
    /// The most probable tokens with their probabilities.
    Dist,
    /// Raw logits, or the pooled row of an embedding model.
    Logits,
    /// Log-probabilities of given tokens.
    Logprobs,
    /// The distribution's entropy.
    Entropy,
    /// Log-probabilities of a prompt token, from the logits row before it.
    Prompt,
}

impl SlotClass {
    /// Number of classes.
    pub const COUNT: usize = 8;

    /// Whether the slot yields a token.
    #[must_use]
    pub const fn is_token(self) -> bool {
        matches!(self, Self::Greedy | Self::Plain | Self::Filtered)
    }

    /// Whether the slot's output depends on its temperature.
    pub(crate) const fn is_tempered(self) -> bool {
        matches!(self, Self::Plain | Self::Filtered | Self::Dist)
    }
}

/// Sampler parameters, clamped as the Pie driver protocol requires. Unused parameters are neutral.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplerParams {
    /// Temperature; 0 = arg-max.
    pub temperature: f32,
    /// Top-k, or number of reported ids or values; `vocab_size` = off.
    pub top_k: u32,
    /// Top-p (nucleus); 1 = off. Negative: `-top_p` of the full distribution instead of what `top_k` leaves.
    pub top_p: f32,
    /// Min-p; 0 = off.
    pub min_p: f32,
    /// Seed of the caller, if any.
    pub seed: Option<u64>,
}

/// Temperatures up to this one mean arg-max.
const GREEDY_TEMPERATURE: f32 = 1e-5;

impl SamplerParams {
    /// Parameters of the greedy sampler.
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

    /// Converts a sampler of the frame; `None` for the reserved one, which has no output.
    #[must_use]
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "parameters that are written one by one and copied as a whole stall the copy"
    )]
    pub fn from_wire(sampler: SamplerView<'_>, vocab_size: u32) -> Option<(SlotClass, Self)> {
        let greedy = Self::greedy(vocab_size);
        let base = |temperature: f32| Self {
            temperature: clamp_temperature(temperature),
            ..greedy
        };
        let token = |params: Self| (params.token_class(vocab_size), params);
        Some(match sampler {
            SamplerView::Multinomial { temperature, seed } => token(Self {
                // 1 is the draw count that the SDKs put into this field.
                seed: Some(u64::from(seed)).filter(|&seed| seed > 1),
                ..base(temperature)
            }),
            SamplerView::TopK { temperature, k } => token(Self {
                top_k: clamp_k(k, vocab_size),
                ..base(temperature)
            }),
            SamplerView::TopP { temperature, p } => token(Self {
                top_p: clamp_share(p, 1.0),
                ..base(temperature)
            }),
            SamplerView::MinP { temperature, p } => token(Self {
                min_p: clamp_share(p, 0.0),
                ..base(temperature)
            }),
            SamplerView::TopKTopP { temperature, k, p } => token(Self {
                top_k: clamp_k(k, vocab_size),
                top_p: clamp_share(p, 1.0),
                ..base(temperature)
            }),
            SamplerView::Dist {
                temperature,
                num_tokens,
            } => (
                SlotClass::Dist,
                Self {
                    top_k: clamp_k(num_tokens, vocab_size),
                    ..base(temperature)
                },
            ),
            SamplerView::RawLogits => (SlotClass::Logits, greedy),
            SamplerView::Logprob { .. } | SamplerView::Logprobs { .. } => {
                (SlotClass::Logprobs, greedy)
            }
            SamplerView::Entropy => (SlotClass::Entropy, greedy),
            SamplerView::Embedding => return None,
        })
    }

    /// Class and parameters of a validated combined sampler.
    #[must_use]
    pub fn combined(sampler: &CombinedSampler, vocab_size: u32) -> (SlotClass, Self) {
        let top_k = clamp_k(sampler.top_k, vocab_size);
        let top_p = sampler.top_p;
        let params = Self {
            temperature: clamp_temperature(sampler.temperature),
            top_k,
            // Without top-k both meanings of top-p are equal.
            top_p: if top_p < 1.0 && top_k < vocab_size {
                -top_p
            } else {
                top_p
            },
            min_p: sampler.min_p,
            // The upper half of the key space is for samplers without a seed.
            seed: sampler.seed.map(|seed| seed & (u64::MAX >> 1)),
        };
        (params.token_class(vocab_size), params)
    }

    fn token_class(&self, vocab_size: u32) -> SlotClass {
        if self.temperature == 0.0 {
            SlotClass::Greedy
        } else if self.top_k < vocab_size || self.top_p < 1.0 || self.min_p > 0.0 {
            SlotClass::Filtered
        } else {
            SlotClass::Plain
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
