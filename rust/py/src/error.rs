//! The one mapping from the crates' errors to Python exceptions.
//!
//! The classes live in `pie_driver_sglang.errors`, next to the driver's own.

use pie_ring::{CallError, RegionError};
use pyo3::exceptions::{PyFileNotFoundError, PyRuntimeError, PyTimeoutError};
use pyo3::{PyErr, import_exception};

import_exception!(pie_driver_sglang.errors, FrontEndError);
import_exception!(pie_driver_sglang.errors, LostError);
import_exception!(pie_driver_sglang.errors, PagesError);
import_exception!(pie_driver_sglang.errors, RadixError);
import_exception!(pie_driver_sglang.errors, RingError);
import_exception!(pie_driver_sglang.errors, StageError);
import_exception!(pie_driver_sglang.errors, StartError);
import_exception!(pie_driver_sglang.errors, WireError);

pub(crate) fn from_ring(error: impl Into<pie_ring::RingError>) -> PyErr {
    let error = error.into();
    let text = error.to_string();
    match error {
        pie_ring::RingError::Call(CallError::TimedOut { .. }) => PyTimeoutError::new_err(text),
        pie_ring::RingError::Region(RegionError::NotFound { .. }) => {
            PyFileNotFoundError::new_err(with_hint(&text, "start the driver of this group first"))
        }
        pie_ring::RingError::Region(RegionError::Owned { name, .. }) => {
            RingError::new_err(with_hint(
                &text,
                &format!(
                    "run one Pie server per host, or per container with a /dev/shm of its own; stop the \
                     other one, or wait for the end of its driver (`fuser -v /dev/shm{name}` lists the users)"
                ),
            ))
        }
        _ => RingError::new_err(text),
    }
}

/// The message of an error with the driver's own remedy: of a driver, its users choose neither name nor process.
fn with_hint(text: &str, hint: &str) -> String {
    let message = text.split_once("\n\n").map_or(text, |(message, _)| message);
    format!("{message}\n\nhint: {hint}")
}

/// Errors of the runtime end with their remedy, where they have one.
pub(crate) fn from_engine(error: &pie_engine::EngineError) -> PyErr {
    let text = error.to_string();
    match text.split_once("\n\nhint: ") {
        Some((message, hint)) => StartError::new_err((message.to_owned(), hint.to_owned())),
        None => StartError::new_err(text),
    }
}

pub(crate) fn from_sglang_frontend(
    error: &pie_frontends::sglang_zmq::SglangFrontendError,
) -> PyErr {
    FrontEndError::new_err(error.to_string())
}

pub(crate) fn from_wire(error: &pie_wire::WireError) -> PyErr {
    WireError::new_err(error.to_string())
}

pub(crate) fn from_batch(error: pie_driver::BatchError) -> PyErr {
    StageError::new_err(error.to_string())
}

pub(crate) fn from_loss(error: &pie_driver::GraphPathError) -> PyErr {
    LostError::new_err(error.to_string())
}

pub(crate) fn from_warm_up(error: &pie_driver::WarmUpError) -> PyErr {
    let text = error.to_string();
    match error {
        pie_driver::WarmUpError::Busy | pie_driver::WarmUpError::GraphPath(_) => {
            PyRuntimeError::new_err(text)
        }
        _ => WireError::new_err(text),
    }
}

pub(crate) fn from_pages(error: pie_kv_cache::pages::PoolError) -> PyErr {
    PagesError::new_err(error.to_string())
}

pub(crate) fn from_radix(error: &pie_kv_cache::radix::RadixError) -> PyErr {
    RadixError::new_err(error.to_string())
}
