//! Clean exit on SIGTERM and on the parent's death.

use pyo3::prelude::*;

use crate::error::from_ring;

/// Ends the process with status 0 on SIGTERM and when the parent dies, and removes its regions first, whatever the other
/// threads do. A line on stderr says why, unless stderr cannot take it at once. The regions of a process that is killed are
/// removed by another process, which is forked off here. One guard per process.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct ExitGuard {
    pub(crate) inner: pie_ring::ExitGuard,
}

#[pymethods]
impl ExitGuard {
    /// Handles SIGTERM and watches the parent from now on.
    ///
    /// Raises:
    ///     RingError: The process has a guard already, or the handler cannot be set.
    #[new]
    fn new() -> PyResult<Self> {
        let inner = pie_ring::ExitGuard::install_named("pie_driver_sglang").map_err(from_ring)?;
        Ok(Self { inner })
    }

    /// Removes the regions and ends the process at once, from any thread and whatever the others do.
    fn exit(&self, status: i32) {
        self.inner.exit(status);
    }

    /// Changes the line that says why the process ends.
    ///
    /// Args:
    ///     form: The line, with `{text}` for the reason, and `{time}` (`YYYY-MM-DD HH:MM:SS.mmm`) or `{iso}` (as in ISO 8601)
    ///         for the local time.
    fn set_last_line(&self, form: String) {
        self.inner.set_last_line(form);
    }

    /// A guard that handles nothing, for a host with its own signal handling.
    #[staticmethod]
    fn inert() -> Self {
        Self {
            inner: pie_ring::ExitGuard::inert(),
        }
    }
}
