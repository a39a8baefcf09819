//! Finding the request that makes steps fail, by bisection (adaptive group testing).
//!
//! The rows of a failed step become *suspects* in two groups of half the rows each. A step has one group, or the sequences that
//! are not suspected; both kinds alternate, so that others make progress. A suspect is cleared when a step has computed it as
//! far as the failed one would have. A group that fails again is halved again: of `n` rows the guilty one is alone after `log2
//! n` failures. It ends after the third failure in a row, if it was alone in the last.
//!
//! A driver death is a failure of the step in flight. The half that has not failed a second time is tried first then, so that
//! restarted drivers answer some steps in between.

use std::borrow::Cow;

use crate::in_flight::ScheduledRow;
use crate::output::Finish;
use crate::scheduler::Scheduler;
use crate::sequence::State;

/// Failures in a row after which a sequence that is alone in the step ends; one or two may have another cause.
const TIMES: u8 = 3;

/// The reason for the client.
const REASON: &str =
    "every step with this request failed, also the one that had it alone\n\nhint: the log says why";

/// The group of sequences that are not suspected.
pub(crate) const CLEARED: u64 = 0;

/// Whether a sequence is suspected of making steps fail.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Suspicion {
    /// Failed steps with it since it was last cleared.
    pub(crate) failures: u8,
    /// Bisection group: a step has sequences of one group only.
    pub(crate) group: u64,
    /// It is cleared once it is computed up to this token.
    pub(crate) until: u32,
}

/// The bisection of failing steps.
#[derive(Debug, Default)]
pub(crate) struct Suspects {
    /// Number of suspects.
    pub(crate) count: usize,
    /// The newest group.
    pub(crate) last_group: u64,
    /// The last step had suspects, or failed.
    pub(crate) probed: bool,
}

impl<S> Scheduler<S> {
    /// Makes the rows of a failed step suspects. Ends a row that was alone, if it has failed often enough;
    /// [`remove_finished`](Self::remove_finished) must follow.
    pub(crate) fn suspect(&mut self, rows: &[ScheduledRow]) {
        let first = self.suspects.last_group + 1;
        self.suspects.last_group = first + 1;
        self.suspects.probed = true;
        let half = rows.len().div_ceil(2);
        for (at, row) in rows.iter().enumerate() {
            let Some(sequence) = self.sequences.get_mut(row.slot) else {
                continue;
            };
            if sequence.order != row.order || sequence.state == State::Ended {
                continue;
            }
            let suspicion = &mut sequence.suspicion;
            self.suspects.count += usize::from(suspicion.group == CLEARED);
            suspicion.failures = suspicion.failures.saturating_add(1);
            suspicion.group = first + u64::from(at >= half);
            suspicion.until = suspicion.until.max(row.end);
            if rows.len() == 1 && suspicion.failures >= TIMES {
                sequence.reason = Some(REASON.into());
                self.finish(row.slot, 0, Finish::Failed);
            }
        }
    }

    /// Clears a suspect that a step has computed up to token `end`.
    pub(crate) fn clear_suspect(&mut self, slot: usize, end: u32) {
        if end >= self.sequences[slot].suspicion.until {
            self.forget_suspect(slot);
        }
    }

    pub(crate) fn forget_suspect(&mut self, slot: usize) {
        let suspicion = std::mem::take(&mut self.sequences[slot].suspicion);
        self.suspects.count -= usize::from(suspicion.group != CLEARED);
    }

    /// The groups for the next step in the order of trial: of suspects the oldest first, which is the half that has not failed
    /// again.
    pub(crate) fn groups(&self) -> Cow<'static, [u64]> {
        if self.suspects.count == 0 {
            return Cow::Borrowed(&[CLEARED]);
        }
        let suspected = self.sequences.iter().map(|(_, it)| it.suspicion.group);
        let mut groups: Vec<u64> = suspected.filter(|&group| group != CLEARED).collect();
        groups.sort_unstable();
        groups.dedup();
        groups.insert(usize::from(!self.suspects.probed), CLEARED);
        groups.into()
    }

    /// Records the group of a scheduled step.
    pub(crate) const fn record_group(&mut self, group: u64) {
        self.suspects.probed = group != CLEARED;
    }
}
