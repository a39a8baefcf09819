//! The responder: waits on the ring, answers what needs no model, hands the rest to Python.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pie_ring::{Lease, RegionLayout, ServerConfig, Wait};
use pie_wire::{ArchivedFrame, ArchivedPayload};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::batch::{Batch, Copy, Shared, Timing, monotonic_ns};
use crate::error::{WireError, from_ring, from_wire};
use crate::guard::ExitGuard;
use crate::planner::Planner;

/// Status codes of the Pie driver protocol.
pub(crate) mod status {
    pub(crate) const OK: i32 = 0;
    pub(crate) const MALFORMED: i32 = 2;
    pub(crate) const OUT_OF_RANGE: i32 = 3;
    pub(crate) const UNSUPPORTED: i32 = 4;
    /// `GenerateAudio` counts frames with positive numbers; its errors are negative.
    pub(crate) const NO_AUDIO: i32 = -1;
}

/// Owns the shared-memory region and iterates over the work that needs Python: `Batch` and `Copy` objects. Everything
/// else (malformed frames, health checks, frames without tokens, unsupported operations) is answered without it.
#[pyclass(module = "pie_driver_sglang._core")]
pub(crate) struct Server {
    ring: pie_ring::Server,
    stop: pie_ring::Stop,
    name: String,
    wait: Wait,
    shared: Option<Arc<Shared>>,
}

/// What Python gets to do.
#[derive(IntoPyObject)]
enum Job {
    Batch(Py<Batch>),
    Copy(Py<Copy>),
}

/// What a request led to.
enum Outcome {
    /// Answered, with what is worth a log line.
    Answered(Vec<Report>),
    /// Python must act.
    Work(Work),
}

enum Work {
    Forward(Lease, Box<pie_batch::Planner>, Timing),
    Copy {
        lease: Lease,
        driver_id: u32,
        sources: Vec<u32>,
        targets: Vec<u32>,
    },
}

enum Event {
    Stopped,
    Reports(Vec<Report>),
    Work(Work),
}

/// One line for the log. `kind` is what its rate is limited by.
pub(crate) struct Report {
    pub(crate) kind: &'static str,
    pub(crate) text: String,
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
        let mut config = ServerConfig::new(
            &name,
            pie_wire::SCHEMA_HASH,
            pie_wire::abort_frame(0).to_vec(),
        );
        config.takeover = Duration::try_from_secs_f64(takeover_s).map_err(|error| {
            PyValueError::new_err(format!("takeover_s is {takeover_s}: {error}"))
        })?;
        config.layout = fit(config.layout, min_request_bytes).map_err(|error| from_ring(&error))?;
        let ring = py
            .detach(|| pie_ring::Server::create(&config, &guard.inner))
            .map_err(|error| from_ring(&error))?;
        let stop = ring.stop_handle();
        Ok(Self {
            ring,
            stop,
            name,
            wait: Wait::from_spin_budget_us(spin_budget_us),
            shared: None,
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
        self.layout().request_capacity()
    }

    /// Bytes that one response may have.
    #[getter]
    fn response_capacity(&self) -> usize {
        self.layout().response_capacity()
    }

    /// Takes the planner and the staging block; iterate over the server afterwards.
    ///
    /// Args:
    ///     planner: It cannot be used by anyone else from now on.
    ///     block: Writable bytes, at least `planner.block_bytes` of them. The engine must not write to them.
    ///     report: Called as `report(kind, text)` for what deserves a log line.
    ///
    /// Raises:
    ///     ValueError: The block is too small or not writable, or the planner was given away before.
    fn serve(
        &mut self,
        planner: &mut Planner,
        block: PyBuffer<u8>,
        report: Py<PyAny>,
    ) -> PyResult<()> {
        let inner = planner
            .inner
            .take()
            .ok_or_else(|| PyValueError::new_err("the planner already serves"))?;
        let needed = inner.layout().bytes();
        if block.readonly() || !block.is_c_contiguous() || block.len_bytes() < needed {
            return Err(PyValueError::new_err(format!(
                "the staging block must be writable, contiguous and at least {needed} bytes; it has {}",
                block.len_bytes()
            )));
        }
        self.shared = Some(Arc::new(Shared {
            planner: Mutex::new(Some(Box::new(inner))),
            block,
            report,
        }));
        Ok(())
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// Waits for the next batch or copy, without the GIL; ends when the server was stopped.
    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<Job>> {
        let shared = self.shared.clone().ok_or_else(not_serving)?;
        loop {
            match py.detach(|| self.next_event(&shared))? {
                Event::Stopped => return Ok(None),
                Event::Reports(reports) => shared.report(py, &reports)?,
                Event::Work(Work::Forward(lease, planner, timing)) => {
                    let batch = Batch::new(Some(lease), planner, shared, timing);
                    return Ok(Some(Job::Batch(Py::new(py, batch)?)));
                }
                Event::Work(Work::Copy {
                    lease,
                    driver_id,
                    sources,
                    targets,
                }) => {
                    let copy = Copy::new(lease, driver_id, sources, targets);
                    return Ok(Some(Job::Copy(Py::new(py, copy)?)));
                }
            }
        }
    }

    /// Plans a request frame of the caller's own, for warm-up: its answer goes nowhere.
    ///
    /// Raises:
    ///     RuntimeError: `serve` was not called, or a batch is open.
    ///     WireError: The bytes are no forward frame, or its arrays contradict each other.
    fn rehearse(&self, frame: &[u8]) -> PyResult<Batch> {
        let shared = self.shared.clone().ok_or_else(not_serving)?;
        // An archive is read in place and must start at a multiple of its alignment.
        let mut aligned = vec![0_u64; frame.len().div_ceil(8)];
        let bytes = &mut bytemuck::cast_slice_mut(&mut aligned)[..frame.len()];
        bytes.copy_from_slice(frame);
        let frame = pie_wire::access_request(bytes).map_err(|error| from_wire(&error))?;
        let ArchivedPayload::Forward(request) = &frame.payload else {
            return Err(WireError::new_err("only forward frames can be rehearsed"));
        };
        let mut planner = shared
            .planner()
            .take()
            .ok_or_else(|| PyRuntimeError::new_err("another batch is open"))?;
        match planner.plan(0, request) {
            Ok(()) => Ok(Batch::new(
                None,
                planner,
                shared,
                Timing::new(monotonic_ns(), Duration::ZERO, Duration::ZERO),
            )),
            Err(error) => {
                shared.take_back(planner);
                Err(WireError::new_err(error.to_string()))
            }
        }
    }

    /// Ends the iteration; may be called from any thread.
    fn stop(&self) {
        self.stop.stop();
    }

    /// Removes the region's name. The mapping lives on as long as the server.
    fn unlink(&self) {
        self.ring.unlink();
    }
}

impl Server {
    fn layout(&self) -> &RegionLayout {
        self.ring.layout()
    }

    fn next_event(&mut self, shared: &Shared) -> PyResult<Event> {
        loop {
            let Some(lease) = self
                .ring
                .wait(self.wait)
                .map_err(|error| from_ring(&error))?
            else {
                return Ok(Event::Stopped);
            };
            match handle(lease, shared) {
                Outcome::Answered(reports) if reports.is_empty() => {}
                Outcome::Answered(reports) => return Ok(Event::Reports(reports)),
                Outcome::Work(work) => return Ok(Event::Work(work)),
            }
        }
    }
}

/// The same layout, with larger request buffers where they must be.
fn fit(
    layout: RegionLayout,
    min_request_bytes: usize,
) -> Result<RegionLayout, pie_ring::RingError> {
    let request = min_request_bytes
        .max(layout.request_capacity())
        .next_multiple_of(64);
    let clamp = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX - 63);
    RegionLayout::new(
        layout.slots() as u32,
        clamp(request),
        clamp(layout.response_capacity()),
    )
}

fn not_serving() -> PyErr {
    PyRuntimeError::new_err("call serve() first")
}

/// Answers a request, or finds out what Python must do for it.
fn handle(lease: Lease, shared: &Shared) -> Outcome {
    let received = Instant::now();
    let received_ns = monotonic_ns();
    let frame = match lease.request() {
        Ok(bytes) => pie_wire::access_request(bytes).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    let frame = match frame {
        Ok(frame) => frame,
        Err(text) => return refuse(lease, 0, status::MALFORMED, "malformed", &text),
    };
    let parsed = Instant::now();
    let driver_id = frame.driver_id.to_native();
    match &frame.payload {
        ArchivedPayload::Health => answer(lease, driver_id, status::OK),
        ArchivedPayload::Adapter(request) => {
            let audio = matches!(request.op, pie_wire::ArchivedAdapterOp::GenerateAudio);
            let code = if audio {
                status::NO_AUDIO
            } else {
                status::UNSUPPORTED
            };
            let text = format!("adapter operation {:?} is not supported yet", request.op);
            refuse(lease, driver_id, code, "adapter", &text)
        }
        ArchivedPayload::Copy(_) => copy(lease, shared),
        ArchivedPayload::Forward(request) => {
            let Some(mut planner) = shared.planner().take() else {
                let text = "a batch of the last request is still open";
                return refuse(lease, driver_id, status::UNSUPPORTED, "busy", text);
            };
            let planned = planner.plan(driver_id, request);
            let mut timing = Timing::new(received_ns, parsed - received, parsed.elapsed());
            match planned {
                Ok(()) if planner.pass_count() == 0 => {
                    let reports = publish(lease, &mut planner, &mut timing, [0; 3]);
                    shared.take_back(planner);
                    Outcome::Answered(reports)
                }
                Ok(()) => Outcome::Work(Work::Forward(lease, planner, timing)),
                Err(error) => {
                    shared.take_back(planner);
                    refuse(
                        lease,
                        driver_id,
                        status::MALFORMED,
                        "malformed",
                        &error.to_string(),
                    )
                }
            }
        }
    }
}

/// Encodes and publishes the planner's answer. `device_us`: host-to-device copies, launch, waiting for tokens.
pub(crate) fn publish(
    mut lease: Lease,
    planner: &mut pie_batch::Planner,
    timing: &mut Timing,
    device_us: [u32; 3],
) -> Vec<Report> {
    let started = Instant::now();
    let emptied = planner.faults().iter();
    let emptied =
        emptied.map(|(index, fault)| (fault.kind(), format!("request {index} emptied: {fault}")));
    let mut reports: Vec<Report> = emptied.map(|(kind, text)| Report { kind, text }).collect();
    let mut dropped = Vec::new();
    let encoded = planner.reply(timing.probes(device_us), lease.response(), &mut dropped);
    // Taken before the client is woken: it may want this core at once.
    timing.respond = started.elapsed();
    let sent = match encoded {
        Ok(length) => lease.commit(length).map_err(|error| error.to_string()),
        // Dropping the lease aborts the request.
        Err(error) => Err(error.to_string()),
    };
    let oversize = |index| Report {
        kind: "oversize",
        text: format!("request {index} emptied: the response does not fit the slot"),
    };
    reports.extend(dropped.into_iter().map(oversize));
    reports.extend(match sent {
        Ok(pie_ring::Publish::Delivered) => None,
        Ok(pie_ring::Publish::Stale) => Some(stale()),
        Err(text) => Some(Report { kind: "ring", text }),
    });
    reports
}

/// The frame of a lease that was already found valid.
fn frame(lease: &Lease) -> Option<&ArchivedFrame> {
    pie_wire::access_request(lease.request().ok()?).ok()
}

fn copy(lease: Lease, shared: &Shared) -> Outcome {
    use pie_wire::{ArchivedCopyDirection, ArchivedCopyResource, NativeSlice};
    let Some((driver_id, request)) = frame(&lease).and_then(|frame| match &frame.payload {
        ArchivedPayload::Copy(request) => Some((frame.driver_id.to_native(), request)),
        _ => None,
    }) else {
        return refuse(
            lease,
            0,
            status::MALFORMED,
            "malformed",
            "the request changed while it was read",
        );
    };
    let (sources, targets) = (
        request.srcs.native().to_vec(),
        request.dsts.native().to_vec(),
    );
    let in_pool = matches!(request.dir, ArchivedCopyDirection::D2D);
    let kv = matches!(request.resource, ArchivedCopyResource::Kv);
    let operation = format!("{:?} copy of {:?}", request.dir, request.resource);
    if !(in_pool && kv) {
        let text =
            format!("{operation} is not supported: there is no host pool and no recurrent state");
        return refuse(lease, driver_id, status::UNSUPPORTED, "copy", &text);
    }
    if sources.len() != targets.len() {
        let text = format!(
            "{operation} names {} sources and {} targets",
            sources.len(),
            targets.len()
        );
        return refuse(lease, driver_id, status::MALFORMED, "copy", &text);
    }
    let total_pages = shared
        .planner()
        .as_ref()
        .map_or(u32::MAX, |planner| planner.limits().total_pages);
    if let Some(page) = sources
        .iter()
        .chain(&targets)
        .find(|&&page| page >= total_pages)
    {
        let text = format!("{operation} names page {page}; the pool has {total_pages} pages");
        return refuse(lease, driver_id, status::OUT_OF_RANGE, "copy", &text);
    }
    if sources.is_empty() {
        return answer(lease, driver_id, status::OK);
    }
    Outcome::Work(Work::Copy {
        lease,
        driver_id,
        sources,
        targets,
    })
}

fn answer(lease: Lease, driver_id: u32, code: i32) -> Outcome {
    match send_status(lease, driver_id, code) {
        Ok(()) => Outcome::Answered(Vec::new()),
        Err(report) => Outcome::Answered(vec![report]),
    }
}

fn refuse(lease: Lease, driver_id: u32, code: i32, kind: &'static str, text: &str) -> Outcome {
    // The answer comes first: a slow log must not delay it.
    let _ = send_status(lease, driver_id, code);
    Outcome::Answered(vec![Report {
        kind,
        text: format!("{text}; answered status {code}"),
    }])
}

/// Publishes a status frame; a stale lease and an unusable slot are worth a report.
pub(crate) fn send_status(lease: Lease, driver_id: u32, code: i32) -> Result<(), Report> {
    match lease.reply(&pie_wire::status_frame(driver_id, code, false)) {
        Ok(pie_ring::Publish::Delivered) => Ok(()),
        Ok(pie_ring::Publish::Stale) => Err(stale()),
        Err(error) => Err(Report {
            kind: "ring",
            text: error.to_string(),
        }),
    }
}

/// The client gave up before its answer was ready.
pub(crate) fn stale() -> Report {
    Report {
        kind: "stale",
        text: "the client gave up on a request before its answer was ready".to_owned(),
    }
}

impl Shared {
    pub(crate) fn planner(&self) -> std::sync::MutexGuard<'_, Option<Box<pie_batch::Planner>>> {
        self.planner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take_back(&self, planner: Box<pie_batch::Planner>) {
        *self.planner() = Some(planner);
    }

    pub(crate) fn report(&self, py: Python<'_>, reports: &[Report]) -> PyResult<()> {
        reports
            .iter()
            .try_for_each(|report| self.report.call1(py, (report.kind, &report.text)).map(drop))
    }
}
