//! Finding the request that makes steps fail, by bisection (adaptive group testing).
//!
//! The rows of a step that failed are *suspects*, in two groups of half the rows each. A step is made of one group, or of the
//! sequences that nobody suspects; both kinds take turns, so that others go on meanwhile. A suspect is cleared when a step has
//! taken it as far as the one that failed would have. A group that fails again is halved again: of `n` rows the guilty one is
//! alone after `log2 n` failures. It ends when it has failed alone, for the third time in a row.
//!
//! The death of a driver is a failure of the step that it had. The half that has not failed a second time comes first then, so
//! that drivers that are started again answer something in between.

use std::borrow::Cow;

use crate::flight::Planned;
use crate::output::Finish;
use crate::scheduler::Scheduler;
use crate::sequence::State;
use crate::suspects::CLEARED;

/// Failures in a row after which a sequence ends, if the last step had it alone: one or two may be somebody else's fault.
const TIMES: u8 = 3;

/// Why a sequence ends that makes steps fail.
const REASON: &str =
    "every step with this request failed, also the one that had it alone\n\nhint: the log says why";

impl<S> Scheduler<S> {
    /// Suspects the rows of a step that failed. Ends the one that was alone in it, when it has failed often enough;
    /// [`sweep`](Self::sweep) must follow.
    pub(crate) fn suspect(&mut self, rows: &[Planned]) {
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

    /// A step has computed a sequence up to token `end`.
    pub(crate) fn clear_suspect(&mut self, slot: usize, end: u32) {
        if end >= self.sequences[slot].suspicion.until {
            self.forget_suspect(slot);
        }
    }

    pub(crate) fn forget_suspect(&mut self, slot: usize) {
        let suspicion = std::mem::take(&mut self.sequences[slot].suspicion);
        self.suspects.count -= usize::from(suspicion.group != CLEARED);
    }

    /// The groups that the next step may be of, in the order in which they are to be tried. Of suspects the group that was made
    /// first comes first: it is the half of one that has not failed again.
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

    /// A step of this group was laid out.
    pub(crate) const fn note_group(&mut self, group: u64) {
        self.suspects.probed = group != CLEARED;
    }
}
