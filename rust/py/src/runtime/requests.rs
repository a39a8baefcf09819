//! Requests that are handed in together.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pie_runtime::{Arrival, Draw};
use pyo3::prelude::*;

type Pending = Vec<(Arrival<Draw>, Option<Duration>)>;

/// Requests for `Runtime.submit_all`, which `Runtime.submit` puts here by its argument `into`.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
#[derive(Default)]
pub(crate) struct Requests(Mutex<Pending>);

#[pymethods]
impl Requests {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __len__(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn __repr__(&self) -> String {
        format!("Requests({})", self.__len__())
    }
}

impl Requests {
    /// Returns its place.
    pub(super) fn add(&self, arrival: Arrival<impl Into<Draw>>, deadline: Option<Duration>) -> u64 {
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pending.push((arrival.map(Into::into), deadline));
        pending.len() as u64 - 1
    }

    pub(super) fn take(&self) -> Pending {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
