//! Outputs: tokens and finish reasons.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;

use crate::logprobs::LogprobBuffer;

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// It reached `max_tokens` or the length limit.
    Length,
    /// Its last token is a stop token.
    StopToken(u32),
    /// Its text contains this stop string.
    StopString {
        /// Which of [`StopCriteria::stop_strings`](crate::StopCriteria::stop_strings).
        index: u32,
        /// Bytes of the output's text before it begins.
        text_bytes: u64,
    },
    /// Its text matches this expression.
    StopRegex {
        /// Which of [`StopCriteria::stop_regexes`](crate::StopCriteria::stop_regexes).
        index: u32,
    },
    /// By [`Scheduler::abort`](crate::Scheduler::abort).
    Aborted,
    /// Aborted while its grammar was compiling.
    Unready,
    /// Its deadline passed.
    Deadline,
    /// A request of better priority took its place in the full queue.
    Displaced,
    /// Its grammar is invalid, or its matcher failed: see [`Output::reason`].
    Grammar,
    /// Its logit processor in the driver's process failed: see [`Output::reason`].
    Processor,
    /// The grammar compiler is overloaded: see [`Output::reason`].
    Busy,
    /// The driver returned no valid token, or its steps fail: see [`Output::reason`].
    Failed,
}

/// A change of the weights while a sequence had output tokens; `SGLang`'s class of this name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightVersionEvent {
    /// The weight version before it.
    pub old_version: u32,
    /// Output tokens by then.
    pub num_output_tokens: u32,
}

/// New output of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Output<'a> {
    /// Id of the request.
    pub id: u64,
    /// Index of the sequence in the request.
    pub sample: u32,
    /// New tokens. With a stop string they end with the token that completed it.
    pub tokens: &'a [u32],
    /// Log-probabilities of prompt tokens, as words; each once, in an output after their computation.
    pub prompt_logprobs: &'a [u32],
    /// Log-probabilities of `tokens`; without output tokens (`max_tokens` 0) those of the first one.
    pub logprobs: &'a [u32],
    /// In the last output of a sequence without output tokens, the token that would come first.
    pub scored: Option<u32>,
    /// Bytes at the end of its text that may be the start of a stop string: do not send them yet.
    pub held_bytes: u32,
    /// Set in its last output.
    pub finish: Option<Finish>,
    /// The reason of [`Finish::Grammar`], [`Finish::Processor`] and [`Finish::Busy`], and some of [`Finish::Failed`].
    pub reason: Option<&'a str>,
    /// Cached prompt tokens at its first admission.
    pub cached_tokens: u32,
    /// Cached prompt tokens that were loaded from the host.
    pub loaded_tokens: u32,
    /// Time of its first admission in µs.
    pub admitted: Option<u64>,
    /// Time of its first token in µs; also if it does not stream.
    pub first_token: Option<u64>,
    /// Number of retractions.
    pub retractions: u32,
    /// The weight version of [`Scheduler::set_weight_version`](crate::Scheduler::set_weight_version), as of this output.
    pub weight_version: u32,
    /// In the last output of a sequence, its changes of that version, in order.
    pub weight_events: &'a [WeightVersionEvent],
}

/// The first admission of a sequence, and its first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Admitted {
    /// Time in µs.
    pub(crate) at: u64,
    /// Cached prompt tokens at its first admission.
    pub(crate) cached_tokens: u32,
    /// Cached prompt tokens that were loaded from the host.
    pub(crate) loaded_tokens: u32,
    /// Time of its first token in µs; also if it does not stream.
    pub(crate) first_token: Option<NonZeroU64>,
}

/// An output without its lists.
#[derive(Debug, Clone, Default)]
pub(crate) struct Entry {
    pub(crate) id: u64,
    pub(crate) sample: u32,
    /// In [`Outputs::tokens`].
    pub(crate) tokens: Range<u32>,
    /// Index in [`Outputs::scores`] plus 1; 0 for none.
    pub(crate) scores: u32,
    pub(crate) held_bytes: u32,
    pub(crate) finish: Option<Finish>,
    pub(crate) admitted: Option<Admitted>,
    pub(crate) retractions: u32,
    pub(crate) weight_version: u32,
}

/// The log-probabilities of an output, as ranges of [`Outputs::logprobs`].
#[derive(Debug, Clone, Default)]
struct Scores {
    prompt: Range<u32>,
    tokens: Range<u32>,
    /// See [`Output::scored`].
    scored: Option<u32>,
}

/// New outputs, in order. Reuse one: [`Scheduler::outputs`](crate::Scheduler::outputs) clears it first.
#[derive(Debug, Clone, Default)]
pub struct Outputs {
    entries: Vec<Entry>,
    tokens: Vec<u32>,
    logprobs: Vec<u32>,
    /// Of entries with log-probabilities; apart, since few have some.
    scores: Vec<Scores>,
    /// Of entries with a reason, by index; apart, so that entries need no drop.
    reasons: Vec<(usize, Arc<str>)>,
    /// The same of changes of the weight version.
    weight_events: Vec<(usize, Vec<WeightVersionEvent>)>,
}

impl Outputs {
    /// The outputs, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Output<'_>> {
        self.entries.iter().enumerate().map(|(at, entry)| {
            let scores = self.scores_of(entry);
            Output {
                id: entry.id,
                sample: entry.sample,
                tokens: slice(&self.tokens, &entry.tokens),
                prompt_logprobs: scores.map_or(&[], |scores| slice(&self.logprobs, &scores.prompt)),
                logprobs: scores.map_or(&[], |scores| slice(&self.logprobs, &scores.tokens)),
                scored: scores.and_then(|scores| scores.scored),
                held_bytes: entry.held_bytes,
                finish: entry.finish,
                reason: match entry.finish {
                    Some(Finish::Grammar | Finish::Processor | Finish::Busy | Finish::Failed) => {
                        self.reason(at)
                    }
                    _ => None,
                },
                cached_tokens: entry.admitted.map_or(0, |admitted| admitted.cached_tokens),
                loaded_tokens: entry.admitted.map_or(0, |admitted| admitted.loaded_tokens),
                admitted: entry.admitted.map(|admitted| admitted.at),
                first_token: entry
                    .admitted
                    .and_then(|admitted| admitted.first_token)
                    .map(NonZeroU64::get),
                retractions: entry.retractions,
                weight_version: entry.weight_version,
                weight_events: self.weight_events(at),
            }
        })
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn reason(&self, at: usize) -> Option<&str> {
        let found = self.reasons.iter().find(|(entry, _)| *entry == at);
        found.map(|(_, reason)| &**reason)
    }

    #[inline]
    fn weight_events(&self, at: usize) -> &[WeightVersionEvent] {
        let found = self.weight_events.iter().find(|(entry, _)| *entry == at);
        found.map_or(&[], |(_, events)| events)
    }

    /// Adds its changes of the weight version to the last output.
    pub(crate) fn set_weight_events(&mut self, events: Vec<WeightVersionEvent>) {
        let last = self.entries.len().saturating_sub(1);
        self.weight_events.push((last, events));
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.tokens.clear();
        self.logprobs.clear();
        self.scores.clear();
        self.reasons.clear();
        self.weight_events.clear();
    }

    fn scores_of(&self, entry: &Entry) -> Option<&Scores> {
        self.scores.get((entry.scores as usize).checked_sub(1)?)
    }

    /// Adds an output with its tokens and buffered log-probabilities.
    #[inline]
    pub(crate) fn push(
        &mut self,
        mut entry: Entry,
        tokens: &[u32],
        kept: Option<&mut LogprobBuffer>,
        reason: Option<&Arc<str>>,
    ) {
        if let Some(reason) = reason {
            self.reasons.push((self.entries.len(), Arc::clone(reason)));
        }
        if let Some(kept) = kept {
            entry.scores = self.push_scores(kept);
        }
        entry.tokens = append(&mut self.tokens, tokens);
        self.entries.push(entry);
    }

    /// Returns their index plus 1.
    #[inline(never)]
    fn push_scores(&mut self, kept: &mut LogprobBuffer) -> u32 {
        let (prompt, own) = kept.pending();
        let scores = Scores {
            prompt: append(&mut self.logprobs, prompt),
            tokens: append(&mut self.logprobs, own),
            scored: kept.scored,
        };
        kept.clear();
        self.scores.push(scores);
        self.scores.len() as u32
    }
}

/// Appends values and returns their range.
fn append(values: &mut Vec<u32>, new: &[u32]) -> Range<u32> {
    let start = values.len() as u32;
    // The common case.
    if let &[value] = new {
        values.push(value);
    } else {
        values.extend_from_slice(new);
    }
    start..values.len() as u32
}

fn slice<'a>(values: &'a [u32], range: &Range<u32>) -> &'a [u32] {
    &values[range.start as usize..range.end as usize]
}
