//! What a model's first rank sends to the others.

use std::os::fd::RawFd;

use pie_driver::Leader;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::from_ring;

/// Sends the other ranks of a model what this one is about to do, in shared memory without a name.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Broadcast {
    pub(crate) lead: Leader,
}

#[pymethods]
impl Broadcast {
    /// A broadcast to `followers` others.
    ///
    /// Raises:
    ///     RingError: The memory cannot be had.
    #[new]
    fn new(followers: usize) -> PyResult<Self> {
        let lead = Leader::new(followers).map_err(from_ring)?;
        Ok(Self { lead })
    }

    /// The descriptor that the followers' processes must inherit.
    #[getter]
    fn fd(&self) -> RawFd {
        self.lead.fd()
    }

    /// Hands a command to the followers, in the order of everything else that is sent.
    ///
    /// Args:
    ///     parts: Contiguous buffers, which a follower gets as one. They are copied straight into the memory that it reads, and must
    ///         not be written to meanwhile.
    ///
    /// Raises:
    ///     RingError: A follower has spoilt the memory.
    ///     ValueError: A buffer is not contiguous.
    #[expect(unsafe_code, reason = "views over the parts' memory")]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments from Python are owned"
    )]
    fn send(&self, py: Python<'_>, parts: Vec<PyBuffer<u8>>) -> PyResult<()> {
        if !parts.iter().all(|part| part.is_c_contiguous()) {
            return Err(PyValueError::new_err("a part is not contiguous"));
        }
        let parts: Vec<&[u8]> = parts
            .iter()
            .filter(|part| part.len_bytes() > 0)
            .map(|part| {
                // SAFETY: contiguous and so long; the `PyBuffer` keeps its memory alive. By the docstring nothing writes to it:
                // it is an object of bytes, or pixels of an open batch, which nothing changes.
                unsafe { std::slice::from_raw_parts(part.buf_ptr().cast::<u8>(), part.len_bytes()) }
            })
            .collect();
        py.detach(|| self.lead.command(&parts)).map_err(from_ring)
    }

    /// Hands the first `end` bytes of the staging block to the followers.
    ///
    /// Raises:
    ///     RingError: A follower has spoilt the memory.
    ///     ValueError: The block is shorter.
    #[expect(unsafe_code, reason = "a view over the engine's memory")]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments from Python are owned"
    )]
    fn send_block(&self, py: Python<'_>, block: PyBuffer<u8>, end: usize) -> PyResult<()> {
        let size = block.len_bytes();
        if end > size || !block.is_c_contiguous() {
            let text = format!("the block is contiguous and has {size} bytes, not {end}");
            return Err(PyValueError::new_err(text));
        }
        // SAFETY: contiguous and at least `end` bytes long; the `PyBuffer` keeps its memory alive. The planner writes to it in
        // calls of the open batch only, and by the engine's contract none runs at the same time.
        let data = unsafe { std::slice::from_raw_parts(block.buf_ptr().cast::<u8>(), end) };
        py.detach(|| self.lead.block(data)).map_err(from_ring)
    }
}
