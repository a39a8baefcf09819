//! Sampling parameters of users, and what they become in a frame.

use std::sync::Arc;

use pie_scheduler::{Logprobs, NewRequest};
use pie_wire::{CombinedSampler, Penalties, RequestExtension, Sampler};

use crate::prompt_images::PromptImages;

/// Sampling parameters of a request; names and meanings are `SGLang`'s.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 for the most probable token, whatever the rest says.
    pub temperature: f32,
    /// Tokens kept; -1 or 0 for all.
    pub top_k: i64,
    /// Probability mass kept; 1 for all.
    pub top_p: f32,
    /// Fraction of the largest probability that a token must have; 0 for none.
    pub min_p: f32,
    /// Seed of this request's random numbers, with the token's position; below 2^63.
    pub seed: Option<u64>,
    /// Subtracted from a token's logit for each time that it was generated; from -2 to 2.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of a generated token; from -2 to 2.
    pub presence_penalty: f32,
    /// Divides the logit of a generated token, or multiplies it if it is negative; above 0 and at most 2.
    pub repetition_penalty: f32,
    /// Tokens, and what is added to their logits.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: -1,
            top_p: 1.0,
            min_p: 0.0,
            seed: None,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
        }
    }
}

/// What every row of a request carries in a frame: sampler, parameters beyond the Pie protocol, images.
#[derive(Clone, Debug, PartialEq)]
pub struct RowParams {
    /// Sampler of the Pie protocol; what that cannot express is in the extension.
    pub sampler: Sampler,
    /// Parameters beyond that protocol.
    pub extension: Option<Arc<RequestExtension>>,
    /// The images of its prompt.
    pub images: Option<Arc<PromptImages>>,
}

impl RowParams {
    /// Adds images to a request whose prompt has their tokens.
    pub fn attach(images: PromptImages, request: &mut NewRequest<Self>) {
        images.write_pad_values(&mut request.prompt);
        request.images = images.spans();
        request.sampling.images = Some(Arc::new(images));
    }

    /// Has a request end with its pooled row of `size` numbers, which takes the place of log-probabilities: words of float32.
    pub fn embed(size: u32, request: &mut NewRequest<Self>) {
        request.sampling.sampler = Sampler::Embedding;
        request.logprobs = Some(Logprobs {
            words: size,
            prompt_from: None,
            uncached: false,
        });
    }
}

impl From<Sampler> for RowParams {
    fn from(sampler: Sampler) -> Self {
        Self {
            sampler,
            extension: None,
            images: None,
        }
    }
}

/// An invalid sampling parameter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// A parameter out of range.
    #[error("{name} is {value}, it must be {wanted}")]
    Range {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: String,
        /// The range.
        wanted: &'static str,
    },
}

const GREEDY: Sampler = Sampler::TopP {
    temperature: 0.0,
    p: 1.0,
};

impl SamplingParams {
    /// Converts to a sampler of the Pie protocol, and an extension for what none of its samplers can express.
    ///
    /// # Errors
    /// [`SamplingError`].
    pub fn row_params(&self) -> Result<RowParams, SamplingError> {
        self.check()?;
        let (sampler, combined) = self.sampler();
        let extension = RequestExtension {
            sampler: combined,
            penalties: Penalties {
                frequency: self.frequency_penalty,
                presence: self.presence_penalty,
                repetition: self.repetition_penalty,
                counted_from: 0,
            },
            biases: self.logit_bias.clone(),
            ..RequestExtension::default()
        };
        let is_needed = extension != RequestExtension::default();
        Ok(RowParams {
            sampler,
            extension: is_needed.then(|| Arc::new(extension)),
            images: None,
        })
    }

    /// The sampler of the Pie protocol, or a combined one in its place.
    fn sampler(&self) -> (Sampler, Option<CombinedSampler>) {
        let Self {
            temperature,
            top_p,
            min_p,
            seed,
            ..
        } = *self;
        if temperature == 0.0 || self.top_k == 1 {
            return (GREEDY, None);
        }
        // A k beyond u32 is beyond every vocabulary: all tokens.
        let k = u32::try_from(self.top_k.max(0)).unwrap_or(0);
        let sampler = match (k, top_p < 1.0, min_p > 0.0, seed) {
            (0, false, false, None) => Sampler::Multinomial {
                temperature,
                seed: 0,
            },
            (k, false, false, None) => Sampler::TopK { temperature, k },
            (0, true, false, None) => Sampler::TopP {
                temperature,
                p: top_p,
            },
            (0, false, true, None) => Sampler::MinP {
                temperature,
                p: min_p,
            },
            _ => {
                let combined = CombinedSampler {
                    temperature,
                    top_k: k,
                    top_p,
                    min_p,
                    seed,
                };
                return (GREEDY, Some(combined));
            }
        };
        (sampler, None)
    }

    fn check(&self) -> Result<(), SamplingError> {
        let wrong = |name, value: &dyn ToString, wanted| SamplingError::Range {
            name,
            value: value.to_string(),
            wanted,
        };
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(wrong("temperature", &self.temperature, "0 or more"));
        }
        if self.top_k < -1 {
            return Err(wrong(
                "top_k",
                &self.top_k,
                "-1 for all tokens, or 1 and more",
            ));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(wrong("top_p", &self.top_p, "above 0 and at most 1"));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return Err(wrong("min_p", &self.min_p, "from 0 to 1"));
        }
        for (name, value) in [
            ("frequency_penalty", self.frequency_penalty),
            ("presence_penalty", self.presence_penalty),
        ] {
            if !(-2.0..=2.0).contains(&value) {
                return Err(wrong(name, &value, "from -2 to 2"));
            }
        }
        let repetition = self.repetition_penalty;
        if !(repetition > 0.0 && repetition <= 2.0) {
            return Err(wrong(
                "repetition_penalty",
                &repetition,
                "above 0 and at most 2",
            ));
        }
        let biases = self.logit_bias.iter();
        if let Some((_, bias)) = biases.into_iter().find(|(_, bias)| !bias.is_finite()) {
            return Err(wrong("logit_bias", bias, "a finite number"));
        }
        match self.seed {
            Some(seed) if seed > u64::MAX >> 1 => Err(wrong("seed", &seed, "below 2^63")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> SamplingParams {
        SamplingParams {
            temperature: 0.5,
            ..SamplingParams::default()
        }
    }

    #[test]
    fn what_the_protocol_can_say_needs_no_extension() {
        let temperature = 0.5;
        let (top_k, top_p, min_p) = (8, 0.75, 0.1);
        let seed = 0;
        for (sampling, sampler) in [
            (plain(), Sampler::Multinomial { temperature, seed }),
            (
                SamplingParams { top_k, ..plain() },
                Sampler::TopK { temperature, k: 8 },
            ),
            (
                SamplingParams {
                    top_k: 1 << 40,
                    ..plain()
                },
                Sampler::Multinomial { temperature, seed },
            ),
            (
                SamplingParams { top_p, ..plain() },
                Sampler::TopP {
                    temperature,
                    p: top_p,
                },
            ),
            (
                SamplingParams { min_p, ..plain() },
                Sampler::MinP {
                    temperature,
                    p: min_p,
                },
            ),
            (
                SamplingParams {
                    top_k: 1,
                    ..plain()
                },
                GREEDY,
            ),
            (
                SamplingParams {
                    temperature: 0.0,
                    min_p,
                    top_k,
                    seed: Some(5),
                    ..plain()
                },
                GREEDY,
            ),
        ] {
            assert_eq!(sampling.row_params(), Ok(sampler.into()), "{sampling:?}");
        }
    }

    #[test]
    fn filters_together_and_seeds_are_combined() {
        let combined = |sampling: SamplingParams| {
            let extension = sampling.row_params().unwrap().extension.unwrap();
            assert!(!extension.penalties.any() && extension.biases.is_empty());
            extension.sampler.unwrap()
        };
        let (top_k, top_p, min_p) = (8, 0.75, 0.1);
        let all = CombinedSampler {
            temperature: 0.5,
            top_k: 8,
            top_p,
            min_p,
            seed: Some(1),
        };
        let seed = Some(1);
        let sampling = SamplingParams {
            top_k,
            top_p,
            min_p,
            seed,
            ..plain()
        };
        assert_eq!(combined(sampling), all);
        // Top-k with top-p, too: Pie's protocol applies top-p to the renormalized top-k.
        let pair = combined(SamplingParams {
            top_k,
            top_p,
            ..plain()
        });
        assert_eq!((pair.min_p, pair.seed), (0.0, None));
        assert_eq!(combined(SamplingParams { seed, ..plain() }).seed, seed);
    }

    #[test]
    fn penalties_and_biases_go_with_any_sampler() {
        let sampling = SamplingParams {
            temperature: 0.0,
            frequency_penalty: 0.5,
            logit_bias: vec![(3, -1.0)],
            ..plain()
        };
        let RowParams {
            sampler, extension, ..
        } = sampling.row_params().unwrap();
        let extension = extension.unwrap();
        assert_eq!(sampler, GREEDY);
        assert_eq!(
            (extension.penalties.frequency, extension.suppressed_until),
            (0.5, 0)
        );
        assert_eq!(extension.biases, [(3, -1.0)]);
        assert!(extension.sampler.is_none());
    }

    #[test]
    fn invalid_values_are_refused_by_name() {
        let refused = |change: fn(&mut SamplingParams)| {
            let mut sampling = plain();
            change(&mut sampling);
            sampling.row_params().unwrap_err().to_string()
        };
        for (error, names) in [
            (refused(|of| of.temperature = -0.1), "temperature is -0.1"),
            (
                refused(|of| of.temperature = f32::NAN),
                "temperature is NaN",
            ),
            (refused(|of| of.top_k = -2), "top_k is -2"),
            (refused(|of| of.top_p = 0.0), "top_p is 0"),
            (refused(|of| of.min_p = 1.5), "min_p is 1.5"),
            (refused(|of| of.seed = Some(1 << 63)), "seed is 92233720"),
            (
                refused(|of| of.frequency_penalty = 2.5),
                "frequency_penalty is 2.5, it must be from -2 to 2",
            ),
            (
                refused(|of| of.presence_penalty = f32::NAN),
                "presence_penalty is NaN",
            ),
            (
                refused(|of| of.repetition_penalty = 0.0),
                "repetition_penalty is 0",
            ),
            (
                refused(|of| of.logit_bias = vec![(1, f32::INFINITY)]),
                "logit_bias is inf",
            ),
        ] {
            assert!(error.contains(names), "{error}");
        }
    }
}
