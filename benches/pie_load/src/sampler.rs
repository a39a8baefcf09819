//! Samplers by name.

use std::num::ParseFloatError;

use pie_wire::Sampler;

/// Samplers that contexts take in turn.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SamplerMix {
    /// As it was asked for.
    pub(crate) name: String,
    samplers: Vec<Sampler>,
}

const GREEDY: Sampler = Sampler::TopP {
    temperature: 0.0,
    p: 1.0,
};

/// Every kind of token sampler.
const MIXED: &str =
    "greedy,multinomial:0.8,top-k:0.8:40,top-p:0.8:0.95,min-p:0.8:0.05,top-k-top-p:0.8:40:0.95";

impl SamplerMix {
    /// Reads `kind:temperature:parameters`, several with commas between them, or `mixed` for every kind.
    pub(crate) fn parse(name: &str) -> Result<Self, String> {
        let list = if name == "mixed" { MIXED } else { name };
        let samplers = list.split(',').map(one).collect::<Result<_, _>>()?;
        Ok(Self {
            name: name.to_owned(),
            samplers,
        })
    }

    /// Whether tokens depend on nothing but the text.
    pub(crate) fn is_greedy(&self) -> bool {
        self.samplers.iter().all(|sampler| *sampler == GREEDY)
    }

    /// The sampler of a context.
    pub(crate) fn of(&self, context: usize) -> Sampler {
        self.samplers[context % self.samplers.len()].clone()
    }
}

fn one(text: &str) -> Result<Sampler, String> {
    let (kind, parameters) = text.split_once(':').unwrap_or((text, ""));
    let numbers = parameters.split(':').filter(|part| !part.is_empty());
    let numbers = numbers.map(str::parse).collect::<Result<Vec<f32>, _>>();
    let numbers = numbers.map_err(|error: ParseFloatError| format!("{text}: {error}"))?;
    match (kind, &numbers[..]) {
        ("greedy", []) => Ok(GREEDY),
        ("multinomial", &[temperature]) => Ok(Sampler::Multinomial {
            temperature,
            seed: 0,
        }),
        ("top-k", &[temperature, k]) => Ok(Sampler::TopK {
            temperature,
            k: k as u32,
        }),
        ("top-p", &[temperature, p]) => Ok(Sampler::TopP { temperature, p }),
        ("min-p", &[temperature, p]) => Ok(Sampler::MinP { temperature, p }),
        ("top-k-top-p", &[temperature, k, p]) => Ok(Sampler::TopKTopP {
            temperature,
            k: k as u32,
            p,
        }),
        _ => Err(format!(
            "{text} is not one of greedy, multinomial:T, top-k:T:K, top-p:T:P, min-p:T:P, top-k-top-p:T:K:P, mixed"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::mem::discriminant;

    use super::*;

    #[test]
    fn contexts_take_turns() {
        let mix = SamplerMix::parse("greedy,top-k-top-p:0.5:7:0.9").unwrap();
        let other = Sampler::TopKTopP {
            temperature: 0.5,
            k: 7,
            p: 0.9,
        };
        assert_eq!([mix.of(0), mix.of(1), mix.of(2)], [GREEDY, other, GREEDY]);
    }

    #[test]
    fn mixed_has_every_kind() {
        let mix = SamplerMix::parse("mixed").unwrap();
        let kinds: HashSet<_> = mix.samplers.iter().map(discriminant).collect();
        // Multinomial, top-k, top-p, min-p and top-k with top-p; greedy is a top-p.
        assert_eq!((kinds.len(), mix.samplers.len()), (5, 6));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "greedy:1",
            "multinomial",
            "top-p:0.5",
            "top-q:1:2",
            "min-p:a:b",
        ] {
            assert!(SamplerMix::parse(text).is_err(), "{text:?}");
        }
    }
}
