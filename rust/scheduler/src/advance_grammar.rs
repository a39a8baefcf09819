//! Structured output: masks and jump-forward tokens of constrained sequences, before their rows are scheduled.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use crate::grammar::{GrammarState, GrammarStatus};
use crate::output::Finish;
use crate::scheduler::Scheduler;
use crate::sequence::State;

/// Most time that a step waits for masks while other sequences decode.
const MASK_WAIT: Duration = Duration::from_micros(500);

/// Why a constrained sequence cannot be scheduled.
enum NotReady {
    /// Its grammar is still compiling.
    Compiling,
    /// The sequence ends.
    Finished(Finish, Arc<str>),
}

impl NotReady {
    const fn failed(reason: Arc<str>) -> Self {
        Self::Finished(Finish::Grammar, reason)
    }
}

impl<S> Scheduler<S> {
    /// Whether a queued request waits for its grammar: [`schedule`](Self::schedule) may have more to do soon although nothing
    /// else happens.
    pub fn awaits_grammar(&self) -> bool {
        let mut waiting = self.waiting.iter().map(|&slot| &self.sequences[slot]);
        waiting.any(|sequence| matches!(sequence.grammar, GrammarState::Compiling))
    }

    /// Computes the masks of running constrained sequences. While unconstrained ones decode, this takes at most [`MASK_WAIT`];
    /// sequences whose mask is not ready by then are left out of the step.
    pub(crate) fn advance_running_grammars(&mut self) {
        let decodes_freely = |&slot: &usize| {
            let sequence = &self.sequences[slot];
            sequence.grammar.is_none() && sequence.decodes()
        };
        let others = self.running.iter().any(decodes_freely);
        let mut budget = MASK_WAIT;
        for at in 0..self.running.len() {
            let slot = self.running[at];
            let sequence = &mut self.sequences[slot];
            if others && sequence.pending == 0 && !sequence.grammar.prepare_mask(&mut budget) {
                self.counts.late_masks += 1;
                continue;
            }
            self.advance_grammar(slot);
        }
        self.remove_finished();
    }

    /// Computes late masks, where nothing else can be scheduled. Returns whether there were any.
    pub(crate) fn advance_late_grammars(&mut self) -> bool {
        let mut late = self.running.clone();
        late.retain(|&slot| self.sequences[slot].is_late());
        for &slot in &late {
            self.advance_grammar(slot);
        }
        self.remove_finished();
        !late.is_empty()
    }

    /// Computes the next mask of a sequence and emits jump-forward tokens. Returns whether it can be scheduled.
    /// [`remove_finished`](Self::remove_finished) must follow.
    pub(crate) fn advance_grammar(&mut self, slot: usize) -> bool {
        let sequence = &self.sequences[slot];
        if sequence.grammar.is_none() || sequence.pending > 0 || sequence.remaining() == 0 {
            return true;
        }
        let mut forced = mem::take(&mut self.forced);
        forced.clear();
        let updated = self.update_mask(slot, &mut forced);
        let can_be_scheduled = match updated {
            Ok(()) => self.append_forced_tokens(slot, &forced),
            Err(NotReady::Compiling) => false,
            Err(NotReady::Finished(finish, reason)) => {
                self.sequences[slot].reason = Some(reason);
                self.finish(slot, 0, finish);
                false
            }
        };
        self.forced = forced;
        can_be_scheduled
    }

    fn update_mask(&mut self, slot: usize, forced: &mut Vec<u32>) -> Result<(), NotReady> {
        let sequence = &mut self.sequences[slot];
        if let (GrammarState::Compiling, Some(handle)) =
            (&sequence.grammar, &sequence.shared.request.grammar)
        {
            let jumps = sequence.logprobs.is_none();
            sequence.grammar = match handle.create_matcher(sequence.remaining(), jumps) {
                GrammarStatus::Compiling => return Err(NotReady::Compiling),
                GrammarStatus::Invalid(reason) => return Err(NotReady::failed(reason)),
                GrammarStatus::Busy(reason) => {
                    return Err(NotReady::Finished(Finish::Busy, reason));
                }
                GrammarStatus::Ready(matcher) => GrammarState::Active {
                    matcher,
                    mask: None,
                    is_current: false,
                },
            };
        }
        let GrammarState::Active {
            matcher,
            mask,
            is_current,
        } = &mut sequence.grammar
        else {
            return Ok(());
        };
        if !*is_current {
            *mask = matcher.next_mask(forced).map_err(NotReady::failed)?;
            *is_current = true;
        }
        Ok(())
    }

    fn append_forced_tokens(&mut self, slot: usize, forced: &[u32]) -> bool {
        if forced.is_empty() {
            return true;
        }
        let (text, rules) = (self.text.as_deref(), self.end_rules());
        let sequence = &mut self.sequences[slot];
        let known = sequence.known();
        let finish = sequence.append_forced(forced, text, rules);
        let new = (sequence.known() - known) as usize;
        self.counts.forced_tokens += new as u64;
        match finish {
            Some(finish) => self.finish(slot, new, finish),
            None => self.emit_output(slot, new, None),
        }
        self.sequences[slot].state != State::Ended
    }
}
