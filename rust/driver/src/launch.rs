//! Launches captured work on a device.
//!
//! [`Launch`] is the interface to a device; [`CudaGraphs`] launches CUDA graphs by their raw handles. The CUDA driver is
//! loaded at run time: this crate builds and loads without it.
//!
//! ```
//! use pie_driver::launch::{CudaGraphs, LaunchError};
//!
//! // SAFETY: no handles are given.
//! let graphs = unsafe { CudaGraphs::new(0, &[]) };
//! if let Err(LaunchError::Library(reason)) = graphs {
//!     assert!(!reason.is_empty(), "there is no CUDA driver here");
//! }
//! ```

mod cuda;

pub use cuda::CudaGraphs;

use thiserror::Error;

/// A device with captured graphs, which run in the order of their launches.
pub trait Launch: Send {
    /// Launches graph number `graph`, counted from 0, without waiting for it.
    ///
    /// # Errors
    /// [`LaunchError`] when the device refuses.
    fn launch(&mut self, graph: usize) -> Result<(), LaunchError>;

    /// Whether all launched graphs have ended.
    ///
    /// # Errors
    /// [`LaunchError`] when the device failed meanwhile: graphs that have not ended by then never will.
    fn ended(&mut self) -> Result<bool, LaunchError>;
}

/// Why a graph cannot be launched, or did not end.
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
        /// The driver's text.
        text: String,
    },
    /// The work could not be run, for a reason of the implementation of [`Launch`].
    #[error("{0}")]
    Failed(String),
}

/// `CUresult`s after which the device is usable as before: out of memory, and out of resources for one launch.
const BENIGN: [i32; 2] = [2, 701];

impl LaunchError {
    /// Whether the device can run nothing more in this process. Errors that a kernel has caused, such as an illegal
    /// access, are sticky: every later call reports them. An invalid handle counts as such, since handles never change.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Cuda { code, .. } if !BENIGN.contains(code))
    }
}

#[cfg(test)]
mod tests {
    use super::LaunchError;

    #[test]
    fn errors_that_stay_are_fatal() {
        let cuda = |code| LaunchError::Cuda {
            call: "cuStreamQuery",
            code,
            text: String::new(),
        };
        // ECC, an invalid handle, an unavailable device, an illegal access, an assertion, a failed launch, anything unknown.
        for code in [214, 400, 46, 700, 710, 719, 999] {
            assert!(cuda(code).is_fatal(), "{code}");
        }
        assert!(!cuda(2).is_fatal(), "out of memory");
        assert!(!cuda(701).is_fatal(), "too many resources for a launch");
        assert!(!LaunchError::Failed("ValueError: no".to_owned()).is_fatal());
        assert!(!LaunchError::Library("no libcuda.so.1".to_owned()).is_fatal());
    }
}
