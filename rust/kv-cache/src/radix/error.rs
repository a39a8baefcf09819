//! The errors of an index.

use thiserror::Error;

use crate::radix::limits::MAX_PAGE_SIZE;

/// Why an index refused. It is then as it was before the call.
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
        /// Its place.
        index: u32,
        /// How often the place was used before.
        generation: u32,
    },
    /// More unlocks than locks.
    #[error("node {index} is not locked: it was unlocked more often than locked")]
    NotLocked {
        /// Its place.
        index: u32,
    },
    /// A list of pages of the wrong length.
    #[error("{pages} pages were given where {wanted} are needed")]
    PageCount {
        /// Pages in the list.
        pages: usize,
        /// Pages of the key, the node or the path.
        wanted: usize,
    },
    /// A node without device pages cannot be copied to the host.
    #[error("node {index} is not on the device; load it first")]
    NotOnDevice {
        /// Its place.
        index: u32,
    },
    /// The node has a copy on the host.
    #[error("node {index} has a copy on the host already")]
    OnHost {
        /// Its place.
        index: u32,
    },
}
