//! Who enters the queue: what is refused at once, and who gives way where it is full.

use crate::arrival::{Arrival, Ends};
use crate::error::Refusal;
use crate::output::Finish;
use crate::scheduler::Scheduler;

/// Most sequences of one request.
const MAX_SAMPLES: u32 = 1024;

/// The rank of a request without a priority: after all others.
const LAST: i64 = i64::MAX / 2;

impl<S> Scheduler<S> {
    /// Whether a request can be served at all. Returns how many tokens it may produce at most.
    pub(crate) fn check(&self, arrival: &Arrival<S>) -> Result<u32, Refusal> {
        let (id, prompt, ends) = (arrival.id, &arrival.prompt, &arrival.ends);
        if self.requests.contains_key(&id) {
            return Err(Refusal::Known { id });
        }
        if prompt.is_empty() {
            return Err(Refusal::Empty);
        }
        let vocab = self.limits.vocab_size;
        if let Some(at) = prompt.iter().position(|&token| token >= vocab) {
            let token = prompt[at];
            return Err(Refusal::Token { token, at, vocab });
        }
        if !(1..=MAX_SAMPLES).contains(&arrival.samples) {
            return Err(Refusal::Samples {
                samples: arrival.samples,
                limit: MAX_SAMPLES,
            });
        }
        let (min, max) = (ends.min_tokens, ends.max_tokens);
        if min > max {
            return Err(Refusal::MinTokens { min, max });
        }
        self.check_texts(ends)?;
        let limit = self.limits.max_logprob_words;
        match arrival.logprobs.map(|wanted| wanted.words) {
            Some(words) if words > limit => return Err(Refusal::Logprobs { words, limit }),
            _ => {}
        }
        let (limit, reason) = self.limits.longest();
        if prompt.len() > limit as usize {
            let tokens = prompt.len();
            return Err(Refusal::TooLong {
                tokens,
                limit,
                reason,
            });
        }
        // The last token is given out and not stored.
        Ok(limit - prompt.len() as u32 + 1)
    }

    fn check_texts(&self, ends: &Ends) -> Result<(), Refusal> {
        let strings = &ends.stop_strings;
        let any = !strings.is_empty() || ends.stop_regexes.is_some();
        let why = if strings.iter().any(|string| string.is_empty()) {
            "one is empty"
        } else if any && self.text.is_none() {
            "this scheduler was made without them"
        } else {
            return Ok(());
        };
        Err(Refusal::StopString { why })
    }

    pub(crate) fn rank(&self, priority: Option<i32>) -> i64 {
        match priority {
            _ if !self.config.priority => 0,
            None => LAST,
            Some(value) if self.config.low_priority_first => value.into(),
            Some(value) => -i64::from(value),
        }
    }

    /// Looks for room in the queue, and makes it where a sequence that waits has a worse rank.
    pub(crate) fn make_place(&mut self, samples: u32, rank: i64) -> Result<(), Refusal> {
        let Some(limit) = self.config.max_queued else {
            return Ok(());
        };
        let waiting = self.waiting.len();
        let excess = (waiting + samples as usize).saturating_sub(limit as usize);
        let mut worse: Vec<(i64, u64, usize)> = Vec::new();
        if excess > 0 {
            let ranks = self.waiting.iter().map(|&slot| {
                let sequence = &self.sequences[slot];
                (sequence.shared.rank, sequence.order, slot)
            });
            worse.extend(ranks.filter(|(other, ..)| *other > rank));
            worse.sort_unstable();
        }
        if worse.len() < excess {
            return Err(Refusal::QueueFull { waiting, limit });
        }
        for (.., slot) in worse.into_iter().rev().take(excess) {
            self.finish(slot, 0, Finish::Displaced);
        }
        self.sweep();
        Ok(())
    }
}
