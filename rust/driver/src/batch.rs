//! An open batch: a planned forward request whose outputs Python computes.

use std::sync::Arc;
use std::time::Instant;

use pie_planner::{
    AttentionMask, ComputedPlan, CustomSlot, LogprobPosition, Outputs, Pass, PassImages, Plan,
    Planner, RECORD_WORDS, SlotGroup, StageError, Staged, StagedGroup, StagedPass, StagedSlots,
};
use pie_ring::{Lease, Publish};
use thiserror::Error;

use crate::counters::ServedBatch;
use crate::graph_path::{GraphPath, GraphPathError};
use crate::log_line::LogLine;
use crate::media::Media;
use crate::shared_planner::SharedPlanner;
use crate::timing::{DeviceTimes, Timing};

/// A call out of order, or with wrong buffers: a bug of the caller. The batch is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BatchError {
    /// The block or the outputs do not fit.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The pass before has sampling groups left.
    #[error(
        "the staged pass has slots without outputs; stage its slot groups first, until none is left"
    )]
    PassOpen,
    /// The sampling group before has no outputs yet.
    #[error("the staged slot group has no outputs; put them first")]
    GroupOpen,
    /// Outputs without a staged sampling group.
    #[error("no slot group waits for outputs; stage one first")]
    NoGroup,
}

/// The stage of a batch.
enum Stage {
    /// Its next pass can be staged.
    Plan(Plan),
    /// A pass is staged.
    Pass(StagedPass),
    /// A sampling group is staged.
    Group(StagedGroup),
    /// All outputs are there.
    Computed(ComputedPlan),
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

/// A planned forward request. Stage and run every pass, put the outputs of every sampling group, then commit. Dropping it
/// aborts the request.
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
    /// Whether the graph path ran it.
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

    /// Host timings so far.
    #[must_use]
    pub const fn timing(&self) -> Timing {
        self.timing
    }

    /// Writes the next pass into the staging block; `None` after the last.
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

    /// Writes the next sampling group of the staged pass into the staging block; `None` after the last.
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

    /// Stores the engine's outputs for the staged sampling group.
    ///
    /// # Errors
    /// [`BatchError`] when an array has the wrong length, or no group is staged.
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

    /// Runs the whole plan as a captured graph; `None` if no graph fits. Commit or fail afterwards.
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

    /// See [`Plan::next_adapters`].
    #[must_use]
    pub fn next_adapters(&self) -> Vec<i64> {
        self.plan().map_or_else(Vec::new, Plan::next_adapters)
    }

    /// See [`Plan::drop_adapter`].
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

    /// See [`StagedPass::adapters`].
    #[must_use]
    pub fn pass_adapters(&self) -> Option<Vec<i64>> {
        self.staged_pass()?.adapters()
    }

    /// See [`StagedPass::attention_mask`].
    #[must_use]
    pub fn attention_mask(&self) -> Option<AttentionMask<'_>> {
        self.staged_pass()?.attention_mask()
    }

    /// See [`StagedPass::images`]; also the owner of their pixels.
    #[must_use]
    pub fn pass_images(&self) -> Option<(PassImages, &Arc<Media>)> {
        let media = self.media.as_ref()?;
        Some((self.staged_pass()?.images()?, media))
    }

    /// See [`StagedPass::states`].
    #[must_use]
    pub fn pass_states(&self) -> Option<Vec<[i64; 2]>> {
        self.staged_pass()?.states()
    }

    /// See [`StagedPass::token_history`].
    #[must_use]
    pub fn pass_token_history(&self) -> Option<&[[i64; 2]]> {
        self.staged_pass()?.token_history()
    }

    /// See [`StagedGroup::logprob_positions`].
    #[must_use]
    pub fn group_logprob_positions(&self) -> (&[LogprobPosition], &[[i64; 2]]) {
        match &self.stage {
            Some(Stage::Group(group)) => group.logprob_positions(),
            _ => (&[], &[]),
        }
    }

    /// See [`StagedGroup::records`].
    #[must_use]
    pub fn group_records(&self) -> (&[[i32; RECORD_WORDS]], &[i32]) {
        match &self.stage {
            Some(Stage::Group(group)) => group.records(),
            _ => (&[], &[]),
        }
    }

    /// See [`StagedGroup::custom`].
    #[must_use]
    pub fn group_custom(&self) -> &[CustomSlot] {
        match &self.stage {
            Some(Stage::Group(group)) => group.custom(),
            _ => &[],
        }
    }

    /// See [`StagedGroup::fail_slot`].
    pub fn fail_slot(&mut self, slot: usize, reason: &str) {
        if let Some(Stage::Group(group)) = &mut self.stage {
            group.fail_slot(slot, reason);
        }
    }

    /// See [`StagedGroup::labels`].
    #[must_use]
    pub fn group_labels(&self) -> &[[i64; 2]] {
        match &self.stage {
            Some(Stage::Group(group)) => group.labels(),
            _ => &[],
        }
    }

    /// Builds and publishes the response; aborts the batch if outputs are missing. Returns log lines: rejected requests, a client
    /// that gave up.
    pub fn commit(&mut self, device: DeviceTimes) -> Vec<LogLine> {
        let Some(mut planner) = self.planner.take() else {
            return Vec::new();
        };
        let computed = match self.stage.take() {
            Some(Stage::Computed(computed)) => Some(computed),
            Some(Stage::Plan(plan)) => plan.computed().ok(),
            _ => None,
        };
        let mut log_lines = Vec::new();
        if let Some(mut computed) = computed {
            if let Some(lease) = self.lease.take() {
                log_lines = self.publish(lease, (&mut planner, &mut computed), device);
            }
            planner.recycle(computed);
        } else {
            planner.invalidate_block_table();
            let text = "a batch was committed before all of its slots had outputs; it was aborted";
            // Dropping an open lease publishes the abort reply.
            if self.lease.take().is_some() {
                self.shared.counters().aborted();
                log_lines.push(LogLine::new("order", text));
            }
        }
        self.shared.put_back(planner);
        log_lines
    }

    /// Publishes the response, then does the bookkeeping.
    fn publish(
        &mut self,
        lease: Lease,
        (planner, computed): (&mut Planner, &mut ComputedPlan),
        device: DeviceTimes,
    ) -> Vec<LogLine> {
        let mut answer = self.shared.answer();
        let started = Instant::now();
        let encoded = planner.reply(computed, self.timing.forward_timings(device), &mut answer);
        // Measured before the client is woken, which may preempt this thread.
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
        for (_, error) in computed.request_errors() {
            counters.refused(error.kind());
        }
        let mut log_lines = LogLine::of_request_errors(computed);
        log_lines.extend(LogLine::of_publication(published));
        let (step, cycle) = self.shared.cycle(self.timing.received_ns, device.busy());
        if computed.pass_count() > 0 && was_answered {
            counters.served(ServedBatch {
                plan: computed,
                token_counts: planner.token_counts(),
                by_graph: self.by_graph,
                host_ns: self.timing.host().as_nanos() as u64,
                step_ns: step.as_nanos() as u64,
            });
        }
        planner.record_step_time(computed, device.busy(), cycle);
        let report = planner.draft_report();
        log_lines.extend(report.map(|counters| LogLine::new("drafts", counters.to_string())));
        log_lines
    }

    /// Aborts the batch after an engine error, and invalidates the block table.
    pub fn fail(&mut self) {
        self.stage = None;
        if let Some(mut planner) = self.planner.take() {
            planner.invalidate_block_table();
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
