//! One request of a plan, and its rows within a pass.

use std::ops::Range;

use crate::adapter::Binding;
use crate::extent::Extent;
use crate::frame::check::Geometry;
use crate::mask::Visibility;
use crate::state::State;
use crate::table::changes::TablePlace;

/// One request of the plan. As with slots, there are many.
#[derive(Debug, Clone, Default)]
pub(crate) struct Request {
    rows: Extent,
    slots: Extent,
    mask_rows: Extent,
    place: TablePlace,
    adapter: Binding,
    /// Its context's id; 0 where the runtime names none.
    context: u64,
    prefix: u32,
    drafts: u32,
    state: State,
    dropped: bool,
    visibility: Visibility,
}

impl Request {
    /// Takes what the checks found.
    pub(crate) const fn describe(&mut self, geometry: Geometry, adapter: Binding) {
        self.prefix = geometry.prefix();
        self.drafts = geometry.drafts;
        self.visibility = geometry.visibility;
        self.adapter = adapter;
    }

    pub(crate) const fn set_context(&mut self, context: u64) {
        self.context = context;
    }

    pub(crate) const fn context(&self) -> u64 {
        self.context
    }

    pub(crate) const fn place_mut(&mut self) -> &mut TablePlace {
        &mut self.place
    }

    pub(crate) const fn set_rows(&mut self, rows: Extent) {
        self.rows = rows;
    }

    pub(crate) const fn set_mask_rows(&mut self, rows: Extent) {
        self.mask_rows = rows;
    }

    pub(crate) const fn set_slots(&mut self, slots: Extent) {
        self.slots = slots;
    }

    /// Takes its outputs away; its KV is stored all the same.
    pub(crate) const fn mute(&mut self) {
        self.slots.clear();
    }

    /// Takes its adapter and its outputs away. Its rows are computed in vain: they store no KV.
    pub(crate) const fn unbind(&mut self) {
        self.adapter = None;
        self.dropped = true;
        self.slots.clear();
    }

    /// Changes the recurrent state that it advances, which is the engine's padding slot at first.
    pub(crate) const fn set_state(&mut self, state: State) {
        self.state = state;
    }

    /// Its rows of the plan, drafts after the inputs; empty when nothing is computed.
    pub(crate) const fn rows(&self) -> Extent {
        self.rows
    }

    /// Its rows before the drafts.
    pub(crate) const fn inputs(&self) -> Range<usize> {
        self.rows.start()..self.rows.end() - self.drafts as usize
    }

    /// Its slots; of a request with drafts those that verify come first.
    pub(crate) const fn slots(&self) -> Extent {
        self.slots
    }

    /// The mask of each input row; empty unless the request is masked.
    pub(crate) const fn mask_rows(&self) -> Range<usize> {
        self.mask_rows.range()
    }

    /// Its row of the block table, and what changes there.
    pub(crate) const fn place(&self) -> &TablePlace {
        &self.place
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
    pub(crate) const fn state(&self) -> State {
        self.state
    }

    /// Whether its rows store no KV.
    pub(crate) const fn is_dropped(&self) -> bool {
        self.dropped
    }

    pub(crate) const fn visibility(&self) -> Visibility {
        self.visibility
    }
}

/// Consecutive rows of one request within one pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    request: u32,
    /// Rows of the plan.
    rows: Extent,
}

impl Segment {
    pub(crate) const fn new(request: usize, rows: Extent) -> Self {
        Self {
            request: request as u32,
            rows,
        }
    }

    pub(crate) const fn request(self) -> usize {
        self.request as usize
    }

    /// First row of the plan.
    pub(crate) const fn start(self) -> usize {
        self.rows.start()
    }

    pub(crate) const fn len(self) -> usize {
        self.rows.len()
    }

    /// Rows of the plan.
    pub(crate) const fn rows(self) -> Range<usize> {
        self.rows.range()
    }

    /// KV index of its first row.
    pub(crate) const fn kv_start(self, request: &Request) -> usize {
        request.prefix() + (self.start() - request.rows().start())
    }
}

/// The rows of a pass: requests without rows leave no gap.
pub(crate) fn pass_rows(segments: &[Segment]) -> Range<usize> {
    segments[0].start()..segments[segments.len() - 1].rows.end()
}
