//! What a request asks for.

use std::sync::Arc;

use crate::constraint::Constrain;
use crate::logprobs::Logprobs;
use crate::regex::StopRegexes;
use crate::stop_strings::StopStrings;

/// When a sequence ends, besides its deadline.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopCriteria {
    /// Most tokens to produce; cut to what model and pool have room for. 0: the prompt is computed, and kept for others. If
    /// log-probabilities are wanted, those of one token are given out then, and not the token.
    pub max_tokens: u32,
    /// Tokens before which no stop token may come. Rows forbid them so long: [`Row::forbidden`](crate::Row::forbidden).
    pub min_tokens: u32,
    /// Tokens that end it, in any order, the model's own among them; none to ignore these. The token is part of the output.
    pub stop_tokens: Vec<u32>,
    /// Texts that end it, found across tokens' borders by [`TokenBytes`](crate::TokenBytes).
    pub stop_strings: StopStrings,
    /// Expressions that end it, searched in the same text; `None` for none.
    pub stop_regexes: Option<Arc<StopRegexes>>,
}

/// A part of a prompt that one row of a step has whole: an image. Its tokens are names of what it shows, different for
/// different images, and need not be the model's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image {
    /// Its first token's place in the prompt.
    pub start: u32,
    /// How many it has.
    pub tokens: u32,
    /// What it brings to the frame besides.
    pub bytes: u32,
}

impl Image {
    /// Place of the token after it.
    pub const fn end(&self) -> u32 {
        self.start + self.tokens
    }
}

/// A request: a prompt, and what to make of it. `S` is what the caller wants to find at the rows of a request that draw a token:
/// the sampler. The scheduler does not look into it.
#[derive(Debug, Clone)]
pub struct NewRequest<S> {
    /// Names the request as long as it has not ended.
    pub id: u64,
    /// Tokens to begin with, at least one.
    pub prompt: Vec<u32>,
    /// Images in the prompt, in their order.
    pub images: Box<[Image]>,
    /// Handed on to [`Row::sampling`](crate::Row::sampling).
    pub sampling: S,
    /// When its sequences end.
    pub ends: StopCriteria,
    /// Sequences that go on from the prompt, each with outputs of its own. Full pages of the prompt are shared.
    pub samples: u32,
    /// Sequences with different ones share no pages: `SGLang`'s `extra_key`, for adapters and cache salts.
    pub namespace: Option<Box<str>>,
    /// Handed on to [`Row::adapter`](crate::Row::adapter). Its KV is no other's, so give it a namespace of its own.
    pub adapter: Option<u64>,
    /// Higher comes first, or lower with [`Config::low_priority_first`](crate::Config::low_priority_first). Without one it
    /// comes last.
    pub priority: Option<i32>,
    /// For [`Policy::RoutingKey`](crate::Policy::RoutingKey).
    pub routing_key: Option<Box<str>>,
    /// A conversation whose pages are kept when this request ends, for as long as there is room, and whose drafter goes on.
    pub session: Option<u64>,
    /// When it ends, finished or not, in µs.
    pub deadline: Option<u64>,
    /// When it ends if it was not admitted by then, in µs.
    pub admit_by: Option<u64>,
    /// Whether the driver may draft for it.
    pub drafts: bool,
    /// Which log-probabilities it wants.
    pub logprobs: Option<Logprobs>,
    /// What binds its tokens. Nothing is drafted for a bound sequence.
    pub constraint: Option<Arc<dyn Constrain>>,
    /// Bytes of its parameters: what [`sampling`](Self::sampling) asks for in all its steps. The first row of each sequence brings
    /// them, and the driver keeps them while it runs.
    pub params_bytes: u32,
    /// Whether its tokens are wanted as they come: there is an output for each step, and [`Config::gap_us`](crate::Config::gap_us)
    /// holds between them. Else each of its sequences has one output, at its end.
    pub streams: bool,
}

impl<S> NewRequest<S> {
    /// A plain request for at most `max_tokens` tokens, which streams.
    pub fn new(id: u64, prompt: Vec<u32>, sampling: S, max_tokens: u32) -> Self {
        Self {
            id,
            prompt,
            images: Box::default(),
            sampling,
            ends: StopCriteria {
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
            constraint: None,
            params_bytes: 0,
            streams: true,
        }
    }

    /// The same with something else for its rows.
    pub fn map<T>(self, change: impl FnOnce(S) -> T) -> NewRequest<T> {
        NewRequest {
            id: self.id,
            prompt: self.prompt,
            images: self.images,
            sampling: change(self.sampling),
            ends: self.ends,
            samples: self.samples,
            namespace: self.namespace,
            adapter: self.adapter,
            priority: self.priority,
            routing_key: self.routing_key,
            session: self.session,
            deadline: self.deadline,
            admit_by: self.admit_by,
            constraint: self.constraint,
            drafts: self.drafts,
            logprobs: self.logprobs,
            params_bytes: self.params_bytes,
            streams: self.streams,
        }
    }
}
