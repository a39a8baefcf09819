//! An open batch: a planned request that waits for its tokens.

use std::sync::Arc;
use std::time::Instant;

use pie_planner::{
    AttentionMask, Computed, Outputs, Pass, PassImages, Place, Plan, Planner, RECORD_WORDS,
    SlotGroup, StageError, Staged, StagedGroup, StagedPass, StagedSlots,
};
use pie_ring::{Lease, Publish};
use thiserror::Error;

use crate::counters::Served;
use crate::graph_path::{GraphPath, GraphPathError};
use crate::media::Media;
use crate::note::Note;
use crate::shared_planner::SharedPlanner;
use crate::timing::{DeviceTimes, Timing};

/// A call that a batch cannot take: a fault of the caller, after which the batch is as before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BatchError {
    /// The block or the outputs do not fit.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// A pass was to be staged before the one before it is done.
    #[error(
        "the staged pass has slots without outputs; stage its slot groups first, until none is left"
    )]
    PassOpen,
    /// A slot group was to be staged before the one before it is done.
    #[error("the staged slot group has no outputs; put them first")]
    GroupOpen,
    /// Outputs came that no slot group waits for.
    #[error("no slot group waits for outputs; stage one first")]
    NoGroup,
}

/// How far a batch is.
enum Stage {
    /// Its next pass can be staged.
    Plan(Plan),
    /// A pass is staged.
    Pass(StagedPass),
    /// A slot group is staged.
    Group(StagedGroup),
    /// It can be answered.
    Computed(Computed),
}

impl Stage {
    fn plan(&self) -> &Plan {
        match self {
            Self::Plan(plan) => plan,
            Self::Pass(pass) => pass,
            Self::Group(group) => group,
            Self::Computed(computed) => computed,
        }
    }
}

/// A planned forward request. Stage and run every pass, hand in the outputs of every slot group, then
/// commit. Dropped without a commit it is answered by an abort.
pub struct Batch {
    /// `None` for a warm-up, and once answered.
    lease: Option<Lease>,
    /// `Some` until answered.
    planner: Option<Box<Planner>>,
    /// `Some` until answered, or until a call of the planner failed.
    stage: Option<Stage>,
    shared: Arc<SharedPlanner>,
    media: Option<Arc<Media>>,
    timing: Timing,
    /// The graph path ran it.
    by_graph: bool,
}

impl Batch {
    pub(crate) fn new(
        lease: Option<Lease>,
        (planner, plan): (Box<Planner>, Plan),
        shared: Arc<SharedPlanner>,
        media: Option<Media>,
        timing: Timing,
    ) -> Self {
        Self {
            lease,
            planner: Some(planner),
            stage: Some(Stage::Plan(plan)),
            shared,
            media: media.map(Arc::new),
            timing,
            by_graph: false,
        }
    }

    /// The plan; `None` once the batch is answered.
    #[must_use]
    pub fn plan(&self) -> Option<&Plan> {
        self.stage.as_ref().map(Stage::plan)
    }

    /// What the host's steps have taken so far.
    #[must_use]
    pub const fn timing(&self) -> Timing {
        self.timing
    }

    /// Writes the next pass into the staging block; `None` when all are done, or the batch is answered.
    ///
    /// # Errors
    /// [`BatchError`] when the block does not fit the layout, or the pass before is not done.
    pub fn stage(&mut self, block: &mut [u8]) -> Result<Option<Pass>, BatchError> {
        let started = Instant::now();
        let staged = self.stage_pass(block);
        self.timing.plan += started.elapsed();
        staged
    }

    fn stage_pass(&mut self, block: &mut [u8]) -> Result<Option<Pass>, BatchError> {
        match &self.stage {
            None | Some(Stage::Computed(_)) => return Ok(None),
            Some(Stage::Plan(_)) => {}
            Some(Stage::Pass(_) | Stage::Group(_)) => return Err(BatchError::PassOpen),
        }
        let Some(planner) = &mut self.planner else {
            return Ok(None);
        };
        let mut block = planner.block(block)?;
        let Some(Stage::Plan(plan)) = self.stage.take() else {
            return Ok(None);
        };
        let (stage, pass) = match planner.stage(plan, &mut block)? {
            Staged::Pass(staged) => {
                let pass = *staged.pass();
                (Stage::Pass(staged), Some(pass))
            }
            Staged::Computed(computed) => (Stage::Computed(computed), None),
        };
        self.stage = Some(stage);
        Ok(pass)
    }

    /// Writes the next slot group of the staged pass into the staging block; `None` when all are done.
    ///
    /// # Errors
    /// [`BatchError`] when the block does not fit the layout, or the group before has no outputs.
    pub fn stage_slots(&mut self, block: &mut [u8]) -> Result<Option<SlotGroup>, BatchError> {
        let started = Instant::now();
        let staged = self.stage_group(block);
        self.timing.plan += started.elapsed();
        staged
    }

    fn stage_group(&mut self, block: &mut [u8]) -> Result<Option<SlotGroup>, BatchError> {
        match &self.stage {
            None | Some(Stage::Plan(_) | Stage::Computed(_)) => return Ok(None),
            Some(Stage::Pass(_)) => {}
            Some(Stage::Group(_)) => return Err(BatchError::GroupOpen),
        }
        let Some(planner) = &self.planner else {
            return Ok(None);
        };
        let mut block = planner.block(block)?;
        let Some(Stage::Pass(pass)) = self.stage.take() else {
            return Ok(None);
        };
        let (stage, group) = match pass.stage_slots(&mut block) {
            StagedSlots::Group(staged) => {
                let group = *staged.group();
                (Stage::Group(staged), Some(group))
            }
            StagedSlots::Done(plan) => (Stage::Plan(plan), None),
        };
        self.stage = Some(stage);
        Ok(group)
    }

    /// Takes what the engine computed for the staged slot group.
    ///
    /// # Errors
    /// [`BatchError`] when an array has another length than the group asks for, or no group waits for outputs.
    pub fn put_outputs(&mut self, outputs: &Outputs<'_>) -> Result<(), BatchError> {
        let group = match self.stage.take() {
            Some(Stage::Group(group)) => group,
            other => {
                self.stage = other;
                return Err(BatchError::NoGroup);
            }
        };
        let (stage, result) = match group.put_outputs(outputs) {
            Ok(pass) => (Stage::Pass(pass), Ok(())),
            Err((group, error)) => (Stage::Group(group), Err(error.into())),
        };
        self.stage = Some(stage);
        result
    }

    /// Runs the whole plan by a captured graph; `None` if the graph path does not take it. Commit afterwards, or fail.
    pub(crate) fn run(
        &mut self,
        graph_path: &mut GraphPath,
    ) -> Option<Result<DeviceTimes, GraphPathError>> {
        let planner = self.planner.as_deref_mut()?;
        let Some(Stage::Plan(plan)) = &mut self.stage else {
            return None;
        };
        let graph = graph_path.choose(planner, plan)?;
        let Some(Stage::Plan(plan)) = self.stage.take() else {
            return None;
        };
        let run = graph_path.run(planner, plan, graph);
        Some(run.map(|run| {
            self.timing.plan += run.staging;
            self.by_graph = true;
            self.stage = Some(Stage::Computed(run.computed));
            run.device
        }))
    }

    /// See [`Planner::prepare_drafts`]; does nothing unless a pass is staged.
    pub fn prepare_drafts(&mut self) {
        if let (Some(planner), Some(Stage::Pass(pass))) = (&mut self.planner, &mut self.stage) {
            planner.prepare_drafts(pass);
        }
    }

    /// The different adapters that the next pass needs; see [`Plan::next_adapters`].
    #[must_use]
    pub fn next_adapters(&self) -> Vec<i64> {
        self.plan().map_or_else(Vec::new, Plan::next_adapters)
    }

    /// Empties the requests of an adapter that cannot be had; see [`Plan::drop_adapter`].
    ///
    /// # Errors
    /// [`BatchError::PassOpen`] when a pass is not done.
    pub fn drop_adapter(&mut self, id: i64, reason: &str) -> Result<(), BatchError> {
        match &mut self.stage {
            Some(Stage::Plan(plan)) => plan.drop_adapter(id, reason),
            Some(Stage::Pass(_) | Stage::Group(_)) => return Err(BatchError::PassOpen),
            None | Some(Stage::Computed(_)) => {}
        }
        Ok(())
    }

    /// The staged pass, until its first slot group is staged.
    fn staged_pass(&self) -> Option<&StagedPass> {
        match &self.stage {
            Some(Stage::Pass(pass)) => Some(pass),
            _ => None,
        }
    }

    /// The adapter of each request of the staged pass; see [`StagedPass::adapters`].
    #[must_use]
    pub fn pass_adapters(&self) -> Option<Vec<i64>> {
        self.staged_pass()?.adapters()
    }

    /// The attention mask of the staged pass; see [`StagedPass::attention_mask`].
    #[must_use]
    pub fn attention_mask(&self) -> Option<AttentionMask<'_>> {
        self.staged_pass()?.attention_mask()
    }

    /// The images of the staged pass, see [`StagedPass::images`], and what holds their pixels.
    #[must_use]
    pub fn pass_images(&self) -> Option<(PassImages, &Arc<Media>)> {
        let media = self.media.as_ref()?;
        Some((self.staged_pass()?.images()?, media))
    }

    /// The recurrent state of the staged pass; see [`StagedPass::states`].
    #[must_use]
    pub fn pass_states(&self) -> Option<Vec<[i64; 2]>> {
        self.staged_pass()?.states()
    }

    /// What the staged pass is to note; see [`StagedPass::noted`].
    #[must_use]
    pub fn pass_noted(&self) -> Option<&[[i64; 2]]> {
        self.staged_pass()?.noted()
    }

    /// The places of the staged slot group; see [`StagedGroup::places`].
    #[must_use]
    pub fn group_places(&self) -> (&[Place], &[[i64; 2]]) {
        match &self.stage {
            Some(Stage::Group(group)) => group.places(),
            _ => (&[], &[]),
        }
    }

    /// What the staged slot group asks of its logits; see [`StagedGroup::records`].
    #[must_use]
    pub fn group_records(&self) -> (&[[i32; RECORD_WORDS]], &[i32]) {
        match &self.stage {
            Some(Stage::Group(group)) => group.records(),
            _ => (&[], &[]),
        }
    }

    /// The labels of the staged slot group; see [`StagedGroup::labels`].
    #[must_use]
    pub fn group_labels(&self) -> &[[i64; 2]] {
        match &self.stage {
            Some(Stage::Group(group)) => group.labels(),
            _ => &[],
        }
    }

    /// Builds the response and publishes it; a batch that has slots without outputs is answered by an abort. Returns what
    /// is worth a log line: emptied requests with their reasons, and a client that gave up.
    pub fn commit(&mut self, device: DeviceTimes) -> Vec<Note> {
        let Some(mut planner) = self.planner.take() else {
            return Vec::new();
        };
        let computed = match self.stage.take() {
            Some(Stage::Computed(computed)) => Some(computed),
            Some(Stage::Plan(plan)) => plan.computed().ok(),
            _ => None,
        };
        let mut notes = Vec::new();
        if let Some(mut computed) = computed {
            if let Some(lease) = self.lease.take() {
                notes = self.publish(lease, (&mut planner, &mut computed), device);
            }
            planner.recycle(computed);
        } else {
            planner.forget_table();
            let text = "a batch was committed before all of its slots had outputs; it was aborted";
            // Dropping an open lease publishes the abort reply.
            if self.lease.take().is_some() {
                self.shared.counters().aborted();
                notes.push(Note::new("order", text));
            }
        }
        self.shared.put_back(planner);
        notes
    }

    /// Answers first; what takes time and does not concern the client follows.
    fn publish(
        &mut self,
        lease: Lease,
        (planner, computed): (&mut Planner, &mut Computed),
        device: DeviceTimes,
    ) -> Vec<Note> {
        let mut answer = self.shared.answer();
        let started = Instant::now();
        let encoded = planner.reply(computed, self.timing.probes(device), &mut answer);
        // Taken before the client is woken: it may want this core at once.
        self.timing.respond = started.elapsed();
        let was_answered = encoded.is_ok();
        let published = match encoded {
            Ok(length) => {
                let published = lease.reply(&answer[..length]);
                if matches!(published, Ok(Publish::Stale)) {
                    self.shared.counters().abandoned();
                }
                published.map_err(|error| error.to_string())
            }
            Err(error) => {
                self.shared.counters().aborted();
                // Aborts the request.
                drop(lease);
                Err(error.to_string())
            }
        };
        let counters = self.shared.counters();
        for (_, fault) in computed.faults() {
            counters.refused(fault.kind());
        }
        let mut notes = Note::of_faults(computed);
        notes.extend(Note::of_publication(published));
        let (step, cycle) = self.shared.cycle(self.timing.received_ns, device.busy());
        if computed.pass_count() > 0 && was_answered {
            counters.served(Served {
                plan: computed,
                answered: planner.answered(),
                by_graph: self.by_graph,
                host_ns: self.timing.host().as_nanos() as u64,
                step_ns: step.as_nanos() as u64,
            });
        }
        planner.step_took(computed, device.busy(), cycle);
        let report = planner.draft_report();
        notes.extend(report.map(|counters| Note::new("drafts", counters.to_string())));
        notes
    }

    /// Answers with an abort, after an engine error: the device's block table counts as lost.
    pub fn fail(&mut self) {
        self.stage = None;
        if let Some(mut planner) = self.planner.take() {
            planner.forget_table();
            self.shared.put_back(planner);
        }
        // Dropping an open lease publishes the abort reply.
        if self.lease.take().is_some() {
            self.shared.counters().aborted();
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.fail();
    }
}
