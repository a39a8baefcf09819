//! A gRPC server over a runtime.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use pie_frontends::grpc::{Contract, GatewayError, GatewaySettings, ServedModel, VisionInfo};
use pyo3::exceptions::{PyOSError, PyRuntimeError};
use pyo3::prelude::*;

use crate::runtime::{Runtime, seconds, value_error};
use crate::traced::{Traced, traced};

/// The gRPC services that the gateway smg calls, for a runtime whose drivers are ready: one thread without Python serves them.
///
/// Nothing else may call `poll` of the runtime. Use it as a context manager, or call `close`, before the runtime is shut down.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Gateway {
    inner: pie_frontends::grpc::Gateway,
    /// It must outlive the server.
    _runtime: Py<Runtime>,
}

#[pymethods]
impl Gateway {
    /// Starts the server.
    ///
    /// Args:
    ///     runtime: What computes.
    ///     contract: `vllm` for `vllm.grpc.engine.VllmEngine`, `sglang` for `sglang.grpc.scheduler.SglangScheduler`.
    ///     host: An address of this machine.
    ///     port: 0 for any that is free.
    ///     model_path: The folder, which a gateway on this machine reads tokenizer and template from.
    ///     tokenizer_path: The folder of the tokenizer, if it is another one.
    ///     served_model_name: What clients call the model.
    ///     model_type: As `config.json` says it.
    ///     architectures: As `config.json` says them.
    ///     eos_token_ids: They end a request, unless it ignores them.
    ///     bos_token_id: Begins texts.
    ///     pad_token_id: Fills batches.
    ///     context_length: Most tokens of prompt and output together; the driver may allow fewer.
    ///     default_sampling: Sampling parameters for what a client leaves out, as a JSON object.
    ///     weight_version: Names the weights.
    ///     version: Of this program.
    ///     max_running_requests: As the runtime has it.
    ///     image_merge: Patches along a side of the square that makes a token of an image; None for a model without images. The
    ///         runtime must have room for them (`max_image_bytes`).
    ///     speculate: The driver may draft for requests.
    ///     event_history: Batches of changes of the prefix index that are kept; 0 to publish none. The runtime must record them
    ///         (`kv_events`).
    ///     traces: Keep for `take_traced` what happens to requests: to those whose call has no `traceparent`, or one of a trace that is
    ///         recorded.
    ///
    /// Raises:
    ///     OSError: The address cannot be listened at.
    ///     RuntimeError: The drivers are not ready.
    ///     ValueError: The contract or the host is none.
    #[new]
    #[pyo3(signature = (
        runtime, *, contract = "vllm", host = "127.0.0.1", port = 0, model_path = String::new(),
        tokenizer_path = String::new(), served_model_name = String::new(), model_type = String::new(),
        architectures = Vec::new(), eos_token_ids = Vec::new(), bos_token_id = None, pad_token_id = None,
        context_length = None, default_sampling = String::new(), weight_version = String::new(), version = String::new(),
        max_running_requests = None, image_merge = None, speculate = false, event_history = 10_000, traces = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        py: Python<'_>,
        runtime: Py<Runtime>,
        contract: &str,
        host: &str,
        port: u16,
        model_path: String,
        tokenizer_path: String,
        served_model_name: String,
        model_type: String,
        architectures: Vec<String>,
        eos_token_ids: Vec<u32>,
        bos_token_id: Option<u32>,
        pad_token_id: Option<u32>,
        context_length: Option<u32>,
        default_sampling: String,
        weight_version: String,
        version: String,
        max_running_requests: Option<u32>,
        image_merge: Option<u32>,
        speculate: bool,
        event_history: usize,
        traces: bool,
    ) -> PyResult<Self> {
        let settings = GatewaySettings {
            address: SocketAddr::from((address_of(host)?, port)),
            limits: runtime.get().limits().clone(),
            max_running: max_running_requests,
            images: image_merge.map(|merge| VisionInfo {
                merge: merge.max(1),
            }),
            speculates: speculate,
            event_history,
            traces,
            ..GatewaySettings::new(
                contract_of(contract)?,
                ServedModel {
                    model_path,
                    tokenizer_path,
                    served_name: served_model_name,
                    model_type,
                    architectures,
                    eos_tokens: eos_token_ids,
                    bos_token: bos_token_id,
                    pad_token: pad_token_id,
                    context_length,
                    default_sampling,
                    weight_version,
                    version,
                },
            )
        };
        let service = Arc::clone(&runtime.get().service);
        let opened = py.detach(|| pie_frontends::grpc::Gateway::open(service, settings));
        let inner = opened.map_err(|error| not_opened(&error))?;
        Ok(Self {
            inner,
            _runtime: runtime,
        })
    }

    /// Where it listens, as `host:port`.
    #[getter]
    fn address(&self) -> String {
        self.inner.address().to_string()
    }

    /// Requests that have not ended.
    #[getter]
    fn open_requests(&self) -> usize {
        self.inner.open_requests()
    }

    /// What happened when to requests that were traced and have ended since the last call; and how many more there were than are
    /// kept, which is 4,096. Nothing without `traces`.
    fn take_traced(&self) -> Traced {
        traced(self.inner.take_traced())
    }

    /// Takes no more requests, lets those that run end, but no longer than `timeout_s`, and closes every connection. A second
    /// call does nothing.
    #[pyo3(signature = (timeout_s = 0.0))]
    fn close(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let limit = seconds("timeout_s", timeout_s)?;
        py.detach(|| self.inner.close(limit));
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (_kind = None, _error = None, _traceback = None))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: Option<&Bound<'_, PyAny>>,
        _error: Option<&Bound<'_, PyAny>>,
        _traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.close(py, 0.0)
    }
}

fn contract_of(name: &str) -> PyResult<Contract> {
    match name {
        "vllm" => Ok(Contract::Vllm),
        "sglang" => Ok(Contract::Sglang),
        other => Err(value_error(format!(
            "the contract is {other:?}: take vllm or sglang"
        ))),
    }
}

fn address_of(host: &str) -> PyResult<IpAddr> {
    host.parse()
        .map_err(|error| value_error(format!("the host is {host:?}: {error}")))
}

fn not_opened(error: &GatewayError) -> PyErr {
    let text = error.to_string();
    match error {
        GatewayError::NotReady => PyRuntimeError::new_err(text),
        _ => PyOSError::new_err(text),
    }
}
