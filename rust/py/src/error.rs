//! The one mapping from the crates' errors to Python exceptions.

use pyo3::exceptions::{PyException, PyFileNotFoundError, PyTimeoutError, PyValueError};
use pyo3::{PyErr, create_exception};

create_exception!(
    _core,
    RingError,
    PyException,
    "The shared-memory region cannot be made, opened or used."
);
create_exception!(
    _core,
    WireError,
    PyValueError,
    "Bytes that are no valid frame, or a buffer too small for one."
);
create_exception!(
    _core,
    StageError,
    PyValueError,
    "A staging block or tokens that do not fit the plan."
);

pub(crate) fn from_ring(error: &pie_ring::RingError) -> PyErr {
    let text = error.to_string();
    match error {
        pie_ring::RingError::TimedOut { .. } => PyTimeoutError::new_err(text),
        pie_ring::RingError::NotFound { .. } => PyFileNotFoundError::new_err(text),
        _ => RingError::new_err(text),
    }
}

pub(crate) fn from_wire(error: &pie_wire::WireError) -> PyErr {
    WireError::new_err(error.to_string())
}

pub(crate) fn from_stage(error: pie_batch::StageError) -> PyErr {
    StageError::new_err(error.to_string())
}
