//! The plan of one frame: the batch that the model computes, split into passes, and the outputs of its requests.

pub(crate) mod batch_arrays;
pub(crate) mod pass_inputs;
pub(crate) mod passes;
mod rejections;

use std::mem;

use pie_speculation::StepKind;
use rustc_hash::FxHashSet;

use crate::block::PassBlock;
use crate::drafting::FrameDrafts;
use crate::drafting::inputs::DraftInputs;
use crate::error::RequestError;
use crate::frame::Frame;
use crate::frame::check::FrameChecks;
use crate::frame::query_tokens::QueryTokens;
use crate::frame::request::{PlannedRequest, Segment, pass_tokens};
use crate::image::Images;
use crate::limits::Limits;
use crate::mask::{MaskMode, MaskRows};
use crate::plan::batch_arrays::{BatchArrays, PlannerState};
use crate::plan::passes::Passes;
use crate::prefix::{PrefixGroups, ROW_COST, Sequence};
use crate::slot::SamplingSlots;
use crate::slot::group::{PassSlots, SlotGroup};
use crate::slot::outputs::Outputs;
use crate::staging::error::StageError;
use crate::staging::pass::{Pass, write_changes, write_requests, write_rows};
use crate::state::RecurrentState;
use crate::table::BlockTable;
use crate::table::slot_mapping::SlotMapping;
use crate::table::updates::TableUpdates;

/// The plan of one frame, from [`Planner::plan`](crate::Planner::plan). Its passes are staged in order by
/// [`Planner::stage`](crate::Planner::stage), or its only one by [`Planner::stage_graph`](crate::Planner::stage_graph).
///
/// Types enforce the call order: each call consumes the stage that the one before returned, and only a
/// [`ComputedPlan`](crate::ComputedPlan) frame can be answered.
///
/// ```compile_fail,E0308
/// # use pie_planner::{Plan, Planner, Probes};
/// fn too_early(planner: &mut Planner, mut plan: Plan, buffer: &mut [u8]) {
///     planner.reply(&mut plan, Probes::default(), buffer);
/// }
/// ```
///
/// ```compile_fail,E0382
/// # use pie_planner::{PassBlock, Plan, Planner};
/// fn twice(planner: &mut Planner, plan: Plan, block: &mut PassBlock<'_>) {
///     planner.stage(plan, block);
///     planner.stage(plan, block);
/// }
/// ```
#[derive(Debug)]
pub struct Plan(Box<PlanInner>);

/// The buffers of a plan, reused from frame to frame.
#[derive(Debug)]
struct PlanInner {
    limits: Limits,
    driver_id: u32,
    /// Number of the frame, from 1 on.
    number: u64,
    has_states: bool,
    requests: Vec<PlannedRequest>,
    arrays: BatchArrays,
    /// Scratch: recurrent state slots seen so far.
    kept_states: FxHashSet<u32>,
    passes: Passes,
    next_pass: usize,
    /// Sampling slots of the staged pass.
    pass_slots: PassSlots,
    prefixes: PrefixGroups,
    request_errors: Vec<(usize, RequestError)>,
}

impl Plan {
    /// An empty plan within `limits`.
    pub(crate) fn new(limits: Limits) -> Self {
        Self(Box::new(PlanInner {
            limits,
            driver_id: 0,
            number: 0,
            has_states: false,
            requests: Vec::new(),
            arrays: BatchArrays::default(),
            kept_states: FxHashSet::default(),
            passes: Passes::default(),
            next_pass: 0,
            pass_slots: PassSlots::default(),
            prefixes: PrefixGroups::default(),
            request_errors: Vec::new(),
        }))
    }

    /// Plans a frame, replacing the last one. The block table has precompared its pages.
    pub(crate) fn make(
        &mut self,
        driver_id: u32,
        (frame, checks): (&Frame<'_>, &FrameChecks<'_>),
        mut planner: PlannerState<'_>,
    ) {
        let inner = &mut *self.0;
        inner.clear();
        inner.driver_id = driver_id;
        inner.number = planner.table.frame();
        inner.has_states = planner.states > 0;
        inner.arrays.start(&inner.limits, &planner);
        // Taken out of `inner`, so that both can be borrowed.
        let mut requests = mem::take(&mut inner.requests);
        requests.resize_with(frame.requests, PlannedRequest::default);
        for (index, request) in requests.iter_mut().enumerate() {
            let own = (index, request);
            let added = (inner.arrays).add((frame, checks), &inner.limits, &mut planner, own);
            if let Err(error) = added {
                inner.request_errors.push((index, error));
            }
        }
        inner.requests = requests;
        if planner.drafting.is_some() {
            let kind = inner.kind();
            inner.arrays.drafts_mut().set_kind(kind);
        }
        inner.reject_oversize_requests();
        inner.keep_last_states();
        let slots = planner.adapters.slots();
        inner.passes.cut(&inner.requests, &inner.limits, slots);
    }

    /// The limits of the plan.
    pub(crate) const fn limits(&self) -> &Limits {
        &self.0.limits
    }

    pub(crate) const fn driver_id(&self) -> u32 {
        self.0.driver_id
    }

    /// Number of the frame, from 1 on.
    pub(crate) const fn number(&self) -> u64 {
        self.0.number
    }

    /// Whether the engine has recurrent state.
    pub(crate) const fn has_states(&self) -> bool {
        self.0.has_states
    }

    pub(crate) const fn query_tokens(&self) -> &QueryTokens {
        self.0.arrays.query_tokens()
    }

    pub(crate) const fn table_updates(&self) -> &TableUpdates {
        self.0.arrays.table_updates()
    }

    pub(crate) fn requests(&self) -> &[PlannedRequest] {
        &self.0.requests
    }

    pub(crate) const fn slots(&self) -> &SamplingSlots {
        self.0.arrays.slots()
    }

    pub(crate) const fn mask_rows(&self) -> &MaskRows {
        self.0.arrays.mask_rows()
    }

    pub(crate) const fn images(&self) -> &Images {
        self.0.arrays.images()
    }

    pub(crate) const fn passes(&self) -> &Passes {
        &self.0.passes
    }

    /// Number of the pass to stage next.
    pub(crate) const fn next_pass(&self) -> usize {
        self.0.next_pass
    }

    /// The segments of the staged pass; none before the first.
    pub(crate) fn staged_segments(&self) -> &[Segment] {
        let pass = self.0.next_pass.checked_sub(1);
        pass.and_then(|pass| self.0.passes.get(pass)).unwrap_or(&[])
    }

    pub(crate) const fn pass_slots(&self) -> &PassSlots {
        &self.0.pass_slots
    }

    pub(crate) const fn prefixes(&self) -> &PrefixGroups {
        &self.0.prefixes
    }

    pub(crate) const fn drafts(&self) -> &FrameDrafts {
        self.0.arrays.drafts()
    }

    /// The drafts of the frame, and the inputs of the drafter.
    pub(crate) fn drafting(&mut self) -> (&mut FrameDrafts, DraftInputs<'_>) {
        let inner = &mut *self.0;
        let (drafts, query_tokens, slots) = inner.arrays.drafting();
        let drafted = DraftInputs {
            limits: &inner.limits,
            number: inner.number,
            requests: &inner.requests,
            query_tokens,
            slots,
        };
        (drafts, drafted)
    }

    /// Writes the next pass into `block`; `None` after the last.
    pub(crate) fn stage(
        &mut self,
        table: &mut BlockTable,
        slot_mapping: &mut SlotMapping,
        block: &mut PassBlock<'_>,
    ) -> Option<Pass> {
        let inner = &mut *self.0;
        let (limits, requests, slots) = (&inner.limits, &inner.requests[..], inner.arrays.slots());
        let segments = inner.passes.get(inner.next_pass)?;
        let updates = write_changes(
            inner.arrays.table_updates(),
            table,
            limits,
            (segments, requests),
            block.table_updates,
        );
        let seq_lens_sum = write_requests(block, segments, requests);
        write_rows(block, segments, inner.arrays.query_tokens());
        slot_mapping.write(limits, table, segments, requests, block.out_cache_loc);
        // Rejected requests have no slots.
        if inner.passes.len() == 1 && inner.request_errors.is_empty() {
            inner.pass_slots.select_all(slots, limits);
        } else {
            inner.pass_slots.select(segments, requests, slots, limits);
        }
        inner.next_pass += 1;
        let rows = pass_tokens(segments);
        let masked = requests[segments[0].request()].mask_mode() != MaskMode::Causal;
        Some(Pass {
            tokens: rows.len(),
            requests: segments.len(),
            decode: !masked
                && segments.iter().all(|segment| segment.len() == 1)
                && !inner.arrays.images().touch(&rows),
            masked,
            seq_lens_sum,
            updates,
            slots: inner.pass_slots.len(),
        })
    }

    /// Marks all passes as staged: a graph computes them.
    pub(crate) const fn skip_passes(&mut self) {
        self.0.next_pass = self.0.passes.len();
    }

    /// Writes the next sampling group of the staged pass into `block`; `None` after the last.
    pub(crate) fn stage_slots(&mut self, block: &mut PassBlock<'_>) -> Option<SlotGroup> {
        let base = self.staged_segments().first()?.start();
        let inner = &mut *self.0;
        inner
            .pass_slots
            .stage(inner.arrays.slots(), &inner.limits, base, block)
    }

    /// Stores the engine's outputs for the staged sampling group.
    pub(crate) fn put_outputs(&mut self, outputs: &Outputs<'_>) -> Result<(), StageError> {
        let inner = &mut *self.0;
        let vocab_size = inner.limits.vocab_size;
        let valid = inner
            .pass_slots
            .put_outputs(inner.arrays.slots_mut(), outputs, vocab_size)?;
        if !valid {
            inner.reject_nan_requests();
        }
        Ok(())
    }

    /// Stores the drafts of a draft model: `num_drafts` for each slot, whose index is as for [`Self::put_tokens`].
    pub(crate) fn put_drafts(
        &mut self,
        numbered: bool,
        num_drafts: usize,
        word: impl Fn(usize) -> u32,
    ) {
        let inner = &mut *self.0;
        let (drafts, _, slots) = inner.arrays.drafting();
        let drafts = drafts.model_mut();
        drafts.start(num_drafts);
        for (number, slot) in slots.all().iter().enumerate() {
            let index = if numbered { number } else { slot.row() };
            let own = index * num_drafts;
            drafts.push((own..own + num_drafts).map(&word));
        }
    }

    /// Stores the outputs of a graph: the token of each slot, indexed by slot if `numbered`, else by query token, and the words
    /// of log-probabilities, in the order of the slots.
    pub(crate) fn put_tokens(
        &mut self,
        numbered: bool,
        token: impl Fn(usize) -> u32,
        logprob_word: impl Fn(usize) -> u32,
    ) {
        let inner = &mut *self.0;
        let vocab_size = inner.limits.vocab_size;
        let slots = inner.arrays.slots_mut();
        let mut valid = true;
        let (mut number, mut word) = (0, 0);
        for request in &inner.requests {
            for slot in request.slots().range() {
                let index = if numbered {
                    number
                } else {
                    slots.all()[slot].row()
                };
                number += 1;
                valid &= slots.put_token(slot, token(index), vocab_size);
                let words = slots.logprob_words(&slots.all()[slot]);
                if words > 0 {
                    let own = (word..word + words).map(&logprob_word);
                    slots.put_logprobs(slot, own);
                    word += words;
                }
            }
        }
        if !valid {
            inner.reject_nan_requests();
        }
    }

    /// Finds shared-prefix groups; see [`Planner::find_prefix_groups`](crate::Planner::find_prefix_groups).
    pub(crate) fn find_prefix_groups(&mut self, table: &mut BlockTable, more_rows: usize) -> bool {
        let inner = &mut *self.0;
        let (segments, page_size) = (inner.passes.segments(), inner.limits.page_size as usize);
        let requests = &inner.requests[..];
        let sequence = |index: usize| {
            let request = &requests[segments[index].request()];
            Sequence {
                first_page: request.table_row().first_page(),
                table_row: request.table_row().index(),
                kv_start: segments[index].kv_start(request),
                rows: segments[index].len(),
            }
        };
        let common = |[earlier, later]: [usize; 2], most| table.common_pages(earlier, later, most);
        inner
            .prefixes
            .find(segments.len(), page_size, sequence, common);
        inner.prefixes.saved() > more_rows as i64 * ROW_COST
    }

    /// Rejects requests whose adapter is lost.
    pub(crate) fn reject_requests(&mut self, requests: &[usize], error: impl Fn() -> RequestError) {
        let inner = &mut *self.0;
        for &index in requests {
            inner.requests[index].unbind_adapter();
        }
        // A request that is rejected already keeps its error. Both lists are sorted.
        let mut faulty = inner
            .request_errors
            .iter()
            .map(|&(index, _)| index)
            .peekable();
        let fresh = requests.iter().copied().filter(|index| {
            while faulty.next_if(|other| other < index).is_some() {}
            faulty.peek() != Some(index)
        });
        let fresh: Vec<_> = fresh.map(|index| (index, error())).collect();
        inner.add_request_errors(fresh);
    }

    /// Requests of the frame.
    #[must_use]
    pub fn request_count(&self) -> usize {
        self.0.requests.len()
    }

    /// Query tokens of the frame, drafts included.
    #[must_use]
    pub fn token_count(&self) -> usize {
        self.query_tokens().len()
    }

    /// Prefill tokens: input tokens of requests with more than one.
    #[must_use]
    pub fn prompt_token_count(&self) -> usize {
        self.0.arrays.prompt_tokens()
    }

    /// The context id of request `index`; `None` if the runtime sent none.
    #[must_use]
    pub fn context_id(&self, index: usize) -> Option<u64> {
        let request = self.0.requests.get(index)?;
        Some(request.context()).filter(|&context| context != 0)
    }

    /// Passes of the frame; 0 when nothing needs the model.
    #[must_use]
    pub fn pass_count(&self) -> usize {
        self.0.passes.len()
    }

    /// The rejected requests, which have empty output ranges, with the reason, by index.
    #[must_use]
    pub fn request_errors(&self) -> &[(usize, RequestError)] {
        &self.0.request_errors
    }

    /// Whether some request has penalties, logit biases, suppressed tokens or log-probabilities.
    #[must_use]
    pub const fn is_extended(&self) -> bool {
        let slots = self.slots();
        slots.processors().adjusts() || slots.processors().counts() || slots.logprob_bytes() > 0
    }

    /// Whether some accepted request binds an adapter.
    #[must_use]
    pub fn binds_adapters(&self) -> bool {
        let mut requests = self.requests().iter();
        requests.any(|request| request.adapter().is_some())
    }

    /// Whether some request has a logit processor of the driver's process.
    #[must_use]
    pub const fn has_custom_processors(&self) -> bool {
        self.slots().processors().has_custom()
    }

    /// Records why the logit processor of a slot of the staged group failed; its request is rejected with the next
    /// [outputs](crate::StagedGroup::put_outputs).
    pub(crate) fn fail_slot(&mut self, slot: usize, reason: &str) {
        self.0.pass_slots.fail(slot, reason);
    }

    /// Whether some accepted request has images.
    #[must_use]
    pub fn has_images(&self) -> bool {
        !self.images().is_empty()
    }
}

impl PlanInner {
    fn clear(&mut self) {
        self.requests.clear();
        self.arrays.clear();
        self.next_pass = 0;
        self.pass_slots.clear();
        self.prefixes.clear();
        self.request_errors.clear();
    }

    /// Cost class of the step, for the draft policy.
    fn kind(&self) -> StepKind {
        let bound = (self.requests.iter()).any(|request| request.adapter().is_some());
        match (bound, self.arrays.slots().has_probes()) {
            (true, _) => StepKind::Adapters,
            (false, true) => StepKind::Probed,
            (false, false) => StepKind::Plain,
        }
    }

    /// If several requests name one recurrent state slot, the last keeps it. Earlier ones are superseded by the runtime and
    /// advance the padding slot.
    fn keep_last_states(&mut self) {
        if !self.has_states {
            return;
        }
        self.kept_states.clear();
        let computed = (self.requests.iter_mut()).filter(|request| !request.tokens().is_empty());
        for request in computed.rev() {
            if !self.kept_states.insert(request.state().slot()) {
                request.set_state(RecurrentState::default());
            }
        }
    }
}
