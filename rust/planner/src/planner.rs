//! The planner: state across frames, and the calls from a request to its reply.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use pie_speculation::{ConfigError, Counters as DraftCounters};
use pie_wire::{ArchivedForwardRequest, Extension};

use crate::adapter::Adapters;
use crate::block::PassBlock;
use crate::block::layout::Layout;
use crate::drafting::history::PagePool;
use crate::drafting::{DraftOptions, Drafting};
use crate::error::FrameError;
use crate::frame::check::FrameChecks;
use crate::frame::request::PlannedRequest;
use crate::frame::{Frame, range};
use crate::image::{MediaConfig, VisionConfig};
use crate::limits::Limits;
use crate::plan::Plan;
use crate::plan::batch_arrays::PlannerState;
use crate::reply::{ForwardTimings, Reply, ReplyError, TokenCounts};
use crate::sampler::params::ParamsStore;
use crate::staging::error::StageError;
use crate::staging::graph::{StepMemory, write_step};
use crate::staging::{ComputedPlan, InFlight, Staged, StagedPass, StagedStep};
use crate::table::BlockTable;
use crate::table::slot_mapping::SlotMapping;

/// Turns frames into [plans](Plan) and plans into replies. Its state across frames: the mirror of the device's block table,
/// adapter ids, context parameters, the drafter, and spare plans.
#[derive(Debug)]
pub struct Planner {
    limits: Limits,
    layout: Layout,
    random_seed: u64,
    table: BlockTable,
    slot_mapping: SlotMapping,
    adapters: Adapters,
    states: u32,
    masks: bool,
    /// Numbers of a pooled row of an embedding model; 0 for a model that generates.
    embedding_size: u32,
    /// Numbers of a hidden state; 0 where it is not known yet.
    hidden_size: u32,
    media: MediaConfig,
    /// Images of all frames so far.
    images: u64,
    /// Parameters registered per context.
    params: ParamsStore,
    drafting: Option<Box<Drafting>>,
    /// Number of the last frame, if it has passes that were not staged.
    unstaged: Option<u64>,
    reply: Reply,
    /// Plans whose buffers are reused.
    spare: Vec<Plan>,
}

impl Planner {
    /// A planner for one engine. `random_seed` keys samplers without a seed. The limits must pass
    /// [`Limits::check`].
    #[must_use]
    pub fn new(limits: Limits, random_seed: u64) -> Self {
        Self {
            limits,
            layout: Layout::new(&limits),
            random_seed,
            table: BlockTable::new(&limits),
            slot_mapping: SlotMapping::new(&limits),
            adapters: Adapters::default(),
            states: 0,
            masks: true,
            embedding_size: 0,
            hidden_size: 0,
            media: MediaConfig::default(),
            images: 0,
            params: ParamsStore::default(),
            drafting: None,
            unstaged: None,
            reply: Reply::default(),
            spare: Vec::new(),
        }
    }

    /// Disables custom attention masks: requests with a non-causal mask are rejected.
    #[must_use]
    pub const fn without_masks(mut self) -> Self {
        self.masks = false;
        self
    }

    /// Plans for an embedding model, whose pooled rows have `size` numbers. Its only sampler is
    /// [`Embedding`](pie_wire::Sampler::Embedding), which returns such a row in the place of logits.
    #[must_use]
    pub const fn with_embeddings(mut self, size: u32) -> Self {
        self.embedding_size = size;
        self
    }

    /// Rejects requests for hidden states of another size than `size` from the next frame on. Before this is called any size is
    /// accepted.
    pub const fn set_hidden_size(&mut self, size: u32) {
        self.hidden_size = size;
    }

    /// Enables recurrent state, with slots `0..slots`, fewer than 2^31.
    #[must_use]
    pub const fn with_states(mut self, slots: u32) -> Self {
        self.states = slots;
        self
    }

    /// Enables `LoRA` adapters, at most `slots` distinct ones per pass; "no adapter" counts as one.
    #[must_use]
    pub const fn with_adapters(mut self, slots: NonZeroUsize) -> Self {
        self.adapters.set_slots(slots);
        self
    }

    /// Enables images; `vision` must pass [`VisionConfig::check`]. Without it requests with images are rejected. Tokens whose
    /// embeddings come from an image are staged with the placeholder id `vocab_size`.
    #[must_use]
    pub const fn with_vision(mut self, vision: VisionConfig) -> Self {
        self.media.vision = Some(vision);
        self
    }

    /// Enables `input_embeds` of `size` numbers for each token. They come as images of Pie's protocol whose grid is 0, tokens, `size`, and
    /// whose pixels are the embeddings; without it such requests are rejected. Their tokens are staged with the placeholder id
    /// `vocab_size`.
    #[must_use]
    pub const fn with_input_embeds(mut self, size: u32) -> Self {
        self.media.embed_size = size;
        self
    }

    /// Enables drafts for requests that want them, from the next frame on.
    ///
    /// # Errors
    /// [`ConfigError`] for options out of range.
    pub fn enable_drafts(&mut self, options: &DraftOptions) -> Result<(), ConfigError> {
        self.drafting = Some(Box::new(Drafting::new(options, &self.limits)?));
        Ok(())
    }

    /// The limits of all plans.
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

    /// Whether the engine supports adapters.
    #[must_use]
    pub const fn supports_adapters(&self) -> bool {
        self.adapters.slots().is_some()
    }

    /// Allows requests to use the adapter from now on.
    pub fn add_adapter(&mut self, id: i64) {
        self.adapters.load(id);
    }

    /// Stops requests from using the adapter.
    pub fn remove_adapter(&mut self, id: i64) {
        self.adapters.unload(id);
    }

    /// Replaces the device slots of adapters: `(adapter id, slot)` of each one that captured graphs can apply, from the next
    /// step on. Steps with other adapters are passes.
    pub fn set_adapter_slots(&mut self, slots: impl IntoIterator<Item = (i64, i32)>) {
        self.adapters.set_resident(slots);
    }

    /// Whether captured graphs apply the adapters of a plan: all of them have a device slot.
    #[must_use]
    pub fn graphs_apply_adapters(&self, plan: &Plan) -> bool {
        let mut bindings = plan.requests().iter().map(PlannedRequest::adapter);
        bindings.all(|binding| self.adapters.device_slot(binding).is_some())
    }

    /// Plans one frame.
    ///
    /// # Errors
    /// [`FrameError`] when the frame's arrays contradict each other. A single request that cannot be served is rejected, and
    /// listed in [`Plan::request_errors`].
    pub fn plan(
        &mut self,
        driver_id: u32,
        request: &ArchivedForwardRequest,
    ) -> Result<Plan, FrameError> {
        self.plan_extended(driver_id, request, &Extension::default())
    }

    /// Plans one frame with its extension.
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
            // Updates in the mirror never reached the device.
            self.invalidate_block_table();
        }
        let frame = Frame::check(request)?;
        let requests = frame.requests;
        let beyond = |&request: &u32| request as usize >= requests;
        if let Some(request) = extension.last_request().filter(beyond) {
            return Err(FrameError::Extension { request, requests });
        }
        let checks = FrameChecks::of(&frame, &self.limits, self.media)?;
        self.params.take(extension.params(), self.limits.vocab_size);
        self.table.start_frame();
        for index in 0..frame.requests {
            self.table
                .precompare(&frame.pages[range(frame.page_indptr, index)]);
        }
        let spare = self.spare.pop();
        let mut plan = spare.unwrap_or_else(|| Plan::new(self.limits));
        let planner = PlannerState {
            table: &mut self.table,
            adapters: &self.adapters,
            drafting: self.drafting.as_deref_mut(),
            states: self.states,
            masks: self.masks,
            embedding_size: self.embedding_size,
            hidden_size: self.hidden_size,
            random_seed: self.random_seed,
            images: self.images,
            extension: extension.rows(),
            params: &self.params,
        };
        plan.make(driver_id, (&frame, &checks), planner);
        self.images += plan.images().len() as u64;
        self.unstaged = (plan.pass_count() > 0).then(|| plan.number());
        Ok(plan)
    }

    /// Writes the next pass of a plan into the staging block.
    ///
    /// # Errors
    /// [`StageError::Superseded`] when another frame was planned since; the plan cannot be used any more.
    pub fn stage(
        &mut self,
        mut plan: Plan,
        block: &mut PassBlock<'_>,
    ) -> Result<Staged, StageError> {
        self.check_latest(&plan)?;
        let pass = plan.stage(&mut self.table, &mut self.slot_mapping, block);
        self.mark_staged(&plan);
        Ok(match pass {
            Some(pass) => Staged::Pass(StagedPass::new(plan, pass)),
            None => Staged::Computed(ComputedPlan::new(plan)),
        })
    }

    /// Finds shared-prefix groups where reading the shared KV once saves time; graphs that support them get these staged.
    /// Returns whether they save more than `more_rows` further rows of padding cost.
    pub fn find_prefix_groups(&mut self, plan: &mut Plan, more_rows: usize) -> bool {
        plan.find_prefix_groups(&mut self.table, more_rows)
    }

    /// Whether a plan that a graph with the draft model can run should run as one: its drafts are likely to pay off, or are not known
    /// yet. Ask once for each plan, before it is staged, and only if there is such a graph.
    pub fn runs_draft_model(&mut self, plan: &mut Plan) -> bool {
        let Some(drafting) = &mut self.drafting else {
            return false;
        };
        let (drafts, frame) = plan.drafting();
        drafting.runs_model(drafts, frame)
    }

    /// Writes a plan's only pass as step number `step` of a graph that [runs](crate::StepSize::runs) steps of
    /// [`Plan::graph_size`].
    ///
    /// # Errors
    /// [`StageError`] when the memory does not fit the layout, or as [`Planner::stage`].
    ///
    /// # Panics
    /// If [`Plan::graph_size`] is `None`, or the layout has no room for it, or none for the adapters that the plan binds.
    pub fn stage_graph(
        &mut self,
        mut plan: Plan,
        layout: &Layout,
        memory: StepMemory<'_>,
        step: u32,
    ) -> Result<StagedStep, StageError> {
        self.check_latest(&plan)?;
        let parts = (&self.table, &mut self.slot_mapping, &self.adapters);
        let written = write_step(&plan, parts, layout, memory, step)?;
        if let Some(drafting) = &mut self.drafting {
            drafting.runs_as_graph(plan.drafting().0);
        }
        plan.skip_passes();
        self.mark_staged(&plan);
        Ok(StagedStep::new(plan, written))
    }

    /// Runs the part of drafting that does not need the sampled tokens; call it while the device computes, before another frame
    /// is planned. Otherwise the reply does it.
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
        frame: &mut ComputedPlan,
        timings: ForwardTimings,
        buffer: &mut [u8],
    ) -> Result<usize, ReplyError> {
        let started = Instant::now();
        let plan = frame.plan_mut();
        if let Some(drafting) = &mut self.drafting {
            let (drafts, frame) = plan.drafting();
            drafting.propose(drafts, frame, &self.table);
        }
        match self.reply.write(plan, timings, buffer, started) {
            // The capacity check does not count new drafts, which are optional.
            Err(ReplyError::Wire(_)) if plan.drafts().any() => {
                if let Some(drafting) = &mut self.drafting {
                    drafting.discard(plan.drafting().0);
                }
                self.reply.write(plan, timings, buffer, started)
            }
            written => written,
        }
    }

    /// Token counts of the last [reply](Self::reply).
    #[must_use]
    pub const fn token_counts(&self) -> TokenCounts {
        self.reply.token_counts()
    }

    /// Reports the device time of an answered frame, and the time since the answer before it (`cycle`). The draft policy learns
    /// the cost of verification from decode steps.
    pub fn record_step_time(&mut self, frame: &mut ComputedPlan, time: Duration, cycle: Duration) {
        if let Some(drafting) = &mut self.drafting {
            let plan = frame.plan_mut();
            let passes = plan.pass_count();
            let (drafts, drafted) = plan.drafting();
            drafting.record_time(drafts, (drafted, passes), time, cycle);
        }
    }

    /// Returns the buffers of an answered frame for reuse.
    pub fn recycle(&mut self, frame: ComputedPlan) {
        self.spare.push(frame.into_plan());
    }

    /// Draft acceptance counters; `None` without drafting.
    #[must_use]
    pub fn draft_counters(&self) -> Option<DraftCounters> {
        self.drafting.as_ref().map(|drafting| drafting.counters())
    }

    /// Draft acceptance counters, when a log line is due: after 256 verified drafts or drafting steps, at each doubling of either
    /// count, and from 2^20 drafts or 2^14 steps on at each of these. Call it once a frame is answered.
    pub fn draft_report(&mut self) -> Option<DraftCounters> {
        self.drafting.as_mut()?.report()
    }

    /// Records a page copy, from (pool, page) to (pool, page).
    pub fn page_copied(&mut self, source: (PagePool, u32), target: (PagePool, u32)) {
        if let Some(drafting) = &mut self.drafting {
            drafting.page_copied(source, target);
        }
    }

    /// Marks the content of a page as unknown.
    pub fn page_invalidated(&mut self, page: (PagePool, u32)) {
        if let Some(drafting) = &mut self.drafting {
            drafting.page_invalidated(page);
        }
    }

    /// Invalidates the mirror of the block table; call it after a failed pass.
    pub fn invalidate_block_table(&mut self) {
        self.unstaged = None;
        self.table.invalidate();
    }

    /// Checks that no other frame was planned since, if passes are left.
    fn check_latest(&self, plan: &Plan) -> Result<(), StageError> {
        let frame = plan.number();
        if plan.next_pass() < plan.pass_count() && self.unstaged != Some(frame) {
            return Err(StageError::Superseded { frame });
        }
        Ok(())
    }

    /// Records whether the plan has passes left.
    fn mark_staged(&mut self, plan: &Plan) {
        if self.unstaged == Some(plan.number()) && plan.next_pass() == plan.pass_count() {
            self.unstaged = None;
        }
    }
}
