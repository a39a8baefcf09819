//! A request as its frontend understood it.

use std::time::Duration;

use pie_engine::{Grammar, PromptImages, SamplingParams};

/// What a client asks for. Numbers are as wide as clients may send them, and nothing has been checked.
#[derive(Clone, Debug)]
pub struct RawRequest {
    /// The client's name of it; empty where a frontend has none.
    pub name: String,
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// The images of the prompt.
    pub images: Option<PromptImages>,
    /// How tokens are sampled, without biases.
    pub sampling: SamplingParams,
    /// Tokens, and what is added to their logits.
    pub logit_bias: Vec<(i64, f32)>,
    /// Most tokens to produce; `None` for as many as there is room for.
    pub max_new_tokens: Option<i64>,
    /// Tokens before which no stop token may come.
    pub min_new_tokens: i64,
    /// Sequences that go on from the prompt.
    pub n: i64,
    /// Tokens that end a sequence, besides the model's own.
    pub stop_token_ids: Vec<i64>,
    /// Texts that end a sequence.
    pub stop: Vec<String>,
    /// Expressions that end a sequence.
    pub stop_regex: Vec<String>,
    /// The model's own stop tokens do not end it.
    pub ignore_eos: bool,
    /// What constrains the output.
    pub grammar: Option<Grammar>,
    /// The tokens after which the grammar constrains, such as those that end a model's thinking; none for the start.
    pub grammar_after: Vec<u32>,
    /// Which log-probabilities are wanted.
    pub logprobs: Option<RawLogprobs>,
    /// The place in the queue.
    pub priority: Option<i64>,
    /// For the policy of that name.
    pub routing_key: Option<String>,
    /// Requests of different ones share no prefix.
    pub extra_key: Option<String>,
    /// The engine's id of a loaded adapter.
    pub adapter: Option<u64>,
    /// The engine's number of a session.
    pub session: Option<u64>,
    /// Whether the driver may draft.
    pub speculates: bool,
    /// Whether tokens are wanted as they come.
    pub streams: bool,
    /// After which it ends, finished or not. One beyond all clocks is none.
    pub deadline: Option<Duration>,
}

/// Log-probabilities that are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawLogprobs {
    /// Most probable tokens of each place.
    pub top_logprobs_num: i64,
    /// Tokens whose log-probabilities are wanted at each place.
    pub token_ids_logprob: Vec<i64>,
    /// The index of a token of the prompt, those after which are wanted, too; -1 for none of the prompt.
    pub logprob_start_len: i64,
    /// Before the temperature.
    pub original: bool,
}

impl RawRequest {
    /// A request for as many tokens as there is room for.
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
            logprobs: None,
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
