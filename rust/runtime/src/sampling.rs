//! From the parameters that users know to the samplers that the driver has.

use pie_wire::Sampler;

/// How tokens are drawn; names and meanings are `SGLang`'s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 for the most probable token, whatever the rest says.
    pub temperature: f32,
    /// Tokens kept; -1 or 0 for all.
    pub top_k: i64,
    /// Probability mass kept; 1 for all.
    pub top_p: f32,
    /// Fraction of the largest probability that a token must have; 0 for none.
    pub min_p: f32,
    /// Fixes what is drawn; from 2 on.
    pub seed: Option<u32>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: -1,
            top_p: 1.0,
            min_p: 0.0,
            seed: None,
        }
    }
}

/// Parameters that no sampler of the driver has.
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
        /// What it may be.
        wanted: &'static str,
    },
    /// Parameters that cannot go together.
    #[error(
        "{one} and {other} cannot go together: the driver draws by one filter\n\nhint: leave one of them out"
    )]
    Together {
        /// The one.
        one: &'static str,
        /// The other.
        other: &'static str,
    },
}

impl Sampling {
    /// The sampler that does this.
    ///
    /// # Errors
    /// [`SamplingError`].
    pub fn sampler(&self) -> Result<Sampler, SamplingError> {
        self.check()?;
        let Self {
            temperature,
            top_p,
            min_p,
            ..
        } = *self;
        if temperature == 0.0 || self.top_k == 1 {
            return Ok(Sampler::TopP {
                temperature: 0.0,
                p: 1.0,
            });
        }
        // More than there are tokens is all of them.
        let k = u32::try_from(self.top_k.max(0)).unwrap_or(0);
        let filters = [
            ("top_k", k > 0),
            ("top_p", top_p < 1.0),
            ("min_p", min_p > 0.0),
        ];
        if let Some(&(one, _)) = filters.iter().find(|(_, set)| *set) {
            // Top-k and top-p are the only pair.
            let (other, both) = filters[2];
            if both && one != other {
                return Err(SamplingError::Together { one, other });
            }
            if self.seed.is_some() {
                let other = "seed";
                return Err(SamplingError::Together { one, other });
            }
        }
        Ok(match (k, top_p < 1.0) {
            (0, false) if min_p > 0.0 => Sampler::MinP {
                temperature,
                p: min_p,
            },
            (0, false) => Sampler::Multinomial {
                temperature,
                seed: self.seed.unwrap_or(0),
            },
            (0, true) => Sampler::TopP {
                temperature,
                p: top_p,
            },
            (k, false) => Sampler::TopK { temperature, k },
            (k, true) => Sampler::TopKTopP {
                temperature,
                k,
                p: top_p,
            },
        })
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
        match self.seed {
            Some(seed @ 0..2) => Err(wrong(
                "seed",
                &seed,
                "2 or more: the driver takes 0 and 1 for none",
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREEDY: Sampler = Sampler::TopP {
        temperature: 0.0,
        p: 1.0,
    };

    #[test]
    fn each_combination_has_its_sampler() {
        let plain = Sampling {
            temperature: 0.5,
            ..Sampling::default()
        };
        let (temperature, seed) = (0.5, 9);
        let (top_k, top_p) = (8, 0.75);
        for (sampling, sampler) in [
            (
                plain,
                Sampler::Multinomial {
                    temperature,
                    seed: 0,
                },
            ),
            (
                Sampling {
                    seed: Some(9),
                    ..plain
                },
                Sampler::Multinomial { temperature, seed },
            ),
            (
                Sampling { top_k, ..plain },
                Sampler::TopK { temperature, k: 8 },
            ),
            (
                Sampling {
                    top_k: 1 << 40,
                    ..plain
                },
                Sampler::Multinomial {
                    temperature,
                    seed: 0,
                },
            ),
            (
                Sampling { top_p, ..plain },
                Sampler::TopP {
                    temperature,
                    p: 0.75,
                },
            ),
            (
                Sampling {
                    min_p: 0.1,
                    ..plain
                },
                Sampler::MinP {
                    temperature,
                    p: 0.1,
                },
            ),
            (
                Sampling {
                    top_k,
                    top_p,
                    ..plain
                },
                Sampler::TopKTopP {
                    temperature,
                    k: 8,
                    p: 0.75,
                },
            ),
            (Sampling { top_k: 1, ..plain }, GREEDY),
            (
                Sampling {
                    temperature: 0.0,
                    min_p: 0.1,
                    top_k,
                    seed: Some(5),
                    ..plain
                },
                GREEDY,
            ),
        ] {
            assert_eq!(sampling.sampler(), Ok(sampler), "{sampling:?}");
        }
    }

    #[test]
    fn what_the_driver_cannot_do_is_refused_by_name() {
        let plain = Sampling::default();
        for (sampling, names) in [
            (
                Sampling {
                    temperature: -0.1,
                    ..plain
                },
                "temperature is -0.1",
            ),
            (
                Sampling {
                    temperature: f32::NAN,
                    ..plain
                },
                "temperature is NaN",
            ),
            (Sampling { top_k: -2, ..plain }, "top_k is -2"),
            (
                Sampling {
                    top_p: 0.0,
                    ..plain
                },
                "top_p is 0",
            ),
            (
                Sampling {
                    min_p: 1.5,
                    ..plain
                },
                "min_p is 1.5",
            ),
            (
                Sampling {
                    seed: Some(1),
                    ..plain
                },
                "seed is 1",
            ),
            (
                Sampling {
                    min_p: 0.5,
                    top_p: 0.5,
                    ..plain
                },
                "top_p and min_p",
            ),
            (
                Sampling {
                    min_p: 0.5,
                    top_k: 3,
                    ..plain
                },
                "top_k and min_p",
            ),
            (
                Sampling {
                    seed: Some(7),
                    top_p: 0.5,
                    ..plain
                },
                "top_p and seed",
            ),
            (
                Sampling {
                    seed: Some(7),
                    min_p: 0.5,
                    ..plain
                },
                "min_p and seed",
            ),
        ] {
            let error = sampling.sampler().unwrap_err().to_string();
            assert!(error.contains(names), "{error}");
        }
    }
}
