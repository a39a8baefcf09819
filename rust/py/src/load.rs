//! An open load of an adapter.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::shared::Shared;

/// An adapter to load, instead of the one that has its id already. Dropped without a commit it is answered by an
/// abort, and requests find what they found before.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct Load {
    inner: pie_driver::Load,
    shared: Arc<Shared>,
}

impl Load {
    pub(crate) const fn new(inner: pie_driver::Load, shared: Arc<Shared>) -> Self {
        Self { inner, shared }
    }
}

#[pymethods]
impl Load {
    /// The id that requests bind, at least 1.
    #[getter]
    const fn adapter_id(&self) -> i64 {
        self.inner.id()
    }

    /// Where the adapter lies.
    #[getter]
    fn path(&self) -> &str {
        self.inner.path()
    }

    /// Answers with a status code: 0 = done, requests may bind the adapter from now on; 5 = it cannot be had.
    ///
    /// Args:
    ///     status: The code.
    ///     reason: Why it cannot be had, for the client.
    #[pyo3(signature = (status, reason = ""))]
    fn commit(&mut self, py: Python<'_>, status: i32, reason: &str) -> PyResult<()> {
        let note = self.inner.commit(status, reason);
        self.shared.report(py, note.as_slice())
    }
}
