//! Who enters the queue, in which order, and who gives way where it is full.

use crate::error::Refusal;
use crate::output::Finish;
use crate::scheduler::Scheduler;

/// The rank of a request without a priority: after all others.
const LAST: i64 = i64::MAX / 2;

impl<S> Scheduler<S> {
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
