//! Waits for requests and answers what needs no model.

use std::sync::{Arc, Mutex, PoisonError};

use pie_planner::{FrameError, Plan, Planner, WARM_UP_ADAPTER};
use pie_ring::{Lease, Server, SystemError, Wait};
use pie_wire::{ArchivedPayload, WireError};
use thiserror::Error;

use crate::batch::Batch;
use crate::copy::Copy;
use crate::counters::Counts;
use crate::decide::{Action, Decision, Work, decide};
use crate::graph_path::{GraphPath, GraphPathError};
use crate::load::Load;
use crate::media::Media;
use crate::note::Note;
use crate::shared_planner::SharedPlanner;
use crate::status;
use crate::timing::{DeviceTimes, Timing, monotonic_ns};

/// What came of waiting.
pub enum Event {
    /// The server was stopped.
    Stopped,
    /// A request was answered, and this is worth a log line.
    Notes(Vec<Note>),
    /// The graph path answered a batch, and the caller [asked for reports](Responder::with_steps).
    Step(Step),
    /// A [`pie_ring::Waker`] has called.
    Called,
    /// The engine must act.
    Job(Job),
    /// Nothing can be served any more: the device [cannot](GraphPathError::is_fatal), or a step failed on this rank of several and
    /// the others wait for it. The request was answered by an abort.
    Lost(GraphPathError),
}

/// A batch that the graph path answered.
#[derive(Debug, Clone)]
pub struct Step {
    /// Requests of the batch.
    pub requests: usize,
    /// Rows that the model computed.
    pub tokens: usize,
    /// The host's side.
    pub timing: Timing,
    /// The device's side.
    pub device: DeviceTimes,
    /// What is worth a log line.
    pub notes: Vec<Note>,
}

/// What the engine must do.
pub enum Job {
    /// Run a batch.
    Batch(Batch),
    /// Copy pages.
    Copy(Copy),
    /// Load an adapter.
    Load(Load),
}

/// A frame that the warm-up cannot use.
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
    /// The last batch is still open.
    #[error("another batch is open")]
    Busy,
    /// The graph path failed.
    #[error(transparent)]
    GraphPath(#[from] GraphPathError),
}

/// Takes requests off the ring, one at a time and oldest first.
pub struct Responder {
    shared: Arc<SharedPlanner>,
    /// The request under examination, as large as the largest so far.
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

    /// With a graph path for the batches that it takes.
    #[must_use]
    pub fn with_graph_path(mut self, graph_path: GraphPath) -> Self {
        self.graph_path = Mutex::new(Some(graph_path));
        self
    }

    /// Reports every batch that the graph path answered.
    #[must_use]
    pub const fn with_steps(mut self) -> Self {
        self.steps = true;
        self
    }

    /// What was served so far. May be called by any thread, at any time; pages are looked at once for each call.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.counters().read()
    }

    /// Waits until there is something to report or to do. Requests that are answered without either
    /// do not end the wait.
    ///
    /// # Errors
    /// [`SystemError`] when the kernel refuses to wait.
    pub fn next(&self, ring: &mut Server) -> Result<Event, SystemError> {
        while let Some(lease) = ring.wait(self.wait)? {
            match self.handle(lease) {
                Event::Notes(notes) if notes.is_empty() => {}
                event => return Ok(event),
            }
        }
        Ok(if ring.take_call() {
            Event::Called
        } else {
            Event::Stopped
        })
    }

    fn handle(&self, lease: Lease) -> Event {
        let received_ns = monotonic_ns();
        let Some(mut planner) = self.shared.take() else {
            // Only a caller that keeps a batch open while it waits for the next comes here.
            let note = Note::new("busy", "a request came while a batch was open");
            let published = status::answer(lease, 0, status::UNSUPPORTED);
            return Event::Notes([note].into_iter().chain(published).collect());
        };
        let Decision {
            driver_id,
            work,
            media,
            parse,
            plan,
        } = {
            let mut words = self.request.lock().unwrap_or_else(PoisonError::into_inner);
            let counters = self.shared.counters();
            decide(&lease, &mut words, &mut planner, self.host_pages, counters)
        };
        let timing = Timing {
            received_ns,
            parse,
            plan,
            ..Timing::default()
        };
        match work {
            Work::Batch(plan) => self.open(lease, (planner, plan), media, timing),
            Work::Other(action) => {
                self.shared.put_back(planner);
                self.act(lease, driver_id, action)
            }
        }
    }

    /// Hands out a batch that needs the model, and answers one that does not.
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
            return Event::Notes(batch.commit(DeviceTimes::default()));
        }
        match self.run(&mut batch) {
            None => Event::Job(Job::Batch(batch)),
            Some(Ok(device)) => self.finish(batch, device),
            Some(Err(error)) => {
                batch.fail();
                if error.is_fatal() || self.leads() {
                    return Event::Lost(error);
                }
                let text = format!("a batch was answered by an abort: {error}");
                Event::Notes(vec![Note::new("forward", text)])
            }
        }
    }

    fn leads(&self) -> bool {
        let graph_path = self
            .graph_path
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        graph_path.as_ref().is_some_and(GraphPath::leads)
    }

    /// Runs a batch on the graph path, if that takes it.
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
        let notes = batch.commit(device);
        if !self.steps {
            return Event::Notes(notes);
        }
        let timing = batch.timing();
        Event::Step(Step {
            requests,
            tokens,
            timing,
            device,
            notes,
        })
    }

    /// Runs a frame of the caller's own on the graph path, for warm-up: its answer goes nowhere. Returns whether
    /// the graph path took it.
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

    /// Plans a frame of the caller's own, for warm-up: its answer goes nowhere. It may bind [`WARM_UP_ADAPTER`].
    ///
    /// # Errors
    /// [`WarmUpError`] when the bytes are not a consistent forward frame, or a batch is open.
    pub fn warm_up(&self, frame: &[u8]) -> Result<Batch, WarmUpError> {
        // An archive is read in place and must start at a multiple of its alignment.
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

    /// Answers a request, or hands out its job.
    fn act(&self, lease: Lease, driver_id: u32, action: Action) -> Event {
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
                Event::Notes(status::answer(lease, driver_id, code).into_iter().collect())
            }
            Action::Refuse { code, kind, text } => {
                // The answer comes first: a slow log must not delay it.
                let published = status::answer(lease, driver_id, code);
                let note = Note::new(kind, format!("{text}; answered status {code}"));
                self.shared.counters().refused(kind);
                Event::Notes([note].into_iter().chain(published).collect())
            }
        }
    }
}
