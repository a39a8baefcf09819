//! What the ring takes from the outside world: atomics and locks of loom, and a clock that stands
//! still until [`pass_time`].

use std::sync::atomic::AtomicUsize;
use std::time::Duration;

pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard, atomic};

use atomic::{AtomicBool, Ordering};

/// One turn says as much as many.
pub(crate) const SPIN_ITERATIONS: u32 = 1;

loom::lazy_static! {
    static ref LATE: AtomicBool = AtomicBool::new(false);
}

loom::lazy_static! {
    /// Turns of spinning that are explored. No part of the model, so no atomic of loom.
    static ref TURNS_LEFT: AtomicUsize = AtomicUsize::new(usize::MAX);
}

/// Explores so many turns of spinning, by all threads together. Two that spin for a third could take
/// turns for ever.
pub(crate) fn limit_turns(turns: usize) {
    TURNS_LEFT.store(turns, Ordering::Relaxed);
}

pub(crate) fn spin_loop() {
    if TURNS_LEFT.fetch_sub(1, Ordering::Relaxed) == 0 {
        // From here on the others have their turns, and a side that spins sees what they do.
        loom::skip_branch();
    }
    loom::hint::spin_loop();
}

/// Lets all time-outs pass.
pub(crate) fn pass_time() {
    LATE.store(true, Ordering::SeqCst);
    crate::futex::time_out();
}

/// A moment: the beginning, or much later.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(Duration);

impl Instant {
    pub(crate) fn now() -> Self {
        let late = LATE.load(Ordering::SeqCst);
        Self(Duration::from_hours(u64::from(late)))
    }

    pub(crate) fn checked_add(self, duration: Duration) -> Option<Self> {
        self.0.checked_add(duration).map(Self)
    }

    pub(crate) fn saturating_duration_since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// Time stands still, so a nap is a chance for the others.
pub(crate) fn sleep(_: Duration) {
    loom::thread::yield_now();
}

pub(crate) fn epoch_us() -> u64 {
    0
}
