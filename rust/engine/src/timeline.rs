//! What happened when to requests that are traced: one record each, which is fetched after the request's end.
//!
//! A frontend begins a [`Timeline`] for a request that is part of a trace, and shows it the request's outputs. Spans are made
//! elsewhere, of the [`TracedRequest`]s that are fetched.

use std::collections::BTreeMap;
use std::mem;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::outbox::{Delta, End};

/// The span that a request is part of, as a `traceparent` of W3C's Trace Context names it.
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
    /// Reads a `traceparent`; `None` for what is none.
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

/// A number in the digits that W3C allows.
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

/// A request that is traced, from its arrival to its end.
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
    /// In µs since the service began.
    admitted: Option<u64>,
    /// The same.
    first_token: Option<u64>,
    ended: Instant,
    samples: u32,
    /// Why sequences ended, by their numbers.
    ends: BTreeMap<u32, End>,
    /// Why the service did not get it.
    refusal: Option<String>,
}

impl Timeline {
    /// A request of `samples` sequences, at its arrival. Without a parent it begins a trace.
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

    /// The same with its place in the queue.
    #[must_use]
    pub const fn with_priority(mut self, priority: Option<i32>) -> Self {
        self.priority = priority;
        self
    }

    /// Takes what is new of one of its sequences.
    pub fn take(&mut self, delta: &Delta) {
        if delta.sample >= self.samples || self.ends.contains_key(&delta.sample) {
            return;
        }
        if let Some(end) = &delta.end {
            self.ends.insert(delta.sample, end.clone());
        }
        self.output_tokens += delta.tokens.len() as u32;
        // The first sequence computes the prompt; others find it cached. Where no scheduler has it any longer, an end says nothing.
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

    /// Ends the sequences that have not ended: their client is gone.
    pub fn abort(&mut self) {
        for sample in 0..self.samples {
            self.ends.entry(sample).or_insert(End::Aborted);
        }
        self.ended = Instant::now();
    }

    /// Ends a request that the service does not get, with the reason.
    pub fn refuse(&mut self, reason: &str) {
        self.refusal = Some(reason.to_owned());
        // It has none of the sequences that it asked for, however many they are.
        self.samples = 1;
        self.abort();
    }

    /// Whether all of its sequences have ended.
    pub fn has_ended(&self) -> bool {
        self.ends.len() == self.samples as usize
    }
}

/// The earlier of two times, or the one that there is.
fn earlier(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.into_iter().chain(other).min()
}

/// A request that was traced and has ended. Times are in ns since 1970, and none comes before the one that it follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedRequest {
    /// Its caller's name of it.
    pub name: String,
    /// The span that it is part of.
    pub parent: Option<TraceParent>,
    /// Its place in the queue, where it has one.
    pub priority: Option<i32>,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Those whose KV was there.
    pub cached_tokens: u32,
    /// Those of them that were loaded from the host.
    pub loaded_tokens: u32,
    /// New tokens of all sequences.
    pub output_tokens: u32,
    /// How often the pages of one of its sequences were taken from it.
    pub retractions: u32,
    /// Why each sequence ended: `stop`, `length` or `abort`.
    pub finish_reasons: Vec<&'static str>,
    /// What went wrong: a word for its kind, and a text.
    pub error: Option<(&'static str, String)>,
    /// When it came.
    pub received_ns: u64,
    /// When it was first admitted.
    pub admitted_ns: Option<u64>,
    /// When the step was answered that gave its first token.
    pub first_token_ns: Option<u64>,
    /// When the frontend received its end.
    pub ended_ns: u64,
}

/// Requests that are kept until they are fetched.
const MOST: usize = 4096;

/// Traced requests that have ended and were not fetched. Of what finds no room only the number is kept.
#[derive(Debug)]
pub struct Timelines {
    began: Instant,
    kept: Mutex<(Vec<Timeline>, u64)>,
}

impl Timelines {
    /// None. `began`: the moment from which the service counts.
    pub fn new(began: Instant) -> Self {
        Self {
            began,
            kept: Mutex::default(),
        }
    }

    /// Keeps a request that has ended.
    pub fn push(&self, timeline: Timeline) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.0.len() < MOST {
            kept.0.push(timeline);
        } else {
            kept.1 += 1;
        }
    }

    /// Those that were kept, and the number of those that were not, since the last call.
    pub fn take(&self) -> (Vec<TracedRequest>, u64) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (timelines, lost) = mem::take(&mut *kept);
        drop(kept);
        let clock = Clock::new(self.began);
        let requests = timelines.into_iter().map(|timeline| clock.date(timeline));
        (requests.collect(), lost)
    }
}

/// The time of day of moments. It may be set at any time, so it is read when requests are fetched, once for all of them.
struct Clock {
    began: Instant,
    now: Instant,
    day: Duration,
}

impl Clock {
    fn new(began: Instant) -> Self {
        let day = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            began,
            now: Instant::now(),
            day: day.unwrap_or_default(),
        }
    }

    fn ns(&self, moment: Instant) -> u64 {
        let since = self.now.saturating_duration_since(moment);
        self.day.saturating_sub(since).as_nanos() as u64
    }

    fn date(&self, timeline: Timeline) -> TracedRequest {
        let (received, ended) = (timeline.received, timeline.ended);
        // They are counted in whole µs.
        let moment = |us| self.began + Duration::from_micros(us);
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

const fn finish_reason(end: &End) -> &'static str {
    match end {
        End::Length => "length",
        End::StopToken(_) | End::StopString { .. } | End::StopRegex { .. } => "stop",
        _ => "abort",
    }
}

/// What went wrong. A request that its client gave up is none.
fn error(end: &End) -> Option<(&'static str, String)> {
    let kind = match end {
        End::Deadline => return Some(("deadline", "its time was over".to_owned())),
        End::Refused(_) => "refused",
        End::Displaced => "displaced",
        End::Grammar(_) => "grammar",
        End::Busy(_) => "busy",
        End::Failed(_) => "failed",
        _ => return None,
    };
    Some((kind, end.reason().unwrap_or_default().into_owned()))
}

#[cfg(test)]
mod tests;
