//! The runtime's side of the ring, for the demo, tests and tools.

use std::time::Duration;

use pie_ring::{ClientConfig, Wait};
use pie_wire::{
    AdapterOp, AdapterRequest, CopyDirection, CopyRequest, CopyResource, ForwardResponse, Frame,
    Payload, ResponsePayload,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{WireError, from_ring};
use crate::logprobs::{PositionLogprobs, position_logprobs};
use crate::request::{Request, encode, encode_batch};

/// Sends requests to a driver as the Pie runtime does. Calls from several threads run on several slots.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Client {
    inner: pie_ring::Client,
}

/// A driver's answer.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
#[derive(Default)]
pub(crate) struct Reply {
    /// The status code of a status answer, else None.
    status: Option<i32>,
    /// Whether the driver gave the request up.
    aborted: bool,
    /// Whether the fast token reply was used.
    fast: bool,
    /// Tokens of each request.
    tokens: Vec<Vec<u32>>,
    /// Distributions of each request: token ids and probabilities.
    dists: Vec<Vec<(Vec<u32>, Vec<f32>)>>,
    /// Logit rows of each request.
    logits: Vec<Vec<Vec<f32>>>,
    /// Log-probability entries of each request.
    logprobs: Vec<Vec<Vec<f32>>>,
    /// Entropies of each request.
    entropies: Vec<Vec<f32>>,
    /// Drafts for the next request of each, empty when no request has some.
    drafts: Vec<Vec<u32>>,
    /// Their positions.
    draft_positions: Vec<Vec<u32>>,
    /// Log-probabilities that extensions asked for, of each request that has some: its number, those of its prompt, those of
    /// its tokens. Each position has the log-probability of its token, the most probable tokens with theirs, best first, and those
    /// of tokens that were given.
    position_logprobs: Vec<(u32, Vec<PositionLogprobs>, Vec<PositionLogprobs>)>,
    /// Driver-side microseconds: parse, plan, host-to-device, launch, sync, response.
    probes: (u32, u32, u32, u32, u32, u32),
}

#[pymethods]
impl Client {
    /// Opens a driver's region.
    ///
    /// Args:
    ///     name: POSIX name, `/pie_shmem_g<group_id>`.
    ///     spin_budget_us: Microseconds to spin before parking; 0 parks at once, 2**64 - 1 never parks.
    ///     timeout_s: Seconds that a call may take.
    ///
    /// Raises:
    ///     FileNotFoundError: There is no such region.
    ///     RingError: The region is not one that this client understands.
    #[new]
    #[pyo3(signature = (name, *, spin_budget_us = 1000, timeout_s = 60.0))]
    fn new(name: &str, spin_budget_us: u64, timeout_s: f64) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .map_err(|error| PyValueError::new_err(format!("timeout_s is {timeout_s}: {error}")))?;
        let config = ClientConfig {
            wait: Wait::from_spin_budget_us(spin_budget_us),
            timeout,
        };
        let inner =
            pie_ring::Client::open(name, pie_wire::SCHEMA_HASH, config).map_err(from_ring)?;
        Ok(Self { inner })
    }

    /// Sends raw bytes and returns the raw answer.
    ///
    /// Raises:
    ///     TimeoutError: No answer in time.
    ///     RingError: The request does not fit the slot.
    fn call(&self, py: Python<'_>, request: &[u8]) -> PyResult<Py<PyBytes>> {
        let answer = py
            .detach(|| self.inner.call(request, <[u8]>::to_vec))
            .map_err(from_ring)?;
        Ok(PyBytes::new(py, &answer).unbind())
    }

    /// Sends a batch and waits for its answer. Errors as `call`.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments from Python are owned"
    )]
    fn forward(&self, py: Python<'_>, requests: Vec<Request>) -> PyResult<Reply> {
        self.call_encoded(py, &encode_batch(&requests, 0)?)
    }

    /// Copies pages and returns the status code.
    ///
    /// Args:
    ///     direction: "D2H", "H2D", "D2D" or "H2H", with D for device pages and H for slots of the host pool.
    ///     sources: Pages to read.
    ///     targets: Pages to write, pair by pair.
    ///     states: They are slots of recurrent state, not pages.
    #[pyo3(signature = (direction, sources, targets, *, states = false))]
    fn copy(
        &self,
        py: Python<'_>,
        direction: &str,
        sources: Vec<u32>,
        targets: Vec<u32>,
        states: bool,
    ) -> PyResult<Option<i32>> {
        let dir = match direction {
            "D2H" => CopyDirection::D2H,
            "H2D" => CopyDirection::H2D,
            "D2D" => CopyDirection::D2D,
            "H2H" => CopyDirection::H2H,
            _ => {
                return Err(PyValueError::new_err(format!(
                    "direction {direction:?} is not one of D2H, H2D, D2D, H2H"
                )));
            }
        };
        let request = CopyRequest {
            dir,
            srcs: sources,
            dsts: targets,
            resource: if states {
                CopyResource::Rs
            } else {
                CopyResource::Kv
            },
        };
        self.status(py, Payload::Copy(request))
    }

    /// Sends an adapter operation and returns the status code.
    ///
    /// Args:
    ///     operation: "Load", "Save", "ZoInit", "ZoUpdate" or "GenerateAudio".
    ///     adapter_id: The id that requests bind.
    ///     path: What the operation asks for, of a load where the adapter lies.
    #[pyo3(signature = (operation, adapter_id, path = ""))]
    fn adapter(
        &self,
        py: Python<'_>,
        operation: &str,
        adapter_id: u64,
        path: &str,
    ) -> PyResult<Option<i32>> {
        let op = match operation {
            "Load" => AdapterOp::Load,
            "Save" => AdapterOp::Save,
            "ZoInit" => AdapterOp::ZoInit,
            "ZoUpdate" => AdapterOp::ZoUpdate,
            "GenerateAudio" => AdapterOp::GenerateAudio,
            _ => {
                return Err(PyValueError::new_err(format!(
                    "operation {operation:?} is not one of Load, Save, ZoInit, ZoUpdate, GenerateAudio"
                )));
            }
        };
        let request = AdapterRequest {
            op,
            adapter_id,
            path: path.to_owned(),
        };
        self.status(py, Payload::Adapter(request))
    }

    /// Asks whether the driver is alive and returns the status code.
    fn health(&self, py: Python<'_>) -> PyResult<Option<i32>> {
        self.status(py, Payload::Health)
    }

    /// Ends every running and later call with an error.
    fn abort(&self) {
        self.inner.abort();
    }
}

impl Client {
    /// Sends a payload and returns the status code of the answer.
    fn status(&self, py: Python<'_>, payload: Payload) -> PyResult<Option<i32>> {
        let frame = Frame {
            driver_id: 0,
            payload,
        };
        Ok(self.call_encoded(py, &encode(&frame)?)?.status)
    }

    fn call_encoded(&self, py: Python<'_>, request: &[u8]) -> PyResult<Reply> {
        let reply = py
            .detach(|| self.inner.call(request, decode))
            .map_err(from_ring)?;
        reply.map_err(WireError::new_err)
    }
}

/// Reads an answer; the error is a text, because it is made without the GIL.
fn decode(bytes: &[u8]) -> Result<Reply, String> {
    let mut reply = Reply::default();
    // What a driver that ends answers.
    if bytes.is_empty() {
        reply.aborted = true;
        return Ok(reply);
    }
    let (bytes, extension) = pie_wire::split_response(bytes).map_err(text)?;
    reply.position_logprobs = extension.rows().map(row_logprobs).collect();
    if let pie_wire::Reply::Tokens(tokens) = pie_wire::decode_reply(bytes).map_err(text)? {
        reply.fast = true;
        reply.tokens = tokens.iter().map(|token| vec![token]).collect();
        return Ok(reply);
    }
    let frame = pie_wire::decode_response(bytes).map_err(text)?;
    reply.aborted = frame.aborted;
    match frame.payload {
        ResponsePayload::Status(status) => reply.status = Some(status.status),
        ResponsePayload::Forward(forward) => {
            forward.check().map_err(text)?;
            reply.read(&forward);
        }
    }
    Ok(reply)
}

fn row_logprobs(
    row: pie_wire::LogprobRow<'_>,
) -> (u32, Vec<PositionLogprobs>, Vec<PositionLogprobs>) {
    let words: Vec<u32> = row.words().collect();
    let mut positions = position_logprobs(&words, row.shape());
    let prompt = positions
        .by_ref()
        .take(row.position_counts().0 as usize)
        .collect();
    (row.request(), prompt, positions.collect())
}

#[expect(clippy::needless_pass_by_value, reason = "the form that map_err takes")]
fn text(error: impl ToString) -> String {
    error.to_string()
}

/// The parts of `values` that `indptr` cuts them into.
fn parts<'a, T>(indptr: &'a [u32], values: &'a [T]) -> impl Iterator<Item = &'a [T]> {
    indptr
        .windows(2)
        .map(|ends| &values[ends[0] as usize..ends[1] as usize])
}

/// For each request its entries.
fn entries<T: Clone>(indptr: &[u32], entries: &[T]) -> Vec<Vec<T>> {
    parts(indptr, entries).map(<[T]>::to_vec).collect()
}

impl Reply {
    /// Takes the outputs of a response whose offsets were checked.
    fn read(&mut self, forward: &ForwardResponse) {
        self.tokens = entries(&forward.tokens_indptr, &forward.tokens);
        let ids = parts(&forward.dists_kv_indptr, &forward.dists_ids);
        let probs = parts(&forward.dists_kv_indptr, &forward.dists_probs);
        let dists: Vec<_> = ids
            .zip(probs)
            .map(|(ids, probs)| (ids.to_vec(), probs.to_vec()))
            .collect();
        self.dists = entries(&forward.dists_req_indptr, &dists);
        let rows: Vec<_> = parts(&forward.logits_byte_indptr, &forward.logits_bytes)
            .map(|bytes| {
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .copied()
                    .map(f32::from_le_bytes)
                    .collect()
            })
            .collect::<Vec<Vec<f32>>>();
        self.logits = entries(&forward.logits_req_indptr, &rows);
        let logprobs: Vec<_> = parts(&forward.logprobs_val_indptr, &forward.logprobs_values)
            .map(<[f32]>::to_vec)
            .collect();
        self.logprobs = entries(&forward.logprobs_req_indptr, &logprobs);
        self.entropies = entries(&forward.entropies_indptr, &forward.entropies);
        self.drafts = entries(&forward.spec_indptr, &forward.spec_tokens);
        self.draft_positions = entries(&forward.spec_indptr, &forward.spec_positions);
        self.probes = (
            forward.probe_wire_parse_us,
            forward.probe_plan_us,
            forward.probe_h2d_us,
            forward.probe_kernel_launch_us,
            forward.probe_sync_us,
            forward.probe_response_build_us,
        );
    }
}
