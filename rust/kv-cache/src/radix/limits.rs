//! Limits of an index.

/// Maximum page size, in tokens.
pub const MAX_PAGE_SIZE: u32 = 1024;
