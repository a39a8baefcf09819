//! Requests that are handed in together.

use std::sync::{Mutex, PoisonError};

use pie_ingress::RequestSpec;
use pyo3::prelude::*;

/// Requests for `Runtime.submit_all`, which `Runtime.submit` puts here by its argument `into`.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
#[derive(Default)]
pub(crate) struct Requests(Mutex<Vec<RequestSpec>>);

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
    /// Returns its index.
    pub(super) fn add(&self, spec: RequestSpec) -> u64 {
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pending.push(spec);
        pending.len() as u64 - 1
    }

    pub(super) fn take(&self) -> Vec<RequestSpec> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
