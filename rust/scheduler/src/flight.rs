//! Steps that are out.

use crate::pace::Load;

/// A row as it was laid out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planned {
    pub(crate) slot: usize,
    /// The sequence's place in the order of arrival: another one may have the slot later.
    pub(crate) order: u64,
    pub(crate) epoch: u32,
    pub(crate) start: u32,
    pub(crate) end: u32,
    pub(crate) drafts: u32,
    pub(crate) pages: u32,
    pub(crate) awaits: Option<u32>,
    pub(crate) draws: bool,
    pub(crate) wants_drafts: bool,
    /// Tokens of the prompt whose log-probabilities it brings.
    pub(crate) prompt_logprobs: (u32, u32),
}

/// A step that is out.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    pub(crate) rows: Vec<Planned>,
    pub(crate) load: Load,
    pub(crate) laid_at: u64,
    /// Whether it is not known before the answer how many tokens it gives, or whether drafts come with them.
    pub(crate) drafting: bool,
    /// Whether a constraint must know its tokens before the next step is laid out.
    pub(crate) binding: bool,
}
