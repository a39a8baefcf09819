//! What a plan becomes, stage by stage. Each stage is a type, and a call takes one and returns the next:
//!
//! ```text
//! Plan ──stage──▶ StagedPass ──stage_slots──▶ StagedGroup ──put_outputs──▶ StagedPass
//!   ▲                └──── no group is left ────▶ Plan
//!   ├──stage, no pass is left──▶ Computed ──reply──▶ bytes
//!   └──stage_graph──▶ StagedStep ──put_tokens──▶ Computed
//! ```

pub(crate) mod error;
pub(crate) mod graph;
pub(crate) mod pass;

use std::ops::Deref;

use crate::block::PassBlock;
use crate::image::PassImages;
use crate::mask::attention::AttentionMask;
use crate::plan::Plan;
use crate::sampler::extra::RECORD_WORDS;
use crate::slot::group::{Place, SlotGroup};
use crate::slot::outputs::Outputs;
use crate::stages::error::StageError;
use crate::stages::graph::WrittenStep;
use crate::stages::pass::Pass;

/// What [`Planner::stage`](crate::Planner::stage) made of a plan.
#[derive(Debug)]
pub enum Staged {
    /// Its next pass is in the staging block.
    Pass(StagedPass),
    /// No pass is left.
    Computed(Computed),
}

/// What [`StagedPass::stage_slots`] made of a pass.
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

    /// Its attention mask, of [`Limits::attention_words`](crate::Limits::attention_words) at most; `None` when its rows are
    /// causal.
    #[must_use]
    pub fn attention_mask(&self) -> Option<AttentionMask<'_>> {
        let plan = &self.plan;
        let segments = plan.staged_segments();
        let mask = || AttentionMask::new(plan.mask_rows(), plan.requests(), segments);
        self.pass.masked.then(mask)
    }

    /// Storage slots and the tokens that they have KV of, which count and are not in the pass; `None` unless the tokens of
    /// the pass are to be noted, too.
    #[must_use]
    pub fn noted(&self) -> Option<&[[i64; 2]]> {
        self.plan.noted()
    }

    /// Its images; `None` when it has none.
    #[must_use]
    pub fn images(&self) -> Option<PassImages> {
        self.plan.pass_images()
    }

    /// The adapter of each of its requests, -1 for none; `None` when no request has one.
    #[must_use]
    pub fn adapters(&self) -> Option<Vec<i64>> {
        self.plan.pass_adapters()
    }

    /// Of each of its requests the slot in the engine's state pool, whose slot 0 is for padding, and 1 where it starts from
    /// zeros; `None` for an engine without recurrent state.
    #[must_use]
    pub fn states(&self) -> Option<Vec<[i64; 2]>> {
        self.plan.pass_states()
    }

    /// Writes the next group of its slots into the staging block.
    #[must_use]
    pub fn stage_slots(mut self, block: &mut PassBlock<'_>) -> StagedSlots {
        match self.plan.stage_slots(block) {
            Some(group) => StagedSlots::Group(StagedGroup { pass: self, group }),
            None => StagedSlots::Done(self.plan),
        }
    }
}

/// A plan with a slot group in the staging block.
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

    /// The tokens whose log-probabilities the group asks for: `[number of the slot among the group's log-probability slots,
    /// token]`. A token may be outside the vocabulary: its log-probability is -inf.
    #[must_use]
    pub fn labels(&self) -> &[[i64; 2]] {
        self.pass.plan.pass_slots().labels()
    }

    /// The slots whose log-probabilities are asked for, in the order of the group, and the tokens that are given for them:
    /// number of the place and token.
    #[must_use]
    pub fn places(&self) -> (&[Place], &[[i64; 2]]) {
        self.pass.plan.pass_slots().places()
    }

    /// What the group asks of its slots' logits before they are sampled: a record of each slot, in the order of the block,
    /// and the words that records refer to; both empty when nothing is asked. See [`RECORD_WORDS`](crate::RECORD_WORDS).
    #[must_use]
    pub fn records(&self) -> (&[[i32; RECORD_WORDS]], &[i32]) {
        self.pass.plan.pass_slots().records()
    }

    /// Takes what the engine computed for the group.
    ///
    /// # Errors
    /// [`StageError::OutputCount`] when an array does not have the length that the group's slots ask for, with the group,
    /// whose outputs are still welcome.
    #[expect(
        clippy::result_large_err,
        reason = "the error is a fault of the caller, and carries what is consumed otherwise"
    )]
    pub fn put_outputs(mut self, outputs: &Outputs<'_>) -> Result<StagedPass, (Self, StageError)> {
        match self.pass.plan.put_outputs(outputs) {
            Ok(()) => Ok(self.pass),
            Err(error) => Err((self, error)),
        }
    }
}

/// A plan that is staged as a step for a graph.
#[derive(Debug)]
pub struct StagedStep {
    plan: Plan,
    step: WrittenStep,
}

impl StagedStep {
    pub(crate) const fn new(plan: Plan, step: WrittenStep) -> Self {
        Self { plan, step }
    }

    /// Words of its further block-table changes and its logit masks.
    #[must_use]
    pub const fn mask_words(&self) -> usize {
        self.step.mask_words
    }

    /// The slots with results to wait for, from the first on; at least one.
    #[must_use]
    pub const fn results(&self) -> usize {
        self.step.results
    }

    /// Words of log-probabilities that the step writes, from the first on.
    #[must_use]
    pub const fn place_words(&self) -> usize {
        self.step.place_words
    }

    /// Takes the token of each slot, and each of the step's [words](Self::place_words) of log-probabilities. A token outside
    /// the vocabulary says that the logits are NaN.
    #[must_use]
    pub fn put_tokens(
        mut self,
        token: impl Fn(usize) -> u32,
        place_word: impl Fn(usize) -> u32,
    ) -> Computed {
        self.plan.put_tokens(self.step.numbered, token, place_word);
        Computed(self.plan)
    }
}

/// A frame whose every slot has its output: it can be answered.
#[derive(Debug)]
pub struct Computed(Plan);

impl Computed {
    /// A plan without a pass or a slot that is left.
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
    /// The frame as computed, if it has no pass left to stage; otherwise itself.
    ///
    /// # Errors
    /// The plan, whose passes are still to be staged.
    pub fn computed(self) -> Result<Computed, Self> {
        if self.next_pass() < self.pass_count() {
            return Err(self);
        }
        Ok(Computed(self))
    }
}

/// What a device may compute: a pass or a step.
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

impl Deref for Computed {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.0
    }
}
