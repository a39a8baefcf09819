//! The one mapping from the crates' errors to Python exceptions.
//!
//! The classes live in `pie_driver_sglang.errors`, beside the driver's own.

use pyo3::exceptions::{PyFileNotFoundError, PyRuntimeError, PyTimeoutError};
use pyo3::{PyErr, import_exception};

import_exception!(pie_driver_sglang.errors, LostError);
import_exception!(pie_driver_sglang.errors, PagesError);
import_exception!(pie_driver_sglang.errors, RadixError);
import_exception!(pie_driver_sglang.errors, RingError);
import_exception!(pie_driver_sglang.errors, StageError);
import_exception!(pie_driver_sglang.errors, StartError);
import_exception!(pie_driver_sglang.errors, WireError);

pub(crate) fn from_ring(error: &pie_ring::RingError) -> PyErr {
    let text = error.to_string();
    match error {
        pie_ring::RingError::TimedOut { .. } => PyTimeoutError::new_err(text),
        pie_ring::RingError::NotFound { .. } => PyFileNotFoundError::new_err(text),
        _ => RingError::new_err(text),
    }
}

/// Errors of the runtime end with their remedy, where they have one.
pub(crate) fn from_runtime(error: &pie_runtime::RuntimeError) -> PyErr {
    let text = error.to_string();
    match text.split_once("\n\nhint: ") {
        Some((message, hint)) => StartError::new_err((message.to_owned(), hint.to_owned())),
        None => StartError::new_err(text),
    }
}

pub(crate) fn from_wire(error: &pie_wire::WireError) -> PyErr {
    WireError::new_err(error.to_string())
}

pub(crate) fn from_stage(error: pie_batch::StageError) -> PyErr {
    StageError::new_err(error.to_string())
}

pub(crate) fn from_loss(error: &pie_serve::LaneError) -> PyErr {
    LostError::new_err(error.to_string())
}

pub(crate) fn from_rehearsal(error: &pie_serve::RehearsalError) -> PyErr {
    let text = error.to_string();
    match error {
        pie_serve::RehearsalError::Busy | pie_serve::RehearsalError::Lane(_) => {
            PyRuntimeError::new_err(text)
        }
        _ => WireError::new_err(text),
    }
}

pub(crate) fn from_pages(error: pie_pages::PoolError) -> PyErr {
    PagesError::new_err(error.to_string())
}

pub(crate) fn from_radix(error: &pie_radix::RadixError) -> PyErr {
    RadixError::new_err(error.to_string())
}
