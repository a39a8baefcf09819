//! What `client`, `lease`, `shared`, `dispatch`, `broadcast`, `words` and `wait` take from the outside world. The
//! model in `rust/ring/model` compiles the same files against its own version of this one.

use std::time::{Duration, UNIX_EPOCH};

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};
pub(crate) use std::time::Instant;

/// Iterations of a spin loop between two reads of the clock: some microseconds.
pub(crate) const SPIN_ITERATIONS: u32 = 256;

/// Sleeps.
pub(crate) fn sleep(duration: Duration) {
    std::thread::sleep(duration);
}

/// Microseconds since the epoch.
pub(crate) fn epoch_us() -> u64 {
    let since = UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
