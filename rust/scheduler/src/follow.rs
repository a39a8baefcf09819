//! Following constraints: before a row of a bound sequence is laid out, what may come next is asked for.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use crate::constraint::{Begun, ConstraintState};
use crate::output::Finish;
use crate::scheduler::Scheduler;
use crate::sequence::State;

/// How long a step waits for the masks of bound sequences, while sequences that are not bound decode.
const MASK_WAIT: Duration = Duration::from_micros(500);

/// What keeps a sequence from being laid out.
enum NotReady {
    /// Its constraint is not ready.
    Waits,
    /// The sequence ends.
    Ends(Finish, Arc<str>),
}

impl NotReady {
    const fn failed(reason: Arc<str>) -> Self {
        Self::Ends(Finish::Constraint, reason)
    }
}

impl<S> Scheduler<S> {
    /// Whether a request waits for its constraint: then [`step`](Self::step) may have more to do soon, although nothing else happens.
    pub fn awaits_constraint(&self) -> bool {
        let mut waiting = self.waiting.iter().map(|&slot| &self.sequences[slot]);
        waiting.any(|sequence| matches!(sequence.constraint_state, ConstraintState::Asked))
    }

    /// Asks for the next tokens of the bound sequences that run and whose tokens are known. Where others are there that decode, these
    /// wait no longer than [`MASK_WAIT`]; then the rest is late.
    pub(crate) fn follow_running(&mut self) {
        let free = |&slot: &usize| {
            let sequence = &self.sequences[slot];
            sequence.constraint_state.is_free() && sequence.decodes()
        };
        let others = self.running.iter().any(free);
        let mut budget = MASK_WAIT;
        for at in 0..self.running.len() {
            let slot = self.running[at];
            let sequence = &mut self.sequences[slot];
            if others && sequence.pending == 0 && !sequence.constraint_state.prepare(&mut budget) {
                self.counts.late_rows += 1;
                continue;
            }
            self.follow(slot);
        }
        self.sweep();
    }

    /// Asks for those that were late, where nothing else could be laid out. Whether there were any.
    pub(crate) fn follow_late(&mut self) -> bool {
        let mut late = self.running.clone();
        late.retain(|&slot| self.sequences[slot].is_late());
        for &slot in &late {
            self.follow(slot);
        }
        self.sweep();
        !late.is_empty()
    }

    /// Asks what may come next, takes what has no alternative, and gives it out. Whether the sequence can be laid out: its
    /// constraint may not be ready, and it may end by this. [`sweep`](Self::sweep) must follow.
    pub(crate) fn follow(&mut self, slot: usize) -> bool {
        let sequence = &self.sequences[slot];
        if sequence.constraint_state.is_free() || sequence.pending > 0 || sequence.remaining() == 0
        {
            return true;
        }
        let mut forced = mem::take(&mut self.forced);
        forced.clear();
        let asked = self.ask(slot, &mut forced);
        let goes_on = match asked {
            Ok(()) => self.take_forced(slot, &forced),
            Err(NotReady::Waits) => false,
            Err(NotReady::Ends(finish, reason)) => {
                self.sequences[slot].reason = Some(reason);
                self.finish(slot, 0, finish);
                false
            }
        };
        self.forced = forced;
        goes_on
    }

    fn ask(&mut self, slot: usize, forced: &mut Vec<u32>) -> Result<(), NotReady> {
        let sequence = &mut self.sequences[slot];
        if let (ConstraintState::Asked, Some(constrain)) = (
            &sequence.constraint_state,
            &sequence.shared.arrival.constraint,
        ) {
            let jumps = sequence.logprobs.is_none();
            sequence.constraint_state = match constrain.begin(sequence.remaining(), jumps) {
                Begun::Waiting => return Err(NotReady::Waits),
                Begun::Failed(reason) => return Err(NotReady::failed(reason)),
                Begun::Busy(reason) => return Err(NotReady::Ends(Finish::Busy, reason)),
                Begun::Ready(constraint) => ConstraintState::Bound {
                    constraint,
                    mask: None,
                    fresh: false,
                },
            };
        }
        let ConstraintState::Bound {
            constraint,
            mask,
            fresh,
        } = &mut sequence.constraint_state
        else {
            return Ok(());
        };
        if !*fresh {
            *mask = constraint.next(forced).map_err(NotReady::failed)?;
            *fresh = true;
        }
        Ok(())
    }

    fn take_forced(&mut self, slot: usize, forced: &[u32]) -> bool {
        if forced.is_empty() {
            return true;
        }
        let (text, vocab) = (self.text.as_deref(), self.limits.vocab_size);
        let sequence = &mut self.sequences[slot];
        let known = sequence.known();
        let finish = sequence.append_forced(forced, text, vocab);
        let new = (sequence.known() - known) as usize;
        self.counts.forced_tokens += new as u64;
        match finish {
            Some(finish) => self.finish(slot, new, finish),
            None => self.give_out(slot, new, None),
        }
        self.sequences[slot].state != State::Ended
    }
}
