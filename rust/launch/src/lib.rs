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

/// `CUresult`s that leave a device as it was: out of memory, and out of resources for one launch.
const BENIGN: [i32; 2] = [2, 701];

impl LaunchError {
    /// Whether the device can run nothing any more in this process. Errors that a kernel has caused, such as an illegal
    /// access, are sticky: every later call reports them. So is a handle that is not valid, since handles never change.
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
