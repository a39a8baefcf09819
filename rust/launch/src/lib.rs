//! Starts captured work on a device.
//!
//! [`Launch`] is what a lane without Python needs; [`CudaGraphs`] starts CUDA graphs by their raw handles. The CUDA driver
//! is loaded at run time: this crate builds and loads without it.

mod cuda;

pub use cuda::CudaGraphs;

use thiserror::Error;

/// A device with captured graphs that run one after the other.
pub trait Launch: Send {
    /// Starts graph number `graph`, without waiting for it.
    ///
    /// # Errors
    /// [`LaunchError`] when the device refuses.
    fn launch(&mut self, graph: usize) -> Result<(), LaunchError>;

    /// Whether all that was started has ended.
    ///
    /// # Errors
    /// [`LaunchError`] when the device failed meanwhile: nothing that runs now will ever end.
    fn ended(&mut self) -> Result<bool, LaunchError>;
}

/// What a device says.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LaunchError {
    /// The CUDA driver library cannot be used.
    #[error("the CUDA driver library cannot be used: {0}")]
    Library(String),
    /// A call of the CUDA driver failed.
    #[error("{call} failed with CUDA error {code} ({text})")]
    Cuda {
        /// Name of the call.
        call: &'static str,
        /// Its `CUresult`.
        code: i32,
        /// The driver's own words.
        text: String,
    },
    /// The work could not be run.
    #[error("{0}")]
    Failed(String),
}
