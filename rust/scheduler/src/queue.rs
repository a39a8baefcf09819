//! The queue: priorities, and its size limit.

use crate::error::ValidationError;
use crate::output::Finish;
use crate::scheduler::Scheduler;

/// Rank of requests without priority: last.
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

    /// Makes space in the queue for a request of this rank, by ending waiting sequences of a worse one.
    pub(crate) fn make_queue_space(
        &mut self,
        samples: u32,
        rank: i64,
    ) -> Result<(), ValidationError> {
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
            return Err(ValidationError::QueueFull { waiting, limit });
        }
        for (.., slot) in worse.into_iter().rev().take(excess) {
            self.finish(slot, 0, Finish::Displaced);
        }
        self.remove_finished();
        Ok(())
    }
}
