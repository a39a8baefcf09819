//! What comes out: tokens, and ends.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;

use crate::logprobs::Kept;

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// It has as many tokens as it may.
    Length,
    /// Its last token is a stop token.
    StopToken(u32),
    /// Its text has this stop string.
    StopString {
        /// Which of [`StopCriteria::stop_strings`](crate::StopCriteria::stop_strings).
        index: u32,
        /// Bytes of the output's text before it begins.
        text_bytes: u64,
    },
    /// Its text has a match of this expression.
    StopRegex {
        /// Which of [`StopCriteria::stop_regexes`](crate::StopCriteria::stop_regexes).
        index: u32,
    },
    /// By [`Scheduler::abort`](crate::Scheduler::abort).
    Aborted,
    /// The same, before its constraint was ready.
    Unready,
    /// Its deadline passed.
    Deadline,
    /// A request of better priority took its place in the queue, which was full.
    Displaced,
    /// Its constraint cannot be used, or cannot go on: [`Output::reason`] says why.
    Constraint,
    /// Its constraint cannot be had now: [`Output::reason`] says why.
    Busy,
    /// The driver gave no token, or one that the model does not have; or its steps fail, and [`Output::reason`] says so.
    Failed,
}

/// What is new of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Output<'a> {
    /// The request.
    pub id: u64,
    /// Which of its sequences, from 0.
    pub sample: u32,
    /// Tokens that follow those of earlier outputs. With a stop string they end with the token that completed it.
    pub tokens: &'a [u32],
    /// Log-probabilities of tokens of the prompt, as their words; each once, in an output that follows their computation.
    pub prompt_logprobs: &'a [u32],
    /// Those of `tokens`. Of a sequence that may have no token, those of the one that would come first.
    pub logprobs: &'a [u32],
    /// In the last output of a sequence that may have no token, the one that would come first.
    pub scored: Option<u32>,
    /// Bytes at the end of its text that may be the start of a stop string: keep them back until they are not.
    pub held_bytes: u32,
    /// Set in its last output.
    pub finish: Option<Finish>,
    /// With [`Finish::Constraint`] and [`Finish::Busy`], and some of [`Finish::Failed`]: why.
    pub reason: Option<&'a str>,
    /// Tokens of the prompt whose KV was there when it was first admitted.
    pub cached_tokens: u32,
    /// Those of them that were loaded from the host.
    pub loaded_tokens: u32,
    /// When it was first admitted, in µs.
    pub admitted: Option<u64>,
    /// When the step was answered that gave its first token, in µs; also of a sequence that does not stream.
    pub first_token: Option<u64>,
    /// How often its pages were taken from it and computed, or loaded, again.
    pub retractions: u32,
}

/// What a sequence found when it was first admitted, and when it had its first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Admitted {
    /// When that was, in µs.
    pub(crate) at: u64,
    /// Tokens of the prompt whose KV was there.
    pub(crate) cached_tokens: u32,
    /// Those of them that were loaded from the host.
    pub(crate) loaded_tokens: u32,
    /// When the step was answered that gave its first token, in µs.
    pub(crate) first_token: Option<NonZeroU64>,
}

/// One output without what is in lists.
#[derive(Debug, Clone, Default)]
pub(crate) struct Entry {
    pub(crate) id: u64,
    pub(crate) sample: u32,
    /// In [`Outputs::tokens`].
    pub(crate) tokens: Range<u32>,
    /// Its place in [`Outputs::scores`], from 1 on; 0 when it has none.
    pub(crate) scores: u32,
    pub(crate) held_bytes: u32,
    pub(crate) finish: Option<Finish>,
    pub(crate) admitted: Option<Admitted>,
    pub(crate) retractions: u32,
}

/// The log-probabilities of an output, as places in [`Outputs::logprobs`].
#[derive(Debug, Clone, Default)]
struct Scores {
    prompt: Range<u32>,
    tokens: Range<u32>,
    /// See [`Output::scored`].
    scored: Option<u32>,
}

/// What is new, in order. Reuse one: [`Scheduler::outputs`](crate::Scheduler::outputs) clears it first.
#[derive(Debug, Clone, Default)]
pub struct Outputs {
    entries: Vec<Entry>,
    tokens: Vec<u32>,
    logprobs: Vec<u32>,
    /// Of the entries that have some. Few ask, so entries are kept small.
    scores: Vec<Scores>,
    /// Of the entries that have one, by index; few, and apart, so that entries need no drop.
    reasons: Vec<(usize, Arc<str>)>,
}

impl Outputs {
    /// The outputs, in the order in which they came to be.
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
                    Some(Finish::Constraint | Finish::Busy | Finish::Failed) => self.reason(at),
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
            }
        })
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn reason(&self, at: usize) -> Option<&str> {
        let found = self.reasons.iter().find(|(entry, _)| *entry == at);
        found.map(|(_, reason)| &**reason)
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.tokens.clear();
        self.logprobs.clear();
        self.scores.clear();
        self.reasons.clear();
    }

    fn scores_of(&self, entry: &Entry) -> Option<&Scores> {
        self.scores.get((entry.scores as usize).checked_sub(1)?)
    }

    /// Adds an output with its tokens and the log-probabilities that `kept` has, which forgets them.
    #[inline]
    pub(crate) fn push(
        &mut self,
        mut entry: Entry,
        tokens: &[u32],
        kept: Option<&mut Kept>,
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

    /// Returns their place, from 1 on.
    #[inline(never)]
    fn push_scores(&mut self, kept: &mut Kept) -> u32 {
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

/// Appends some values and returns where they are.
fn append(values: &mut Vec<u32>, new: &[u32]) -> Range<u32> {
    let start = values.len() as u32;
    // One by one, as most outputs have no more.
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
