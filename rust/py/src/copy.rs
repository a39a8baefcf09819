//! An open copy of pages.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::shared::Shared;

/// A copy of whole KV pages within or between the device pool and the host pool, or of recurrent state. Dropped without a commit it is answered
/// by an abort.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct Copy {
    inner: pie_driver::Copy,
    shared: Arc<Shared>,
}

impl Copy {
    pub(crate) const fn new(inner: pie_driver::Copy, shared: Arc<Shared>) -> Self {
        Self { inner, shared }
    }
}

#[pymethods]
impl Copy {
    /// Number of pages or slots.
    fn __len__(&self) -> usize {
        self.inner.len()
    }

    /// The pools of sources and targets: `"D2H"`, `"H2D"`, `"D2D"` or `"H2H"`, with D for device and H for host.
    #[getter]
    fn direction(&self) -> String {
        format!("{:?}", self.inner.direction())
    }

    /// Whether slots of recurrent state are copied, not pages.
    #[getter]
    fn states(&self) -> bool {
        self.inner.states()
    }

    /// Sources and targets, cut so that copying the parts in order, and each of them at once, gives the result of
    /// copying pair by pair. Only lists that overlap have more than one part.
    fn groups(&self) -> Vec<(&[u32], &[u32])> {
        self.inner.batches().collect()
    }

    /// Answers with a status code: 0 = done, 5 = internal failure.
    fn commit(&mut self, py: Python<'_>, status: i32) -> PyResult<()> {
        let note = self.inner.commit(status);
        self.shared.report(py, note.as_slice())
    }
}
