//! The planner: what lasts from frame to frame, and the calls that take a frame from request to reply.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use pie_speculation::{ConfigError, Counters as DraftCounters};
use pie_wire::{ArchivedForwardRequest, Extension};

use crate::adapter::Adapters;
use crate::block::PassBlock;
use crate::block::layout::Layout;
use crate::drafting::history::PagePool;
use crate::drafting::{DraftOptions, Drafting};
use crate::fault::FrameError;
use crate::frame::check::FrameFacts;
use crate::frame::{Frame, range};
use crate::image::Vision;
use crate::limits::Limits;
use crate::plan::Plan;
use crate::plan::contents::Lasting;
use crate::reply::{Answered, Probes, Reply, ReplyError};
use crate::sampler::params::ParamsStore;
use crate::stages::error::StageError;
use crate::stages::graph::{StepMemory, write_step};
use crate::stages::{Computed, InFlight, Staged, StagedPass, StagedStep};
use crate::table::BlockTable;
use crate::table::storage::Storage;

/// Turns frames into [plans](Plan) and plans into replies. Keeps what outlasts a frame: the mirror of the device's block
/// table, the adapters, the drafter, and the memory of plans that were answered.
#[derive(Debug)]
pub struct Planner {
    limits: Limits,
    layout: Layout,
    random_seed: u64,
    table: BlockTable,
    storage: Storage,
    adapters: Adapters,
    states: u32,
    masks: bool,
    vision: Option<Vision>,
    /// Images of all frames so far.
    images: u64,
    /// What contexts ask for in all their steps.
    params: ParamsStore,
    drafting: Option<Box<Drafting>>,
    /// Number of the last frame, if it has passes that were not staged.
    unstaged: Option<u64>,
    reply: Reply,
    /// Memory for plans to come.
    spare: Vec<Plan>,
}

impl Planner {
    /// A planner for one engine. `random_seed` keys the randomness of unseeded samplers. The limits must pass
    /// [`Limits::check`].
    #[must_use]
    pub fn new(limits: Limits, random_seed: u64) -> Self {
        Self {
            limits,
            layout: Layout::new(&limits),
            random_seed,
            table: BlockTable::new(&limits),
            storage: Storage::new(&limits),
            adapters: Adapters::default(),
            states: 0,
            masks: true,
            vision: None,
            images: 0,
            params: ParamsStore::default(),
            drafting: None,
            unstaged: None,
            reply: Reply::default(),
            spare: Vec::new(),
        }
    }

    /// For an engine that cannot apply attention masks: a request whose mask is not causal is emptied.
    #[must_use]
    pub const fn without_masks(mut self) -> Self {
        self.masks = false;
        self
    }

    /// For an engine with recurrent state: the runtime may name slots `0..slots`, fewer than 2^31.
    #[must_use]
    pub const fn with_states(mut self, slots: u32) -> Self {
        self.states = slots;
        self
    }

    /// For an engine with adapters, of which a pass can hold `slots`; requests without one take a slot together.
    #[must_use]
    pub const fn with_adapters(mut self, slots: NonZeroUsize) -> Self {
        self.adapters.set_slots(slots);
        self
    }

    /// For an engine with this encoder, which must pass [`Vision::check`]; without one requests with images are
    /// emptied. Rows whose embeddings come from an image are staged with token `vocab_size`, which no text has.
    #[must_use]
    pub const fn with_vision(mut self, vision: Vision) -> Self {
        self.vision = Some(vision);
        self
    }

    /// Drafts for requests that ask for it, from the next frame on.
    ///
    /// # Errors
    /// [`ConfigError`] for options out of range.
    pub fn draft(&mut self, options: &DraftOptions) -> Result<(), ConfigError> {
        self.drafting = Some(Box::new(Drafting::new(options, &self.limits)?));
        Ok(())
    }

    /// The bounds that plans keep to.
    #[must_use]
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The layout of the staging block.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The staging block in memory of [`Layout::bytes`] bytes or more, aligned to 8.
    ///
    /// # Errors
    /// [`StageError`] when it is smaller or misaligned.
    pub fn block<'b>(&self, memory: &'b mut [u8]) -> Result<PassBlock<'b>, StageError> {
        PassBlock::of(&self.layout, memory)
    }

    /// Slots of the engine's pool of recurrent state; 0 when it has none.
    #[must_use]
    pub const fn states(&self) -> u32 {
        self.states
    }

    /// Whether the engine takes adapters.
    #[must_use]
    pub const fn takes_adapters(&self) -> bool {
        self.adapters.slots().is_some()
    }

    /// From now on requests may bind the adapter.
    pub fn add_adapter(&mut self, id: i64) {
        self.adapters.load(id);
    }

    /// From now on requests may not bind the adapter.
    pub fn remove_adapter(&mut self, id: i64) {
        self.adapters.unload(id);
    }

    /// Plans one frame.
    ///
    /// # Errors
    /// [`FrameError`] when the frame's arrays contradict each other. A single request that cannot be served is not an error:
    /// it is listed in [`Plan::faults`].
    pub fn plan(
        &mut self,
        driver_id: u32,
        request: &ArchivedForwardRequest,
    ) -> Result<Plan, FrameError> {
        self.plan_extended(driver_id, request, &Extension::default())
    }

    /// Plans one frame with what its extension asks for.
    ///
    /// # Errors
    /// As [`Planner::plan`], and [`FrameError::Extension`] when the extension is of other requests.
    pub fn plan_extended(
        &mut self,
        driver_id: u32,
        request: &ArchivedForwardRequest,
        extension: &Extension<'_>,
    ) -> Result<Plan, FrameError> {
        if self.unstaged.is_some() {
            // Changes that the mirror holds never reached the device.
            self.forget_table();
        }
        let frame = Frame::check(request)?;
        let requests = frame.requests;
        let beyond = |&request: &u32| request as usize >= requests;
        if let Some(request) = extension.last_request().filter(beyond) {
            return Err(FrameError::Extension { request, requests });
        }
        let facts = FrameFacts::of(&frame, &self.limits, self.vision)?;
        self.params.take(extension.params(), self.limits.vocab_size);
        self.table.start_frame();
        for index in 0..frame.requests {
            self.table
                .expect(&frame.pages[range(frame.page_indptr, index)]);
        }
        let spare = self.spare.pop();
        let mut plan = spare.unwrap_or_else(|| Plan::new(self.limits));
        let lasting = Lasting {
            table: &mut self.table,
            adapters: &self.adapters,
            drafting: self.drafting.as_deref_mut(),
            states: self.states,
            masks: self.masks,
            random_seed: self.random_seed,
            images: self.images,
            extension: extension.rows(),
            params: &self.params,
        };
        plan.make(driver_id, (&frame, &facts), lasting);
        self.images += plan.images().len() as u64;
        self.unstaged = (plan.pass_count() > 0).then(|| plan.number());
        Ok(plan)
    }

    /// Writes the next pass of a plan into the staging block.
    ///
    /// # Errors
    /// [`StageError::Superseded`] when the block table is not the plan's any more; the plan is of no use then.
    pub fn stage(
        &mut self,
        mut plan: Plan,
        block: &mut PassBlock<'_>,
    ) -> Result<Staged, StageError> {
        self.check_newest(&plan)?;
        let pass = plan.stage(&mut self.table, &mut self.storage, block);
        self.note_staged(&plan);
        Ok(match pass {
            Some(pass) => Staged::Pass(StagedPass::new(plan, pass)),
            None => Staged::Computed(Computed::new(plan)),
        })
    }

    /// Puts rows that read the same KV first into groups, where that saves reading. They are staged for graphs that know
    /// them. Returns whether they save more than so many rows cost that such a graph has and another would not.
    pub fn find_groups(&mut self, plan: &mut Plan, more_rows: usize) -> bool {
        plan.find_groups(&mut self.table, more_rows)
    }

    /// Writes a plan's one pass as step number `step` for a graph that [runs](crate::StepSize::runs) steps of
    /// [`Plan::graph_size`].
    ///
    /// # Errors
    /// [`StageError`] when the memory does not fit the layout, or as [`Planner::stage`].
    ///
    /// # Panics
    /// If [`Plan::graph_size`] is `None`, or the layout has no room for it.
    pub fn stage_graph(
        &mut self,
        mut plan: Plan,
        layout: &Layout,
        memory: StepMemory<'_>,
        step: u32,
    ) -> Result<StagedStep, StageError> {
        self.check_newest(&plan)?;
        let parts = (&self.table, &mut self.storage);
        let written = write_step(&plan, parts, layout, memory, step)?;
        if let Some(drafting) = &mut self.drafting {
            drafting.runs_as_graph(plan.drafting().0);
        }
        plan.skip_passes();
        self.note_staged(&plan);
        Ok(StagedStep::new(plan, written))
    }

    /// Does what can be done for a frame's drafts before its tokens are known; call it while the device computes. Without
    /// this call the reply waits for it. Call it before another frame is planned, or contexts that are not known yet stay so.
    pub fn prepare_drafts(&mut self, staged: &mut impl InFlight) {
        if let Some(drafting) = &mut self.drafting {
            let (drafts, frame) = staged.plan_mut().drafting();
            drafting.prepare(drafts, frame, &self.table);
        }
    }

    /// Encodes the answer to a frame into `buffer`, which has the [`reply_bytes`](Limits::reply_bytes) that the frame was
    /// planned for, and returns its length in bytes. It is the fast token reply when every request has exactly one token,
    /// else a response archive.
    ///
    /// # Errors
    /// [`ReplyError`] when the buffer is smaller, or the arrays contradict each other.
    pub fn reply(
        &mut self,
        frame: &mut Computed,
        probes: Probes,
        buffer: &mut [u8],
    ) -> Result<usize, ReplyError> {
        let started = Instant::now();
        let plan = frame.plan_mut();
        if let Some(drafting) = &mut self.drafting {
            let (drafts, frame) = plan.drafting();
            drafting.propose(drafts, frame, &self.table);
        }
        match self.reply.write(plan, probes, buffer, started) {
            // The frame was planned for a reply without drafts, which may be left out at any time.
            Err(ReplyError::Wire(_)) if plan.drafts().any() => {
                if let Some(drafting) = &mut self.drafting {
                    drafting.take_back(plan.drafting().0);
                }
                self.reply.write(plan, probes, buffer, started)
            }
            written => written,
        }
    }

    /// What the last [reply](Self::reply) gives to the runtime.
    #[must_use]
    pub const fn answered(&self) -> Answered {
        self.reply.answered()
    }

    /// Notes how long the device took for a frame, and how much time its answer came after the one before: what drafts
    /// cost is learnt from frames that are steps. Call it once the frame is answered.
    pub fn step_took(&mut self, frame: &mut Computed, time: Duration, cycle: Duration) {
        if let Some(drafting) = &mut self.drafting {
            let plan = frame.plan_mut();
            let passes = plan.pass_count();
            let (drafts, drafted) = plan.drafting();
            drafting.took(drafts, (drafted, passes), time, cycle);
        }
    }

    /// Takes the memory of an answered frame for frames to come.
    pub fn recycle(&mut self, frame: Computed) {
        self.spare.push(frame.into_plan());
    }

    /// What became of drafts so far, as a line; `None` when the planner does not draft.
    #[must_use]
    pub fn draft_counters(&self) -> Option<DraftCounters> {
        self.drafting.as_ref().map(|drafting| drafting.counters())
    }

    /// What became of drafts so far, if it is time to say so. That is with the first 256 drafts that were verified, or steps
    /// that asked for some, and then whenever there were twice as many of either. Later it is with every 2^20 drafts or
    /// 2^14 steps. Call it once a frame is answered.
    pub fn draft_report(&mut self) -> Option<DraftCounters> {
        self.drafting.as_mut()?.report()
    }

    /// Notes that a page was copied, from pool and page to pool and page.
    pub fn page_copied(&mut self, source: (PagePool, u32), target: (PagePool, u32)) {
        if let Some(drafting) = &mut self.drafting {
            drafting.page_copied(source, target);
        }
    }

    /// Notes that it is not known any more what a page holds.
    pub fn page_lost(&mut self, page: (PagePool, u32)) {
        if let Some(drafting) = &mut self.drafting {
            drafting.page_lost(page);
        }
    }

    /// Forgets what the device's block table holds; call it after a pass failed half-way.
    pub fn forget_table(&mut self) {
        self.unstaged = None;
        self.table.forget();
    }

    /// Checks that the block table is as the plan left it, if it has a pass to stage.
    fn check_newest(&self, plan: &Plan) -> Result<(), StageError> {
        let frame = plan.number();
        if plan.next_pass() < plan.pass_count() && self.unstaged != Some(frame) {
            return Err(StageError::Superseded { frame });
        }
        Ok(())
    }

    /// Notes whether a plan still has passes to stage.
    fn note_staged(&mut self, plan: &Plan) {
        if self.unstaged == Some(plan.number()) && plan.next_pass() == plan.pass_count() {
            self.unstaged = None;
        }
    }
}
