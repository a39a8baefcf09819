//! The planner, owned by one batch at a time, and other state that batches share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pie_planner::Planner;

use crate::counters::Counters;
use crate::timing::monotonic_ns;

/// A pending update of the planner.
type Change = Box<dyn FnOnce(&mut Planner) + Send>;

/// The planner, which a batch takes and puts back, the response buffer and the counters.
pub(crate) struct SharedPlanner {
    cell: Mutex<PlannerCell>,
    /// Buffer for the response; the ring's own may be written by a client at any time.
    answer: Mutex<Vec<u8>>,
    /// When the last batch was answered, by [`monotonic_ns`].
    answered_ns: AtomicU64,
    counters: Counters,
}

struct PlannerCell {
    /// `None` while a batch has it.
    planner: Option<Box<Planner>>,
    /// Updates to apply when it is back, in order.
    pending: Vec<Change>,
}

/// Idle time between batches counts in the cycle up to this multiple of the device time: an idle client is not a slow one.
const MAX_IDLE: u32 = 16;

impl SharedPlanner {
    pub(crate) fn new(planner: Planner) -> Self {
        // Zeroed lazily by the kernel.
        let answer = vec![0; planner.limits().reply_bytes as usize];
        let counters = Counters::new(planner.limits().total_pages);
        Self {
            cell: Mutex::new(PlannerCell {
                planner: Some(Box::new(planner)),
                pending: Vec::new(),
            }),
            answer: Mutex::new(answer),
            answered_ns: AtomicU64::new(0),
            counters,
        }
    }

    pub(crate) fn take(&self) -> Option<Box<Planner>> {
        self.lock().planner.take()
    }

    pub(crate) fn put_back(&self, mut planner: Box<Planner>) {
        let mut cell = self.lock();
        for change in cell.pending.drain(..) {
            change(&mut planner);
        }
        cell.planner = Some(planner);
    }

    /// Updates the planner now, or when the open batch returns it.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Planner) + Send + 'static) {
        let mut cell = self.lock();
        match cell.planner.as_deref_mut() {
            Some(planner) => change(planner),
            None => cell.pending.push(Box::new(change)),
        }
    }

    pub(crate) const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Records the response to a batch; returns the time since it was received, and since the response before.
    pub(crate) fn cycle(&self, received_ns: u64, busy: Duration) -> (Duration, Duration) {
        let now = monotonic_ns();
        // Ordered by the lock of the planner.
        let before = self.answered_ns.swap(now, Ordering::Relaxed);
        let idle = Duration::from_nanos(received_ns.saturating_sub(before));
        let step = Duration::from_nanos(now.saturating_sub(received_ns));
        (step, step + idle.min(MAX_IDLE * busy))
    }

    /// The response buffer of the open batch.
    pub(crate) fn answer(&self) -> MutexGuard<'_, Vec<u8>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, PlannerCell> {
        self.cell.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
