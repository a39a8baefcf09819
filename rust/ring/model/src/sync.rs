//! What the ring takes from the outside world: atomics and locks of loom, and a clock that stands
//! still until [`pass_time`].

use std::time::Duration;

pub(crate) use loom::hint::spin_loop;
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};

use atomic::{AtomicBool, Ordering};

/// One turn says as much as many.
pub(crate) const TURNS: u32 = 1;

loom::lazy_static! {
    static ref LATE: AtomicBool = AtomicBool::new(false);
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

pub(crate) fn epoch_us() -> u64 {
    0
}
