//! What a step was answered.

/// The answer to a step: for each row, in order, its tokens, and what the driver drafts after them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Answer<'a> {
    /// The tokens of all rows. A row that draws has one, after the drafts that came true; others have none. A row that
    /// should have one and has none failed.
    pub tokens: &'a [u32],
    /// Where each row's tokens begin in `tokens`, and where the last one's end: one more than there are rows.
    pub token_ends: &'a [u32],
    /// Drafts for the next step of rows that want some.
    pub drafts: &'a [u32],
    /// As `token_ends`; empty when no row has drafts.
    pub draft_ends: &'a [u32],
    /// What the copies before the step took, in µs; 0 when there were none.
    pub copies_us: u64,
}
