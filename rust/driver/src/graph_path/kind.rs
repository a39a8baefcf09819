//! The kinds of captured graphs.

/// A kind, in the order of the graphs' numbers; those that draft are last.
#[derive(Clone, Copy)]
pub(super) enum GraphKind {
    Plain,
    /// With prefix groups.
    Grouped,
    /// With penalties, biases and log-probabilities.
    Extended,
    /// With `LoRA` adapters.
    Adapters,
    /// Both of the former two.
    ExtendedAdapters,
    /// With the passes of a draft model after those of the model.
    Drafting,
    /// The same with penalties, biases and log-probabilities.
    ExtendedDrafting,
}

impl GraphKind {
    pub(super) const COUNT: usize = 7;
}
