//! The stages of a plan as a typestate: each call consumes one stage and returns the next.
//!
//! ```text
//! Plan ──stage──▶ StagedPass ──stage_slots──▶ StagedGroup ──put_outputs──▶ StagedPass
//!   ▲                └──── no group is left ────▶ Plan
//!   ├──stage, no pass is left──▶ ComputedPlan ──reply──▶ bytes
//!   └──stage_graph──▶ StagedStep ──put_tokens──▶ ComputedPlan
//! ```

pub(crate) mod error;
pub(crate) mod graph;
pub(crate) mod pass;

use std::ops::Deref;

use crate::block::PassBlock;
use crate::image::PassImages;
use crate::mask::attention::AttentionMask;
use crate::plan::Plan;
use crate::sampler::logits_processors::{CustomSlot, RECORD_WORDS};
use crate::slot::group::{LogprobPosition, SlotGroup};
use crate::slot::outputs::Outputs;
use crate::staging::error::StageError;
use crate::staging::graph::WrittenStep;
use crate::staging::pass::Pass;

/// Result of [`Planner::stage`](crate::Planner::stage).
#[derive(Debug)]
pub enum Staged {
    /// Its next pass is in the staging block.
    Pass(StagedPass),
    /// No pass is left.
    Computed(ComputedPlan),
}

/// Result of [`StagedPass::stage_slots`].
#[derive(Debug)]
pub enum StagedSlots {
    /// Its next group is in the staging block.
    Group(StagedGroup),
    /// No group is left.
    Done(Plan),
}

/// A plan with a pass in the staging block.
#[derive(Debug)]
pub struct StagedPass {
    plan: Plan,
    pass: Pass,
}

impl StagedPass {
    pub(crate) const fn new(plan: Plan, pass: Pass) -> Self {
        Self { plan, pass }
    }

    /// What is staged.
    #[must_use]
    pub const fn pass(&self) -> &Pass {
        &self.pass
    }

    /// Its custom attention mask, of at most [`Limits::attention_words`](crate::Limits::attention_words); `None` for causal
    /// attention.
    #[must_use]
    pub fn attention_mask(&self) -> Option<AttentionMask<'_>> {
        let plan = &self.plan;
        let segments = plan.staged_segments();
        let mask = || AttentionMask::new(plan.mask_rows(), plan.requests(), segments);
        self.pass.masked.then(mask)
    }

    /// `[KV slot, token]` of tokens that penalties count and that earlier passes stored; `None` unless the tokens of this pass
    /// must be recorded, too.
    #[must_use]
    pub fn token_history(&self) -> Option<&[[i64; 2]]> {
        self.plan.token_history()
    }

    /// Its images; `None` when it has none.
    #[must_use]
    pub fn images(&self) -> Option<PassImages> {
        self.plan.pass_images()
    }

    /// `LoRA` adapter id of each request, -1 = none; `None` when no request has an adapter.
    #[must_use]
    pub fn adapters(&self) -> Option<Vec<i64>> {
        self.plan.pass_adapters()
    }

    /// `[slot in the engine's state pool (0 = padding), 1 = reset to zeros]` of each request; `None` for an engine without
    /// recurrent state.
    #[must_use]
    pub fn states(&self) -> Option<Vec<[i64; 2]>> {
        self.plan.pass_states()
    }

    /// Writes the next sampling group into the staging block.
    #[must_use]
    pub fn stage_slots(mut self, block: &mut PassBlock<'_>) -> StagedSlots {
        match self.plan.stage_slots(block) {
            Some(group) => StagedSlots::Group(StagedGroup { pass: self, group }),
            None => StagedSlots::Done(self.plan),
        }
    }
}

/// A plan with a sampling group in the staging block.
#[derive(Debug)]
pub struct StagedGroup {
    pass: StagedPass,
    group: SlotGroup,
}

impl StagedGroup {
    /// What is staged.
    #[must_use]
    pub const fn group(&self) -> &SlotGroup {
        &self.group
    }

    /// `[log-probability slot within the group, token]` of the tokens whose log-probabilities are requested. A token may be
    /// outside the vocabulary: its log-probability is -inf.
    #[must_use]
    pub fn labels(&self) -> &[[i64; 2]] {
        self.pass.plan.pass_slots().labels()
    }

    /// The logprob positions of the group, in the order of its slots, and `[position, token]` of the further tokens requested
    /// for them.
    #[must_use]
    pub fn logprob_positions(&self) -> (&[LogprobPosition], &[[i64; 2]]) {
        self.pass.plan.pass_slots().logprob_positions()
    }

    /// Penalties and logit biases: a record of each slot, in the order of the block, and the bias words that records refer to;
    /// both empty without any. See [`RECORD_WORDS`](crate::RECORD_WORDS).
    #[must_use]
    pub fn records(&self) -> (&[[i32; RECORD_WORDS]], &[i32]) {
        self.pass.plan.pass_slots().records()
    }

    /// The slots whose logits a processor of the driver's process changes, in the order of the group.
    #[must_use]
    pub fn custom(&self) -> &[CustomSlot] {
        self.pass.plan.pass_slots().custom()
    }

    /// Records why the processor of a slot of the group failed. Its token must be one outside the vocabulary: its request is
    /// then rejected with this reason.
    pub fn fail_slot(&mut self, slot: usize, reason: &str) {
        self.pass.plan.fail_slot(slot, reason);
    }

    /// Stores the engine's outputs for the group.
    ///
    /// # Errors
    /// [`StageError::OutputCount`] when an array has the wrong length, with the group, which still waits for its outputs.
    #[expect(
        clippy::result_large_err,
        reason = "the error is a bug of the caller, and returns what is consumed otherwise"
    )]
    pub fn put_outputs(mut self, outputs: &Outputs<'_>) -> Result<StagedPass, (Self, StageError)> {
        match self.pass.plan.put_outputs(outputs) {
            Ok(()) => Ok(self.pass),
            Err(error) => Err((self, error)),
        }
    }
}

/// A plan that is staged as a step of a captured CUDA graph.
#[derive(Debug)]
pub struct StagedStep {
    plan: Plan,
    step: WrittenStep,
}

impl StagedStep {
    pub(crate) const fn new(plan: Plan, step: WrittenStep) -> Self {
        Self { plan, step }
    }

    /// Words that the step uses of [`StepMemory::mask_words`](crate::StepMemory::mask_words).
    #[must_use]
    pub const fn mask_words(&self) -> usize {
        self.step.mask_words
    }

    /// How many of the first sampling slots have a result to wait for; at least one.
    #[must_use]
    pub const fn results(&self) -> usize {
        self.step.results
    }

    /// Words of log-probabilities that the step writes.
    #[must_use]
    pub const fn logprob_words(&self) -> usize {
        self.step.logprob_words
    }

    /// Stores the drafts that a draft model has computed for each slot: `word` gives those of all slots, `num_drafts` each, and a token
    /// outside the vocabulary for none.
    pub fn put_drafts(&mut self, num_drafts: usize, word: impl Fn(usize) -> u32) {
        self.plan.put_drafts(self.step.numbered, num_drafts, word);
    }

    /// Stores the sampled token of each slot, and each of the step's [words](Self::logprob_words) of log-probabilities. A token
    /// outside the vocabulary marks NaN logits.
    #[must_use]
    pub fn put_tokens(
        mut self,
        token: impl Fn(usize) -> u32,
        logprob_word: impl Fn(usize) -> u32,
    ) -> ComputedPlan {
        self.plan
            .put_tokens(self.step.numbered, token, logprob_word);
        ComputedPlan(self.plan)
    }
}

/// A plan whose sampling slots all have their outputs: ready for [`Planner::reply`](crate::Planner::reply).
#[derive(Debug)]
pub struct ComputedPlan(Plan);

impl ComputedPlan {
    /// A plan with no pass or slot left.
    pub(crate) const fn new(plan: Plan) -> Self {
        Self(plan)
    }

    pub(crate) const fn plan_mut(&mut self) -> &mut Plan {
        &mut self.0
    }

    pub(crate) fn into_plan(self) -> Plan {
        self.0
    }
}

impl Plan {
    /// The computed plan, if no pass is left to stage.
    ///
    /// # Errors
    /// The plan itself, if passes are left.
    pub fn computed(self) -> Result<ComputedPlan, Self> {
        if self.next_pass() < self.pass_count() {
            return Err(self);
        }
        Ok(ComputedPlan(self))
    }
}

/// What a device may be running: a pass or a step.
pub trait InFlight {
    #[doc(hidden)]
    fn plan_mut(&mut self) -> &mut Plan;
}

impl InFlight for StagedPass {
    fn plan_mut(&mut self) -> &mut Plan {
        &mut self.plan
    }
}

impl InFlight for StagedStep {
    fn plan_mut(&mut self) -> &mut Plan {
        &mut self.plan
    }
}

impl Deref for StagedPass {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.plan
    }
}

impl Deref for StagedGroup {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.pass.plan
    }
}

impl Deref for StagedStep {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.plan
    }
}

impl Deref for ComputedPlan {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.0
    }
}
