//! One request of a plan, and its segments in passes.

use std::ops::Range;

use crate::adapter::Binding;
use crate::frame::check::Geometry;
use crate::mask::MaskMode;
use crate::range32::Range32;
use crate::state::RecurrentState;
use crate::table::updates::BlockTableRow;

/// One request of the plan, as ranges of the batch arrays. Kept small.
#[derive(Debug, Clone, Default)]
pub(crate) struct PlannedRequest {
    tokens: Range32,
    slots: Range32,
    mask_rows: Range32,
    table_row: BlockTableRow,
    adapter: Binding,
    /// Context id; 0 = none.
    context: u64,
    prefix: u32,
    drafts: u32,
    state: RecurrentState,
    dropped: bool,
    mask_mode: MaskMode,
}

impl PlannedRequest {
    /// Sets what validation found.
    pub(crate) const fn describe(&mut self, geometry: Geometry, adapter: Binding) {
        self.prefix = geometry.prefix();
        self.drafts = geometry.drafts;
        self.mask_mode = geometry.mask_mode;
        self.adapter = adapter;
    }

    pub(crate) const fn set_context(&mut self, context: u64) {
        self.context = context;
    }

    pub(crate) const fn context(&self) -> u64 {
        self.context
    }

    pub(crate) const fn table_row_mut(&mut self) -> &mut BlockTableRow {
        &mut self.table_row
    }

    pub(crate) const fn set_tokens(&mut self, tokens: Range32) {
        self.tokens = tokens;
    }

    pub(crate) const fn set_mask_rows(&mut self, tokens: Range32) {
        self.mask_rows = tokens;
    }

    pub(crate) const fn set_slots(&mut self, slots: Range32) {
        self.slots = slots;
    }

    /// Removes its outputs; its KV is still stored.
    pub(crate) const fn drop_outputs(&mut self) {
        self.slots.clear();
    }

    /// Removes its adapter and outputs; its tokens are computed without storing KV.
    pub(crate) const fn unbind_adapter(&mut self) {
        self.adapter = None;
        self.dropped = true;
        self.slots.clear();
    }

    /// Sets its recurrent state slot; the default is the padding slot.
    pub(crate) const fn set_state(&mut self, state: RecurrentState) {
        self.state = state;
    }

    /// Its rows of the plan, drafts after the inputs; empty when nothing is computed.
    pub(crate) const fn tokens(&self) -> Range32 {
        self.tokens
    }

    /// Its rows before the drafts.
    pub(crate) const fn inputs(&self) -> Range<usize> {
        self.tokens.start()..self.tokens.end() - self.drafts as usize
    }

    /// Its slots; of a request with drafts those that verify come first.
    pub(crate) const fn slots(&self) -> Range32 {
        self.slots
    }

    /// The mask of each input row; empty unless the request is masked.
    pub(crate) const fn mask_rows(&self) -> Range<usize> {
        self.mask_rows.range()
    }

    /// Its row of the block table, and what changes there.
    pub(crate) const fn table_row(&self) -> &BlockTableRow {
        &self.table_row
    }

    /// The adapter that it is bound to.
    pub(crate) const fn adapter(&self) -> Binding {
        self.adapter
    }

    /// Tokens stored before this frame.
    pub(crate) const fn prefix(&self) -> usize {
        self.prefix as usize
    }

    /// Draft tokens: the last rows.
    pub(crate) const fn drafts(&self) -> usize {
        self.drafts as usize
    }

    /// Its recurrent state, of an engine that has some.
    pub(crate) const fn state(&self) -> RecurrentState {
        self.state
    }

    /// Whether its rows store no KV.
    pub(crate) const fn skips_kv_write(&self) -> bool {
        self.dropped
    }

    pub(crate) const fn mask_mode(&self) -> MaskMode {
        self.mask_mode
    }
}

/// Consecutive rows of one request within one pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    request: u32,
    /// Rows of the plan.
    tokens: Range32,
}

impl Segment {
    pub(crate) const fn new(request: usize, tokens: Range32) -> Self {
        Self {
            request: request as u32,
            tokens,
        }
    }

    pub(crate) const fn request(self) -> usize {
        self.request as usize
    }

    /// First row of the plan.
    pub(crate) const fn start(self) -> usize {
        self.tokens.start()
    }

    pub(crate) const fn len(self) -> usize {
        self.tokens.len()
    }

    /// Rows of the plan.
    pub(crate) const fn tokens(self) -> Range<usize> {
        self.tokens.range()
    }

    /// KV index of its first row.
    pub(crate) const fn kv_start(self, request: &PlannedRequest) -> usize {
        request.prefix() + (self.start() - request.tokens().start())
    }
}

/// The rows of a pass: requests without rows leave no gap.
pub(crate) fn pass_tokens(segments: &[Segment]) -> Range<usize> {
    segments[0].start()..segments[segments.len() - 1].tokens.end()
}
