//! The planner, which one batch at a time has, and what batches share besides it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pie_planner::Planner;

use crate::counters::Counters;
use crate::timing::monotonic_ns;

/// What the planner is to learn.
type Change = Box<dyn FnOnce(&mut Planner) + Send>;

/// The planner, which a batch takes and puts back, and what batches share besides it.
pub(crate) struct SharedPlanner {
    place: Mutex<Place>,
    /// The answer under construction, as large as any. The ring's own buffer is not the place for that: its client may write
    /// there at any time.
    answer: Mutex<Vec<u8>>,
    /// When the last batch was answered, by [`monotonic_ns`].
    answered_ns: AtomicU64,
    counters: Counters,
}

struct Place {
    /// `None` while a batch has it.
    planner: Option<Box<Planner>>,
    /// What it learns when it is back, in this order.
    later: Vec<Change>,
}

/// Idle time between two batches counts as part of the cycle up to so many times the device's own: a client that has nothing
/// to do for a while is not a slow client.
const MAX_IDLE: u32 = 16;

impl SharedPlanner {
    pub(crate) fn new(planner: Planner) -> Self {
        // Pages of it take memory once they are written.
        let answer = vec![0; planner.limits().reply_bytes as usize];
        let counters = Counters::new(planner.limits().total_pages);
        Self {
            place: Mutex::new(Place {
                planner: Some(Box::new(planner)),
                later: Vec::new(),
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
        let mut place = self.lock();
        for change in place.later.drain(..) {
            change(&mut planner);
        }
        place.planner = Some(planner);
    }

    /// Changes the planner; if a batch has it, as soon as it is back, so before it plans another one.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Planner) + Send + 'static) {
        let mut place = self.lock();
        match place.planner.as_deref_mut() {
            Some(planner) => change(planner),
            None => place.later.push(Box::new(change)),
        }
    }

    pub(crate) const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Notes that a batch has been answered, which was received at `received_ns` and kept the device `busy`; returns how
    /// long after it was received, and how long after the batch before.
    pub(crate) fn cycle(&self, received_ns: u64, busy: Duration) -> (Duration, Duration) {
        let now = monotonic_ns();
        // Batches are answered one after the other, and the planner goes from one to the next by its lock.
        let before = self.answered_ns.swap(now, Ordering::Relaxed);
        let idle = Duration::from_nanos(received_ns.saturating_sub(before));
        let step = Duration::from_nanos(now.saturating_sub(received_ns));
        (step, step + idle.min(MAX_IDLE * busy))
    }

    /// Memory for the answer of the open batch.
    pub(crate) fn answer(&self) -> MutexGuard<'_, Vec<u8>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
