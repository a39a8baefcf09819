//! What is known of a request that has not ended: what was sent of it, and what is due.

use std::time::Instant;

use pie_engine::{FinishReason, OutputDelta, Timeline};
use pie_ingress::{PooledRow, StopTexts};

use crate::sglang_zmq::hidden_states::OpenHiddenStates;
use crate::sglang_zmq::logprobs::OpenLogprobs;
use crate::sglang_zmq::request::{GenerateRequest, TextParams};
use crate::sglang_zmq::weight_versions::WeightVersionSpan;

/// Tokens of the prompt that the detokenizer needs before the first new one.
const SURROUNDING: usize = 5;

/// A request that has not ended.
#[derive(Debug, Clone)]
pub(crate) struct OpenRequest {
    pub(crate) rid: String,
    pub(crate) worker: Option<String>,
    /// The session in which it continues, and the backend's number of it.
    pub(crate) session: Option<(String, u64)>,
    /// Those that it wants.
    pub(crate) logprobs: Option<OpenLogprobs>,
    /// Of a request for an embedding.
    pub(crate) embedding: Option<OpenEmbedding>,
    /// Its hidden states, if it wants some.
    pub(crate) hidden_states: Option<OpenHiddenStates>,
    /// By which its end is named.
    pub(crate) stops: StopTexts,
    /// How its tokens become text.
    pub(crate) text: TextParams,
    /// The prompt's last tokens, until they were sent.
    pub(crate) window: Vec<u32>,
    /// How many of them there are.
    pub(crate) surrounding: u32,
    pub(crate) prompt_tokens: u32,
    /// Those of them that are images'.
    pub(crate) image_tokens: u32,
    pub(crate) cached_tokens: u32,
    /// Those of them that came from the host.
    pub(crate) loaded_tokens: u32,
    pub(crate) received: Instant,
    /// When it was admitted, in µs since the backend began.
    pub(crate) admitted: Option<u64>,
    /// When its first token came.
    pub(crate) computed: Option<Instant>,
    pub(crate) retractions: u32,
    /// Once it has ended.
    pub(crate) weight_versions: Vec<WeightVersionSpan>,
    /// What a trace has of it.
    pub(crate) timeline: Option<Box<Timeline>>,
    /// Tokens that were not sent yet.
    pub(crate) pending: Vec<u32>,
    /// Tokens so far, those among them that are pending.
    pub(crate) tokens: u32,
    /// Tokens that were sent.
    sent: u32,
    /// Tokens between two outputs.
    interval: u32,
    stream: bool,
    thinking: Thinking,
}

/// Counts tokens up to the end of thinking.
#[derive(Debug, Clone)]
struct Thinking {
    /// Whether the model still thinks.
    open: bool,
    tokens: u32,
    /// The last tokens, one fewer than an end has.
    tail: Vec<u32>,
}

/// The embedding of a request that asks for one.
#[derive(Debug, Clone, Default)]
pub(crate) struct OpenEmbedding {
    /// What becomes of its pooled row; `None` until it was validated.
    pub(crate) row: Option<PooledRow>,
    /// Empty until it is computed.
    pub(crate) values: Vec<f32>,
}

/// How often outputs are sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutputIntervals {
    /// Tokens from one output of a stream to the next.
    pub(crate) stream: u32,
    /// The same for requests that do not stream.
    pub(crate) other: u32,
}

impl OpenRequest {
    /// A request with this prompt. What it wants besides is set once it was validated.
    pub(crate) fn new(
        request: &GenerateRequest,
        prompt: &[u32],
        intervals: OutputIntervals,
        thinks: bool,
    ) -> Self {
        let timeline = request.parent.map(|parent| {
            let timeline = Timeline::begin(&request.rid, Some(parent), prompt.len() as u32, 1);
            Box::new(timeline)
        });
        let window = prompt[prompt.len().saturating_sub(SURROUNDING)..].to_vec();
        let interval = if request.stream {
            request.stream_interval.unwrap_or(intervals.stream)
        } else {
            intervals.other
        };
        Self {
            rid: request.rid.clone(),
            worker: request.worker.clone(),
            session: None,
            logprobs: request.wants_logprobs.then(OpenLogprobs::none),
            embedding: request.embeds.then(OpenEmbedding::default),
            hidden_states: None,
            stops: StopTexts::default(),
            text: request.text,
            surrounding: window.len() as u32,
            window,
            prompt_tokens: prompt.len() as u32,
            image_tokens: 0,
            cached_tokens: 0,
            loaded_tokens: 0,
            received: Instant::now(),
            admitted: None,
            computed: None,
            retractions: 0,
            weight_versions: Vec::new(),
            timeline,
            pending: Vec::new(),
            tokens: 0,
            sent: 0,
            interval: interval.max(1),
            stream: request.stream,
            thinking: Thinking {
                open: request.reasons && thinks,
                tokens: 0,
                tail: Vec::new(),
            },
        }
    }

    /// Shows a trace its index in the queue.
    pub(crate) fn set_priority(&mut self, priority: Option<i64>) {
        let priority = priority.and_then(|priority| i32::try_from(priority).ok());
        let timeline = self.timeline.take();
        self.timeline = timeline.map(|timeline| Box::new(timeline.with_priority(priority)));
    }

    /// Takes what is new of it, and says whether an output is due.
    pub(crate) fn take(&mut self, delta: &OutputDelta, think_end: &[u32]) -> bool {
        self.thinking.push(&delta.tokens, think_end);
        if let Some(timeline) = &mut self.timeline {
            timeline.update(delta);
        }
        self.pending.extend_from_slice(&delta.tokens);
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.take(delta);
        }
        if let Some(embedding) = &mut self.embedding
            && let Some(row) = embedding.row
        {
            embedding.values = row.embedding(&delta.logprobs);
        }
        if let Some(states) = &mut self.hidden_states {
            states.take(delta);
        }
        self.tokens += delta.tokens.len() as u32;
        self.cached_tokens = delta.cached_tokens;
        self.loaded_tokens = delta.loaded_tokens;
        self.admitted = delta.admitted;
        if !delta.tokens.is_empty() || delta.finish == Some(FinishReason::Length) {
            self.computed.get_or_insert_with(Instant::now);
        }
        self.retractions = delta.retractions;
        delta.finish.is_some() || self.is_due(delta.held_bytes)
    }

    /// A stream gets its 1st token, and then every `interval`-th; others one output in a while, by which the front end knows
    /// that they live. A text that may turn out to be a stop string waits.
    fn is_due(&self, held_bytes: u32) -> bool {
        let passed = |tokens: u32| {
            if self.stream {
                tokens.div_ceil(self.interval)
            } else {
                tokens / self.interval
            }
        };
        held_bytes == 0 && passed(self.tokens) > passed(self.sent)
    }

    /// Forgets what was sent.
    pub(crate) fn sent(&mut self) {
        self.window.clear();
        self.pending.clear();
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.sent();
        }
        self.sent = self.tokens;
    }

    /// Whether it still waits for its first step: nothing was computed, and nothing sent.
    pub(crate) const fn waits(&self) -> bool {
        self.admitted.is_none() && self.tokens == 0
    }

    pub(crate) const fn reasoning_tokens(&self) -> u32 {
        self.thinking.tokens
    }
}

impl Thinking {
    fn push(&mut self, tokens: &[u32], end: &[u32]) {
        if !self.open || end.is_empty() {
            return;
        }
        for &token in tokens {
            self.tokens += 1;
            self.tail.push(token);
            if self.tail == end {
                self.open = false;
                return;
            }
            if self.tail.len() == end.len() {
                self.tail.remove(0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sglang_zmq::hidden_states::HiddenStates;
    use pie_ingress::RawRequest;

    const PROMPT: [u32; 9] = [0, 1, 2, 3, 4, 5, 6, 7, 8];

    fn open(
        stream: bool,
        stream_interval: Option<u32>,
        intervals: OutputIntervals,
        thinks: bool,
    ) -> OpenRequest {
        let request = GenerateRequest {
            rid: "a".into(),
            embeds: false,
            worker: None,
            stream,
            stream_interval,
            adapter: None,
            session: None,
            media: None,
            reasons: true,
            wants_logprobs: false,
            hidden_states: HiddenStates::None,
            parent: None,
            text: TextParams::default(),
            parsed: Ok(RawRequest::new("a".into(), PROMPT.into())),
        };
        OpenRequest::new(&request, &PROMPT, intervals, thinks)
    }

    fn delta(tokens: &[u32], held_bytes: u32) -> OutputDelta {
        OutputDelta {
            request: 1,
            sample: 0,
            tokens: tokens.to_vec(),
            prompt_logprobs: Vec::new(),
            logprobs: Vec::new(),
            scored: None,
            held_bytes,
            finish: None,
            cached_tokens: 0,
            loaded_tokens: 0,
            admitted: None,
            first_token: None,
            retractions: 0,
            weight_version: None,
            weight_events: Vec::new(),
        }
    }

    /// The numbers of tokens at which an output is due, one token at a time.
    fn dues(open: &mut OpenRequest, count: u32) -> Vec<u32> {
        let mut found = Vec::new();
        for token in 1..=count {
            if open.take(&delta(&[token], 0), &[]) {
                found.push(token);
                open.sent();
            }
        }
        found
    }

    #[test]
    fn outputs_are_due_as_sglang_sends_them() {
        let intervals = OutputIntervals {
            stream: 1,
            other: 50,
        };
        let mut each = open(true, None, intervals, false);
        assert_eq!(dues(&mut each, 4), [1, 2, 3, 4]);
        let mut third = open(true, Some(3), intervals, false);
        assert_eq!(dues(&mut third, 8), [1, 4, 7]);
        let mut whole = open(false, None, intervals, false);
        assert_eq!(dues(&mut whole, 120), [50, 100]);
    }

    #[test]
    fn a_text_that_may_be_a_stop_string_waits() {
        let intervals = OutputIntervals {
            stream: 1,
            other: 50,
        };
        let mut open = open(true, None, intervals, false);
        assert_eq!(open.window, PROMPT[4..]);
        assert!(!open.take(&delta(&[1], 2), &[]));
        assert!(open.take(&delta(&[2], 0), &[]));
        assert_eq!(open.pending, [1, 2]);
        open.sent();
        assert!(open.window.is_empty());
    }

    #[test]
    fn thinking_is_counted_up_to_its_end() {
        let intervals = OutputIntervals {
            stream: 1,
            other: 50,
        };
        let mut thinks = open(true, None, intervals, true);
        thinks.take(&delta(&[7, 8, 7], 0), &[7, 9]);
        assert_eq!(thinks.reasoning_tokens(), 3);
        thinks.take(&delta(&[9, 1, 2], 0), &[7, 9]);
        assert_eq!(thinks.reasoning_tokens(), 4);
        let mut plain = open(true, None, intervals, false);
        plain.take(&delta(&[7, 9], 0), &[7, 9]);
        assert_eq!(plain.reasoning_tokens(), 0);
    }
}
