//! An open batch: a planned request that waits for its tokens.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pie_batch::{AttentionMask, Outputs, Pass, PassImages, Planner, SlotGroup, StageError};
use pie_ring::Lease;

use crate::lane::{Lane, LaneError};
use crate::media::Media;
use crate::note::Note;
use crate::timing::{DeviceTimes, Timing, monotonic_ns};

/// What the planner is to learn.
type Change = Box<dyn FnOnce(&mut Planner) + Send>;

/// Where the planner is while no batch is open.
pub(crate) struct Desk {
    place: Mutex<Place>,
    /// The answer under construction, as large as any. The slot's own buffer is no place for that: its client may write
    /// there at any time.
    answer: Mutex<Vec<u8>>,
    /// When the last batch was answered, by [`monotonic_ns`].
    answered_ns: AtomicU64,
}

struct Place {
    /// `None` while a batch has it.
    planner: Option<Box<Planner>>,
    /// What it learns when it is back, in this order.
    later: Vec<Change>,
}

/// Idle time between two batches counts as part of the cycle up to so many times the device's own: a client that has nothing
/// to do for a while is no slow client.
const MOST_IDLE: u32 = 16;

impl Desk {
    pub(crate) fn new(planner: Planner) -> Self {
        // Pages of it take memory once they are written.
        let answer = vec![0; planner.limits().reply_bytes as usize];
        Self {
            place: Mutex::new(Place {
                planner: Some(Box::new(planner)),
                later: Vec::new(),
            }),
            answer: Mutex::new(answer),
            answered_ns: AtomicU64::new(0),
        }
    }

    pub(crate) fn take(&self) -> Option<Box<Planner>> {
        self.lock().planner.take()
    }

    pub(crate) fn put_back(&self, mut planner: Box<Planner>) {
        let mut place = self.lock();
        for change in place.later.drain(..) {
            change(&mut planner);
        }
        place.planner = Some(planner);
    }

    /// Changes the planner; if a batch has it, as soon as it is back, so before it plans another one.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Planner) + Send + 'static) {
        let mut place = self.lock();
        match place.planner.as_deref_mut() {
            Some(planner) => change(planner),
            None => place.later.push(Box::new(change)),
        }
    }

    /// Notes that a batch has been answered, which was received at `received_ns` and kept the device `busy`; returns how
    /// long after the batch before.
    fn cycle(&self, received_ns: u64, busy: Duration) -> Duration {
        let now = monotonic_ns();
        // Batches are answered one after the other, and the planner goes from one to the next by its lock.
        let before = self.answered_ns.swap(now, Ordering::Relaxed);
        let idle = Duration::from_nanos(received_ns.saturating_sub(before));
        Duration::from_nanos(now.saturating_sub(received_ns)) + idle.min(MOST_IDLE * busy)
    }

    fn lock(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self) -> MutexGuard<'_, Vec<u8>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A planned forward request. Stage and run every pass, hand in the tokens of every slot group, then
/// commit. Dropped without a commit it is answered by an abort.
pub struct Batch {
    /// `None` for a rehearsal, and once answered.
    lease: Option<Lease>,
    /// `Some` until answered.
    planner: Option<Box<Planner>>,
    desk: Arc<Desk>,
    media: Option<Arc<Media>>,
    timing: Timing,
}

impl Batch {
    pub(crate) fn new(
        lease: Option<Lease>,
        planner: Box<Planner>,
        desk: Arc<Desk>,
        media: Option<Media>,
        timing: Timing,
    ) -> Self {
        Self {
            lease,
            planner: Some(planner),
            desk,
            media: media.map(Arc::new),
            timing,
        }
    }

    /// The plan; `None` once the batch is answered.
    #[must_use]
    pub fn plan(&self) -> Option<&Planner> {
        self.planner.as_deref()
    }

    /// What the host's steps have taken so far.
    #[must_use]
    pub const fn timing(&self) -> Timing {
        self.timing
    }

    /// Writes the next pass into the staging block; `None` when all are done, or the batch is answered.
    ///
    /// # Errors
    /// [`StageError`] when the block does not fit the layout.
    pub fn stage(&mut self, block: &mut [u8]) -> Result<Option<Pass>, StageError> {
        self.timed(|planner| planner.stage(block))
    }

    /// Writes the next slot group of the current pass into the staging block; `None` when all are done.
    ///
    /// # Errors
    /// [`StageError`] when the block does not fit the layout.
    pub fn stage_slots(&mut self, block: &mut [u8]) -> Result<Option<SlotGroup>, StageError> {
        self.timed(|planner| planner.stage_slots(block))
    }

    /// Runs the whole plan on the fast lane; `None` if that does not take it. Commit afterwards, or fail.
    pub(crate) fn run(&mut self, lane: &mut Lane) -> Option<Result<DeviceTimes, LaneError>> {
        let run = lane.run(self.planner.as_deref_mut()?)?;
        Some(run.map(|(staging, device)| {
            self.timing.plan += staging;
            device
        }))
    }

    /// See [`Planner::prepare_drafts`].
    pub fn prepare_drafts(&mut self) {
        if let Some(planner) = self.planner.as_deref_mut() {
            planner.prepare_drafts();
        }
    }

    /// The different adapters that the next pass needs; see [`Planner::next_adapters`].
    #[must_use]
    pub fn next_adapters(&self) -> Vec<i64> {
        self.planner
            .as_deref()
            .map_or_else(Vec::new, Planner::next_adapters)
    }

    /// Empties the requests of an adapter that cannot be had; see [`Planner::drop_adapter`].
    pub fn drop_adapter(&mut self, id: i64, reason: &str) {
        if let Some(planner) = self.planner.as_deref_mut() {
            planner.drop_adapter(id, reason);
        }
    }

    /// The adapter of each request of the last staged pass; see [`Planner::pass_adapters`].
    #[must_use]
    pub fn pass_adapters(&self) -> Option<Vec<i64>> {
        self.planner.as_deref().and_then(Planner::pass_adapters)
    }

    /// The attention mask of the last staged pass; see [`Planner::attention_mask`].
    #[must_use]
    pub fn attention_mask(&self) -> Option<AttentionMask<'_>> {
        self.planner.as_deref().and_then(Planner::attention_mask)
    }

    /// The images of the last staged pass, see [`Planner::pass_images`], and what holds their pixels.
    #[must_use]
    pub fn pass_images(&self) -> Option<(PassImages, &Arc<Media>)> {
        let media = self.media.as_ref()?;
        Some((self.plan()?.pass_images()?, media))
    }

    /// The recurrent state of the last staged pass; see [`Planner::pass_states`].
    #[must_use]
    pub fn pass_states(&self) -> Option<Vec<[i64; 2]>> {
        self.planner.as_deref().and_then(Planner::pass_states)
    }

    /// The labels of the last staged slot group; see [`Planner::group_labels`].
    #[must_use]
    pub fn group_labels(&self) -> &[[i64; 2]] {
        self.planner.as_deref().map_or(&[], Planner::group_labels)
    }

    /// Takes what the engine computed for the last staged slot group.
    ///
    /// # Errors
    /// [`StageError`] when an array has another length than the group asks for.
    pub fn put_outputs(&mut self, outputs: &Outputs<'_>) -> Result<(), StageError> {
        self.planner
            .as_mut()
            .map_or(Ok(()), |planner| planner.put_outputs(outputs))
    }

    /// Runs a step of the planner and counts its time as planning.
    fn timed<T>(
        &mut self,
        step: impl FnOnce(&mut Planner) -> Result<Option<T>, StageError>,
    ) -> Result<Option<T>, StageError> {
        let started = Instant::now();
        let staged = self.planner.as_deref_mut().map_or(Ok(None), step);
        self.timing.plan += started.elapsed();
        staged
    }

    /// Builds the response and publishes it. Returns what is worth a log line: emptied
    /// requests with their reasons, and a client that gave up.
    pub fn commit(&mut self, device: DeviceTimes) -> Vec<Note> {
        let mut notes = Vec::new();
        if let (Some(lease), Some(planner)) = (self.lease.take(), self.planner.as_mut()) {
            let mut answer = self.desk.answer();
            notes = publish(
                lease,
                planner,
                &mut answer,
                &mut self.timing,
                device,
                &self.desk,
            );
        }
        if let Some(planner) = self.planner.take() {
            self.desk.put_back(planner);
        }
        notes
    }

    /// Answers with an abort, after an engine error: the device's block table counts as lost.
    pub fn fail(&mut self) {
        if let Some(mut planner) = self.planner.take() {
            planner.forget_table();
            self.desk.put_back(planner);
        }
        // Dropping an open lease publishes the abort reply.
        self.lease = None;
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.fail();
    }
}

/// Answers first; what takes time and does not concern the client follows.
fn publish(
    lease: Lease,
    planner: &mut Planner,
    answer: &mut [u8],
    timing: &mut Timing,
    device: DeviceTimes,
    desk: &Desk,
) -> Vec<Note> {
    let started = Instant::now();
    let encoded = planner.reply(timing.probes(device), answer);
    // Taken before the client is woken: it may want this core at once.
    timing.respond = started.elapsed();
    let published = match encoded {
        Ok(length) => {
            let published = lease.reply(&answer[..length]);
            published.map_err(|error| error.to_string())
        }
        Err(error) => {
            // Aborts the request.
            drop(lease);
            Err(error.to_string())
        }
    };
    let mut notes = Note::of_faults(planner.faults());
    notes.extend(Note::of_publication(published));
    planner.step_took(device.busy(), desk.cycle(timing.received_ns, device.busy()));
    let report = planner.draft_report();
    notes.extend(report.map(|counters| Note::new("drafts", counters.to_string())));
    notes
}
