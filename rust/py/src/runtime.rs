//! The engine for Python: drivers with schedulers.

mod config;
mod grammars;
mod outputs;
mod requests;
mod settings;
mod wait;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pie_engine::{
    MetricsReader, Pause, SamplingParams, Service, SubmitError, TraceSettings, TraceSummary,
};
use pie_ingress::{Ingress, RawEmbedding, RawLogprobs, RawRequest, RequestLimits, RequestSpec};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use self::config::Config;
use self::grammars::grammar_of;
use self::outputs::{Shown, Stats, dict, shown};
use self::requests::from_rejected;
use self::settings::{Prompt, limits, lock};
use crate::error::from_engine;
use crate::image_backend::{ReadImage, prompt_images, read_embeds};

pub(crate) use self::grammars::run_grammar_compiler;
pub(crate) use self::outputs::Output;
pub(crate) use self::requests::Requests;
pub(crate) use self::settings::{check_request_limits, seconds, value_error};
pub(crate) use self::wait::wait;

/// Drivers with a scheduler for each: requests in, tokens out.
///
/// The constructor starts every driver process, one of each replica, and returns at once; `wait_ready` waits for them. All
/// work is done by threads that never take Python's lock. A driver that dies is started again, and its requests continue where
/// they were. Use it as a context manager, or call `shutdown`.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Runtime {
    pub(crate) service: Arc<Service>,
    /// One for each replica.
    metrics: Mutex<Vec<MetricsReader>>,
    lines: Arc<Mutex<VecDeque<String>>>,
    stop_tokens: Vec<u32>,
    /// Requests may bring a custom logit processor.
    pub(crate) logit_processors: bool,
    /// Numbers of a hidden state by the model's files; 0 where none are returned.
    hidden_size: u32,
    limits: RequestLimits,
    /// Once the drivers are ready.
    ingress: OnceLock<Ingress>,
}

#[pymethods]
impl Runtime {
    /// Starts the drivers.
    ///
    /// Args:
    ///     model: Folder of the snapshot.
    ///     python: The drivers' interpreter, which has this package: `sys.executable`.
    ///     settings: See `Config` in `rust/py/src/runtime/config.rs`.
    ///
    /// Raises:
    ///     ValueError: A value is out of range.
    ///     TypeError: An unknown setting, or a value of another type.
    ///     OSError: The log file cannot be opened.
    ///     StartError: No thread can be started.
    #[new]
    #[pyo3(signature = (model, *, python, **settings: "object"))]
    fn new(
        py: Python<'_>,
        model: PathBuf,
        python: PathBuf,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let config = Config::extract(settings)?;
        let lines = Arc::<Mutex<VecDeque<String>>>::default();
        let limits = limits(config.request_limits.as_ref())?;
        let stop_tokens = config.eos_token_ids.clone();
        let logit_processors = config.enable_custom_logit_processor;
        let hidden_size = config.hidden_size;
        let settings = config.service(py, model, python, Arc::clone(&lines))?;
        let service = py
            .detach(|| Service::start(&settings))
            .map_err(|error| from_engine(&error))?;
        let now = Instant::now();
        let readers = settings.drivers.iter().map(|_| MetricsReader::new(now));
        Ok(Self {
            service: Arc::new(service),
            metrics: Mutex::new(readers.collect()),
            lines,
            stop_tokens,
            logit_processors,
            hidden_size,
            limits,
            ingress: OnceLock::new(),
        })
    }

    /// The names of the settings.
    #[staticmethod]
    fn setting_names() -> Vec<&'static str> {
        Config::NAMES.to_vec()
    }

    /// Waits until every driver serves; False when the time is over. To show progress, call it again and again with a short
    /// time, and `log_lines` in between.
    ///
    /// Raises:
    ///     StartError: A driver ended, or was not ready in time; with the last lines of its log.
    #[pyo3(signature = (timeout_s = None))]
    fn wait_ready(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        wait(py, timeout_s, |slice| {
            match self.service.wait_ready(slice) {
                Ok(false) if self.service.is_stopped() => Some(Ok(false)),
                Ok(false) => None,
                Ok(true) => Some(Ok(true)),
                Err(error) => Some(Err(from_engine(&error))),
            }
        })?
        .unwrap_or(Ok(false))
    }

    /// What the drivers have logged since the last call, oldest first, the last 1000 lines at most. With several replicas
    /// each line begins with `[number] `.
    fn log_lines(&self) -> Vec<String> {
        lock(&self.lines).drain(..).collect()
    }

    /// What the first driver can do, by the names of its handshake.
    ///
    /// Raises:
    ///     RuntimeError: It is not ready.
    fn capabilities<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let caps = self.service.capabilities();
        let caps =
            caps.ok_or_else(|| PyRuntimeError::new_err(SubmitError::NotReady.to_string()))?;
        dict(py, &caps)
    }

    /// Hands a request in and returns its id at once. What comes of it is for `poll`; one that cannot be served, because its
    /// prompt is too long, for example, ends with the reason `error`.
    ///
    /// Args:
    ///     token_ids: The prompt: an array of integers, or a list.
    ///     max_new_tokens: Most tokens to produce; cut to what model and pool have room for.
    ///     min_new_tokens: Tokens before which no stop token may come.
    ///     temperature: 0 for the most probable token.
    ///     top_k: Tokens kept; -1 for all.
    ///     top_p: Probability mass kept.
    ///     min_p: Fraction of the largest probability that a token must have.
    ///     seed: With the position it fixes what is sampled.
    ///     frequency_penalty: Taken from a token's logit for each time that it was produced.
    ///     presence_penalty: Taken from the logit of a token that was produced.
    ///     repetition_penalty: Divides the logit of a token that was produced, or multiplies it if it is below 0.
    ///     logit_bias: Tokens, and what is added to their logits.
    ///     stop_token_ids: They end it, besides the model's own.
    ///     stop: Texts that end it.
    ///     stop_regex: Expressions that end it where they match, in the syntax of Rust's `regex`.
    ///     ignore_eos: The model's own do not end it.
    ///     n: Sequences that continue from the prompt.
    ///     priority: Higher comes first.
    ///     routing_key: Requests with one key go to one replica, and are one group for the policy of that name.
    ///     session: A conversation whose pages are kept; it stays with one replica.
    ///     namespace: Requests of different ones share no prefix; SGLang's `extra_key`.
    ///     adapter_id: What `load_adapter` loaded; None for the model alone. Different ones share no prefix.
    ///     grammar: What binds the output: `json_schema`, `regex`, `ebnf`, `lark` or `structural_tag`, and its text. It is compiled
    ///         while the request waits; a wrong one ends it with the reason `error`.
    ///     grammar_after: The tokens after which the grammar binds, as those that end a model's thinking; none for the start.
    ///     logit_processor: SGLang's `custom_logit_processor`, as `CustomLogitProcessor.to_str` writes it.
    ///     custom_params: Its parameters, as JSON.
    ///     logprobs: Log-probabilities of its tokens, None for none: how many most probable tokens of each position, tokens whose
    ///         log-probabilities are wanted at each position, and the index of a token of the prompt, those after which are wanted,
    ///         too, or None.
    ///     logprobs_original: They are those before the temperature.
    ///     hidden_states: Those of the rows that are computed, after their log-probabilities; see `Output.hidden_states`.
    ///     speculate: The driver may draft for it.
    ///     deadline_s: Seconds after which it ends, finished or not.
    ///     streams: Outputs come with every step, and `max_token_gap_ms` holds between them. Else each sequence has one
    ///         output, at its end.
    ///     images: Those of the prompt, in its order. Of each the index of its first token, its tokens, its grid (time, height and
    ///         width in patches), its pixels (float32 `[patches, values of a patch]`), and the rotary positions of its tokens
    ///         (uint32 `[tokens, 3]`, or none).
    ///     input_embeds: Float32 `[tokens, embed_size]` as bytes, in place of `token_ids`, which are ignored.
    ///     into: Where the request is put instead, to be handed in with others by `submit_all`; then its index there is returned.
    ///
    /// Raises:
    ///     ValueError: A parameter is out of range, or the driver cannot do what is asked for.
    ///     TypeError: `token_ids` is neither.
    ///     OverflowError: A token of the prompt does not fit into uint32, or another number not into 64 bits.
    ///     StartError: No driver is left.
    ///     RuntimeError: The drivers are not ready, or the runtime is shut down.
    #[pyo3(signature = (
        token_ids, *, max_new_tokens = 128, min_new_tokens = 0, temperature = 1.0, top_k = -1, top_p = 1.0, min_p = 0.0,
        seed = None, frequency_penalty = 0.0, presence_penalty = 0.0, repetition_penalty = 1.0, logit_bias = Vec::new(),
        stop_token_ids = Vec::new(), stop = Vec::new(), stop_regex = Vec::new(), ignore_eos = false, n = 1, priority = None,
        routing_key = None, session = None, namespace = None, adapter_id = None, grammar = None, grammar_after = Vec::new(),
        logit_processor = None, custom_params = None, logprobs = None, logprobs_original = false, hidden_states = false, speculate = false, deadline_s = None, streams = true, images = Vec::new(), input_embeds = None, into = None
    ))]
    #[expect(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "keywords of Python"
    )]
    fn submit(
        &self,
        py: Python<'_>,
        token_ids: Prompt,
        max_new_tokens: i64,
        min_new_tokens: i64,
        temperature: f32,
        top_k: i64,
        top_p: f32,
        min_p: f32,
        seed: Option<u64>,
        frequency_penalty: f32,
        presence_penalty: f32,
        repetition_penalty: f32,
        logit_bias: Vec<(i64, f32)>,
        stop_token_ids: Vec<i64>,
        stop: Vec<String>,
        stop_regex: Vec<String>,
        ignore_eos: bool,
        n: i64,
        priority: Option<i64>,
        routing_key: Option<String>,
        session: Option<u64>,
        namespace: Option<String>,
        adapter_id: Option<u64>,
        grammar: Option<(String, String)>,
        grammar_after: Vec<u32>,
        logit_processor: Option<String>,
        custom_params: Option<String>,
        logprobs: Option<(i64, Vec<i64>, Option<i64>)>,
        logprobs_original: bool,
        hidden_states: bool,
        speculate: bool,
        deadline_s: Option<f64>,
        streams: bool,
        images: Vec<ReadImage<'_>>,
        input_embeds: Option<Bound<'_, PyBytes>>,
        into: Option<PyRef<'_, Requests>>,
    ) -> PyResult<u64> {
        let images = (!images.is_empty()).then(|| prompt_images(py, images));
        let mut images = images.transpose().map_err(PyValueError::new_err)?;
        let (mut prompt, ingress) = (token_ids.0, self.ingress()?);
        if let Some(embeds) = input_embeds {
            let embeds = read_embeds(py, ingress, embeds.as_bytes());
            let embeds = embeds.map_err(value_error)?;
            prompt = vec![0; embeds.tokens() as usize];
            images = Some(embeds);
        }
        let logprobs = logprobs.map(|(top_logprobs_num, token_ids_logprob, start)| RawLogprobs {
            top_logprobs_num,
            token_ids_logprob,
            logprob_start_len: start.unwrap_or(-1),
            original: logprobs_original,
        });
        let deadline = deadline_s.map(|limit| seconds("deadline_s", limit));
        let grammar = grammar.map(|(kind, text)| grammar_of(&kind, text));
        let raw = RawRequest {
            sampling: SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
                seed,
                frequency_penalty,
                presence_penalty,
                repetition_penalty,
                logit_bias: Vec::new(),
            },
            logit_bias,
            max_new_tokens: Some(max_new_tokens),
            min_new_tokens,
            n,
            stop_token_ids,
            stop,
            stop_regex,
            ignore_eos,
            grammar: grammar.transpose()?,
            grammar_after,
            logit_processor,
            custom_params,
            logprobs,
            hidden_states,
            priority,
            routing_key,
            extra_key: namespace,
            adapter: adapter_id,
            session,
            speculates: speculate,
            streams,
            deadline: deadline.transpose()?,
            images,
            ..RawRequest::new(String::new(), prompt)
        };
        self.hand_in(ingress, raw, into)
    }

    /// Hands in a request for an embedding, whose only output has it; see `submit`.
    ///
    /// Args:
    ///     token_ids: The prompt: an array of integers, or a list.
    ///     dimensions: Leading numbers to return (Matryoshka); None for all.
    ///     priority, namespace, adapter_id, into: As in `submit`.
    ///
    /// Raises:
    ///     ValueError: A parameter is out of range, or the model generates text.
    ///     TypeError, OverflowError, StartError, RuntimeError: As `submit`.
    #[pyo3(signature = (token_ids, *, dimensions = None, priority = None, namespace = None, adapter_id = None, into = None))]
    fn submit_embedding(
        &self,
        token_ids: Prompt,
        dimensions: Option<i64>,
        priority: Option<i64>,
        namespace: Option<String>,
        adapter_id: Option<u64>,
        into: Option<PyRef<'_, Requests>>,
    ) -> PyResult<u64> {
        let raw = RawRequest {
            embedding: Some(RawEmbedding { dimensions }),
            priority,
            extra_key: namespace,
            adapter: adapter_id,
            ..RawRequest::new(String::new(), token_ids.0)
        };
        self.hand_in(self.ingress()?, raw, into)
    }

    /// Hands requests in and returns their ids, in order. No step is laid out between them: those that do not stream fill steps as
    /// large as can be. Afterwards `requests` is empty.
    ///
    /// Raises:
    ///     StartError: No driver is left.
    ///     RuntimeError: The drivers are not ready, or the runtime is shut down.
    fn submit_all(&self, requests: &Requests) -> PyResult<Vec<u64>> {
        let arrivals = requests.take().into_iter().map(RequestSpec::into_request);
        self.service
            .submit_all(arrivals)
            .map_err(|rejected| from_rejected(&rejected))
    }

    /// Has every driver read a LoRA adapter, without Python's lock; requests of others continue meanwhile. A driver that is
    /// started again reads it again.
    ///
    /// Args:
    ///     adapter_id: From 1, at most 2**63 - 2; one that was loaded before gets the new files, so let its requests end first.
    ///     path: A folder as PEFT saves it, or a safetensors file next to its `adapter_config.json`; on the drivers' machine.
    ///
    /// Raises:
    ///     StartError: A driver does not take it, with the reason in its log, or there is no driver.
    fn load_adapter(&self, py: Python<'_>, adapter_id: u64, path: &str) -> PyResult<()> {
        py.detach(|| self.service.load_adapter(adapter_id, path))
            .map_err(|error| from_engine(&error))
    }

    /// Forgets an adapter that no request has: a driver that is started again does not read it, and one that has it drops it
    /// when it needs the room. An id that is not loaded is ignored.
    fn unload_adapter(&self, adapter_id: u64) {
        self.service.unload_adapter(adapter_id);
    }

    /// Ends a request, with the reason `abort`. One that has ended, or never was, is ignored.
    fn abort(&self, request: u64) {
        self.service.abort(request);
    }

    /// Lets the pages of a session go.
    fn end_session(&self, session: u64) {
        self.service.end_session(session);
    }

    /// Waits for outputs, without Python's lock, and returns all there are; none when the time is over, or after a shutdown.
    /// Outputs of one sequence that were not fetched yet are one, so that a slow caller gets fewer and longer ones.
    #[pyo3(signature = (timeout_s = None))]
    fn poll(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<Vec<Output>> {
        let deltas = wait(py, timeout_s, |slice| {
            let deltas = self.service.poll(slice);
            (!deltas.is_empty() || self.service.is_stopped()).then_some(deltas)
        })?;
        Ok(deltas
            .unwrap_or_default()
            .into_iter()
            .map(Output::from)
            .collect())
    }

    /// Computes nothing more until `resume`. Requests are still taken, and can be aborted; deadlines wait. Returns when no
    /// step is in flight; false where one is after a minute.
    ///
    /// Args:
    ///     retract: Requests give back what was computed, and are computed again afterwards; the prefix index is emptied.
    #[pyo3(signature = (*, retract = false))]
    fn pause(&self, py: Python<'_>, retract: bool) -> bool {
        let pause = if retract {
            Pause::Retract
        } else {
            Pause::InPlace
        };
        py.detach(|| self.service.pause(Some(pause), Duration::from_mins(1)))
    }

    /// Continues after `pause`.
    fn resume(&self) {
        self.service.pause(None, Duration::ZERO);
    }

    /// Empties the prefix indices. False, with nothing done, where requests run or wait.
    fn flush_cache(&self, py: Python<'_>) -> bool {
        py.detach(|| self.service.flush(Duration::from_mins(1)))
    }

    /// Counts of all replicas, and under `replicas` those of each. Of `steps`, `prompt_steps` had parts of prompts; all had
    /// `rows`. `driver_s` are the seconds that drivers took for them, from request to answer; `host_s` those from answer to
    /// request, when devices wait for this side, with `gap_us_p50` and `gap_us_p99` of a step.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        dict(py, &Stats::of(&self.service.stats()))
    }

    /// Metrics of each replica. Those that are rates are about the time since the last call.
    ///
    /// Returns:
    ///     For each replica a list of name, whether it is a counter, what it counts, a label with its value or None, and the
    ///     value.
    fn metrics(&self) -> Vec<Vec<Shown>> {
        let (stats, now) = (self.service.stats(), Instant::now());
        let mut readers = self.metrics.lock().unwrap_or_else(PoisonError::into_inner);
        let replicas = readers.iter_mut().zip(&stats);
        replicas
            .map(|(reader, stats)| reader.read(stats, now).iter().map(shown).collect())
            .collect()
    }

    /// Writes each step from now on into a file of Chrome trace events: how long the driver took, and how long it waited for
    /// this side.
    ///
    /// Args:
    ///     path: The file; of several replicas `.N` follows for each after the first.
    ///     skip: Steps before the first that is written.
    ///     steps: Steps that are written; None until `end_trace`.
    ///
    /// Raises:
    ///     StartError: Steps are traced already, or the file cannot be made.
    #[pyo3(signature = (path, *, skip = 0, steps = None))]
    fn start_trace(
        &self,
        py: Python<'_>,
        path: PathBuf,
        skip: u64,
        steps: Option<u64>,
    ) -> PyResult<()> {
        let settings = TraceSettings { path, skip, steps };
        let started = py.detach(|| self.service.start_trace(&settings));
        started.map_err(|error| from_engine(&error))
    }

    /// Ends a trace, or tells of one that ended by itself: for each replica its file, the steps in it, and why it ended early.
    /// Nothing where there was no trace.
    fn end_trace(&self, py: Python<'_>) -> Vec<(PathBuf, u64, Option<String>)> {
        let ends = py.detach(|| self.service.end_trace(Duration::from_secs(10)));
        let shown = |end: TraceSummary| (end.path, end.steps, end.failure);
        ends.into_iter().map(shown).collect()
    }

    /// Ends every request, with the reason `abort`, and stops the drivers. A second call does nothing.
    fn shutdown(&self, py: Python<'_>) {
        py.detach(|| self.service.shutdown());
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
    ) {
        self.shutdown(py);
    }
}
