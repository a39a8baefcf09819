//! Requests that were traced.

use pie_engine::TraceParent;
use pyo3::prelude::*;

/// A request that was traced and has ended. Times are in ns since 1970, and none comes before the one that it follows.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct TracedRequest {
    /// Its caller's name of it.
    name: String,
    /// The trace and the span that it is part of; None if it begins a trace.
    parent: Option<(u128, u64)>,
    /// Its position in the queue, where it has one.
    priority: Option<i32>,
    /// Tokens of its prompt.
    prompt_tokens: u32,
    /// Tokens of its prompt whose KV was there.
    cached_tokens: u32,
    /// Tokens of its prompt that were loaded from the host.
    loaded_tokens: u32,
    /// New tokens of all sequences.
    output_tokens: u32,
    /// How often the pages of one of its sequences were taken from it.
    retractions: u32,
    /// Why each sequence ended: `stop`, `length` or `abort`.
    finish_reasons: Vec<&'static str>,
    /// What went wrong: a word for its kind, and a text.
    error: Option<(&'static str, String)>,
    /// When it came.
    received_ns: u64,
    /// When it was first admitted.
    admitted_ns: Option<u64>,
    /// When the step was answered that gave its first token.
    first_token_ns: Option<u64>,
    /// When the frontend received its end.
    ended_ns: u64,
}

/// Requests, and how many more there were than were kept.
pub(crate) type Traced = (Vec<TracedRequest>, u64);

pub(crate) fn traced((requests, lost): (Vec<pie_engine::TracedRequest>, u64)) -> Traced {
    (
        requests.into_iter().map(TracedRequest::from).collect(),
        lost,
    )
}

impl From<pie_engine::TracedRequest> for TracedRequest {
    fn from(request: pie_engine::TracedRequest) -> Self {
        let ids = |parent: TraceParent| (parent.trace_id, parent.span_id);
        Self {
            name: request.name,
            parent: request.parent.map(ids),
            priority: request.priority,
            prompt_tokens: request.prompt_tokens,
            cached_tokens: request.cached_tokens,
            loaded_tokens: request.loaded_tokens,
            output_tokens: request.output_tokens,
            retractions: request.retractions,
            finish_reasons: request.finish_reasons,
            error: request.error,
            received_ns: request.received_ns,
            admitted_ns: request.admitted_ns,
            first_token_ns: request.first_token_ns,
            ended_ns: request.ended_ns,
        }
    }
}
