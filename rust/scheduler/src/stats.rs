//! Counts.

/// How things stand, and what has happened since the scheduler was made.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Stats {
    /// Sequences that wait.
    pub waiting: usize,
    /// Those of them that were retracted.
    pub retracted: usize,
    /// Sequences that wait for their constraint.
    pub unbound: usize,
    /// Sequences that hold pages.
    pub running: usize,
    /// Their tokens, prompts and outputs.
    pub running_tokens: u64,
    /// Sequences of the last step.
    pub rows: usize,
    /// Device pages that nothing holds.
    pub free_pages: usize,
    /// Device pages that only the prefix index holds.
    pub cached_pages: usize,
    /// Host pages in use.
    pub host_pages: usize,
    /// Steps given.
    pub steps: u64,
    /// Those of them with more of a sequence than its last token.
    pub prompt_steps: u64,
    /// Rows of all steps.
    pub total_rows: u64,
    /// Tokens of prompts, of admitted sequences.
    pub prompt_tokens: u64,
    /// Those of them whose KV was there.
    pub cached_tokens: u64,
    /// Those of them that were loaded from the host.
    pub loaded_tokens: u64,
    /// Tokens given out.
    pub output_tokens: u64,
    /// Tokens of constraints that were not drawn, because they had no alternative.
    pub forced_tokens: u64,
    /// Rows that were left out of a step because a constraint was not ready in time.
    pub late_rows: u64,
    /// Drafts verified.
    pub drafts: u64,
    /// Drafts that came true.
    pub accepted: u64,
    /// Times that running requests lost their pages.
    pub retractions: u64,
    /// Sequences that ended.
    pub finished: u64,
    /// The share of outputs that is taken for certain; `SGLang`'s `new_token_ratio`.
    pub new_token_ratio: f32,
    /// Tokens of prompts that a step may have among decodes.
    pub prompt_budget: u32,
}
