//! Timelines of traced requests: when each was received, admitted, got its first token, and finished.
//!
//! A frontend begins a [`Timeline`] for a request that is part of a trace, and updates it by the request's outputs. The caller makes spans
//! of the [`TracedRequest`]s that it fetches.

use std::collections::BTreeMap;
use std::mem;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::output_collector::{FinishReason, OutputDelta};

/// A `traceparent` of W3C Trace Context: the span that a request is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// Not 0.
    pub trace_id: u128,
    /// Not 0.
    pub span_id: u64,
    /// Whether the caller records this trace.
    pub is_sampled: bool,
}

impl TraceParent {
    /// Parses a `traceparent` header; `None` if it is invalid.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let mut parts = text.split(|&byte| byte == b'-');
        let mut field = |digits: usize| hex(parts.next().filter(|part| part.len() == digits)?);
        let (version, trace_id) = (field(2)?, field(32)?);
        let (span_id, flags) = (field(16)? as u64, field(2)?);
        // Later versions may have more parts.
        let is_known = version != 0xff && (version != 0 || parts.next().is_none());
        (is_known && trace_id != 0 && span_id != 0).then_some(Self {
            trace_id,
            span_id,
            is_sampled: flags & 1 == 1,
        })
    }
}

/// A number in lower-case hexadecimal digits.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number, &digit| {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(value))
    })
}

/// The timeline of a request.
#[derive(Clone, Debug)]
pub struct Timeline {
    name: String,
    parent: Option<TraceParent>,
    priority: Option<i32>,
    prompt_tokens: u32,
    cached_tokens: u32,
    loaded_tokens: u32,
    output_tokens: u32,
    retractions: u32,
    received: Instant,
    /// In µs since the service started.
    admitted: Option<u64>,
    /// The same.
    first_token: Option<u64>,
    ended: Instant,
    samples: u32,
    /// Why sequences finished, by sample.
    ends: BTreeMap<u32, FinishReason>,
    /// Why it was not submitted.
    refusal: Option<String>,
}

impl Timeline {
    /// A request of `samples` sequences that arrives now. Without a parent it begins a trace.
    pub fn begin(
        name: &str,
        parent: Option<TraceParent>,
        prompt_tokens: u32,
        samples: u32,
    ) -> Self {
        let now = Instant::now();
        Self {
            name: name.to_owned(),
            parent,
            priority: None,
            prompt_tokens,
            cached_tokens: 0,
            loaded_tokens: 0,
            output_tokens: 0,
            retractions: 0,
            received: now,
            admitted: None,
            first_token: None,
            ended: now,
            samples,
            ends: BTreeMap::new(),
            refusal: None,
        }
    }

    /// Sets the priority.
    #[must_use]
    pub const fn with_priority(mut self, priority: Option<i32>) -> Self {
        self.priority = priority;
        self
    }

    /// Adds an output.
    pub fn update(&mut self, delta: &OutputDelta) {
        if delta.sample >= self.samples || self.ends.contains_key(&delta.sample) {
            return;
        }
        if let Some(end) = &delta.finish {
            self.ends.insert(delta.sample, end.clone());
        }
        self.output_tokens += delta.tokens.len() as u32;
        // The first sequence computes the prompt, the others find it cached. Ends without a scheduler have no counts.
        if delta.sample == 0 && delta.admitted.is_some() {
            self.cached_tokens = delta.cached_tokens;
            self.loaded_tokens = delta.loaded_tokens;
        }
        self.admitted = earlier(self.admitted, delta.admitted);
        self.first_token = earlier(self.first_token, delta.first_token);
        self.retractions = self.retractions.max(delta.retractions);
        if self.has_ended() {
            self.ended = Instant::now();
        }
    }

    /// Aborts the unfinished sequences: their client is gone.
    pub fn abort(&mut self) {
        for sample in 0..self.samples {
            self.ends.entry(sample).or_insert(FinishReason::Aborted);
        }
        self.ended = Instant::now();
    }

    /// Ends a request that is not submitted.
    pub fn refuse(&mut self, reason: &str) {
        self.refusal = Some(reason.to_owned());
        // `n` was not validated, and may be huge.
        self.samples = 1;
        self.abort();
    }

    /// Whether all sequences have finished.
    pub fn has_ended(&self) -> bool {
        self.ends.len() == self.samples as usize
    }
}

/// The earlier of two times, or the only one.
fn earlier(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.into_iter().chain(other).min()
}

/// A traced request that has finished. Times are in ns since 1970, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedRequest {
    /// The caller's request id.
    pub name: String,
    /// Its parent span.
    pub parent: Option<TraceParent>,
    /// Its priority, if any.
    pub priority: Option<i32>,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Those found in the prefix cache.
    pub cached_tokens: u32,
    /// Those of them that were loaded from host memory.
    pub loaded_tokens: u32,
    /// Generated tokens of all sequences.
    pub output_tokens: u32,
    /// Retractions of the sequence that had most.
    pub retractions: u32,
    /// Finish reason of each sequence: `stop`, `length` or `abort`.
    pub finish_reasons: Vec<&'static str>,
    /// Kind and message of an error.
    pub error: Option<(&'static str, String)>,
    /// Arrival.
    pub received_ns: u64,
    /// First admission.
    pub admitted_ns: Option<u64>,
    /// End of the step of the first token.
    pub first_token_ns: Option<u64>,
    /// When the frontend received its last output.
    pub ended_ns: u64,
}

/// Most requests that are kept until they are fetched.
const CAPACITY: usize = 4096;

/// Traced requests that have finished and were not fetched; those beyond the capacity are only counted.
#[derive(Debug)]
pub struct Timelines {
    started: Instant,
    kept: Mutex<(Vec<Timeline>, u64)>,
}

impl Timelines {
    /// `started`: the start of the service, from which outputs count their times.
    pub fn new(started: Instant) -> Self {
        Self {
            started,
            kept: Mutex::default(),
        }
    }

    /// Adds a request that has finished.
    pub fn push(&self, timeline: Timeline) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.0.len() < CAPACITY {
            kept.0.push(timeline);
        } else {
            kept.1 += 1;
        }
    }

    /// Takes all requests, with the number of those dropped since the last call.
    pub fn take(&self) -> (Vec<TracedRequest>, u64) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (timelines, lost) = mem::take(&mut *kept);
        drop(kept);
        let clock = Clock::new(self.started);
        let requests = timelines
            .into_iter()
            .map(|timeline| clock.convert(timeline));
        (requests.collect(), lost)
    }
}

/// Converts instants to the time of day, which is read once per fetch because it may be set at any time.
struct Clock {
    started: Instant,
    now: Instant,
    day: Duration,
}

impl Clock {
    fn new(started: Instant) -> Self {
        let day = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            started,
            now: Instant::now(),
            day: day.unwrap_or_default(),
        }
    }

    fn ns(&self, moment: Instant) -> u64 {
        let since = self.now.saturating_duration_since(moment);
        self.day.saturating_sub(since).as_nanos() as u64
    }

    fn convert(&self, timeline: Timeline) -> TracedRequest {
        let (received, ended) = (timeline.received, timeline.ended);
        let moment = |us| self.started + Duration::from_micros(us);
        let admitted = timeline.admitted;
        let admitted = admitted.map(|us| moment(us).clamp(received, ended));
        let first_token = timeline.first_token;
        let first_token =
            first_token.map(|us| moment(us).clamp(admitted.unwrap_or(received), ended));
        let ends = timeline.ends.values();
        let refused = timeline.refusal.map(|reason| ("refused", reason));
        TracedRequest {
            name: timeline.name,
            parent: timeline.parent,
            priority: timeline.priority,
            prompt_tokens: timeline.prompt_tokens,
            cached_tokens: timeline.cached_tokens,
            loaded_tokens: timeline.loaded_tokens,
            output_tokens: timeline.output_tokens,
            retractions: timeline.retractions,
            finish_reasons: ends.clone().map(finish_reason).collect(),
            error: refused.or_else(|| ends.clone().find_map(error)),
            received_ns: self.ns(received),
            admitted_ns: admitted.map(|moment| self.ns(moment)),
            first_token_ns: first_token.map(|moment| self.ns(moment)),
            ended_ns: self.ns(ended),
        }
    }
}

const fn finish_reason(end: &FinishReason) -> &'static str {
    match end {
        FinishReason::Length => "length",
        FinishReason::StopToken(_)
        | FinishReason::StopString { .. }
        | FinishReason::StopRegex { .. } => "stop",
        _ => "abort",
    }
}

/// Kind and message of an error; an abort by the client is none.
fn error(end: &FinishReason) -> Option<(&'static str, String)> {
    let kind = match end {
        FinishReason::Deadline => return Some(("deadline", "its time was over".to_owned())),
        FinishReason::Refused(_) => "refused",
        FinishReason::Displaced => "displaced",
        FinishReason::Grammar(_) => "grammar",
        FinishReason::Processor(_) => "custom logit processor",
        FinishReason::Busy(_) => "busy",
        FinishReason::Failed(_) => "failed",
        _ => return None,
    };
    Some((kind, end.message().unwrap_or_default().into_owned()))
}

#[cfg(test)]
mod tests;
