//! What methods of a runtime have in common.

use std::time::{Duration, Instant};

use pie_runtime::{LogprobParams, Sampling};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::Runtime;
use super::settings::{seconds, value_error};

/// How often a wait looks for Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(100);

impl Runtime {
    /// Log-probabilities must be of tokens that the model has.
    pub(super) fn check_logprobs(&self, params: &LogprobParams, prompt: usize) -> PyResult<()> {
        let caps = self.service.capabilities();
        let vocab_size = caps.map_or(u32::MAX, |caps| caps.vocab_size);
        params.check(prompt, vocab_size).map_err(value_error)
    }

    /// Biases must be of tokens that the model has.
    pub(super) fn check_biases(&self, sampling: &Sampling) -> PyResult<()> {
        let Some(&largest) = sampling.logit_bias.iter().map(|(token, _)| token).max() else {
            return Ok(());
        };
        let limit = self.service.capabilities().map(|caps| caps.vocab_size);
        match limit.filter(|&limit| largest >= limit) {
            None => Ok(()),
            Some(limit) => Err(PyValueError::new_err(format!(
                "logit_bias has token {largest}, it must be below {limit}"
            ))),
        }
    }
}

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
