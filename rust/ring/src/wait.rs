//! Waiting for a condition that another process makes true: spin, spin then park, or park.
//!
//! Parking loses no wake-up because of its order: take a snapshot of the wake counter, check the
//! condition, sleep only while the counter still equals the snapshot. The other side makes the
//! condition true first and raises the counter second.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::error::RingError;
use crate::futex;

/// The clock is read once per this many turns of a spin loop.
const TURNS_PER_CLOCK_READ: u32 = 256;

/// How to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Never sleep: lowest latency, one core fully used. A server makes no system call.
    Spin,
    /// Spin for this long, then sleep.
    SpinThenPark(Duration),
    /// Sleep at once.
    Park,
}

impl Wait {
    /// The strategy behind the launcher's `spin_budget_us`: 0 parks, `u64::MAX` spins forever,
    /// anything else spins that many microseconds before it parks.
    pub fn from_spin_budget_us(budget: u64) -> Self {
        match budget {
            0 => Self::Park,
            u64::MAX => Self::Spin,
            micros => Self::SpinThenPark(Duration::from_micros(micros)),
        }
    }
}

/// Waits until `ready` gives a value; `None` once the deadline has passed. `word` is the wake
/// counter that the other side raises after it made `ready` true.
pub(crate) fn until<T>(
    wait: Wait,
    word: &AtomicU32,
    deadline: Option<Instant>,
    mut ready: impl FnMut() -> Option<T>,
) -> Result<Option<T>, RingError> {
    if let Some(value) = ready() {
        return Ok(Some(value));
    }
    match wait {
        Wait::Spin => Ok(spin(deadline, &mut ready)),
        Wait::SpinThenPark(budget) => {
            let limit = Instant::now().checked_add(budget);
            let limit = limit.into_iter().chain(deadline).min();
            match spin(limit, &mut ready) {
                Some(value) => Ok(Some(value)),
                None => park(word, deadline, ready),
            }
        }
        Wait::Park => park(word, deadline, ready),
    }
}

/// Spins until `ready` or `limit`. Without a limit the clock is never read.
fn spin<T>(limit: Option<Instant>, ready: &mut impl FnMut() -> Option<T>) -> Option<T> {
    loop {
        for _ in 0..TURNS_PER_CLOCK_READ {
            if let Some(value) = ready() {
                return Some(value);
            }
            std::hint::spin_loop();
        }
        if limit.is_some_and(|limit| Instant::now() >= limit) {
            return None;
        }
    }
}

fn park<T>(
    word: &AtomicU32,
    deadline: Option<Instant>,
    mut ready: impl FnMut() -> Option<T>,
) -> Result<Option<T>, RingError> {
    loop {
        // SYNC: pairs with the release increments of the wake counters (client: `send`, `abort`;
        // server: `Lease::publish`, `Shared::wake_server`). A new value brings the condition along.
        let snapshot = word.load(Ordering::Acquire);
        if let Some(value) = ready() {
            return Ok(Some(value));
        }
        let remaining = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if remaining.is_some_and(|left| left.is_zero()) {
            return Ok(None);
        }
        futex::wait(word, snapshot, remaining)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets() {
        assert_eq!(Wait::from_spin_budget_us(0), Wait::Park);
        assert_eq!(Wait::from_spin_budget_us(u64::MAX), Wait::Spin);
        let expected = Wait::SpinThenPark(Duration::from_millis(1));
        assert_eq!(Wait::from_spin_budget_us(1000), expected);
    }

    #[test]
    fn every_strategy_keeps_the_deadline() {
        let word = AtomicU32::new(0);
        for budget in [0, 1, 1000, u64::MAX - 1, u64::MAX] {
            let start = Instant::now();
            let deadline = Some(start + Duration::from_millis(20));
            let wait = Wait::from_spin_budget_us(budget);
            assert_eq!(until(wait, &word, deadline, || None::<()>).unwrap(), None);
            assert!(start.elapsed() >= Duration::from_millis(20), "{wait:?}");
        }
    }

    #[test]
    fn a_ready_condition_needs_no_time() {
        let word = AtomicU32::new(0);
        for budget in [0, 1000, u64::MAX] {
            let wait = Wait::from_spin_budget_us(budget);
            assert_eq!(
                until(wait, &word, Some(Instant::now()), || Some(7)).unwrap(),
                Some(7)
            );
        }
    }
}
