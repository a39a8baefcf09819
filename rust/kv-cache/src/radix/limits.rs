//! Limits of an index.

/// Largest page, in tokens.
pub const MAX_PAGE_SIZE: u32 = 1024;
