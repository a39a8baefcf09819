//! What the server and its jobs share.

use pie_driver::LogLine;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// What the server and its jobs share of Python's: the staging block and the log.
pub(crate) struct Shared {
    block: PyBuffer<u8>,
    report: Py<PyAny>,
}

impl Shared {
    pub(crate) fn new(block: PyBuffer<u8>, needed: usize, report: Py<PyAny>) -> PyResult<Self> {
        if block.readonly() || !block.is_c_contiguous() || block.len_bytes() < needed {
            return Err(PyValueError::new_err(format!(
                "the staging block must be writable, contiguous and at least {needed} bytes; it has {}",
                block.len_bytes()
            )));
        }
        Ok(Self { block, report })
    }

    pub(crate) fn report(&self, py: Python<'_>, notes: &[LogLine]) -> PyResult<()> {
        notes
            .iter()
            .try_for_each(|note| self.report.call1(py, (note.kind, &note.text)).map(drop))
    }

    /// The staging block as plain bytes.
    #[expect(unsafe_code, reason = "the one view over the engine's memory")]
    pub(crate) fn block_bytes<'a>(&'a self, _attached: Python<'a>) -> &'a mut [u8] {
        // SAFETY: `new` accepted the buffer as writable and contiguous, and the `PyBuffer` keeps its memory alive. By
        // the contract of `Server.serve` nothing else writes to it, and the engine reads it only between two calls of
        // the one open batch, never while this exclusive slice lives.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.block.buf_ptr().cast::<u8>(),
                self.block.len_bytes(),
            )
        }
    }
}
