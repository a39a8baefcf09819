//! Taking the answer to a step.

use crate::answer::Answer;
use crate::error::SchedError;
use crate::flight::Planned;
use crate::output::Finish;
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, State};

impl<S> Sequence<S> {
    /// Takes the log-probabilities that a row has brought: of so many tokens, as many of which it keeps. Whether they are those
    /// that it wants.
    fn take_logprobs(
        &mut self,
        (row, at): (&Planned, usize),
        (drawn, kept): (usize, usize),
        answer: &Answer<'_>,
    ) -> bool {
        let (start, end) = row.prompt_logprobs;
        match &mut self.logprobs {
            Some(logprobs) => logprobs.take(start..end, drawn, kept, answer.logprobs_of(at)),
            None => true,
        }
    }
}

impl<S> Scheduler<S> {
    /// Takes the answer to the older of the steps that are out, which has just come.
    ///
    /// # Errors
    ///
    /// [`SchedError::NoStep`], [`SchedError::Rows`] and [`SchedError::Answer`]; the step is still out then.
    pub fn answer(&mut self, now: u64, answer: &Answer<'_>) -> Result<(), SchedError> {
        self.memory.check_fault()?;
        let Some(flight) = self.flights.front() else {
            return Err(SchedError::NoStep);
        };
        answer.check(flight.rows.len())?;
        let Some(flight) = self.flights.pop_front() else {
            return Err(SchedError::NoStep);
        };
        // A step that was laid out ahead began with the answer to the one before.
        let took = now.saturating_sub(self.last_answer.max(flight.laid_at));
        self.pace.learn(flight.load, took, answer.copies_us);
        self.last_answer = now;
        for (at, row) in flight.rows.iter().enumerate() {
            self.settle(row, answer, at);
        }
        self.recycle(flight);
        self.sweep();
        self.memory.check_fault()
    }

    fn settle(&mut self, row: &Planned, answer: &Answer<'_>, at: usize) {
        let Some(sequence) = self.sequences.get(row.slot) else {
            return;
        };
        if sequence.order != row.order || sequence.state == State::Ended {
            return;
        }
        let current = sequence.epoch == row.epoch && sequence.state == State::Running;
        self.clear_suspect(row.slot, row.end);
        if row.draws {
            return self.settle_draw(row, answer, at, current);
        }
        let sequence = &mut self.sequences[row.slot];
        if !sequence.take_logprobs((row, at), (0, 0), answer) {
            sequence.forget_steps();
            return self.finish(row.slot, 0, Finish::Failed);
        }
        if current {
            sequence.stored = row.end;
            let ends = sequence.shared.max_tokens == 0 && row.end == sequence.len();
            if ends {
                return self.finish(row.slot, 0, Finish::Length);
            }
            self.store(row.slot, true, true);
        }
    }

    fn settle_draw(&mut self, row: &Planned, answer: &Answer<'_>, at: usize, current: bool) {
        let tokens = answer.tokens_of(at);
        let sequence = &mut self.sequences[row.slot];
        let known = sequence.known();
        let accepted = (tokens.len() as u32).saturating_sub(1);
        if tokens.is_empty() || accepted > row.drafts {
            sequence.forget_steps();
            return self.finish(row.slot, 0, Finish::Failed);
        }
        if sequence.only_scores() {
            return self.settle_score((row, at), answer, current);
        }
        let text = self.text.as_deref();
        let mut finish = sequence.take(row.end, tokens, text, self.limits.vocab_size);
        let new = (sequence.known() - known) as usize;
        if !sequence.take_logprobs((row, at), (tokens.len(), new), answer) {
            finish = Some(Finish::Failed);
        }
        let first = known == sequence.prompt_len;
        if current {
            sequence.stored = row.end + accepted;
            sequence.scheduled += accepted;
        }
        sequence.drafts.clear();
        self.counts.drafts += u64::from(row.drafts);
        self.counts.accepted += u64::from(accepted);
        if let Some(finish) = finish {
            return self.finish(row.slot, new, finish);
        }
        if current && row.wants_drafts {
            sequence.drafts.extend_from_slice(answer.drafts_of(at));
        }
        // The prompt's pages are there for others as soon as it is computed.
        if current && (first || row.end - row.start > 1) {
            self.store(row.slot, true, true);
        }
        self.give_out(row.slot, new, None);
    }

    /// Of a sequence that may have no token: it ends with the log-probabilities of the one that would come first.
    fn settle_score(&mut self, (row, at): (&Planned, usize), answer: &Answer<'_>, current: bool) {
        let sequence = &mut self.sequences[row.slot];
        if current {
            sequence.stored = row.end;
        }
        sequence.forget_steps();
        let tokens = answer.tokens_of(at);
        let taken = sequence.take_logprobs((row, at), (tokens.len(), 1), answer);
        if let Some(kept) = &mut sequence.logprobs {
            kept.scored = tokens.first().copied();
        }
        let finish = if taken {
            Finish::Length
        } else {
            Finish::Failed
        };
        self.finish(row.slot, 0, finish);
    }
}
