//! The responder: the loop over the requests of the ring.

use std::sync::{Arc, Mutex, PoisonError};

use pie_planner::{FrameError, Plan, Planner, WARM_UP_ADAPTER};
use pie_ring::{Lease, Server, SystemError, Wait};
use pie_wire::{ArchivedPayload, WireError};
use thiserror::Error;

use crate::batch::Batch;
use crate::copy::Copy;
use crate::counters::Counts;
use crate::graph_path::{GraphPath, GraphPathError};
use crate::load::Load;
use crate::log_line::LogLine;
use crate::media::Media;
use crate::parse::{Action, ParsedRequest, RequestKind, parse_request};
use crate::shared_planner::SharedPlanner;
use crate::status;
use crate::timing::{DeviceTimes, Timing, monotonic_ns};

/// Result of [`Responder::next`].
pub enum Event {
    /// The server was stopped.
    Stopped,
    /// A request was answered, with log lines.
    LogLines(Vec<LogLine>),
    /// The graph path answered a batch; only [with steps](Responder::with_steps).
    Step(Step),
    /// A [`pie_ring::Waker`] interrupted the wait.
    Woken,
    /// Work for Python.
    Job(Job),
    /// The driver must end: the device is [lost](GraphPathError::is_fatal), or a step failed on one of several ranks. The request was
    /// aborted.
    DeviceLost(GraphPathError),
}

/// A batch that the graph path answered.
#[derive(Debug, Clone)]
pub struct Step {
    /// Requests of the batch.
    pub requests: usize,
    /// Query tokens.
    pub tokens: usize,
    /// Host timings.
    pub timing: Timing,
    /// Device timings.
    pub device: DeviceTimes,
    /// Log lines.
    pub log_lines: Vec<LogLine>,
}

/// Work for Python.
pub enum Job {
    /// Run a batch.
    Batch(Batch),
    /// Copy pages.
    Copy(Copy),
    /// Load an adapter.
    Load(Load),
}

/// A warm-up failed.
#[derive(Debug, Error)]
pub enum WarmUpError {
    /// The bytes are not a frame.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The frame's arrays contradict each other.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The frame is not a forward request.
    #[error("the warm-up takes forward frames only")]
    NotForward,
    /// Another batch is open.
    #[error("another batch is open")]
    Busy,
    /// The graph path failed.
    #[error(transparent)]
    GraphPath(#[from] GraphPathError),
}

/// Takes requests off the ring, one at a time and oldest first.
pub struct Responder {
    shared: Arc<SharedPlanner>,
    /// Buffer for the copy of the current request.
    request: Mutex<Vec<u64>>,
    host_pages: u32,
    wait: Wait,
    graph_path: Mutex<Option<GraphPath>>,
    steps: bool,
}

impl Responder {
    /// A responder that plans with `planner` and waits by `wait`. The engine's host pool has
    /// `host_pages` pages; 0 for none.
    #[must_use]
    pub fn new(planner: Planner, host_pages: u32, wait: Wait) -> Self {
        Self {
            shared: Arc::new(SharedPlanner::new(planner)),
            request: Mutex::default(),
            host_pages,
            wait,
            graph_path: Mutex::new(None),
            steps: false,
        }
    }

    /// Enables the graph path.
    #[must_use]
    pub fn with_graph_path(mut self, graph_path: GraphPath) -> Self {
        self.graph_path = Mutex::new(Some(graph_path));
        self
    }

    /// Enables [`Event::Step`] for every batch of the graph path.
    #[must_use]
    pub const fn with_steps(mut self) -> Self {
        self.steps = true;
        self
    }

    /// Counters so far, for any thread; each call triggers one sample of the pages in use.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.counters().read()
    }

    /// Serves requests until there is something to report or to do.
    ///
    /// # Errors
    /// [`SystemError`] when the kernel refuses to wait.
    pub fn next(&self, ring: &mut Server) -> Result<Event, SystemError> {
        while let Some(lease) = ring.wait(self.wait)? {
            match self.handle(lease) {
                Event::LogLines(log_lines) if log_lines.is_empty() => {}
                event => return Ok(event),
            }
        }
        Ok(if ring.take_wake() {
            Event::Woken
        } else {
            Event::Stopped
        })
    }

    fn handle(&self, lease: Lease) -> Event {
        let received_ns = monotonic_ns();
        let Some(mut planner) = self.shared.take() else {
            // The caller kept a batch open while it waited for the next.
            let log_line = LogLine::new("busy", "a request came while a batch was open");
            let published = status::answer(lease, 0, status::UNSUPPORTED);
            return Event::LogLines([log_line].into_iter().chain(published).collect());
        };
        let ParsedRequest {
            driver_id,
            kind,
            media,
            parse,
            plan,
        } = {
            let mut words = self.request.lock().unwrap_or_else(PoisonError::into_inner);
            let counters = self.shared.counters();
            parse_request(&lease, &mut words, &mut planner, self.host_pages, counters)
        };
        let timing = Timing {
            received_ns,
            parse,
            plan,
            ..Timing::default()
        };
        match kind {
            RequestKind::Batch(plan) => self.open(lease, (planner, plan), media, timing),
            RequestKind::Other(action) => {
                self.shared.put_back(planner);
                self.perform(lease, driver_id, action)
            }
        }
    }

    /// Runs or returns a batch that needs the model, and answers one that does not.
    fn open(
        &self,
        lease: Lease,
        (planner, plan): (Box<Planner>, Plan),
        media: Option<Media>,
        timing: Timing,
    ) -> Event {
        let needs_model = plan.pass_count() > 0;
        let shared = Arc::clone(&self.shared);
        let mut batch = Batch::new(Some(lease), (planner, plan), shared, media, timing);
        if !needs_model {
            return Event::LogLines(batch.commit(DeviceTimes::default()));
        }
        match self.run(&mut batch) {
            None => Event::Job(Job::Batch(batch)),
            Some(Ok(device)) => self.finish(batch, device),
            Some(Err(error)) => {
                batch.fail();
                if error.is_fatal() || self.is_leader() {
                    return Event::DeviceLost(error);
                }
                let text = format!("a batch was answered by an abort: {error}");
                Event::LogLines(vec![LogLine::new("forward", text)])
            }
        }
    }

    fn is_leader(&self) -> bool {
        let graph_path = self
            .graph_path
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        graph_path.as_ref().is_some_and(GraphPath::is_leader)
    }

    /// Runs a batch on the graph path, if a graph fits.
    fn run(&self, batch: &mut Batch) -> Option<Result<DeviceTimes, GraphPathError>> {
        let mut graph_path = self
            .graph_path
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        batch.run(graph_path.as_mut()?)
    }

    fn finish(&self, mut batch: Batch, device: DeviceTimes) -> Event {
        let (requests, tokens) = batch
            .plan()
            .map_or((0, 0), |plan| (plan.request_count(), plan.token_count()));
        let log_lines = batch.commit(device);
        if !self.steps {
            return Event::LogLines(log_lines);
        }
        let timing = batch.timing();
        Event::Step(Step {
            requests,
            tokens,
            timing,
            device,
            log_lines,
        })
    }

    /// Runs a warm-up frame on the graph path. Returns whether a graph fits it.
    ///
    /// # Errors
    /// [`WarmUpError`] as [`Responder::warm_up`], and when the graph path fails.
    pub fn warm_up_graph_path(&self, frame: &[u8]) -> Result<bool, WarmUpError> {
        let mut batch = self.warm_up(frame)?;
        match self.run(&mut batch) {
            None => Ok(false),
            Some(result) => {
                batch.commit(result?);
                Ok(true)
            }
        }
    }

    /// Rejects requests for hidden states of another size; see [`Planner::set_hidden_size`](pie_planner::Planner::set_hidden_size).
    pub fn set_hidden_size(&self, size: u32) {
        self.shared
            .change(move |planner| planner.set_hidden_size(size));
    }

    /// Replaces the device slots of adapters; see [`Planner::set_adapter_slots`](pie_planner::Planner::set_adapter_slots).
    pub fn set_adapter_slots(&self, slots: Vec<(i64, i32)>) {
        self.shared
            .change(move |planner| planner.set_adapter_slots(slots));
    }

    /// Plans a warm-up frame, whose response is dropped. It may use [`WARM_UP_ADAPTER`].
    ///
    /// # Errors
    /// [`WarmUpError`] when the bytes are not a consistent forward frame, or a batch is open.
    pub fn warm_up(&self, frame: &[u8]) -> Result<Batch, WarmUpError> {
        // Archives are read in place, aligned.
        let mut aligned = vec![0_u64; frame.len().div_ceil(size_of::<u64>())];
        let bytes = &mut bytemuck::cast_slice_mut(&mut aligned)[..frame.len()];
        bytes.copy_from_slice(frame);
        let (bytes, extension) = pie_wire::split_request(bytes).map_err(WireError::from)?;
        let frame = pie_wire::access_request(bytes)?;
        let ArchivedPayload::Forward(request) = &frame.payload else {
            return Err(WarmUpError::NotForward);
        };
        let mut planner = self.shared.take().ok_or(WarmUpError::Busy)?;
        planner.add_adapter(WARM_UP_ADAPTER);
        let planned = planner.plan_extended(frame.driver_id.to_native(), request, &extension);
        planner.remove_adapter(WARM_UP_ADAPTER);
        let plan = match planned {
            Ok(plan) => plan,
            Err(error) => {
                self.shared.put_back(planner);
                return Err(error.into());
            }
        };
        let pixels = Media::pixel_range(bytes, request);
        let media = plan.has_images().then(|| Media::new(aligned, pixels));
        let timing = Timing {
            received_ns: monotonic_ns(),
            ..Timing::default()
        };
        let shared = Arc::clone(&self.shared);
        Ok(Batch::new(None, (planner, plan), shared, media, timing))
    }

    /// Responds to a request, or returns its job.
    fn perform(&self, lease: Lease, driver_id: u32, action: Action) -> Event {
        match action {
            Action::Copy(pairs) => {
                let shared = Arc::clone(&self.shared);
                Event::Job(Job::Copy(Copy::new(lease, driver_id, pairs, shared)))
            }
            Action::Load(adapter) => {
                let shared = Arc::clone(&self.shared);
                Event::Job(Job::Load(Load::new(lease, driver_id, adapter, shared)))
            }
            Action::Status(code) => {
                Event::LogLines(status::answer(lease, driver_id, code).into_iter().collect())
            }
            Action::Refuse { code, kind, text } => {
                // The response first: a slow log must not delay it.
                let published = status::answer(lease, driver_id, code);
                let log_line = LogLine::new(kind, format!("{text}; answered status {code}"));
                self.shared.counters().refused(kind);
                Event::LogLines([log_line].into_iter().chain(published).collect())
            }
        }
    }
}
