//! What methods of a runtime have in common.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pie_runtime::{Constrain, Sampling};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::Runtime;
use super::settings::{seconds, value_error};

/// How often a wait looks for Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(100);

impl Runtime {
    pub(super) fn bind(&self, kind: &str, text: String) -> PyResult<Arc<dyn Constrain>> {
        let grammars = self.grammars.as_ref().ok_or_else(|| {
            value_error("a grammar needs the bytes of tokens: give the runtime a `vocabulary`")
        })?;
        grammars.bind(kind, text)
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
