//! Errors of staging calls: bugs of the caller.

use bytemuck::PodCastError;
use thiserror::Error;

/// The memory or outputs do not fit the plan, or the plan is outdated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum StageError {
    /// The staging block is too small.
    #[error("the staging block has {found} bytes, the layout needs {needed}")]
    BlockSize {
        /// Bytes given.
        found: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// The staging block is misaligned.
    #[error("the staging block is not aligned to 8 bytes ({0})")]
    Alignment(PodCastError),
    /// An output array of the wrong length.
    #[error("{array} has {found} values, the slot group asks for {expected}")]
    OutputCount {
        /// Name of the array.
        array: &'static str,
        /// Values given.
        found: usize,
        /// Values needed.
        expected: usize,
    },
    /// The block table is not the plan's any more.
    #[error(
        "frame {frame} cannot be staged: since it was planned another one was, or the block table was forgotten"
    )]
    Superseded {
        /// Number of the frame.
        frame: u64,
    },
}
