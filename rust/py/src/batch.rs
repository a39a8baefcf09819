//! Work that needs the model: a planned batch, or a copy of pages.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pie_batch::Probes;
use pie_ring::Lease;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::error::{RingError, from_stage};
use crate::server::{Report, publish, send_status};

/// What the server and its open batch share.
pub(crate) struct Shared {
    /// Present while no batch is open.
    pub(crate) planner: Mutex<Option<Box<pie_batch::Planner>>>,
    pub(crate) block: PyBuffer<u8>,
    pub(crate) report: Py<PyAny>,
}

/// Nanoseconds of the monotonic clock, which is also Python's `time.perf_counter_ns`.
pub(crate) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// When a batch arrived, and what its host-side steps took.
#[derive(Clone, Copy)]
pub(crate) struct Timing {
    received_ns: u64,
    parse: Duration,
    plan: Duration,
    /// Building the response, up to its publication.
    pub(crate) respond: Duration,
}

impl Timing {
    pub(crate) const fn new(received_ns: u64, parse: Duration, plan: Duration) -> Self {
        Self {
            received_ns,
            parse,
            plan,
            respond: Duration::ZERO,
        }
    }

    pub(crate) fn probes(self, [h2d, kernel_launch, sync]: [u32; 3]) -> Probes {
        Probes {
            wire_parse: micros(self.parse),
            plan: micros(self.plan),
            h2d,
            kernel_launch,
            sync,
        }
    }
}

/// One staged forward pass.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct Pass {
    /// Rows.
    tokens: usize,
    /// Requests.
    requests: usize,
    /// Whether every request has exactly one row.
    decode: bool,
    /// Sum of the KV lengths after the pass.
    seq_lens_sum: u64,
    /// Changed block-table entries.
    updates: usize,
    /// Sampling slots of the pass, over all its groups.
    slots: usize,
}

/// Staged sampling slots: first the greedy ones, then the plain, then the filtered.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct SlotGroup {
    /// Arg-max slots.
    greedy: usize,
    /// Slots that sample the whole distribution.
    plain: usize,
    /// Slots with top-k, top-p or min-p.
    filtered: usize,
}

#[pymethods]
impl SlotGroup {
    /// A group of the given sizes; the planner makes them, tests may.
    #[new]
    #[pyo3(signature = (greedy = 0, plain = 0, filtered = 0))]
    fn new(greedy: usize, plain: usize, filtered: usize) -> Self {
        Self {
            greedy,
            plain,
            filtered,
        }
    }

    fn __len__(&self) -> usize {
        self.greedy + self.plain + self.filtered
    }
}

/// A planned forward request. Stage and run every pass, hand in the tokens of every slot group, then commit. Dropped
/// without a commit it is answered by an abort.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct Batch {
    /// `None` once answered, and for a rehearsal.
    lease: Option<Lease>,
    planner: Option<Box<pie_batch::Planner>>,
    shared: Arc<Shared>,
    timing: Timing,
}

impl Batch {
    pub(crate) const fn new(
        lease: Option<Lease>,
        planner: Box<pie_batch::Planner>,
        shared: Arc<Shared>,
        timing: Timing,
    ) -> Self {
        Self {
            lease,
            planner: Some(planner),
            shared,
            timing,
        }
    }

    fn planner(&mut self) -> PyResult<&mut pie_batch::Planner> {
        self.planner.as_deref_mut().ok_or_else(closed)
    }

    /// Runs `write` on the planner and the staging block, and counts its time as planning.
    fn staging<T>(
        &mut self,
        py: Python<'_>,
        write: impl FnOnce(&mut pie_batch::Planner, &mut [u8]) -> Result<T, pie_batch::StageError>,
    ) -> PyResult<T> {
        let started = Instant::now();
        let shared = Arc::clone(&self.shared);
        let bytes = block_bytes(&shared.block, py);
        let written = write(self.planner()?, bytes).map_err(from_stage);
        self.timing.plan += started.elapsed();
        written
    }
}

/// The staging block as plain bytes.
#[expect(unsafe_code, reason = "the one view over the engine's memory")]
fn block_bytes<'a>(block: &'a PyBuffer<u8>, _attached: Python<'a>) -> &'a mut [u8] {
    // SAFETY: `Server.serve` accepted the buffer as writable and contiguous, and the `PyBuffer` keeps its memory alive.
    // By the contract of `serve` nobody else writes to it, and the engine reads it only between two calls of the one
    // open batch, never while this exclusive slice lives.
    unsafe { std::slice::from_raw_parts_mut(block.buf_ptr().cast::<u8>(), block.len_bytes()) }
}

fn closed() -> PyErr {
    PyRuntimeError::new_err("the batch was already answered")
}

#[pymethods]
impl Batch {
    /// When the request was seen, in nanoseconds of `time.perf_counter_ns`.
    #[getter]
    fn received_ns(&self) -> u64 {
        self.timing.received_ns
    }

    /// Nanoseconds spent on validating the archive.
    #[getter]
    fn parse_ns(&self) -> u64 {
        self.timing.parse.as_nanos() as u64
    }

    /// Nanoseconds spent on planning and staging so far.
    #[getter]
    fn plan_ns(&self) -> u64 {
        self.timing.plan.as_nanos() as u64
    }

    /// Nanoseconds spent on building the response; 0 before the commit.
    #[getter]
    fn respond_ns(&self) -> u64 {
        self.timing.respond.as_nanos() as u64
    }

    /// Requests of the frame.
    #[getter]
    fn requests(&mut self) -> PyResult<usize> {
        Ok(self.planner()?.request_count())
    }

    /// Rows that the model computes, drafts included.
    #[getter]
    fn tokens(&mut self) -> PyResult<usize> {
        Ok(self.planner()?.token_count())
    }

    /// Writes the next pass into the staging block; None when all are done.
    fn stage(&mut self, py: Python<'_>) -> PyResult<Option<Pass>> {
        let pass = self.staging(py, pie_batch::Planner::stage)?;
        Ok(pass.map(|pass| Pass {
            tokens: pass.tokens,
            requests: pass.requests,
            decode: pass.decode,
            seq_lens_sum: pass.seq_lens_sum,
            updates: pass.updates,
            slots: pass.slots,
        }))
    }

    /// Writes the next slot group of the current pass into the staging block; None when all are done.
    fn stage_slots(&mut self, py: Python<'_>) -> PyResult<Option<SlotGroup>> {
        let group = self.staging(py, pie_batch::Planner::stage_slots)?;
        Ok(group.map(|group| SlotGroup {
            greedy: group.greedy,
            plain: group.plain,
            filtered: group.filtered,
        }))
    }

    /// Takes the tokens of the last staged slot group: `[slots]` int64, contiguous.
    ///
    /// Raises:
    ///     StageError: Their number or a value cannot be right.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments from Python are owned"
    )]
    fn put_tokens(&mut self, py: Python<'_>, tokens: PyBuffer<i64>) -> PyResult<()> {
        let tokens = tokens.to_vec(py)?;
        self.planner()?.put_tokens(&tokens).map_err(from_stage)
    }

    /// Builds the response in the slot and publishes it.
    ///
    /// Args:
    ///     h2d_us: Microseconds of host-to-device copies.
    ///     launch_us: Microseconds of issuing the forward pass and sampling.
    ///     sync_us: Microseconds of waiting for the sampled tokens.
    #[pyo3(signature = (*, h2d_us = 0, launch_us = 0, sync_us = 0))]
    fn commit(
        &mut self,
        py: Python<'_>,
        h2d_us: u32,
        launch_us: u32,
        sync_us: u32,
    ) -> PyResult<()> {
        let mut planner = self.planner.take().ok_or_else(closed)?;
        let device_us = [h2d_us, launch_us, sync_us];
        let reports = match self.lease.take() {
            Some(lease) => publish(lease, &mut planner, &mut self.timing, device_us),
            None => Vec::new(),
        };
        self.shared.take_back(planner);
        self.shared.report(py, &reports)
    }

    /// Answers with an abort, after an engine error: the device's block table counts as lost.
    fn fail(&mut self) {
        self.close();
    }
}

impl Batch {
    fn close(&mut self) {
        if let Some(mut planner) = self.planner.take() {
            planner.forget_table();
            self.shared.take_back(planner);
        }
        // Dropping an open lease publishes the abort reply.
        self.lease = None;
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.close();
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from((duration.as_nanos() + 500) / 1000).unwrap_or(u32::MAX)
}

/// A copy of whole KV pages within the device pool. Dropped without a commit it is answered by an abort.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct Copy {
    lease: Option<Lease>,
    driver_id: u32,
    /// Pages to read.
    #[pyo3(get)]
    sources: Vec<u32>,
    /// Pages to write, pair by pair with the sources.
    #[pyo3(get)]
    targets: Vec<u32>,
}

impl Copy {
    pub(crate) const fn new(
        lease: Lease,
        driver_id: u32,
        sources: Vec<u32>,
        targets: Vec<u32>,
    ) -> Self {
        Self {
            lease: Some(lease),
            driver_id,
            sources,
            targets,
        }
    }
}

#[pymethods]
impl Copy {
    /// Answers with a status code: 0 = done, 5 = internal failure.
    fn commit(&mut self, status: i32) -> PyResult<()> {
        let lease = self
            .lease
            .take()
            .ok_or_else(|| PyRuntimeError::new_err("the copy was already answered"))?;
        // A client that gave up on a copy ignores its status; nothing is left to tell.
        match send_status(lease, self.driver_id, status) {
            Ok(()) | Err(Report { kind: "stale", .. }) => Ok(()),
            Err(report) => Err(RingError::new_err(report.text)),
        }
    }
}
