//! Emission of output tokens, caching of pages, and the end of sequences.

use std::num::NonZeroU64;

use pie_kv_cache::radix::InsertParams;

use crate::in_flight::InFlightStep;
use crate::output::{Entry, Finish};
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, State};
use crate::stop_criteria::EndRules;

impl<S> Scheduler<S> {
    /// Emits the last `new` tokens of a sequence; if it does not stream, all tokens at its end.
    pub(crate) fn emit_output(&mut self, slot: usize, new: usize, finish: Option<Finish>) {
        self.counts.output_tokens += new as u64;
        let sequence = &mut self.sequences[slot];
        if let Some(admitted) = &mut sequence.admitted
            && admitted.first_token.is_none()
            && new > 0
        {
            admitted.first_token = NonZeroU64::new(self.last_answer);
        }
        if !sequence.streams && finish.is_none() {
            return;
        }
        let known = sequence.known() as usize;
        let first = if sequence.streams {
            known - new
        } else {
            sequence.prompt_len as usize
        };
        let entry = Entry {
            id: sequence.id(),
            sample: sequence.sample,
            held_bytes: if finish.is_some() {
                0
            } else {
                sequence.stop_matcher.held(&sequence.shared.request.stop)
            },
            finish,
            admitted: sequence.admitted,
            retractions: sequence.epoch,
            weight_version: self.weight_version,
            ..Entry::default()
        };
        let tokens = &sequence.tokens[first..known];
        self.outputs.push(
            entry,
            tokens,
            sequence.logprobs.as_deref_mut(),
            sequence.reason.as_ref(),
        );
        if finish.is_some() && !self.weight_events.is_empty() {
            let events = self.weight_events.remove(&sequence.order);
            self.outputs.set_weight_events(events.unwrap_or_default());
        }
    }

    pub(crate) fn end_rules(&self) -> EndRules {
        EndRules {
            vocab_size: self.limits.vocab_size,
            stop_before_length: self.config.stop_before_length,
        }
    }

    /// Ends a sequence whose last `new` tokens were not emitted. [`remove_finished`](Self::remove_finished) removes it.
    pub(crate) fn finish(&mut self, slot: usize, new: usize, finish: Finish) {
        self.emit_output(slot, new, Some(finish));
        let ran = self.sequences[slot].state == State::Running;
        if ran {
            self.cache_pages(slot, finish != Finish::Failed, false);
        }
        let Sequence {
            session,
            context,
            kv,
            ..
        } = &mut self.sequences[slot];
        match *session {
            Some(session) if ran => self.kv_cache.keep_for_session(kv, session, *context),
            Some(session) => self.kv_cache.sessions.give_context(session, *context),
            None => self.kv_cache.free(kv),
        }
        self.sequences[slot].state = State::Ended;
        self.ended.push(slot);
    }

    /// Inserts the full pages of a sequence's computed tokens into the prefix index; `SGLang`'s `cache_unfinished_req`.
    pub(crate) fn cache_pages(&mut self, slot: usize, valid: bool, chunked: bool) {
        let sequence = &mut self.sequences[slot];
        let stored = sequence.stored.min(sequence.known());
        if !valid {
            return;
        }
        let mut kv = std::mem::take(&mut sequence.kv);
        let priority = sequence.shared.request.priority.unwrap_or(0);
        let how = InsertParams {
            now: self.last_answer,
            priority,
            chunked,
            inserted: 0,
        };
        let full = stored - stored % self.limits.page_size;
        let adopted = self.kv_cache.cache(&mut kv, sequence.key(full), how);
        sequence.kv = kv;
        if adopted > sequence.prompt_len as usize {
            // Another sequence computed some of its output tokens: its next row reports them as history.
            sequence.resumed = sequence.scheduled;
        }
    }

    /// Removes ended sequences.
    pub(crate) fn remove_finished(&mut self) {
        if self.ended.is_empty() {
            return;
        }
        let sequences = &self.sequences;
        let lives = |slot: &usize| sequences[*slot].state != State::Ended;
        self.waiting.retain(lives);
        self.running.retain(lives);
        for at in 0..self.ended.len() {
            let slot = self.ended[at];
            self.forget_suspect(slot);
            let sequence = self.sequences.remove(slot);
            self.constrained -= usize::from(sequence.shared.request.grammar.is_some());
            self.streaming -= usize::from(sequence.streams);
            self.counts.finished += 1;
            if let Some(request) = self.requests.get_mut(&sequence.id()) {
                request.live -= 1;
                if request.live == 0 {
                    self.kept_bytes -= request.kept_bytes;
                    self.requests.remove(&sequence.id());
                }
            }
        }
        self.ended.clear();
        self.admission_blocked_until = 0;
    }

    pub(crate) fn recycle(&mut self, mut step: InFlightStep) {
        step.rows.clear();
        self.spare.push(step);
    }
}
