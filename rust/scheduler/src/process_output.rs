//! Processing of step outputs.

use std::sync::Arc;

use crate::error::SchedulerError;
use crate::in_flight::ScheduledRow;
use crate::output::Finish;
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, State};
use crate::step_output::StepOutput;
use crate::stop_criteria::{EndRules, TokenBytes};

impl<S> Sequence<S> {
    /// Buffers the log-probabilities of `sampled` output tokens, of which `kept` are kept, and of prompt tokens. Returns whether
    /// their number is right.
    fn take_logprobs(
        &mut self,
        (row, at): (&ScheduledRow, usize),
        (sampled, kept): (usize, usize),
        output: &StepOutput<'_>,
    ) -> bool {
        let (start, end) = row.prompt_logprobs;
        match &mut self.logprobs {
            Some(logprobs) => logprobs.take(start..end, sampled, kept, output.logprobs_of(at)),
            None => true,
        }
    }

    /// Checks the last token against the stop criteria: text before stop token, and the length before or after both.
    #[inline]
    pub(crate) fn check_stop(
        &mut self,
        token: u32,
        text: Option<&dyn TokenBytes>,
        rules: EndRules,
    ) -> Option<Finish> {
        let shared = &self.shared;
        let ends = &shared.request.stop;
        let hit = match text {
            Some(text) if !self.stop_matcher.is_idle() => {
                self.stop_matcher.advance(ends, text.bytes(token))
            }
            _ => None,
        };
        let produced = self.len() - self.prompt_len;
        let is_last = produced >= self.max_tokens;
        if is_last && !rules.stop_before_length {
            return Some(Finish::Length);
        }
        if hit.is_some() {
            return hit;
        }
        if produced > self.min_tokens && ends.stop_tokens.binary_search(&token).is_ok() {
            return Some(Finish::StopToken(token));
        }
        is_last.then_some(Finish::Length)
    }
}

impl<S> Scheduler<S> {
    /// Processes the output of the oldest step in flight.
    ///
    /// # Errors
    ///
    /// [`SchedulerError::NoStep`], [`SchedulerError::Rows`] and [`SchedulerError::StepOutput`]; the step stays in flight.
    pub fn process_output(
        &mut self,
        now: u64,
        output: &StepOutput<'_>,
    ) -> Result<(), SchedulerError> {
        self.kv_cache.check_fault()?;
        let Some(step) = self.in_flight.front() else {
            return Err(SchedulerError::NoStep);
        };
        output.check(step.rows.len())?;
        let Some(step) = self.in_flight.pop_front() else {
            return Err(SchedulerError::NoStep);
        };
        // A step that was scheduled ahead began with the output of the previous one.
        let took = now.saturating_sub(self.last_answer.max(step.scheduled_at));
        self.prefill_budget
            .record(step.load, took, output.copies_us);
        self.last_answer = now;
        let rules = self.end_rules();
        for (at, row) in step.rows.iter().enumerate() {
            self.process_row((row, at), output, rules);
        }
        self.recycle(step);
        self.remove_finished();
        self.kv_cache.check_fault()
    }

    fn process_row(
        &mut self,
        (row, at): (&ScheduledRow, usize),
        output: &StepOutput<'_>,
        rules: EndRules,
    ) {
        let Some(sequence) = self.sequences.get(row.slot) else {
            return;
        };
        if sequence.order != row.order || sequence.state == State::Ended {
            return;
        }
        let current = sequence.epoch == row.epoch && sequence.state == State::Running;
        self.clear_suspect(row.slot, row.end);
        if row.samples_token {
            return self.process_sampled((row, at), output, current, rules);
        }
        let sequence = &mut self.sequences[row.slot];
        if !sequence.take_logprobs((row, at), (0, 0), output) {
            sequence.discard_in_flight();
            return self.finish(row.slot, 0, Finish::Failed);
        }
        if current {
            sequence.stored = row.end;
            let ends = sequence.shared.max_tokens == 0 && row.end == sequence.len();
            if ends {
                return self.finish(row.slot, 0, Finish::Length);
            }
            self.cache_pages(row.slot, true, true);
        }
    }

    fn process_sampled(
        &mut self,
        (row, at): (&ScheduledRow, usize),
        output: &StepOutput<'_>,
        current: bool,
        rules: EndRules,
    ) {
        let tokens = output.tokens_of(at);
        let sequence = &mut self.sequences[row.slot];
        let known = sequence.known();
        let accepted = (tokens.len() as u32).saturating_sub(1);
        if tokens.is_empty() || accepted > row.drafts {
            sequence.discard_in_flight();
            let finish = match output.failure_of(at) {
                Some(reason) => {
                    sequence.reason = Some(Arc::clone(reason));
                    Finish::Processor
                }
                None => Finish::Failed,
            };
            return self.finish(row.slot, 0, finish);
        }
        if sequence.only_scores() {
            return self.process_score((row, at), output, current);
        }
        let text = self.text.as_deref();
        let mut finish = sequence.append_tokens(row.end, tokens, text, rules);
        let new = (sequence.known() - known) as usize;
        if !sequence.take_logprobs((row, at), (tokens.len(), new), output) {
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
            sequence.drafts.extend_from_slice(output.drafts_of(at));
        }
        // Other requests may share the prompt as soon as it is computed.
        if current && (first || row.end - row.start > 1) {
            self.cache_pages(row.slot, true, true);
        }
        self.emit_output(row.slot, new, None);
    }

    /// Processes the row of a sequence without output tokens, which ends with the log-probabilities of its first token.
    fn process_score(
        &mut self,
        (row, at): (&ScheduledRow, usize),
        output: &StepOutput<'_>,
        current: bool,
    ) {
        let sequence = &mut self.sequences[row.slot];
        if current {
            sequence.stored = row.end;
        }
        sequence.discard_in_flight();
        let tokens = output.tokens_of(at);
        let taken = sequence.take_logprobs((row, at), (tokens.len(), 1), output);
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
