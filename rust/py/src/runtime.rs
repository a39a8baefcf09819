//! Drivers with schedulers: the native half of the public engine.

mod grammars;
mod outputs;
mod settings;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pie_runtime::{
    Arrival, Config, Constrain, DriverSettings, Ends, Pause, Rejected, Sampling, Service,
    ServiceSettings,
};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use toml::Table;

use self::grammars::Grammars;
use self::outputs::{Stats, dict};
use self::settings::{Prompt, at_least_one, lock, log, share, table, token_bytes};
use crate::error::from_runtime;

pub(crate) use self::outputs::Output;
pub(crate) use self::settings::{seconds, value_error};

/// How often a wait looks for Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(100);

/// Drivers with a scheduler for each: requests in, tokens out.
///
/// The constructor starts every driver process, one of each replica, and returns at once; `wait_ready` waits for them. All
/// work is done by threads that never take Python's lock. A driver that dies is started again, and its requests go on where
/// they were. Use it as a context manager, or call `shutdown`.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Runtime {
    pub(crate) service: Arc<Service>,
    lines: Arc<Mutex<VecDeque<String>>>,
    stop_tokens: Vec<u32>,
    pub(crate) grammars: Option<Arc<Grammars>>,
}

#[pymethods]
impl Runtime {
    /// Starts the drivers.
    ///
    /// Args:
    ///     model: Folder of the snapshot.
    ///     python: The drivers' interpreter, which has this package: `sys.executable`.
    ///     devices: `cuda:N` or `cpu`, as many as all replicas need; the first ones are the first replica's.
    ///     replicas: Drivers, each with the whole model; SGLang's `dp_size`.
    ///     tensor_parallel_size: Devices of a driver; SGLang's `tp_size`.
    ///     dtype: Type of the activations; None for bfloat16, on the CPU float32.
    ///     seed: Of everything that is drawn; SGLang's `random_seed`.
    ///     spin_budget_us: Microseconds that both sides of the ring spin before they park; 0 parks at once, 2**64 - 1 never.
    ///     options: The table `[driver.options]`: bool, int, float, str, and lists of them.
    ///     schedule_policy: `fcfs`, `lpm`, `dfs-weight`, `lof`, `random` or `routing-key`.
    ///     schedule_conservativeness: How much of the output of running requests is taken for certain.
    ///     max_running_requests: Sequences that hold pages at once; None for as many as a step takes.
    ///     max_queued_requests: Sequences that may wait.
    ///     chunked_prefill_size: Most tokens of a step.
    ///     max_token_gap_ms: The longest time between two tokens of a stream that prompts of others may cause; 0 for no
    ///         limit.
    ///     radix_eviction_policy: `lru`, `lfu`, `fifo`, `filo`, `mru`, `slru` or `priority`.
    ///     disable_radix_cache: Share no prefixes.
    ///     kv_events: Record changes of the prefix index, for a `Gateway`; they cost a SHA-256 per page.
    ///     enable_priority_scheduling: `priority` of requests comes before the policy.
    ///     schedule_low_priority_values_first: The lowest value comes first.
    ///     priority_scheduling_preemption_threshold: A request whose priority is better by more takes the pages of running
    ///         ones; None for never.
    ///     max_total_pages: Use no more KV pages than this of what a driver has.
    ///     eos_token_ids: They end a request, unless it ignores them.
    ///     vocabulary: What each token adds to a text, as bytes; needed for stop strings.
    ///     special_tokens: Tokens without text, with their names, which grammars may use.
    ///     max_restarts: How often in a row a driver is started again, without an answer in between.
    ///     ready_timeout_s: Limit for one start.
    ///     step_timeout_s: A driver that does not answer so long is killed and started again.
    ///     stop_timeout_s: How long a driver may take to end after SIGTERM.
    ///     log_file: Where the drivers' logs go, after what is there.
    ///
    /// Raises:
    ///     ValueError: A value is out of range.
    ///     OSError: The log file cannot be opened.
    ///     StartError: No thread can be started.
    #[new]
    #[pyo3(signature = (
        model, *, python, devices = vec!["cuda:0".to_owned()], replicas = 1, tensor_parallel_size = 1, dtype = None,
        seed = 42, spin_budget_us = 1000, options = None, schedule_policy = "fcfs", schedule_conservativeness = 1.0,
        max_running_requests = None, max_queued_requests = None, chunked_prefill_size = 8192, max_token_gap_ms = 6.0,
        radix_eviction_policy = "lru", disable_radix_cache = false, kv_events = false, enable_priority_scheduling = false,
        schedule_low_priority_values_first = false, priority_scheduling_preemption_threshold = None,
        max_total_pages = None, eos_token_ids = Vec::new(), vocabulary = None, special_tokens = Vec::new(), max_restarts = 3,
        ready_timeout_s = 1200.0, step_timeout_s = 60.0, stop_timeout_s = 5.0, log_file = None
    ))]
    #[expect(
        clippy::fn_params_excessive_bools,
        clippy::too_many_arguments,
        clippy::needless_pass_by_value,
        reason = "keywords of Python"
    )]
    fn new(
        py: Python<'_>,
        model: PathBuf,
        python: PathBuf,
        devices: Vec<String>,
        replicas: usize,
        tensor_parallel_size: usize,
        dtype: Option<String>,
        seed: i64,
        spin_budget_us: u64,
        options: Option<Bound<'_, PyDict>>,
        schedule_policy: &str,
        schedule_conservativeness: f32,
        max_running_requests: Option<u32>,
        max_queued_requests: Option<u32>,
        chunked_prefill_size: u32,
        max_token_gap_ms: f64,
        radix_eviction_policy: &str,
        disable_radix_cache: bool,
        kv_events: bool,
        enable_priority_scheduling: bool,
        schedule_low_priority_values_first: bool,
        priority_scheduling_preemption_threshold: Option<i32>,
        max_total_pages: Option<u32>,
        eos_token_ids: Vec<u32>,
        vocabulary: Option<Vec<Vec<u8>>>,
        special_tokens: Vec<(u32, String)>,
        max_restarts: u32,
        ready_timeout_s: f64,
        step_timeout_s: f64,
        stop_timeout_s: f64,
        log_file: Option<PathBuf>,
    ) -> PyResult<Self> {
        let driver = DriverSettings {
            dtype,
            seed,
            spin_budget_us,
            options: options.map_or_else(|| Ok(Table::new()), |options| table(&options))?,
            ready_timeout: seconds("ready_timeout_s", ready_timeout_s)?,
            answer_timeout: seconds("step_timeout_s", step_timeout_s)?,
            stop_timeout: seconds("stop_timeout_s", stop_timeout_s)?,
            ..DriverSettings::new(python, model)
        };
        let drivers = share(&driver, &devices, replicas, tensor_parallel_size)?;
        let gap = seconds("max_token_gap_ms", max_token_gap_ms / 1e3)?;
        let scheduler = Config {
            policy: schedule_policy.parse().map_err(value_error)?,
            conservativeness: schedule_conservativeness,
            chunk_tokens: chunked_prefill_size,
            max_running: at_least_one("max_running_requests", max_running_requests)?.unwrap_or(0),
            max_queued: max_queued_requests,
            gap_us: gap.as_micros() as u64,
            prefix_cache: !disable_radix_cache,
            eviction: radix_eviction_policy.parse().map_err(value_error)?,
            kv_events,
            priority: enable_priority_scheduling,
            low_priority_first: schedule_low_priority_values_first,
            preemption_threshold: priority_scheduling_preemption_threshold,
            seed: seed.cast_unsigned(),
            ..Config::default()
        };
        let lines = Arc::<Mutex<VecDeque<String>>>::default();
        let text = vocabulary.map(token_bytes);
        let settings = ServiceSettings {
            drivers,
            scheduler,
            max_pages: at_least_one("max_total_pages", max_total_pages)?,
            text: text.clone().map(|bytes| bytes as _),
            max_restarts,
            log: log(Arc::clone(&lines), replicas, log_file)?,
        };
        let service = py
            .detach(|| Service::start(&settings))
            .map_err(|error| from_runtime(&error))?;
        Ok(Self {
            service: Arc::new(service),
            lines,
            grammars: text
                .map(|bytes| Arc::new(Grammars::new(bytes, special_tokens, &eos_token_ids))),
            stop_tokens: eos_token_ids,
        })
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
                Err(error) => Some(Err(from_runtime(&error))),
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
        let caps = caps.ok_or_else(|| PyRuntimeError::new_err(Rejected::NotReady.to_string()))?;
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
    ///     seed: With the position it fixes what is drawn.
    ///     frequency_penalty: Taken from a token's logit for each time that it was produced.
    ///     presence_penalty: Taken from the logit of a token that was produced.
    ///     repetition_penalty: Divides the logit of a token that was produced, or multiplies it if it is below 0.
    ///     logit_bias: Tokens, and what is added to their logits.
    ///     stop_token_ids: They end it, besides the model's own.
    ///     stop: Texts that end it.
    ///     ignore_eos: The model's own do not end it.
    ///     n: Sequences that go on from the prompt.
    ///     priority: Higher comes first.
    ///     routing_key: Requests with one key go to one replica, and are one group for the policy of that name.
    ///     session: A conversation whose pages are kept; it stays with one replica.
    ///     namespace: Requests of different ones share no prefix; SGLang's `extra_key`.
    ///     adapter_id: What `load_adapter` loaded; None for the model alone. Different ones share no prefix.
    ///     grammar: What binds the output: `json_schema`, `regex`, `ebnf`, `lark` or `structural_tag`, and its text. It is compiled
    ///         while the request waits; a wrong one ends it with the reason `error`.
    ///     speculate: The driver may draft for it.
    ///     deadline_s: Seconds after which it ends, finished or not.
    ///     streams: Outputs come with every step, and `max_token_gap_ms` holds between them. Else each sequence has one
    ///         output, at its end.
    ///
    /// Raises:
    ///     ValueError: A parameter is out of range, or the driver cannot do what is asked for.
    ///     TypeError: `token_ids` is neither.
    ///     OverflowError: A token does not fit into uint32.
    ///     StartError: No driver is left.
    ///     RuntimeError: The drivers are not ready, or the runtime is shut down.
    #[pyo3(signature = (
        token_ids, *, max_new_tokens = 128, min_new_tokens = 0, temperature = 1.0, top_k = -1, top_p = 1.0, min_p = 0.0,
        seed = None, frequency_penalty = 0.0, presence_penalty = 0.0, repetition_penalty = 1.0, logit_bias = Vec::new(),
        stop_token_ids = Vec::new(), stop = Vec::new(), ignore_eos = false, n = 1, priority = None,
        routing_key = None, session = None, namespace = None, adapter_id = None, grammar = None, speculate = false,
        deadline_s = None, streams = true
    ))]
    #[expect(
        clippy::too_many_arguments,
        clippy::needless_pass_by_value,
        reason = "keywords of Python"
    )]
    fn submit(
        &self,
        token_ids: Prompt,
        max_new_tokens: u32,
        min_new_tokens: u32,
        temperature: f32,
        top_k: i64,
        top_p: f32,
        min_p: f32,
        seed: Option<u64>,
        frequency_penalty: f32,
        presence_penalty: f32,
        repetition_penalty: f32,
        logit_bias: Vec<(u32, f32)>,
        stop_token_ids: Vec<u32>,
        stop: Vec<String>,
        ignore_eos: bool,
        n: u32,
        priority: Option<i32>,
        routing_key: Option<String>,
        session: Option<u64>,
        namespace: Option<String>,
        adapter_id: Option<u64>,
        grammar: Option<(String, String)>,
        speculate: bool,
        deadline_s: Option<f64>,
        streams: bool,
    ) -> PyResult<u64> {
        let sampling = Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            frequency_penalty,
            presence_penalty,
            repetition_penalty,
            logit_bias,
        };
        let mut stop_tokens = stop_token_ids;
        if !ignore_eos {
            stop_tokens.extend_from_slice(&self.stop_tokens);
        }
        let deadline = deadline_s.map(|limit| seconds("deadline_s", limit));
        self.check_biases(&sampling)?;
        let draw = sampling.draw().map_err(value_error)?;
        let bind = |(kind, text): (String, String)| self.bind(&kind, text);
        let constraint = grammar.map(bind).transpose()?;
        let arrival = Arrival {
            ends: Ends {
                max_tokens: max_new_tokens,
                min_tokens: min_new_tokens,
                stop_tokens,
                stop_strings: stop.iter().map(|text| text.as_bytes().into()).collect(),
            },
            samples: n,
            namespace: namespace.map(String::into_boxed_str),
            adapter: adapter_id,
            priority,
            routing_key: routing_key.map(String::into_boxed_str),
            session,
            constraint,
            drafts: speculate,
            streams,
            ..Arrival::new(0, token_ids.0, draw, max_new_tokens)
        };
        self.service
            .submit(arrival, deadline.transpose()?)
            .map_err(|rejected| match &rejected {
                Rejected::Gone(error) => from_runtime(error),
                _ => PyRuntimeError::new_err(rejected.to_string()),
            })
    }

    /// Has every driver read a LoRA adapter, without Python's lock; requests of others go on meanwhile. A driver that is
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
            .map_err(|error| from_runtime(&error))
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

    /// Computes nothing more until `resume`. Requests are still taken, and can be aborted; deadlines wait.
    ///
    /// Args:
    ///     retract: Requests give back what was computed, and are computed again afterwards.
    #[pyo3(signature = (*, retract = false))]
    fn pause(&self, retract: bool) {
        let pause = if retract {
            Pause::Retract
        } else {
            Pause::InPlace
        };
        self.service.pause(Some(pause));
    }

    /// Goes on after `pause`.
    fn resume(&self) {
        self.service.pause(None);
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

impl Runtime {
    fn bind(&self, kind: &str, text: String) -> PyResult<Arc<dyn Constrain>> {
        let grammars = self.grammars.as_ref().ok_or_else(|| {
            value_error("a grammar needs the bytes of tokens: give the runtime a `vocabulary`")
        })?;
        grammars.bind(kind, text)
    }

    /// Biases must be of tokens that the model has.
    fn check_biases(&self, sampling: &Sampling) -> PyResult<()> {
        let Some(&largest) = sampling.logit_bias.iter().map(|(token, _)| token).max() else {
            return Ok(());
        };
        let limit = self.service.capabilities().map(|caps| caps.vocab_size);
        match limit.filter(|&limit| largest >= limit) {
            None => Ok(()),
            Some(limit) => Err(PyValueError::new_err(format!(
                "logit_bias has token {largest}, it must be below {limit}"
            ))),
        }
    }
}

/// Calls `poll` without Python's lock, for a short time each, until it has something or the time is over. Ctrl-C ends it.
pub(crate) fn wait<R: Send>(
    py: Python<'_>,
    timeout_s: Option<f64>,
    poll: impl Fn(Duration) -> Option<R> + Sync,
) -> PyResult<Option<R>> {
    let limit = timeout_s.map(|limit| seconds("timeout_s", limit));
    let until = limit
        .transpose()?
        .and_then(|limit| Instant::now().checked_add(limit));
    loop {
        let left = until.map_or(Duration::MAX, |until| {
            until.saturating_duration_since(Instant::now())
        });
        let found = py.detach(|| poll(left.min(SIGNALS)));
        if found.is_some() || left.is_zero() {
            return Ok(found);
        }
        py.check_signals()?;
    }
}
