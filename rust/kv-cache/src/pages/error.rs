//! The errors of a pool.

use thiserror::Error;

/// Why a call was rejected. The pool is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PoolError {
    /// Too few free pages.
    #[error(
        "{wanted} pages are asked for and {free} are free; evict cached pages or wait for running steps"
    )]
    Exhausted {
        /// Requested pages.
        wanted: usize,
        /// Free pages.
        free: usize,
    },
    /// An id of another pool.
    #[error("page {page} is not of this pool, whose ids are {first}..{end}")]
    Foreign {
        /// The id.
        page: u32,
        /// First id of the pool.
        first: u32,
        /// End of its range.
        end: u32,
    },
    /// The caller has no reference: freed before.
    #[error("page {page} is not held: it was freed before, or never allocated")]
    NotHeld {
        /// The page.
        page: u32,
    },
    /// The only reference left is the prefix index's.
    #[error(
        "page {page} is held only by the prefix index; take it out of the index with `uncache`"
    )]
    Cached {
        /// The page.
        page: u32,
    },
    /// The prefix index holds this page already.
    #[error("page {page} is in the prefix index already; free the duplicate instead")]
    AlreadyCached {
        /// The page.
        page: u32,
    },
    /// The prefix index does not hold this page.
    #[error("page {page} is not in the prefix index; free it with `free`")]
    NotCached {
        /// The page.
        page: u32,
    },
    /// More than 32 bits of references.
    #[error("page {page} has {} references, the most there can be", u32::MAX)]
    TooManyReferences {
        /// The page.
        page: u32,
    },
    /// Reference count and holders disagree.
    #[error("page {page} has {references} references and {held} holders; {}",
        if references > held { "it leaked" } else { "it was freed too often" })]
    Unbalanced {
        /// The page.
        page: u32,
        /// Reference count.
        references: u32,
        /// Holders that the caller lists.
        held: u32,
    },
}
