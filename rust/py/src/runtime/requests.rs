//! How requests are validated and handed in, one by one or together.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pie_engine::{Capabilities, SubmitError};
use pie_ingress::{EmbeddingInfo, Ingress, ModelInfo, RawRequest, RequestLimits, RequestSpec};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::Runtime;
use super::settings::value_error;
use crate::error::from_engine;

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

impl Runtime {
    /// What its frontends hold requests to.
    pub(crate) const fn limits(&self) -> &RequestLimits {
        &self.limits
    }

    /// Validates a request and hands it in, or puts it into `into`; returns its id, or its index there.
    pub(super) fn hand_in(
        &self,
        ingress: &Ingress,
        raw: RawRequest,
        into: Option<PyRef<'_, Requests>>,
    ) -> PyResult<u64> {
        let spec = ingress.validate(raw, |grammar, after| {
            self.service.compile_grammar(grammar, after)
        });
        let spec = spec.map_err(value_error)?;
        if let Some(requests) = into {
            return Ok(requests.add(spec));
        }
        let (arrival, deadline) = spec.into_request();
        let submitted = self.service.submit(arrival, deadline);
        submitted.map_err(|rejected| from_rejected(&rejected))
    }

    /// Numbers of a hidden state, as a ready driver has measured them; 0 where none are returned.
    pub(crate) const fn hidden_size(&self, caps: &Capabilities) -> u32 {
        match (self.hidden_size, caps.hidden_size) {
            (0, _) => 0,
            (configured, 0) => configured,
            (_, measured) => measured,
        }
    }

    /// By which `submit` validates requests. It takes the vocabulary of a driver that is ready.
    pub(super) fn ingress(&self) -> PyResult<&Ingress> {
        if let Some(ingress) = self.ingress.get() {
            return Ok(ingress);
        }
        let Some(caps) = self.service.capabilities() else {
            return Err(match self.service.wait_ready(Duration::ZERO) {
                Err(error) => from_engine(&error),
                Ok(_) if self.service.is_stopped() => from_rejected(&SubmitError::Stopped),
                Ok(_) => from_rejected(&SubmitError::NotReady),
            });
        };
        let model = ModelInfo {
            vocab_size: caps.vocab_size,
            embeddings: EmbeddingInfo::of(&caps),
            eos_token_ids: self.stop_tokens.clone(),
            // The scheduler knows its pool.
            max_prompt_tokens: None,
            context_length: None,
            logit_processors: self.logit_processors,
            hidden_size: self.hidden_size(&caps),
            embed_size: caps.embed_size,
        };
        Ok(self
            .ingress
            .get_or_init(|| Ingress::new(self.limits.clone(), model)))
    }
}

pub(super) fn from_rejected(rejected: &SubmitError) -> PyErr {
    match rejected {
        SubmitError::Gone(error) | SubmitError::Forked(error) => from_engine(error),
        _ => PyRuntimeError::new_err(rejected.to_string()),
    }
}
