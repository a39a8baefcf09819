//! Wait strategies for a condition that another process sets: spin, spin then park, or park.
//!
//! Parking loses no wake-up because of its order: take a snapshot of the wake counter, check the
//! condition, sleep only while the counter still equals the snapshot. The other side makes the
//! condition true first and raises the counter second.

use std::time::Duration;

use crate::error::SystemError;
use crate::futex;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Instant, SPIN_ITERATIONS, spin_loop};

/// Wait strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Never sleep: lowest latency, one core fully used, and no system call as long as the other side spins, too. A
    /// sleeping other side is woken a little later.
    Spin,
    /// Spin for this long, then sleep.
    SpinThenPark(Duration),
    /// Sleep at once.
    Park,
}

impl Wait {
    /// The strategy of a budget in microseconds: 0 parks, `u64::MAX` spins forever, and any other budget is the time to spin
    /// before it parks.
    pub fn from_spin_budget_us(budget: u64) -> Self {
        match budget {
            0 => Self::Park,
            u64::MAX => Self::Spin,
            micros => Self::SpinThenPark(Duration::from_micros(micros)),
        }
    }
}

/// Waits until `ready` returns a value; `None` on timeout. `word` is the wake counter that the other side increments after it made
/// `ready` true. `idle` is called every few microseconds of spinning.
pub(crate) fn until<T>(
    wait: Wait,
    word: &AtomicU32,
    timeout: Option<Duration>,
    mut ready: impl FnMut() -> Option<T>,
    idle: impl FnMut(),
) -> Result<Option<T>, SystemError> {
    if let Some(value) = ready() {
        return Ok(Some(value));
    }
    let budget = match wait {
        Wait::Spin => return Ok(spin(timeout, &mut ready, idle)),
        Wait::SpinThenPark(budget) => budget,
        Wait::Park => Duration::ZERO,
    };
    // A limit beyond the clock's range means no limit.
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    if !budget.is_zero() {
        let budget = timeout.map_or(budget, |timeout| timeout.min(budget));
        if let Some(value) = spin(Some(budget), &mut ready, idle) {
            return Ok(Some(value));
        }
    }
    park(word, deadline, ready)
}

/// Spins until `ready`, or for `limit`. The clock is first read after one round of spinning.
fn spin<T>(
    limit: Option<Duration>,
    ready: &mut impl FnMut() -> Option<T>,
    mut idle: impl FnMut(),
) -> Option<T> {
    let mut end = None;
    loop {
        for _ in 0..SPIN_ITERATIONS {
            if let Some(value) = ready() {
                return Some(value);
            }
            spin_loop();
        }
        idle();
        if let Some(limit) = limit {
            let now = Instant::now();
            // As above: a limit beyond the clock's range means no limit.
            let end = *end.get_or_insert_with(|| now.checked_add(limit));
            if end.is_some_and(|end| now >= end) {
                return None;
            }
        }
    }
}

/// Parks on a futex until `ready`, or until `deadline`.
fn park<T>(
    word: &AtomicU32,
    deadline: Option<Instant>,
    mut ready: impl FnMut() -> Option<T>,
) -> Result<Option<T>, SystemError> {
    loop {
        // SYNC: pairs with the releases of new values of the wake counters (client: `send`, `abort`;
        // server: `Lease::publish`, `Shared::wake_server`; `Broadcast::publish`). A new value brings
        // the condition along.
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
            let limit = Some(Duration::from_millis(20));
            let wait = Wait::from_spin_budget_us(budget);
            let result = until(wait, &word, limit, || None::<()>, || ());
            assert_eq!(result.unwrap(), None);
            assert!(start.elapsed() >= Duration::from_millis(20), "{wait:?}");
        }
    }

    #[test]
    fn a_ready_condition_needs_no_time() {
        let word = AtomicU32::new(0);
        for budget in [0, 1000, u64::MAX] {
            let wait = Wait::from_spin_budget_us(budget);
            let result = until(wait, &word, Some(Duration::ZERO), || Some(7), || ());
            assert_eq!(result.unwrap(), Some(7));
        }
    }
}
