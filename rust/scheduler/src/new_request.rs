//! New requests.

use std::sync::Arc;

use crate::grammar::GrammarHandle;
use crate::logprobs::Logprobs;
use crate::stop_criteria::StopCriteria;

/// An image: a range of prompt tokens that is computed in one row. Its placeholder tokens are unique to its content and need
/// not be in the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image {
    /// Index of its first token.
    pub start: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Bytes in the frame.
    pub bytes: u32,
}

impl Image {
    /// Index of the token after it.
    pub const fn end(&self) -> u32 {
        self.start + self.tokens
    }
}

/// A request. `S` is the caller's sampling parameters, which rows that sample a token return; the scheduler does not look into
/// them.
#[derive(Debug, Clone)]
pub struct NewRequest<S> {
    /// Unique among unfinished requests.
    pub id: u64,
    /// Prompt tokens, at least one.
    pub prompt: Vec<u32>,
    /// Images of the prompt, in order.
    pub images: Box<[Image]>,
    /// Returned as [`Row::sampling`](crate::Row::sampling).
    pub sampling: S,
    /// Stop criteria of its sequences.
    pub stop: StopCriteria,
    /// Number of sequences (`n`). They share full pages of the prompt.
    pub samples: u32,
    /// Prefix cache namespace: `SGLang`'s `extra_key`, which holds its `cache_salt`, too; the `LoRA` adapter is added.
    pub namespace: Option<Box<str>>,
    /// Returned as [`Row::adapter`](crate::Row::adapter). An adapter needs a namespace of its own.
    pub adapter: Option<u64>,
    /// Higher is first, or lower with [`Config::low_priority_first`](crate::Config::low_priority_first). Without one it is
    /// last.
    pub priority: Option<i32>,
    /// For [`Policy::RoutingKey`](crate::Policy::RoutingKey).
    pub routing_key: Option<Box<str>>,
    /// Session id: its pages stay locked when this request ends, as long as there is room, and its context continues.
    pub session: Option<u64>,
    /// Time at which it is ended, in µs.
    pub deadline: Option<u64>,
    /// Time at which it is ended if it was not admitted, in µs.
    pub admit_by: Option<u64>,
    /// Whether the driver may draft for it (speculative decoding).
    pub drafts: bool,
    /// Log-probabilities to return.
    pub logprobs: Option<Logprobs>,
    /// Its grammar. Constrained sequences have no drafts.
    pub grammar: Option<Arc<dyn GrammarHandle>>,
    /// Frame bytes of its parameters, [`sampling`](Self::sampling): the first row of each sequence brings them, and the driver
    /// keeps them.
    pub params_bytes: u32,
    /// Its rows bring all tokens before their input, as [`Row::history`](crate::Row::history).
    pub whole_history: bool,
    /// Whether there is an output for each step, and [`Config::gap_us`](crate::Config::gap_us) holds. Otherwise each sequence
    /// has one output, at its end.
    pub streams: bool,
}

impl<S> NewRequest<S> {
    /// A streaming request for at most `max_tokens` tokens.
    pub fn new(id: u64, prompt: Vec<u32>, sampling: S, max_tokens: u32) -> Self {
        Self {
            id,
            prompt,
            images: Box::default(),
            sampling,
            stop: StopCriteria {
                max_tokens,
                ..StopCriteria::default()
            },
            samples: 1,
            namespace: None,
            adapter: None,
            priority: None,
            routing_key: None,
            session: None,
            deadline: None,
            admit_by: None,
            drafts: false,
            logprobs: None,
            grammar: None,
            params_bytes: 0,
            whole_history: false,
            streams: true,
        }
    }

    /// Maps the sampling parameters.
    pub fn map<T>(self, change: impl FnOnce(S) -> T) -> NewRequest<T> {
        NewRequest {
            id: self.id,
            prompt: self.prompt,
            images: self.images,
            sampling: change(self.sampling),
            stop: self.stop,
            samples: self.samples,
            namespace: self.namespace,
            adapter: self.adapter,
            priority: self.priority,
            routing_key: self.routing_key,
            session: self.session,
            deadline: self.deadline,
            admit_by: self.admit_by,
            grammar: self.grammar,
            drafts: self.drafts,
            logprobs: self.logprobs,
            params_bytes: self.params_bytes,
            whole_history: self.whole_history,
            streams: self.streams,
        }
    }
}
