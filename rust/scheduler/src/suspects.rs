//! State of the bisection of failing steps; `bisection.rs` has the search.

/// The group of sequences that are not suspected.
pub(crate) const CLEARED: u64 = 0;

/// Whether a sequence is suspected of making steps fail.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Suspicion {
    /// Failed steps with it since it was last cleared.
    pub(crate) failures: u8,
    /// Bisection group: a step has sequences of one group only.
    pub(crate) group: u64,
    /// It is cleared once it is computed up to this token.
    pub(crate) until: u32,
}

/// The bisection of failing steps.
#[derive(Debug, Default)]
pub(crate) struct Suspects {
    /// Number of suspects.
    pub(crate) count: usize,
    /// The newest group.
    pub(crate) last_group: u64,
    /// The last step had suspects, or failed.
    pub(crate) probed: bool,
}
