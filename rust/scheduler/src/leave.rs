//! What leaves: tokens that a sequence gives out, pages that it gives to others, and sequences that have ended.

use std::num::NonZeroU64;

use pie_kv_cache::radix::Insertion;

use crate::flight::Flight;
use crate::output::{Entry, Finish};
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, State};

impl<S> Scheduler<S> {
    /// Gives out the last `new` tokens of a sequence; of one that does not stream all of them, at its end.
    pub(crate) fn give_out(&mut self, slot: usize, new: usize, finish: Option<Finish>) {
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
                sequence.found.held(&sequence.shared.arrival.ends)
            },
            finish,
            admitted: sequence.admitted,
            retractions: sequence.epoch,
            ..Entry::default()
        };
        let tokens = &sequence.tokens[first..known];
        self.outputs.push(
            entry,
            tokens,
            sequence.logprobs.as_deref_mut(),
            sequence.reason.as_ref(),
        );
    }

    /// Ends a sequence, whose last `new` tokens were not given out. [`sweep`](Self::sweep) removes it.
    pub(crate) fn finish(&mut self, slot: usize, new: usize, finish: Finish) {
        self.give_out(slot, new, Some(finish));
        let ran = self.sequences[slot].state == State::Running;
        if ran {
            self.store(slot, finish != Finish::Failed, false);
        }
        let Sequence {
            shared,
            context,
            held,
            ..
        } = &mut self.sequences[slot];
        match shared.arrival.session {
            Some(session) if ran => self.memory.keep(held, session, *context),
            Some(session) => self.memory.sessions.give_context(session, *context),
            None => self.memory.release(held),
        }
        self.sequences[slot].state = State::Ended;
        self.ended.push(slot);
    }

    /// Gives the full pages of a sequence's stored tokens to the prefix index.
    pub(crate) fn store(&mut self, slot: usize, valid: bool, chunked: bool) {
        let sequence = &mut self.sequences[slot];
        let stored = sequence.stored.min(sequence.known());
        if !valid {
            return;
        }
        let mut held = std::mem::take(&mut sequence.held);
        let priority = sequence.shared.arrival.priority.unwrap_or(0);
        let how = Insertion {
            now: self.last_answer,
            priority,
            chunked,
        };
        let full = stored - stored % self.limits.page_size;
        let adopted = self.memory.share(&mut held, sequence.key(full), how);
        sequence.held = held;
        if adopted > sequence.prompt_len as usize {
            // Another sequence stored some of its own tokens: its next row reports them.
            sequence.resumed = sequence.scheduled;
        }
    }

    /// Removes the sequences that have ended.
    pub(crate) fn sweep(&mut self) {
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
            self.constrained -= usize::from(sequence.shared.arrival.constraint.is_some());
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
        self.full_until = 0;
    }

    pub(crate) fn recycle(&mut self, mut flight: Flight) {
        flight.rows.clear();
        self.spare.push(flight);
    }
}
