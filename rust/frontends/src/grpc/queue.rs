//! What a request has brought forth and its client has not fetched yet: tokens of one sequence become one part.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use pie_engine::{FinishReason, OutputDelta};

use crate::grpc::logprobs::Words;

/// How a client wants its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamInterval {
    /// Whether it gets them as they come.
    pub(crate) streams: bool,
    /// Tokens from one part to the next, after the first; 1 or more.
    pub(crate) interval: u32,
}

/// The next thing that a client gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// New tokens of a sequence.
    Tokens {
        /// Which sequence of the request, from 0.
        sample: u32,
        tokens: Vec<u32>,
        counts: Counts,
        words: Words,
    },
    /// The end of a sequence, whose tokens were all sent, if they are sent as they come.
    End {
        sample: u32,
        /// All of them.
        tokens: Vec<u32>,
        counts: Counts,
        words: Words,
        end: FinishReason,
    },
}

/// Of one sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Tokens so far, those of this part among them.
    pub(crate) tokens: u32,
    /// Tokens of the prompt whose KV was there.
    pub(crate) cached: u32,
}

/// The parts of one request. It holds no more than the tokens of the request, however slow its client is.
#[derive(Debug)]
pub(crate) struct OutputQueue(Mutex<State>);

#[derive(Debug)]
struct State {
    interval: StreamInterval,
    samples: Box<[Sample]>,
    /// Samples that have something for the client, each once.
    due: VecDeque<u32>,
    /// Samples whose end the client does not have.
    open: u32,
    waker: Option<Waker>,
}

#[derive(Clone, Debug, Default)]
struct Sample {
    /// All tokens; the client does not have those after `sent`.
    tokens: Vec<u32>,
    sent: usize,
    /// Log-probabilities, in step with the tokens.
    words: Vec<u32>,
    sent_words: usize,
    prompt_words: Vec<u32>,
    /// The token that would come first, of a request that wants none.
    scored: Option<u32>,
    cached: u32,
    end: Option<FinishReason>,
    is_due: bool,
}

impl OutputQueue {
    /// For a request of so many sequences.
    pub(crate) fn new(samples: u32, interval: StreamInterval) -> Self {
        Self(Mutex::new(State {
            interval,
            samples: vec![Sample::default(); samples as usize].into(),
            due: VecDeque::new(),
            open: samples,
            waker: None,
        }))
    }

    /// How many sequences the request has.
    pub(crate) fn samples(&self) -> u32 {
        self.lock().samples.len() as u32
    }

    /// Takes what is new, and returns whom to wake. What no sequence of the request is is ignored.
    pub(crate) fn put(&self, delta: OutputDelta) -> Option<Waker> {
        let mut state = self.lock();
        let state = &mut *state;
        let sample = state.samples.get_mut(delta.sample as usize)?;
        if sample.end.is_some() {
            return None;
        }
        if sample.tokens.is_empty() {
            sample.tokens = delta.tokens;
        } else {
            sample.tokens.extend_from_slice(&delta.tokens);
        }
        sample.words.extend_from_slice(&delta.logprobs);
        sample
            .prompt_words
            .extend_from_slice(&delta.prompt_logprobs);
        sample.scored = delta.scored;
        sample.cached = delta.cached_tokens;
        sample.end = delta.finish;
        if sample.is_due || !sample.has_part(state.interval) {
            return None;
        }
        sample.is_due = true;
        state.due.push_back(delta.sample);
        state.waker.take()
    }

    /// The next part; `None` after the last one. While there is none, the task of the last call is woken by what comes.
    pub(crate) fn take(&self, context: &mut Context<'_>) -> Poll<Option<Part>> {
        let mut state = self.lock();
        let state = &mut *state;
        let Some(number) = state.due.pop_front() else {
            if state.open == 0 {
                return Poll::Ready(None);
            }
            match &mut state.waker {
                Some(waker) => waker.clone_from(context.waker()),
                none => *none = Some(context.waker().clone()),
            }
            return Poll::Pending;
        };
        let sample = &mut state.samples[number as usize];
        let part = sample.take(number, state.interval);
        sample.is_due = sample.has_part(state.interval);
        if matches!(part, Part::End { .. }) {
            state.open -= 1;
            sample.is_due = false;
        }
        if sample.is_due {
            state.due.push_back(number);
        }
        Poll::Ready(Some(part))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sample {
    /// Whether there is something for the client.
    fn has_part(&self, interval: StreamInterval) -> bool {
        if self.end.is_some() {
            return true;
        }
        let passed = |tokens: usize| (tokens as u32).div_ceil(interval.interval);
        interval.streams && passed(self.tokens.len()) > passed(self.sent)
    }

    /// Takes a part, which is there.
    fn take(&mut self, sample: u32, interval: StreamInterval) -> Part {
        let counts = Counts {
            tokens: self.tokens.len() as u32,
            cached: self.cached,
        };
        let first = self.sent == 0;
        let new = &self.tokens[mem::replace(&mut self.sent, self.tokens.len())..];
        let new_words = &self.words[mem::replace(&mut self.sent_words, self.words.len())..];
        match &self.end {
            Some(end) if new.is_empty() || !interval.streams => {
                let computed = !self.tokens.is_empty() || self.scored.is_some();
                Part::End {
                    sample,
                    end: end.clone(),
                    tokens: mem::take(&mut self.tokens),
                    counts,
                    words: Words {
                        prompt: computed.then(|| mem::take(&mut self.prompt_words)),
                        tokens: mem::take(&mut self.words),
                        scored: self.scored,
                    },
                }
            }
            _ => Part::Tokens {
                sample,
                tokens: new.to_vec(),
                counts,
                words: Words {
                    prompt: first.then(|| self.prompt_words.clone()),
                    tokens: new_words.to_vec(),
                    scored: None,
                },
            },
        }
    }
}

#[cfg(test)]
mod tests;
