//! What the other ranks of a model do.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::Mutex;

use pie_driver::{Worker, WorkerError};
use pie_ring::Wait;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::from_ring;
use crate::graph_path::GraphPath;

/// A rank's end of a `Broadcast`: iterates over the commands, and does in between what needs no Python. It keeps the staging
/// block as the leader's is, and runs the leader's steps on its own graph path.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Follower {
    /// Locked while a thread waits for a command, and never with the GIL held.
    follow: Mutex<Worker>,
    block: PyBuffer<u8>,
}

#[pymethods]
impl Follower {
    /// Follower number `index`, from 0.
    ///
    /// Args:
    ///     fd: `Broadcast.fd`, inherited; the follower takes it.
    ///     index: Which follower this is; each can be taken once.
    ///     block: This rank's staging block: writable bytes that only the engine reads.
    ///     spin_budget_us: As `Server`.
    ///     graph_path: Runs the leader's steps.
    ///
    /// Raises:
    ///     RingError: The descriptor is not of a broadcast, or the follower is taken.
    ///     ValueError: The block is not writable, or the graph path already serves.
    #[new]
    #[pyo3(signature = (fd, index, block, *, spin_budget_us, graph_path = None))]
    #[expect(unsafe_code, reason = "descriptors come from Python as numbers")]
    fn new(
        fd: RawFd,
        index: usize,
        block: PyBuffer<u8>,
        spin_budget_us: u64,
        graph_path: Option<&GraphPath>,
    ) -> PyResult<Self> {
        if block.readonly() || !block.is_c_contiguous() {
            let text = "the staging block must be writable and contiguous";
            return Err(PyValueError::new_err(text));
        }
        if fd < 0 {
            return Err(PyValueError::new_err(format!("{fd} is not a descriptor")));
        }
        let wait = Wait::from_spin_budget_us(spin_budget_us);
        let graph_path = graph_path
            .map(|graph_path| graph_path.take(wait))
            .transpose()?;
        // SAFETY: not negative, and by the docstring nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let follow = Worker::open(fd, index, graph_path, wait).map_err(from_ring)?;
        Ok(Self {
            follow: Mutex::new(follow),
            block,
        })
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// Waits for the next command, without the GIL. It does not end by itself.
    #[expect(unsafe_code, reason = "a view over the engine's memory")]
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let (address, size) = (
            self.block.buf_ptr().expose_provenance(),
            self.block.len_bytes(),
        );
        let command = py.detach(|| {
            let mut follow = self
                .follow
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            let start = std::ptr::with_exposed_provenance_mut::<u8>(address);
            // SAFETY: `new` accepted the buffer as writable and contiguous, and it keeps its memory alive. The engine reads it
            // when it runs a command, and no such slice lives then. A step of the graph path, which may be a call of Python while
            // this one lives, reads only the graph path's memory. The lock keeps other callers away.
            follow.next(unsafe { std::slice::from_raw_parts_mut(start, size) })
        });
        match command {
            Ok(command) => Ok(PyBytes::new(py, &command)),
            Err(WorkerError::Ring(error)) => Err(from_ring(error)),
            Err(error) => Err(PyRuntimeError::new_err(error.to_string())),
        }
    }
}

/// Has the kernel kill this process as soon as its parent dies, which must be the process `parent`; ends it at once if it is
/// another.
#[pyfunction]
pub(crate) fn die_with_parent(parent: u32) -> PyResult<()> {
    pie_ring::die_with_parent(parent).map_err(from_ring)
}
