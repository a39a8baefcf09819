//! Steps in flight: scheduled, and not answered yet.

use crate::prefill_budget::StepLoad;

/// A row of a step in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScheduledRow {
    pub(crate) slot: usize,
    /// [`Sequence::order`](crate::sequence::Sequence): another sequence may get the slot later.
    pub(crate) order: u64,
    pub(crate) epoch: u32,
    pub(crate) start: u32,
    pub(crate) end: u32,
    pub(crate) drafts: u32,
    pub(crate) pages: u32,
    pub(crate) awaits: Option<u32>,
    pub(crate) samples_token: bool,
    pub(crate) wants_drafts: bool,
    /// Prompt tokens whose log-probabilities it returns, as `(start, end)`.
    pub(crate) prompt_logprobs: (u32, u32),
}

#[derive(Debug, Default)]
pub(crate) struct InFlightStep {
    pub(crate) rows: Vec<ScheduledRow>,
    pub(crate) load: StepLoad,
    pub(crate) scheduled_at: u64,
    /// Drafts are verified or wanted: the inputs of the next step are not known before the output.
    pub(crate) has_drafts: bool,
    /// A token of a constrained sequence is sampled: its grammar must accept it before the next step is scheduled.
    pub(crate) is_constrained: bool,
}
