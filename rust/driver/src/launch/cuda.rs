//! CUDA graphs by raw handle, through the driver API.
#![expect(unsafe_code, reason = "raw calls of the CUDA driver")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use libloading::Library;

use crate::launch::{Launch, LaunchError};

/// `CUresult`, `CUcontext`, `CUstream` and `CUgraphExec` of `cuda.h`.
type Status = c_int;
type Handle = *mut c_void;

const SUCCESS: Status = 0;
const NOT_READY: Status = 600;

/// The library that every CUDA driver installs.
const LIBRARY: &str = "libcuda.so.1";

/// Entry points of the CUDA driver. They stay valid as long as the library is loaded.
struct Driver {
    get_context: unsafe extern "C" fn(*mut Handle) -> Status,
    set_context: unsafe extern "C" fn(Handle) -> Status,
    launch_graph: unsafe extern "C" fn(Handle, Handle) -> Status,
    query_stream: unsafe extern "C" fn(Handle) -> Status,
    error_string: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
    _library: Library,
}

impl Driver {
    fn load() -> Result<Self, libloading::Error> {
        // SAFETY: the CUDA driver's initialisers have no preconditions; a process with a graph handle has loaded it already.
        let library = unsafe { Library::new(LIBRARY)? };
        // SAFETY: the types are those of `cuda.h`, and `_library` keeps the symbols alive.
        unsafe {
            Ok(Self {
                get_context: *library.get(b"cuCtxGetCurrent")?,
                set_context: *library.get(b"cuCtxSetCurrent")?,
                launch_graph: *library.get(b"cuGraphLaunch")?,
                query_stream: *library.get(b"cuStreamQuery")?,
                error_string: *library.get(b"cuGetErrorString")?,
                _library: library,
            })
        }
    }

    fn check(&self, call: &'static str, code: Status) -> Result<(), LaunchError> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: `text` is a valid place; the driver stores the address of a static string, or null.
        unsafe { (self.error_string)(code, &raw mut text) };
        let text = if text.is_null() {
            "unknown".to_owned()
        } else {
            // SAFETY: not null, so it is a string of static lifetime.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        };
        Err(LaunchError::Cuda { call, code, text })
    }
}

/// Instantiated CUDA graphs and the stream that they run on.
pub struct CudaGraphs {
    driver: Driver,
    context: Handle,
    stream: Handle,
    graphs: Vec<Handle>,
}

// SAFETY: contexts, streams and executable graphs belong to the process; the driver allows their use from any thread, one
// at a time, which `&mut self` ensures.
unsafe impl Send for CudaGraphs {}

impl CudaGraphs {
    /// Graphs `graphs` (`CUgraphExec` or `cudaGraphExec_t`) to be launched on `stream` (`CUstream` or `cudaStream_t`). The
    /// calling thread's CUDA context must be theirs.
    ///
    /// # Errors
    /// [`LaunchError`] when there is no CUDA driver or no context.
    ///
    /// # Safety
    /// The handles must be valid as long as this value lives, and these graphs may not be launched elsewhere at the same time.
    pub unsafe fn new(stream: usize, graphs: &[usize]) -> Result<Self, LaunchError> {
        let driver = Driver::load().map_err(|error| LaunchError::Library(error.to_string()))?;
        let mut context = ptr::null_mut();
        // SAFETY: `context` is a valid place for a handle.
        let code = unsafe { (driver.get_context)(&raw mut context) };
        driver.check("cuCtxGetCurrent", code)?;
        if context.is_null() {
            let text = "this thread has no CUDA context".to_owned();
            return Err(LaunchError::Failed(text));
        }
        Ok(Self {
            driver,
            context,
            stream: ptr::with_exposed_provenance_mut(stream),
            graphs: graphs
                .iter()
                .map(|&graph| ptr::with_exposed_provenance_mut(graph))
                .collect(),
        })
    }
}

impl Launch for CudaGraphs {
    fn launch(&mut self, graph: usize) -> Result<(), LaunchError> {
        // SAFETY: a context that lives as long as the process uses CUDA.
        let code = unsafe { (self.driver.set_context)(self.context) };
        self.driver.check("cuCtxSetCurrent", code)?;
        // SAFETY: by the contract of `new` both handles are valid, and in no other use. After a fault on the device the driver
        // reports an error here, but it is known to crash if launches that it was given before have not ended. Callers have
        // one launch in flight, whose end or error they await.
        let code = unsafe { (self.driver.launch_graph)(self.graphs[graph], self.stream) };
        self.driver.check("cuGraphLaunch", code)
    }

    fn ended(&mut self) -> Result<bool, LaunchError> {
        // SAFETY: by the contract of `new` the stream is valid.
        match unsafe { (self.driver.query_stream)(self.stream) } {
            NOT_READY => Ok(false),
            code => self.driver.check("cuStreamQuery", code).map(|()| true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::CudaGraphs;
    use crate::launch::LaunchError;

    #[test]
    fn without_a_driver_or_a_context_there_is_a_reason() {
        // SAFETY: no handle is given.
        let error = unsafe { CudaGraphs::new(0, &[]) }.err();
        assert!(
            matches!(
                error,
                Some(LaunchError::Library(_) | LaunchError::Failed(_) | LaunchError::Cuda { .. })
            ),
            "{error:?}"
        );
    }
}
