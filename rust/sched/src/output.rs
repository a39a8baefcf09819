//! What comes out: tokens, and ends.

use std::ops::Range;
use std::sync::Arc;

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// It has as many tokens as it may.
    Length,
    /// Its last token is a stop token.
    StopToken(u32),
    /// Its text has this stop string.
    StopString {
        /// Which of [`Ends::stop_strings`](crate::Ends::stop_strings).
        index: u32,
        /// Bytes of the output's text before it begins.
        text_bytes: u64,
    },
    /// Its text has a match of this expression.
    StopRegex {
        /// Which of [`Ends::stop_regexes`](crate::Ends::stop_regexes).
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
    /// The driver gave no token, or one that the model does not have.
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
    /// With [`Finish::Constraint`]: why.
    pub reason: Option<&'a str>,
    /// Tokens of the prompt whose KV was there when it was first admitted.
    pub cached_tokens: u32,
    /// Those of them that were loaded from the host.
    pub loaded_tokens: u32,
    /// When it was first admitted, in µs.
    pub admitted: Option<u64>,
    /// How often its pages were taken from it and computed, or loaded, again.
    pub retractions: u32,
}

/// What a sequence found when it was first admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Admitted {
    /// When that was, in µs.
    pub(crate) at: u64,
    /// Tokens of the prompt whose KV was there.
    pub(crate) cached_tokens: u32,
    /// Those of them that were loaded from the host.
    pub(crate) loaded_tokens: u32,
}

/// One output without its tokens.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) id: u64,
    pub(crate) sample: u32,
    pub(crate) tokens: Range<u32>,
    pub(crate) prompt_logprobs: Range<u32>,
    pub(crate) logprobs: Range<u32>,
    pub(crate) scored: Option<u32>,
    pub(crate) held_bytes: u32,
    pub(crate) finish: Option<Finish>,
    pub(crate) admitted: Option<Admitted>,
    pub(crate) retractions: u32,
}

/// What is new, in order. Reuse one: [`Scheduler::outputs`](crate::Scheduler::outputs) clears it first.
#[derive(Debug, Clone, Default)]
pub struct Outputs {
    pub(crate) entries: Vec<Entry>,
    pub(crate) tokens: Vec<u32>,
    logprobs: Vec<u32>,
    /// Of the entries that have one, by index; few, and apart, so that entries need no drop.
    reasons: Vec<(usize, Arc<str>)>,
}

impl Outputs {
    /// The outputs, in the order in which they came to be.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Output<'_>> {
        self.entries.iter().enumerate().map(|(at, entry)| Output {
            id: entry.id,
            sample: entry.sample,
            tokens: &self.tokens[entry.tokens.start as usize..entry.tokens.end as usize],
            prompt_logprobs: self.words(&entry.prompt_logprobs),
            logprobs: self.words(&entry.logprobs),
            scored: entry.scored,
            held_bytes: entry.held_bytes,
            finish: entry.finish,
            reason: match entry.finish {
                Some(Finish::Constraint) => self.reason(at),
                _ => None,
            },
            cached_tokens: entry.admitted.map_or(0, |admitted| admitted.cached_tokens),
            loaded_tokens: entry.admitted.map_or(0, |admitted| admitted.loaded_tokens),
            admitted: entry.admitted.map(|admitted| admitted.at),
            retractions: entry.retractions,
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
        self.reasons.clear();
    }

    fn words(&self, range: &Range<u32>) -> &[u32] {
        &self.logprobs[range.start as usize..range.end as usize]
    }

    /// Keeps the log-probabilities of an entry, of its prompt and of its tokens, and returns where they are.
    pub(crate) fn push_logprobs(
        &mut self,
        prompt: &[u32],
        tokens: &[u32],
    ) -> (Range<u32>, Range<u32>) {
        let mut push = |words: &[u32]| {
            let start = self.logprobs.len() as u32;
            self.logprobs.extend_from_slice(words);
            start..self.logprobs.len() as u32
        };
        (push(prompt), push(tokens))
    }

    pub(crate) fn push(&mut self, mut entry: Entry, tokens: &[u32], reason: Option<&Arc<str>>) {
        if let Some(reason) = reason {
            self.reasons.push((self.entries.len(), Arc::clone(reason)));
        }
        let start = self.tokens.len() as u32;
        self.tokens.extend_from_slice(tokens);
        entry.tokens = start..self.tokens.len() as u32;
        self.entries.push(entry);
    }
}
