//! Statistics.

/// Current state, and totals since the scheduler was made.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Stats {
    /// Waiting sequences.
    pub waiting: usize,
    /// Waiting sequences that were retracted.
    pub retracted: usize,
    /// Waiting sequences whose grammar is compiling or not started.
    pub grammar_queue: usize,
    /// Running sequences.
    pub running: usize,
    /// Tokens of running sequences, prompts and outputs.
    pub running_tokens: u64,
    /// Rows of the last step.
    pub rows: usize,
    /// Free device pages.
    pub free_pages: usize,
    /// Evictable device pages of the prefix index.
    pub cached_pages: usize,
    /// Used host pages.
    pub host_pages: usize,
    /// Scheduled steps.
    pub steps: u64,
    /// Steps with prefills.
    pub prompt_steps: u64,
    /// Rows of all steps.
    pub total_rows: u64,
    /// Admissions; a sequence that was retracted is admitted again.
    pub admissions: u64,
    /// Cached tokens of all admissions.
    pub matched_tokens: u64,
    /// Prefill tokens of all steps.
    pub prefill_tokens: u64,
    /// Tokens that wait for their prefill: those of waiting sequences, and the rest of running prefills.
    pub pending_tokens: u64,
    /// Prompt tokens of admitted sequences.
    pub prompt_tokens: u64,
    /// Cached prompt tokens.
    pub cached_tokens: u64,
    /// Cached prompt tokens that were loaded from the host.
    pub loaded_tokens: u64,
    /// Emitted tokens.
    pub output_tokens: u64,
    /// Jump-forward tokens.
    pub forced_tokens: u64,
    /// Rows left out of a step because their mask was not ready in time.
    pub late_masks: u64,
    /// Verified drafts.
    pub drafts: u64,
    /// Accepted drafts.
    pub accepted: u64,
    /// Retractions.
    pub retractions: u64,
    /// Finished sequences.
    pub finished: u64,
    /// `SGLang`'s `new_token_ratio`.
    pub new_token_ratio: f32,
    /// Prefill tokens of a step next to decodes of streams.
    pub prompt_budget: u32,
}
