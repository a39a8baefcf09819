//! Waiting without Python's lock.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

use super::settings::seconds;

/// How often signals are checked.
const SIGNALS: Duration = Duration::from_millis(100);

/// Calls `poll` without Python's lock, for a short time each, until it has something or the time is over. Ctrl-C ends it.
pub(crate) fn wait<R: Send>(
    py: Python<'_>,
    timeout_s: Option<f64>,
    poll: impl Fn(Duration) -> Option<R> + Sync,
) -> PyResult<Option<R>> {
    let limit = timeout_s.map(|limit| seconds("timeout_s", limit));
    let until = limit
        .transpose()?
        .and_then(|limit| Instant::now().checked_add(limit));
    loop {
        let left = until.map_or(Duration::MAX, |until| {
            until.saturating_duration_since(Instant::now())
        });
        let found = py.detach(|| poll(left.min(SIGNALS)));
        if found.is_some() || left.is_zero() {
            return Ok(found);
        }
        py.check_signals()?;
    }
}
