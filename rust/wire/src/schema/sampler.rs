//! Samplers (§5.5, §6.7).

use rkyv::{Archive, Deserialize, Serialize};

use crate::native::NativeSlice;

/// What to compute from the logits of one sampled row.
///
/// The first five variants are *token samplers* and yield one token each; the
/// others are *probes*. A temperature of 0 means arg-max.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(tag = "type", deny_unknown_fields))]
#[rkyv(derive(Debug))]
pub enum Sampler {
    /// Sample from the whole softmax.
    Multinomial {
        /// Softmax temperature.
        temperature: f32,
        /// Seed of the random stream; 0 and 1 ask for fresh randomness.
        seed: u32,
    },
    /// Sample among the `k` most probable tokens.
    TopK {
        /// Softmax temperature.
        temperature: f32,
        /// Tokens kept; 0 keeps all.
        k: u32,
    },
    /// Sample within the smallest set of tokens that has mass `p`.
    TopP {
        /// Softmax temperature.
        temperature: f32,
        /// Probability mass kept; 1 keeps all.
        p: f32,
    },
    /// Sample among tokens at least `p` times as probable as the best one.
    MinP {
        /// Softmax temperature.
        temperature: f32,
        /// Fraction of the largest probability.
        p: f32,
    },
    /// Top-k, then top-p on the renormalized rest.
    TopKTopP {
        /// Softmax temperature.
        temperature: f32,
        /// Tokens kept; 0 keeps all.
        k: u32,
        /// Probability mass kept of the rest.
        p: f32,
    },
    /// Reserved: no output. From an embedding model, the pooled row of the request in the place of logits.
    Embedding,
    /// The most probable tokens with their probabilities.
    Dist {
        /// Softmax temperature.
        temperature: f32,
        /// Tokens reported; 0 reports the whole vocabulary.
        num_tokens: u32,
    },
    /// All logits of the row as f32, without temperature.
    RawLogits,
    /// The log-probability of one token, without temperature.
    Logprob {
        /// The token asked for.
        token_id: u32,
    },
    /// The log-probabilities of several tokens, in the given order.
    Logprobs {
        /// The tokens asked for; may be empty.
        token_ids: Vec<u32>,
    },
    /// The entropy of the softmax in nats, without temperature.
    Entropy,
}

/// A sampler with native values, borrowed from a [`Sampler`] or from a frame.
///
/// The variants and fields are those of [`Sampler`].
#[expect(missing_docs, reason = "the fields are documented at `Sampler`")]
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SamplerView<'a> {
    /// See [`Sampler::Multinomial`].
    Multinomial { temperature: f32, seed: u32 },
    /// See [`Sampler::TopK`].
    TopK { temperature: f32, k: u32 },
    /// See [`Sampler::TopP`].
    TopP { temperature: f32, p: f32 },
    /// See [`Sampler::MinP`].
    MinP { temperature: f32, p: f32 },
    /// See [`Sampler::TopKTopP`].
    TopKTopP { temperature: f32, k: u32, p: f32 },
    /// See [`Sampler::Embedding`].
    Embedding,
    /// See [`Sampler::Dist`].
    Dist { temperature: f32, num_tokens: u32 },
    /// See [`Sampler::RawLogits`].
    RawLogits,
    /// See [`Sampler::Logprob`].
    Logprob { token_id: u32 },
    /// See [`Sampler::Logprobs`].
    Logprobs { token_ids: &'a [u32] },
    /// See [`Sampler::Entropy`].
    Entropy,
}

impl SamplerView<'_> {
    /// Whether this sampler yields a token; otherwise it is a probe.
    pub const fn is_token(self) -> bool {
        matches!(
            self,
            Self::Multinomial { .. }
                | Self::TopK { .. }
                | Self::TopP { .. }
                | Self::MinP { .. }
                | Self::TopKTopP { .. }
        )
    }
}

impl ArchivedSampler {
    /// The sampler with native values; token lists stay borrowed.
    #[inline]
    pub fn view(&self) -> SamplerView<'_> {
        match self {
            Self::Multinomial { temperature, seed } => SamplerView::Multinomial {
                temperature: temperature.to_native(),
                seed: seed.to_native(),
            },
            Self::TopK { temperature, k } => SamplerView::TopK {
                temperature: temperature.to_native(),
                k: k.to_native(),
            },
            Self::TopP { temperature, p } => SamplerView::TopP {
                temperature: temperature.to_native(),
                p: p.to_native(),
            },
            Self::MinP { temperature, p } => SamplerView::MinP {
                temperature: temperature.to_native(),
                p: p.to_native(),
            },
            Self::TopKTopP { temperature, k, p } => SamplerView::TopKTopP {
                temperature: temperature.to_native(),
                k: k.to_native(),
                p: p.to_native(),
            },
            Self::Embedding => SamplerView::Embedding,
            Self::Dist {
                temperature,
                num_tokens,
            } => SamplerView::Dist {
                temperature: temperature.to_native(),
                num_tokens: num_tokens.to_native(),
            },
            Self::RawLogits => SamplerView::RawLogits,
            Self::Logprob { token_id } => SamplerView::Logprob {
                token_id: token_id.to_native(),
            },
            Self::Logprobs { token_ids } => SamplerView::Logprobs {
                token_ids: token_ids.native(),
            },
            Self::Entropy => SamplerView::Entropy,
        }
    }
}
