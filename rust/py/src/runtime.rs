//! Drivers with schedulers: the native half of the public engine.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pie_runtime::{
    Arrival, Config, Delta, DriverSettings, End, Ends, Rejected, ReplicaStats, Sampling, Service,
    ServiceLog, ServiceSettings, TokenBytes,
};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use pyo3::{type_hint_identifier, type_hint_subscript, type_hint_union};
use serde::Serialize;
use toml::{Table, Value};

use crate::arrays::{self, Ids};
use crate::error::from_runtime;

/// How often a wait looks for Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(100);
/// Lines of logs that are kept for `log_lines`.
const LINES: usize = 1000;

/// Drivers with a scheduler for each: requests in, tokens out.
///
/// The constructor starts every driver process, one of each replica, and returns at once; `wait_ready` waits for them. All
/// work is done by threads that never take Python's lock. A driver that dies is started again, and its requests go on where
/// they were. Use it as a context manager, or call `shutdown`.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Runtime {
    service: Service,
    lines: Arc<Mutex<VecDeque<String>>>,
    stop_tokens: Vec<u32>,
}

/// New tokens of one sequence of a request, or its end, or both.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct Output {
    /// What `Runtime.submit` returned.
    request: u64,
    /// Which of the request's `n` sequences, from 0.
    sample: u32,
    /// New since the last output; a new list at every access. A stop token is the last one.
    token_ids: Vec<u32>,
    /// `stop`, `length`, `abort`, `deadline` or `error` in the last output, else None.
    finish_reason: Option<&'static str>,
    /// The stop token that ended it.
    stop_token: Option<u32>,
    /// Index of the stop string that ended it.
    stop_string: Option<u32>,
    /// With a stop string, the bytes of the output's text before it begins.
    text_bytes: Option<u64>,
    /// Bytes at the end of the text so far that may be the start of a stop string: keep them back.
    held_bytes: u32,
    /// What happened, where the reason is `error`.
    error: Option<String>,
    /// Tokens of the prompt whose KV was there.
    cached_tokens: u32,
}

#[pymethods]
impl Output {
    fn __repr__(&self) -> String {
        format!(
            "Output(request={}, sample={}, token_ids={:?}, finish_reason={:?})",
            self.request, self.sample, self.token_ids, self.finish_reason
        )
    }
}

impl From<Delta> for Output {
    fn from(delta: Delta) -> Self {
        let mut output = Self {
            request: delta.request,
            sample: delta.sample,
            token_ids: delta.tokens,
            finish_reason: None,
            stop_token: None,
            stop_string: None,
            text_bytes: None,
            held_bytes: delta.held_bytes,
            error: None,
            cached_tokens: delta.cached_tokens,
        };
        output.finish_reason = delta.end.map(|end| match end {
            End::Length => "length",
            End::StopToken(token) => {
                output.stop_token = Some(token);
                "stop"
            }
            End::StopString { index, text_bytes } => {
                output.stop_string = Some(index);
                output.text_bytes = Some(text_bytes);
                "stop"
            }
            End::Aborted => "abort",
            End::Deadline => "deadline",
            End::Failed(error) => {
                output.error = Some(error.to_string());
                "error"
            }
        });
        output
    }
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
    ///     max_token_gap_ms: The longest time between two tokens that prompts of others may cause; 0 for no limit.
    ///     radix_eviction_policy: `lru`, `lfu`, `fifo`, `filo`, `mru`, `slru` or `priority`.
    ///     disable_radix_cache: Share no prefixes.
    ///     enable_priority_scheduling: `priority` of requests comes before the policy.
    ///     schedule_low_priority_values_first: The lowest value comes first.
    ///     priority_scheduling_preemption_threshold: A request whose priority is better by more takes the pages of running
    ///         ones; None for never.
    ///     max_total_pages: Use no more KV pages than this of what a driver has.
    ///     eos_token_ids: They end a request, unless it ignores them.
    ///     vocabulary: What each token adds to a text, as bytes; needed for stop strings.
    ///     max_restarts: How often in a row a driver is started again, without an answer in between.
    ///     ready_timeout_s: Limit for one start.
    ///     step_timeout_s: A driver that does not answer so long is killed and started again.
    ///     stop_timeout_s: How long a driver may take to end after SIGTERM.
    ///     log_file: Where the drivers' logs go, behind what is there.
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
        radix_eviction_policy = "lru", disable_radix_cache = false, enable_priority_scheduling = false,
        schedule_low_priority_values_first = false, priority_scheduling_preemption_threshold = None,
        max_total_pages = None, eos_token_ids = Vec::new(), vocabulary = None, max_restarts = 3,
        ready_timeout_s = 1200.0, step_timeout_s = 60.0, stop_timeout_s = 5.0, log_file = None
    ))]
    #[expect(
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
        enable_priority_scheduling: bool,
        schedule_low_priority_values_first: bool,
        priority_scheduling_preemption_threshold: Option<i32>,
        max_total_pages: Option<u32>,
        eos_token_ids: Vec<u32>,
        vocabulary: Option<Vec<Vec<u8>>>,
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
            priority: enable_priority_scheduling,
            low_priority_first: schedule_low_priority_values_first,
            preemption_threshold: priority_scheduling_preemption_threshold,
            seed: seed.cast_unsigned(),
            ..Config::default()
        };
        let lines = Arc::<Mutex<VecDeque<String>>>::default();
        let settings = ServiceSettings {
            drivers,
            scheduler,
            max_pages: at_least_one("max_total_pages", max_total_pages)?,
            text: vocabulary.map(token_bytes),
            max_restarts,
            log: log(Arc::clone(&lines), replicas, log_file)?,
        };
        let service = py
            .detach(|| Service::start(&settings))
            .map_err(|error| from_runtime(&error))?;
        Ok(Self {
            service,
            lines,
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
    ///     speculate: The driver may draft for it.
    ///     deadline_s: Seconds after which it ends, finished or not.
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
        routing_key = None, session = None, namespace = None, speculate = false, deadline_s = None
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
        speculate: bool,
        deadline_s: Option<f64>,
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
        let arrival = Arrival {
            ends: Ends {
                max_tokens: max_new_tokens,
                min_tokens: min_new_tokens,
                stop_tokens,
                stop_strings: stop.iter().map(|text| text.as_bytes().into()).collect(),
            },
            samples: n,
            namespace: namespace.map(String::into_boxed_str),
            priority,
            routing_key: routing_key.map(String::into_boxed_str),
            session,
            drafts: speculate,
            ..Arrival::new(0, token_ids.0, draw, max_new_tokens)
        };
        self.service
            .submit(arrival, deadline.transpose()?)
            .map_err(|rejected| match &rejected {
                Rejected::Gone(error) => from_runtime(error),
                _ => PyRuntimeError::new_err(rejected.to_string()),
            })
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

    /// Empties the prefix indices. False, with nothing done, where requests run or wait.
    fn flush_cache(&self, py: Python<'_>) -> bool {
        py.detach(|| self.service.flush(Duration::from_mins(1)))
    }

    /// Counts of all replicas, and under `replicas` those of each.
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

/// A prompt: an array of integers, or a list.
struct Prompt(Vec<u32>);

impl<'a, 'py> FromPyObject<'a, 'py> for Prompt {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        <Ids<'_, '_> as FromPyObject<'_, '_>>::INPUT_TYPE,
        type_hint_subscript!(
            type_hint_identifier!("builtins", "list"),
            type_hint_identifier!("builtins", "int")
        )
    );

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyList>() {
            return Ok(Self(object.extract()?));
        }
        let mut tokens = Vec::new();
        let Ok(ids) = Ids::extract(object);
        arrays::read("token_ids", ids, None, arrays::TOKENS, &mut tokens)?;
        Ok(Self(tokens))
    }
}

/// What `Runtime.stats` shows.
#[derive(Default, Serialize)]
struct Stats {
    #[serde(flatten)]
    all: Counts,
    replicas: Vec<Counts>,
}

#[derive(Clone, Default, Serialize)]
struct Counts {
    running: usize,
    waiting: usize,
    steps: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
    retractions: u64,
    finished: u64,
    drafted: u64,
    accepted: u64,
    restarts: u64,
    pages_total: u64,
    pages_free: u64,
    pages_cached: u64,
    /// Of all replicas the longest.
    gap_us_p50: f64,
    gap_us_p99: f64,
    driver_pids: Vec<u32>,
}

impl Stats {
    fn of(replicas: &[ReplicaStats]) -> Self {
        let replicas: Vec<Counts> = replicas.iter().map(Counts::of).collect();
        let all = replicas.iter().fold(Counts::default(), Counts::plus);
        Self { all, replicas }
    }
}

impl Counts {
    fn of(stats: &ReplicaStats) -> Self {
        let counts = &stats.scheduler;
        Self {
            running: counts.running,
            waiting: counts.waiting,
            steps: counts.steps,
            prompt_tokens: counts.prompt_tokens,
            cached_tokens: counts.cached_tokens,
            output_tokens: counts.output_tokens,
            retractions: counts.retractions,
            finished: counts.finished,
            drafted: counts.drafts,
            accepted: counts.accepted,
            restarts: stats.restarts,
            pages_total: stats.total_pages.into(),
            pages_free: counts.free_pages as u64,
            pages_cached: counts.cached_pages as u64,
            gap_us_p50: stats.gaps_ns[0] as f64 / 1e3,
            gap_us_p99: stats.gaps_ns[1] as f64 / 1e3,
            driver_pids: vec![stats.driver_pid],
        }
    }

    fn plus(mut self, other: &Self) -> Self {
        self.running += other.running;
        self.waiting += other.waiting;
        self.driver_pids.extend(&other.driver_pids);
        self.gap_us_p50 = self.gap_us_p50.max(other.gap_us_p50);
        self.gap_us_p99 = self.gap_us_p99.max(other.gap_us_p99);
        for (sum, more) in [
            (&mut self.steps, other.steps),
            (&mut self.prompt_tokens, other.prompt_tokens),
            (&mut self.cached_tokens, other.cached_tokens),
            (&mut self.output_tokens, other.output_tokens),
            (&mut self.retractions, other.retractions),
            (&mut self.finished, other.finished),
            (&mut self.drafted, other.drafted),
            (&mut self.accepted, other.accepted),
            (&mut self.restarts, other.restarts),
            (&mut self.pages_total, other.pages_total),
            (&mut self.pages_free, other.pages_free),
            (&mut self.pages_cached, other.pages_cached),
        ] {
            *sum += more;
        }
        self
    }
}

/// The settings of each replica, with its share of the devices.
fn share(
    driver: &DriverSettings,
    devices: &[String],
    replicas: usize,
    ranks: usize,
) -> PyResult<Vec<DriverSettings>> {
    let needed = replicas.checked_mul(ranks).filter(|&needed| needed > 0);
    if needed != Some(devices.len()) {
        return Err(PyValueError::new_err(format!(
            "{replicas} replicas of {ranks} devices were asked for, and {} devices given: replicas times \
             tensor_parallel_size must be the number of devices, and 1 at least",
            devices.len()
        )));
    }
    let parts = devices.chunks(ranks);
    let settings = parts.map(|devices| DriverSettings {
        devices: devices.to_vec(),
        ..driver.clone()
    });
    Ok(settings.collect())
}

/// Keeps the last lines, and writes all to a file if there is a path.
fn log(
    lines: Arc<Mutex<VecDeque<String>>>,
    replicas: usize,
    path: Option<PathBuf>,
) -> PyResult<ServiceLog> {
    let open = |path| OpenOptions::new().create(true).append(true).open(path);
    let file: Option<File> = path.map(open).transpose()?;
    Ok(Arc::new(move |replica, line: &str| {
        let line = if replicas > 1 {
            format!("[{replica}] {line}")
        } else {
            line.to_owned()
        };
        if let Some(mut file) = file.as_ref() {
            // What a full disk loses is still among the last lines.
            let _ = file.write_all(format!("{line}\n").as_bytes());
        }
        let mut lines = lock(&lines);
        if lines.len() == LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }))
}

fn token_bytes(vocabulary: Vec<Vec<u8>>) -> Arc<dyn TokenBytes> {
    let bytes = vocabulary.into_iter().map(Vec::into_boxed_slice);
    Arc::new(bytes.collect::<Vec<Box<[u8]>>>())
}

fn lock(lines: &Mutex<VecDeque<String>>) -> MutexGuard<'_, VecDeque<String>> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `poll` without Python's lock, for a short time each, until it has something or the time is over. Ctrl-C ends it.
fn wait<R: Send>(
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

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("{name} is {value}: {error}")))
}

fn at_least_one(name: &str, value: Option<u32>) -> PyResult<Option<u32>> {
    match value {
        Some(0) => Err(PyValueError::new_err(format!(
            "{name} is 0, it must be 1 or more, or None"
        ))),
        value => Ok(value),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the form that map_err takes")]
fn value_error(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// By way of JSON, whose reader Python has.
fn dict<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyDict>> {
    let text = serde_json::to_string(value).map_err(value_error)?;
    let loads = py.import("json")?.getattr("loads")?;
    Ok(loads.call1((text,))?.cast_into::<PyDict>()?)
}

fn table(options: &Bound<'_, PyDict>) -> PyResult<Table> {
    let mut table = Table::new();
    for (key, value) in options {
        let key: String = key.extract()?;
        let value = toml_value(&key, &value)?;
        table.insert(key, value);
    }
    Ok(table)
}

fn toml_value(key: &str, value: &Bound<'_, PyAny>) -> PyResult<Value> {
    let many = |values: Vec<Bound<'_, PyAny>>| -> PyResult<Value> {
        let values = values.iter().map(|value| toml_value(key, value));
        Ok(Value::Array(values.collect::<PyResult<_>>()?))
    };
    // A bool is an int in Python.
    if value.is_instance_of::<PyBool>() {
        Ok(Value::Boolean(value.extract()?))
    } else if value.is_instance_of::<PyInt>() {
        Ok(Value::Integer(value.extract()?))
    } else if value.is_instance_of::<PyFloat>() {
        Ok(Value::Float(value.extract()?))
    } else if value.is_instance_of::<PyString>() {
        Ok(Value::String(value.extract()?))
    } else if let Ok(values) = value.cast::<PyList>() {
        many(values.iter().collect())
    } else if let Ok(values) = value.cast::<PyTuple>() {
        many(values.iter().collect())
    } else if let Ok(values) = value.cast::<PyDict>() {
        Ok(Value::Table(table(values)?))
    } else {
        Err(PyTypeError::new_err(format!(
            "option {key} is a {}, it must be bool, int, float, str, or a list or dict of them; leave it out for its default",
            value.get_type().name()?
        )))
    }
}
