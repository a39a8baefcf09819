//! The errors of an index.

use thiserror::Error;

use crate::radix::config::MAX_PAGE_SIZE;

/// Why a call was rejected. The index is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RadixError {
    /// A page size out of range.
    #[error("page size {page_size} is not within 1..={MAX_PAGE_SIZE}")]
    PageSize {
        /// Tokens of a page.
        page_size: u32,
    },
    /// An unknown policy.
    #[error("`{name}` is not an eviction policy; take lru, lfu, fifo, filo, mru, slru or priority")]
    Policy {
        /// Its name.
        name: String,
    },
    /// The node was evicted, or the index was reset.
    #[error(
        "node {index} (generation {generation}) is not in the index: it was evicted, or the index was reset"
    )]
    UnknownNode {
        /// Its index.
        index: u32,
        /// Its generation.
        generation: u32,
    },
    /// More unlocks than locks.
    #[error("node {index} is not locked: it was unlocked more often than locked")]
    NotLocked {
        /// Its index.
        index: u32,
    },
    /// A list of pages of the wrong length.
    #[error("{pages} pages were given where {wanted} are needed")]
    PageCount {
        /// Number of pages in the list.
        pages: usize,
        /// Number of pages of the key, node or path.
        wanted: usize,
    },
    /// The node has no device pages to copy.
    #[error("node {index} is not on the device; load it first")]
    NotOnDevice {
        /// Its index.
        index: u32,
    },
    /// The node has a host copy.
    #[error("node {index} has a copy on the host already")]
    OnHost {
        /// Its index.
        index: u32,
    },
}
