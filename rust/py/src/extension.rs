//! What a request asks for beyond the Pie protocol, as Python builds it.

use pie_wire::{CombinedSampler, LogprobOptions, Penalties, PromptLogprobs, RequestExtension};
use pyo3::prelude::*;

/// What one request asks for beyond the Pie protocol; `docs/wire-extension.md` has the bytes.
#[pyclass(frozen, from_py_object, module = "pie_driver_sglang._core")]
#[derive(Clone)]
pub(crate) struct Extension(RequestExtension);

impl Extension {
    pub(crate) const fn inner(&self) -> &RequestExtension {
        &self.0
    }
}

#[pymethods]
impl Extension {
    /// Describes it. What is left out changes nothing.
    ///
    /// Args:
    ///     temperature: In place of the parameters of its samplers of tokens, with those up to `seed`; 0 for the arg-max, None
    ///         to keep its samplers.
    ///     top_k: Tokens kept; 0 for all.
    ///     top_p: Mass kept, of the whole distribution.
    ///     min_p: Share of the largest probability that a token must have.
    ///     seed: With the position it fixes what is sampled.
    ///     frequency_penalty: Taken from a token's logit for each time that it counts.
    ///     presence_penalty: Taken from the logit of a token that counts.
    ///     repetition_penalty: Divides the logit of a token that counts, or multiplies it if it is below 0.
    ///     counted_from: KV index of the first token that counts.
    ///     history: Tokens that count and lie right before the input, whose KV is there already.
    ///     logit_bias: Tokens, and what is added to their logits.
    ///     suppressed: Tokens that must not be sampled before `suppressed_until`.
    ///     suppressed_until: KV index of the first position for which they may.
    ///     mask: Bit `i` of word `w` allows token `32 w + i`; empty for all.
    ///     shares_mask: The mask is that of the nearest request before in the frame that has one; `mask` is empty.
    ///     logprobs: Most probable tokens whose log-probabilities are wanted besides that of each sampled token; None for no
    ///         log-probabilities at all.
    ///     logprobs_scaled: After the temperature.
    ///     logprobs_of: Tokens whose log-probabilities are wanted.
    ///     prompt_logprobs: KV indices of the first token of the prompt whose log-probabilities are wanted and after the last
    ///         one, and the token after the input, if that is one of them.
    ///     processor: A logit processor of the driver's process; `history` is then all tokens before the input.
    ///     hidden_states: With log-probabilities, the numbers of a hidden state, which each position has after them; 0 for none.
    #[new]
    #[pyo3(signature = (*, temperature = None, top_k = 0, top_p = 1.0, min_p = 0.0, seed = None, frequency_penalty = 0.0, presence_penalty = 0.0, repetition_penalty = 1.0, counted_from = 0, history = Vec::new(), logit_bias = Vec::new(), suppressed = Vec::new(), suppressed_until = 0, mask = Vec::new(), shares_mask = false, logprobs = None, logprobs_scaled = false, logprobs_of = Vec::new(), prompt_logprobs = None, processor = Vec::new(), hidden_states = 0))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only parameters")]
    fn new(
        temperature: Option<f32>,
        top_k: u32,
        top_p: f32,
        min_p: f32,
        seed: Option<u64>,
        frequency_penalty: f32,
        presence_penalty: f32,
        repetition_penalty: f32,
        counted_from: u32,
        history: Vec<u32>,
        logit_bias: Vec<(u32, f32)>,
        suppressed: Vec<u32>,
        suppressed_until: u32,
        mask: Vec<u32>,
        shares_mask: bool,
        logprobs: Option<u32>,
        logprobs_scaled: bool,
        logprobs_of: Vec<u32>,
        prompt_logprobs: Option<(u32, u32, u32)>,
        processor: Vec<u8>,
        hidden_states: u32,
    ) -> Self {
        Self(RequestExtension {
            sampler: temperature.map(|temperature| CombinedSampler {
                temperature,
                top_k,
                top_p,
                min_p,
                seed,
            }),
            penalties: Penalties {
                frequency: frequency_penalty,
                presence: presence_penalty,
                repetition: repetition_penalty,
                counted_from,
            },
            history,
            biases: logit_bias,
            suppressed,
            suppressed_until,
            logprobs: logprobs.map(|top| LogprobOptions {
                scaled: logprobs_scaled,
                top,
                token_ids: logprobs_of,
                hidden: hidden_states,
                prompt: prompt_logprobs.map(|(from, end, next)| PromptLogprobs { from, end, next }),
            }),
            processor,
            mask,
            shares_mask,
        })
    }
}
