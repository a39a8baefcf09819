//! What is known of sequences that are suspected to make steps fail; `bisection.rs` has the search.

/// Of the sequences that nobody suspects.
pub(crate) const CLEARED: u64 = 0;

/// Whether a sequence is suspected to make steps fail.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Suspicion {
    /// Steps with it that failed since it was last cleared.
    pub(crate) failures: u8,
    /// Only sequences of one group are in a step.
    pub(crate) group: u64,
    /// It is cleared when a step has computed so many of its tokens.
    pub(crate) until: u32,
}

/// What is known of all suspects.
#[derive(Debug, Default)]
pub(crate) struct Suspects {
    /// How many there are.
    pub(crate) count: usize,
    /// The group that was made last.
    pub(crate) last_group: u64,
    /// The last step was of suspects, or failed.
    pub(crate) probed: bool,
}
