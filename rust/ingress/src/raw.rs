//! An unvalidated request.

use std::time::Duration;

use pie_engine::{Grammar, PromptImages, SamplingParams};

use crate::embedding::RawEmbedding;

/// An unvalidated request. Numbers are as wide as clients may send them.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a parameter of its own"
)]
pub struct RawRequest {
    /// The client's request id; empty where a frontend has none.
    pub name: String,
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// Images of the prompt.
    pub images: Option<PromptImages>,
    /// Sampling parameters without biases.
    pub sampling: SamplingParams,
    /// Token ids, and the biases of their logits.
    pub logit_bias: Vec<(i64, f32)>,
    /// Most output tokens; `None` for as many as fit.
    pub max_new_tokens: Option<i64>,
    /// Fewest output tokens: stop tokens are forbidden until then.
    pub min_new_tokens: i64,
    /// Number of sequences.
    pub n: i64,
    /// Stop tokens besides the model's EOS tokens.
    pub stop_token_ids: Vec<i64>,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Stop expressions.
    pub stop_regex: Vec<String>,
    /// EOS tokens do not end it.
    pub ignore_eos: bool,
    /// The grammar of the output.
    pub grammar: Option<Grammar>,
    /// Tokens after which the grammar starts, such as the end of a model's thinking; empty for the start.
    pub grammar_after: Vec<u32>,
    /// `SGLang`'s `custom_logit_processor`.
    pub logit_processor: Option<String>,
    /// `SGLang`'s `custom_params`, as JSON.
    pub custom_params: Option<String>,
    /// Requested log-probabilities.
    pub logprobs: Option<RawLogprobs>,
    /// An embedding is wanted instead of tokens; its other parameters are ignored.
    pub embedding: Option<RawEmbedding>,
    /// Whether hidden states are returned.
    pub hidden_states: bool,
    /// Queue priority.
    pub priority: Option<i64>,
    /// For the policy `routing-key`.
    pub routing_key: Option<String>,
    /// Prefix cache namespace.
    pub extra_key: Option<String>,
    /// The engine's id of a loaded adapter.
    pub adapter: Option<u64>,
    /// The engine's session id.
    pub session: Option<u64>,
    /// Whether it may use speculative decoding.
    pub speculates: bool,
    /// Whether tokens are streamed.
    pub streams: bool,
    /// Time limit after which it is ended. One beyond the clock is none.
    pub deadline: Option<Duration>,
}

/// Requested log-probabilities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawLogprobs {
    /// Most probable tokens at each position.
    pub top_logprobs_num: i64,
    /// Tokens whose log-probabilities are returned at each position.
    pub token_ids_logprob: Vec<i64>,
    /// Index of the prompt token after which they start; -1 for output tokens only.
    pub logprob_start_len: i64,
    /// Without temperature.
    pub original: bool,
}

impl RawRequest {
    /// A request for as many tokens as fit.
    #[must_use]
    pub fn new(name: String, prompt: Vec<u32>) -> Self {
        Self {
            name,
            prompt,
            images: None,
            sampling: SamplingParams::default(),
            logit_bias: Vec::new(),
            max_new_tokens: None,
            min_new_tokens: 0,
            n: 1,
            stop_token_ids: Vec::new(),
            stop: Vec::new(),
            stop_regex: Vec::new(),
            ignore_eos: false,
            grammar: None,
            grammar_after: Vec::new(),
            logit_processor: None,
            custom_params: None,
            logprobs: None,
            embedding: None,
            hidden_states: false,
            priority: None,
            routing_key: None,
            extra_key: None,
            adapter: None,
            session: None,
            speculates: false,
            streams: true,
            deadline: None,
        }
    }
}
