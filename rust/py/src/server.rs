//! The region and the work that comes through it.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pie_driver::{Event, Responder};
use pie_ring::{LayoutError, RegionLayout, ServerConfig, Wait};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::batch::Batch;
use crate::copy::Copy;
use crate::counts::Counts;
use crate::error::{from_loss, from_ring, from_warm_up};
use crate::graph_path::GraphPath;
use crate::guard::ExitGuard;
use crate::load::Load;
use crate::planner::Planner;
use crate::shared::Shared;
use crate::step::{Step, Wake};

/// Owns the shared-memory region and iterates over the work that needs Python: `Batch`, `Copy` and `Load` objects, and `Wake` where another
/// thread has called `wake`. Everything
/// else (malformed frames, health checks, frames without tokens, unsupported operations) is answered without it.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Server {
    /// Locked while a thread waits for work, and never with the GIL held.
    ring: Mutex<pie_ring::Server>,
    stop: pie_ring::Stop,
    waker: pie_ring::Waker,
    layout: RegionLayout,
    name: String,
    wait: Wait,
    serving: OnceLock<Serving>,
}

struct Serving {
    responder: Responder,
    shared: Arc<Shared>,
}

/// What Python gets to do.
#[derive(IntoPyObject)]
enum Job {
    Batch(Py<Batch>),
    Copy(Py<Copy>),
    Step(Py<Step>),
    Load(Py<Load>),
    Wake(Py<Wake>),
}

#[pymethods]
impl Server {
    /// Creates the region `name`, waiting up to `takeover_s` seconds for a live owner to leave.
    ///
    /// Args:
    ///     name: POSIX name, `/pie_shmem_g<group_id>`.
    ///     guard: Removes the region when the process must end.
    ///     spin_budget_us: Microseconds to spin before parking; 0 parks at once, 2**64 - 1 never parks.
    ///     takeover_s: Seconds to wait for a live owner.
    ///     min_request_bytes: Size of the largest request to expect; enlarges the region where it must.
    ///
    /// Raises:
    ///     RingError: Another driver owns the name, or the memory cannot be had.
    #[new]
    #[pyo3(signature = (name, guard, *, spin_budget_us, takeover_s = 5.0, min_request_bytes = 0))]
    fn new(
        py: Python<'_>,
        name: String,
        guard: &ExitGuard,
        spin_budget_us: u64,
        takeover_s: f64,
        min_request_bytes: usize,
    ) -> PyResult<Self> {
        let abort = pie_wire::abort_frame(0).to_vec();
        let mut config = ServerConfig::new(&name, pie_wire::SCHEMA_HASH, abort);
        config.takeover = Duration::try_from_secs_f64(takeover_s).map_err(|error| {
            PyValueError::new_err(format!("takeover_s is {takeover_s}: {error}"))
        })?;
        config.layout = fit(config.layout, min_request_bytes).map_err(from_ring)?;
        let ring = py
            .detach(|| pie_ring::Server::create(&config, &guard.inner))
            .map_err(from_ring)?;
        Ok(Self {
            stop: ring.stop_handle(),
            waker: ring.waker(),
            layout: config.layout,
            name,
            wait: Wait::from_spin_budget_us(spin_budget_us),
            serving: OnceLock::new(),
            ring: Mutex::new(ring),
        })
    }

    /// Name of the region.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Bytes that one request may have.
    #[getter]
    fn request_capacity(&self) -> usize {
        self.layout.request_capacity()
    }

    /// Bytes that one response may have.
    #[getter]
    fn response_capacity(&self) -> usize {
        self.layout.response_capacity()
    }

    /// Takes the planner and the staging block; iterate over the server afterwards.
    ///
    /// Args:
    ///     planner: It cannot be used by anyone else from now on.
    ///     block: Writable bytes, at least `planner.block_bytes` of them. The engine must not write to them.
    ///     report: Called as `report(kind, text)` for what deserves a log line.
    ///     host_pages: Size of the engine's host pool; 0 for none.
    ///     graph_path: Answers the batches that its graphs can run, without Python.
    ///     steps: Iterate over these too, as `Step` objects, once they are answered.
    ///
    /// Raises:
    ///     ValueError: The block is too small or not writable, or planner or graph path were given away before.
    ///     RuntimeError: The server serves already.
    #[pyo3(signature = (planner, block, report, *, host_pages = 0, graph_path = None, steps = false))]
    fn serve(
        &self,
        planner: &mut Planner,
        block: PyBuffer<u8>,
        report: Py<PyAny>,
        host_pages: u32,
        graph_path: Option<&GraphPath>,
        steps: bool,
    ) -> PyResult<()> {
        let shared = Shared::new(block, planner.block_bytes(), report)?;
        let planner = planner
            .inner
            .take()
            .ok_or_else(|| PyValueError::new_err("the planner already serves"))?;
        let mut responder = Responder::new(planner, host_pages, self.wait);
        if let Some(graph_path) = graph_path {
            responder = responder.with_graph_path(graph_path.take(self.wait)?);
        }
        if steps {
            responder = responder.with_steps();
        }
        let shared = Arc::new(shared);
        let started = self.serving.set(Serving { responder, shared });
        started.map_err(|_| PyRuntimeError::new_err("the server serves already"))
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// Waits for the next job, without the GIL; ends when the server was stopped.
    ///
    /// Raises:
    ///     LostError: The device can run nothing any more, or a step failed on one rank of several, so that none can continue.
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Job>> {
        let Serving { responder, shared } = self.serving.get().ok_or_else(not_serving)?;
        loop {
            let event = py
                .detach(|| responder.next(&mut self.ring()))
                .map_err(from_ring)?;
            let job = match event {
                Event::Stopped => return Ok(None),
                Event::Woken => Job::Wake(Py::new(py, Wake)?),
                Event::LogLines(notes) => {
                    shared.report(py, &notes)?;
                    continue;
                }
                Event::DeviceLost(error) => return Err(from_loss(&error)),
                Event::Step(step) => {
                    shared.report(py, &step.log_lines)?;
                    Job::Step(Py::new(py, Step::new(&step))?)
                }
                Event::Job(pie_driver::Job::Batch(batch)) => {
                    Job::Batch(Py::new(py, Batch::new(batch, Arc::clone(shared)))?)
                }
                Event::Job(pie_driver::Job::Copy(copy)) => {
                    Job::Copy(Py::new(py, Copy::new(copy, Arc::clone(shared)))?)
                }
                Event::Job(pie_driver::Job::Load(load)) => {
                    Job::Load(Py::new(py, Load::new(load, Arc::clone(shared)))?)
                }
            };
            return Ok(Some(job));
        }
    }

    /// What was served so far, without the warm-up; may be called from any thread, and delays no batch.
    ///
    /// Raises:
    ///     RuntimeError: `serve` was not called.
    fn counts(&self) -> PyResult<Counts> {
        let Serving { responder, .. } = self.serving.get().ok_or_else(not_serving)?;
        Ok(Counts::new(responder.counts()))
    }

    /// Plans a request frame of the caller's own, for warm-up: its answer goes nowhere. It may bind `WARM_UP_ADAPTER`.
    ///
    /// Raises:
    ///     RuntimeError: `serve` was not called, or a batch is open.
    ///     WireError: The bytes are not a forward frame, or its arrays contradict each other.
    fn warm_up(&self, frame: &[u8]) -> PyResult<Batch> {
        let Serving { responder, shared } = self.serving.get().ok_or_else(not_serving)?;
        let batch = responder
            .warm_up(frame)
            .map_err(|error| from_warm_up(&error))?;
        Ok(Batch::new(batch, Arc::clone(shared)))
    }

    /// Runs a request frame of the caller's own on the graph path, for warm-up: its answer goes nowhere.
    ///
    /// Returns:
    ///     Whether the graph path took it.
    ///
    /// Raises:
    ///     RuntimeError: As `warm_up`, or the graph path failed.
    ///     WireError: As `warm_up`.
    fn warm_up_graph_path(&self, py: Python<'_>, frame: &[u8]) -> PyResult<bool> {
        let Serving { responder, .. } = self.serving.get().ok_or_else(not_serving)?;
        py.detach(|| responder.warm_up_graph_path(frame))
            .map_err(|error| from_warm_up(&error))
    }

    /// Rejects requests for hidden states of another size than `size`, each by itself; before, any size is accepted.
    ///
    /// Args:
    ///     size: Numbers of a hidden state of the model.
    ///
    /// Raises:
    ///     RuntimeError: `serve` was not called.
    fn set_hidden_size(&self, size: u32) -> PyResult<()> {
        let Serving { responder, .. } = self.serving.get().ok_or_else(not_serving)?;
        responder.set_hidden_size(size);
        Ok(())
    }

    /// Replaces the device slots of adapters, for the steps of graphs. Call it when they have changed, before the iteration
    /// continues: a graph reads whatever its slot holds.
    ///
    /// Args:
    ///     slots: Id and slot of each loaded adapter that graphs can apply. Steps with others are passes.
    ///
    /// Raises:
    ///     RuntimeError: `serve` was not called.
    fn set_adapter_slots(&self, slots: Vec<(i64, i32)>) -> PyResult<()> {
        let Serving { responder, .. } = self.serving.get().ok_or_else(not_serving)?;
        responder.set_adapter_slots(slots);
        Ok(())
    }

    /// Makes the iteration give a `Wake` soon, after at most one request; may be called from any thread. Several calls may
    /// give one. After a `Wake` a request that waits comes before the next one.
    fn wake(&self) {
        self.waker.wake();
    }

    /// Ends the iteration; may be called from any thread.
    fn stop(&self) {
        self.stop.stop();
    }

    /// Ends the iteration, removes the region's name and aborts requests that wait. The mapping lives on as long as the
    /// server.
    fn unlink(&self, py: Python<'_>) {
        self.stop.stop();
        py.detach(|| {
            let mut ring = self.ring();
            ring.unlink();
            // Dropped without an answer, a request is aborted. A client may send again: one round is enough.
            for _ in 0..ring.layout().slots() {
                drop(ring.poll());
            }
        });
    }
}

impl Server {
    fn ring(&self) -> MutexGuard<'_, pie_ring::Server> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The same layout, with larger request buffers where they must be.
fn fit(layout: RegionLayout, min_request_bytes: usize) -> Result<RegionLayout, LayoutError> {
    let request = min_request_bytes
        .max(layout.request_capacity())
        .next_multiple_of(64);
    let clamp = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX - 63);
    let slots = clamp(layout.slots());
    RegionLayout::new(slots, clamp(request), clamp(layout.response_capacity()))
}

/// Bytes of `/dev/shm` that a region takes.
///
/// Args:
///     min_request_bytes: As for `Server`.
///
/// Raises:
///     RingError: A region cannot be as large.
#[pyfunction]
#[pyo3(signature = (min_request_bytes = 0))]
pub(crate) fn region_bytes(min_request_bytes: usize) -> PyResult<usize> {
    fit(RegionLayout::default(), min_request_bytes)
        .map(|layout| layout.total_bytes())
        .map_err(from_ring)
}

fn not_serving() -> PyErr {
    PyRuntimeError::new_err("call serve() first")
}
