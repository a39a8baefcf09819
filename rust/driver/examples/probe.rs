//! Says whether graphs could be launched here. A plain program has no CUDA context, so the best answer is that one is missing.

use std::io::{self, Write, stdout};

use pie_driver::launch::{CudaGraphs, LaunchError};

#[expect(unsafe_code, reason = "the constructor takes raw handles")]
fn main() -> io::Result<()> {
    // SAFETY: no handle is given.
    let graphs = unsafe { CudaGraphs::new(0, &[]) };
    let mut out = stdout().lock();
    match graphs {
        Ok(_) => writeln!(
            out,
            "a CUDA driver is loaded, and this thread has a context"
        ),
        Err(LaunchError::Library(reason)) => writeln!(out, "no CUDA driver: {reason}"),
        Err(error) if error.is_fatal() => writeln!(out, "the CUDA driver cannot be used: {error}"),
        Err(error) => writeln!(out, "a CUDA driver is loaded, but {error}"),
    }
}
