//! A match of the prefix index, and the lock that it may hold.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arrays::{Array, NodeNumber};
use crate::radix::RadixIndex;

/// The longest cached prefix of a key. One of `match_and_lock` is a context manager that holds its lock.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Match {
    /// Pages of the prefix on the device, int32.
    pages: Array,
    found: pie_radix::Match,
    /// The index in which a lock is held.
    index: Option<Py<RadixIndex>>,
    held: AtomicBool,
}

impl Match {
    /// A match, with a lock in `index`.
    pub(crate) fn new(
        pages: Array,
        found: pie_radix::Match,
        index: Option<Py<RadixIndex>>,
    ) -> Self {
        let held = AtomicBool::new(index.is_some());
        Self {
            pages,
            found,
            index,
            held,
        }
    }

    pub(crate) fn found(&self) -> &pie_radix::Match {
        &self.found
    }
}

#[pymethods]
impl Match {
    /// Pages of the prefix that are on the device, int32.
    #[getter]
    fn pages(&self, py: Python<'_>) -> Array {
        self.pages.clone_ref(py)
    }

    /// The node in which the prefix ends, on any tier; 0 if nothing matched.
    #[getter]
    fn node(&self) -> u64 {
        self.found.node.to_bits()
    }

    /// The node in which the prefix ends on the device.
    #[getter]
    fn device_node(&self) -> u64 {
        self.found.device_node.to_bits()
    }

    /// Pages after those of the device that are on the host.
    #[getter]
    fn host_pages(&self) -> usize {
        self.found.host_pages
    }

    /// Gives the lock back.
    ///
    /// Raises:
    ///     RuntimeError: There is none: it was given back before, or the match came from `match_prefix`.
    fn unlock(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.held.swap(false, Ordering::Relaxed);
        let index = self.index.as_ref().filter(|_| held);
        let index = index.ok_or_else(|| PyRuntimeError::new_err("this match holds no lock"))?;
        index
            .borrow_mut(py)
            .unlock(NodeNumber(self.found.node))
            .map(drop)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if self.held.load(Ordering::Relaxed) {
            self.unlock(py)
        } else {
            Ok(())
        }
    }

    fn __repr__(&self) -> String {
        let held = if self.held.load(Ordering::Relaxed) {
            ", locked"
        } else {
            ""
        };
        format!(
            "Match(node={}, device_pages={}, host_pages={}{held})",
            self.node(),
            self.found.device_pages,
            self.found.host_pages
        )
    }
}
