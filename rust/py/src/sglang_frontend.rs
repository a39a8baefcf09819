//! The frontend of SGLang's HTTP server.

use std::time::Instant;

use pie_frontends::sglang_zmq::{
    MessageClass, MessageField, Outgoing, SglangFrontendSettings, TimeStats, TimesTemplate,
};
use pie_ingress::EmbeddingInfo;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::from_sglang_frontend;
use crate::image_backend::ServiceWithImages;
use crate::runtime::{Runtime, seconds, wait};
use crate::traced::{Traced, traced};

/// A field of a message class: its name, and its default as msgpack.
type Field = (String, Option<Vec<u8>>);
/// A clock, a pickle, and four offsets in it.
type Times = (f64, Vec<u8>, (usize, usize, usize, usize));
/// Messages by receiver: for the detokenizer, for the tokenizer manager, and those that came and are not about requests; and what
/// could not be read, a line each.
type Received<'py> = (
    Vec<Bound<'py, PyBytes>>,
    Vec<Bound<'py, PyBytes>>,
    Vec<Bound<'py, PyBytes>>,
    Vec<String>,
);
/// Messages by receiver: for the detokenizer, for the tokenizer manager, and none that came.
type Messages<'py> = (
    Vec<Bound<'py, PyBytes>>,
    Vec<Bound<'py, PyBytes>>,
    Vec<Bound<'py, PyBytes>>,
);

/// The frontend of SGLang's HTTP server: reads and writes the messages (msgpack) between its tokenizer manager, its detokenizer and a
/// scheduler.
///
/// `receive` and `poll` may run in two threads at once; nothing else may call `poll` of the runtime.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct SglangFrontend {
    inner: pie_frontends::sglang_zmq::SglangFrontend,
    runtime: Py<Runtime>,
    takes_images: bool,
    read_images: Option<Py<PyAny>>,
}

#[pymethods]
impl SglangFrontend {
    /// A frontend without requests.
    ///
    /// Args:
    ///     runtime: What computes them, whose drivers are ready.
    ///     classes: SGLang's message classes: of each the name and its fields in their order, each with its default as msgpack,
    ///         None where there is none.
    ///     eos_token_ids: They end a request, unless it ignores them.
    ///     think_end_ids: The tokens that end the model's thinking; none where it is not counted.
    ///     stream_interval: Tokens from one output of a stream to the next.
    ///     other_interval: The same for requests that do not stream.
    ///     max_prompt_tokens: Most tokens of a prompt.
    ///     context_length: Most tokens of a prompt and its answer together.
    ///     truncate: Cut longer prompts instead of refusing them.
    ///     vocab_size: Token ids are below it.
    ///     speculate: The driver may draft for requests.
    ///     bos_token_id: The token that begins a text, which turns of a session leave out.
    ///     refuse_priority: Refuse requests that have a priority.
    ///     original_logprobs: Log-probabilities are those before the temperature.
    ///     probe_prefix: How the names of SGLang's health probes begin.
    ///     dp_rank: Which of several replicas this is.
    ///     takes_images: The model has images; those of requests are refused without.
    ///     read_images: Reads a pickled `MultimodalProcessorOutput`; None where they come as messages. Of each image it returns the first
    ///         token's index in the prompt, the number of tokens, the grid (time, height, width in patches), the pixels (float32
    ///         `[patches, values of a patch]`) and the rotary positions (uint32 `[tokens, 3]`, or none), both as little-endian
    ///         bytes; or it raises ValueError with the answer to the client.
    ///     times: Where the front end makes metrics of the times of requests: `time.perf_counter()` now, a pickled
    ///         `SchedulerReqTimeStats` without the opcodes around it, and where the times lie in it at which a request began to
    ///         wait, was admitted, and had its first token, and by how much
    ///         the time of day is ahead of that clock.
    ///     weight_version: The name of the weights that the drivers start with.
    ///     traces: Keep for `take_traced` what happens to requests that the front end traces.
    ///
    /// Raises:
    ///     FrontEndError: The classes are not those of a version of SGLang that is served.
    #[new]
    #[pyo3(signature = (
        runtime, classes, *, eos_token_ids, think_end_ids, stream_interval, other_interval, max_prompt_tokens, context_length, truncate,
        vocab_size, speculate, probe_prefix, refuse_priority = false, original_logprobs = false, bos_token_id = None, dp_rank = None, takes_images = false, read_images = None, times = None, weight_version = "default".to_owned(), traces = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    #[expect(
        clippy::fn_params_excessive_bools,
        reason = "each is a flag of the server"
    )]
    fn new(
        runtime: Py<Runtime>,
        classes: Vec<(String, Vec<Field>)>,
        eos_token_ids: Vec<u32>,
        think_end_ids: Vec<u32>,
        stream_interval: u32,
        other_interval: u32,
        max_prompt_tokens: u32,
        context_length: u32,
        truncate: bool,
        vocab_size: u32,
        speculate: bool,
        probe_prefix: String,
        refuse_priority: bool,
        original_logprobs: bool,
        bos_token_id: Option<u32>,
        dp_rank: Option<u32>,
        takes_images: bool,
        read_images: Option<Py<PyAny>>,
        times: Option<Times>,
        weight_version: String,
        traces: bool,
    ) -> PyResult<Self> {
        let capabilities = runtime.get().service.capabilities();
        let field = |(name, default): Field| MessageField { name, default };
        let class = |(name, fields): (String, Vec<Field>)| MessageClass {
            name,
            fields: fields.into_iter().map(field).collect(),
        };
        let classes: Vec<MessageClass> = classes.into_iter().map(class).collect();
        let settings = SglangFrontendSettings {
            eos_tokens: eos_token_ids,
            think_end: think_end_ids,
            stream_interval,
            other_interval,
            max_prompt_tokens,
            context_length,
            truncates: truncate,
            vocab_size,
            embeddings: capabilities.as_ref().and_then(EmbeddingInfo::of),
            limits: runtime.get().limits().clone(),
            bos_token: bos_token_id,
            speculates: speculate,
            refuses_priority: refuse_priority,
            original_logprobs,
            logit_processors: runtime.get().logit_processors,
            hidden_size: (capabilities.as_ref())
                .map_or(0, |found| runtime.get().hidden_size(found)),
            embed_size: capabilities.as_ref().map_or(0, |found| found.embed_size),
            probe_prefix,
            dp_rank,
            times: times
                .map(|times| time_stats(times, runtime.get().service.started_at()))
                .transpose()?,
            weight_version,
            traces: traces.then(|| runtime.get().service.started_at()),
        };
        let inner = pie_frontends::sglang_zmq::SglangFrontend::new(&classes, settings)
            .map_err(|e| from_sglang_frontend(&e))?;
        Ok(Self {
            inner,
            runtime,
            takes_images,
            read_images,
        })
    }

    /// Takes messages of the tokenizer manager.
    ///
    /// Returns:
    ///     Messages for the detokenizer, messages for the tokenizer manager, those of `messages` that are not about requests,
    ///     in their order, and a line for the log for each that cannot be read and has no name to be answered by. No message
    ///     fails another one.
    fn receive<'py>(&self, py: Python<'py>, messages: Vec<Bound<'py, PyBytes>>) -> Received<'py> {
        let backend = ServiceWithImages {
            service: &self.runtime.get().service,
            py,
            takes_images: self.takes_images,
            read_images: self.read_images.as_ref(),
        };
        let bytes = messages.iter().map(PyBytesMethods::as_bytes);
        let outgoing = self.inner.receive(&backend, bytes);
        let mut messages = messages;
        let mut index = 0..;
        messages.retain(|_| index.next().is_some_and(|at| outgoing.others.contains(&at)));
        let (to_detokenizer, to_tokenizer, _) = lists(py, &outgoing);
        (to_detokenizer, to_tokenizer, messages, outgoing.unreadable)
    }

    /// Waits for outputs, without Python's lock, and returns the messages as `receive` does; none when the time is over.
    fn poll<'py>(&self, py: Python<'py>, timeout_s: Option<f64>) -> PyResult<Messages<'py>> {
        let service = &self.runtime.get().service;
        let outgoing = wait(py, timeout_s, |slice| {
            let deltas = service.poll(slice);
            let found = self.inner.outputs(&deltas);
            (!deltas.is_empty() || service.is_stopped()).then_some(found)
        })?;
        let outgoing = outgoing.unwrap_or_default();
        for &session in &outgoing.ended_sessions {
            service.end_session(session);
        }
        Ok(lists(py, &outgoing))
    }

    /// Has requests that name an adapter computed with the one that the runtime has loaded as `adapter_id`; with None they are
    /// refused.
    ///
    /// Args:
    ///     name: The tokenizer manager's `lora_id`.
    ///     adapter_id: Of `Runtime.load_adapter`.
    fn set_adapter(&self, name: &str, adapter_id: Option<u64>) {
        self.inner.set_adapter(name, adapter_id);
    }

    /// Opens a session, whose requests continue from each other's tokens. False if there is one of that name.
    ///
    /// Args:
    ///     session_id: Its name.
    ///     streaming: It has one request at a time, which continues from the last that ended well.
    ///     timeout_s: Seconds without a request after which `reap_sessions` closes it; None for never.
    #[pyo3(signature = (session_id, *, streaming = false, timeout_s = None))]
    fn open_session(
        &self,
        session_id: &str,
        streaming: bool,
        timeout_s: Option<f64>,
    ) -> PyResult<bool> {
        let patience = timeout_s.map(|limit| seconds("timeout_s", limit));
        Ok(self
            .inner
            .open_session(session_id, streaming, patience.transpose()?))
    }

    /// Closes a session and lets its pages go. Its requests that run continue; one that is not open is ignored.
    fn close_session(&self, session_id: &str) {
        self.inner
            .close_session(&*self.runtime.get().service, session_id);
    }

    /// Closes the sessions that had no request for longer than they allow.
    fn reap_sessions(&self) {
        self.inner.reap_sessions(&*self.runtime.get().service);
    }

    /// Sessions that are open.
    #[getter]
    fn open_sessions(&self) -> usize {
        self.inner.open_sessions()
    }

    /// Of each request that had its first token since the last call: seconds from its arrival to its admission, and from there
    /// to the token; nothing without `times`.
    fn take_waits(&self) -> Vec<(f64, f64)> {
        self.inner.take_waits()
    }

    /// What happened when to requests that were traced and have ended since the last call; and how many more there were than are
    /// kept, which is 4,096. Nothing without `traces`.
    fn take_traced(&self) -> Traced {
        traced(self.inner.take_traced())
    }

    /// Requests that have not ended.
    #[getter]
    fn open_requests(&self) -> usize {
        self.inner.open_requests()
    }

    /// Refuses requests with this reason and the status 503, and aborts the open ones; None serves them again.
    fn set_unavailable(&self, reason: Option<String>) {
        self.inner
            .set_unavailable(&*self.runtime.get().service, reason);
    }

    /// Names the weights that compute from now on. Answers of SGLang 0.5.23 say which of these versions each token is of (`weight_versions`);
    /// tokens of a step that runs count as the new version's.
    fn set_weight_version(&self, weight_version: &str) {
        let backend = &*self.runtime.get().service;
        self.inner.set_weight_version(backend, weight_version);
    }

    /// Whether nothing is computed for now; health probes are answered all the same.
    fn set_paused(&self, paused: bool) {
        self.inner.set_paused(paused);
    }
}

fn time_stats((now_s, pickle, offsets): Times, began: Instant) -> PyResult<TimeStats> {
    let (queued, admitted, computed, ahead) = offsets;
    let template = TimesTemplate {
        pickle,
        queued,
        admitted,
        computed,
        ahead,
    };
    if !template.is_whole() {
        return Err(PyValueError::new_err(format!(
            "the offsets {offsets:?} are not all inside of the pickle, which has {} bytes",
            template.pickle.len()
        )));
    }
    Ok(TimeStats {
        began,
        began_s: now_s - began.elapsed().as_secs_f64(),
        template,
    })
}

fn lists<'py>(py: Python<'py>, outgoing: &Outgoing) -> Messages<'py> {
    let list = |messages: &[Vec<u8>]| {
        let messages = messages.iter().map(|message| PyBytes::new(py, message));
        messages.collect()
    };
    (
        list(&outgoing.to_detokenizer),
        list(&outgoing.to_tokenizer),
        Vec::new(),
    )
}
