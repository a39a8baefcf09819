//! Drivers with schedulers: the native half of the public engine.

mod grammars;
mod help;
mod outputs;
mod requests;
mod settings;

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pie_engine::{
    CompilerSettings, Config, DriverSettings, FigureReader, GrammarLimits, GrammarSettings,
    JsonSpace, Pause, Rejected, Sampling, Service, ServiceSettings, TraceEnd, TraceSettings,
};
use pie_ingress::{Ingress, ModelInfo, RawLogprobs, RawRequest, RequestLimits, RequestSpec};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use toml::Table;

use self::grammars::{compiler_command, grammar_of};
use self::outputs::{Shown, Stats, dict, shown};
use self::settings::{
    Prompt, at_least_one, limits, lock, log, milliseconds, share, table, token_bytes, with_special,
};
use crate::error::from_runtime;

pub(crate) use self::grammars::run_grammar_compiler;
pub(crate) use self::help::wait;
pub(crate) use self::outputs::Output;
pub(crate) use self::requests::Requests;
pub(crate) use self::settings::{check_request_limits, seconds, value_error};

/// Drivers with a scheduler for each: requests in, tokens out.
///
/// The constructor starts every driver process, one of each replica, and returns at once; `wait_ready` waits for them. All
/// work is done by threads that never take Python's lock. A driver that dies is started again, and its requests go on where
/// they were. Use it as a context manager, or call `shutdown`.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Runtime {
    pub(crate) service: Arc<Service>,
    /// One for each replica.
    figures: Mutex<Vec<FigureReader>>,
    lines: Arc<Mutex<VecDeque<String>>>,
    stop_tokens: Vec<u32>,
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
    ///         limit. None is 6, and up to nine times what a step of decodes takes while many requests wait for their first token.
    ///     max_step_ms: While no request streams, a step has as many tokens of prompts as take about so long, at least
    ///         `chunked_prefill_size`; 0 for no more than these.
    ///     radix_eviction_policy: `lru`, `lfu`, `fifo`, `filo`, `mru`, `slru` or `priority`.
    ///     disable_radix_cache: Share no prefixes.
    ///     kv_events: Record changes of the prefix index, for a `Gateway`; they cost a SHA-256 per page.
    ///     enable_priority_scheduling: `priority` of requests comes before the policy.
    ///     schedule_low_priority_values_first: The lowest value comes first.
    ///     priority_scheduling_preemption_threshold: A request whose priority is better by more takes the pages of running
    ///         ones; None for never.
    ///     max_total_pages: Use no more KV pages than this of what a driver has.
    ///     max_image_bytes: Most bytes that the images of a step bring, their pixels and positions; 0: images are refused.
    ///     eos_token_ids: They end a request, unless it ignores them.
    ///     vocabulary: What each token adds to a text, as bytes; needed for stop strings.
    ///     special_tokens: Tokens without text, with their names, which grammars may use.
    ///     tokenizer_file: The `tokenizer.json`; with it text that a grammar forces is not drawn.
    ///     constrained_json_whitespace_pattern: What white space between the parts of JSON must match, under a schema.
    ///     constrained_json_disable_any_whitespace: There is none.
    ///     max_grammar_bytes: Most bytes of the text of one grammar; None for 1 MiB.
    ///     grammar_timeout_s: Time for one grammar from its first request on, the wait for others included; None for 30.
    ///     grammar_compile_timeout_s: Time for compiling one grammar; None for 10.
    ///     grammar_memory_mb: MiB of memory that compiling one grammar may take; None for 512.
    ///     waiting_limit_s: A request that is not admitted so long after it came ends with the reason `deadline`; None for no
    ///         limit.
    ///     running_limit_s: The same from its admission to its end.
    ///     request_limits: Limits on what a request may hold, by their names in docs/limits.md, where they differ from the defaults.
    ///         They hold for every frontend of this runtime.
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
        max_running_requests = None, max_queued_requests = None, chunked_prefill_size = 8192, max_token_gap_ms = None,
        max_step_ms = 250.0, radix_eviction_policy = "lru", disable_radix_cache = false, kv_events = false,
        enable_priority_scheduling = false,
        schedule_low_priority_values_first = false, priority_scheduling_preemption_threshold = None,
        max_total_pages = None, max_image_bytes = 0, eos_token_ids = Vec::new(), vocabulary = None, special_tokens = Vec::new(),
        tokenizer_file = None,
        constrained_json_whitespace_pattern = None, constrained_json_disable_any_whitespace = false,
        max_grammar_bytes = None, grammar_timeout_s = None, grammar_compile_timeout_s = None, grammar_memory_mb = None,
        waiting_limit_s = None, running_limit_s = None, request_limits = None, max_restarts = 3,
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
        max_token_gap_ms: Option<f64>,
        max_step_ms: f64,
        radix_eviction_policy: &str,
        disable_radix_cache: bool,
        kv_events: bool,
        enable_priority_scheduling: bool,
        schedule_low_priority_values_first: bool,
        priority_scheduling_preemption_threshold: Option<i32>,
        max_total_pages: Option<u32>,
        max_image_bytes: u32,
        eos_token_ids: Vec<u32>,
        vocabulary: Option<Vec<Vec<u8>>>,
        special_tokens: Vec<(u32, String)>,
        tokenizer_file: Option<PathBuf>,
        constrained_json_whitespace_pattern: Option<String>,
        constrained_json_disable_any_whitespace: bool,
        max_grammar_bytes: Option<usize>,
        grammar_timeout_s: Option<f64>,
        grammar_compile_timeout_s: Option<f64>,
        grammar_memory_mb: Option<u32>,
        waiting_limit_s: Option<f64>,
        running_limit_s: Option<f64>,
        request_limits: Option<BTreeMap<String, u64>>,
        max_restarts: u32,
        ready_timeout_s: f64,
        step_timeout_s: f64,
        stop_timeout_s: f64,
        log_file: Option<PathBuf>,
    ) -> PyResult<Self> {
        let process = compiler_command(py, &python)?;
        let usual = GrammarLimits::default();
        let limit = |name, value: Option<f64>| value.map(|value| seconds(name, value)).transpose();
        let grammar_limits = GrammarLimits {
            bytes: max_grammar_bytes.unwrap_or(usual.bytes),
            time: limit("grammar_timeout_s", grammar_timeout_s)?.unwrap_or(usual.time),
            compile_time: limit("grammar_compile_timeout_s", grammar_compile_timeout_s)?
                .unwrap_or(usual.compile_time),
            memory: at_least_one("grammar_memory_mb", grammar_memory_mb)?
                .map_or(usual.memory, |mebibytes| u64::from(mebibytes) << 20),
            ..usual
        };
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
        let limits = limits(request_limits.unwrap_or_default())?;
        let running_limit = limit("running_limit_s", running_limit_s)?;
        let usual = Config::default();
        let gap_us = match max_token_gap_ms {
            Some(limit) => milliseconds("max_token_gap_ms", limit)?,
            None => usual.gap_us,
        };
        // A limit that is named is kept, however many wait.
        let gap_growth = max_token_gap_ms.map_or(usual.gap_growth, |_| 0);
        let step_us = milliseconds("max_step_ms", max_step_ms)?;
        let scheduler = Config {
            policy: schedule_policy.parse().map_err(value_error)?,
            conservativeness: schedule_conservativeness,
            chunk_tokens: chunked_prefill_size,
            max_running: at_least_one("max_running_requests", max_running_requests)?.unwrap_or(0),
            max_queued: max_queued_requests,
            gap_us,
            gap_growth,
            step_us,
            prefix_cache: !disable_radix_cache,
            eviction: radix_eviction_policy.parse().map_err(value_error)?,
            kv_events,
            priority: enable_priority_scheduling,
            low_priority_first: schedule_low_priority_values_first,
            preemption_threshold: priority_scheduling_preemption_threshold,
            running_limit_us: running_limit.map_or(0, |limit| {
                u64::try_from(limit.as_micros().max(1)).unwrap_or(u64::MAX)
            }),
            seed: seed.cast_unsigned(),
            ..Config::default()
        };
        let lines = Arc::<Mutex<VecDeque<String>>>::default();
        let text = vocabulary.map(token_bytes);
        let settings = ServiceSettings {
            drivers,
            scheduler,
            max_pages: at_least_one("max_total_pages", max_total_pages)?,
            max_image_bytes,
            text: text
                .as_ref()
                .map(|bytes| with_special(bytes, &special_tokens) as _),
            grammars: text.map(|tokens| GrammarSettings {
                tokens,
                special: special_tokens,
                ends: eos_token_ids.clone(),
                compiler: CompilerSettings {
                    space: JsonSpace {
                        fixed: constrained_json_disable_any_whitespace,
                        pattern: constrained_json_whitespace_pattern,
                    },
                    tokenizer: tokenizer_file,
                    limits: grammar_limits,
                    process: Some(process),
                },
            }),
            waiting_limit: limit("waiting_limit_s", waiting_limit_s)?,
            max_restarts,
            log: log(Arc::clone(&lines), replicas, log_file)?,
        };
        let service = py
            .detach(|| Service::start(&settings))
            .map_err(|error| from_runtime(&error))?;
        let now = Instant::now();
        let readers = settings.drivers.iter().map(|_| FigureReader::new(now));
        Ok(Self {
            service: Arc::new(service),
            figures: Mutex::new(readers.collect()),
            lines,
            stop_tokens: eos_token_ids,
            limits,
            ingress: OnceLock::new(),
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
    ///     stop_regex: Expressions that end it where they match, in the syntax of Rust's `regex`.
    ///     ignore_eos: The model's own do not end it.
    ///     n: Sequences that go on from the prompt.
    ///     priority: Higher comes first.
    ///     routing_key: Requests with one key go to one replica, and are one group for the policy of that name.
    ///     session: A conversation whose pages are kept; it stays with one replica.
    ///     namespace: Requests of different ones share no prefix; SGLang's `extra_key`.
    ///     adapter_id: What `load_adapter` loaded; None for the model alone. Different ones share no prefix.
    ///     grammar: What binds the output: `json_schema`, `regex`, `ebnf`, `lark` or `structural_tag`, and its text. It is compiled
    ///         while the request waits; a wrong one ends it with the reason `error`.
    ///     grammar_after: The tokens after which the grammar binds, as those that end a model's thinking; none for the start.
    ///     logprobs: Log-probabilities of its tokens, None for none: how many most probable tokens of each place, tokens whose
    ///         log-probabilities are wanted at each place, and the index of a token of the prompt, those after which are wanted,
    ///         too, or None.
    ///     logprobs_original: They are those before the temperature.
    ///     speculate: The driver may draft for it.
    ///     deadline_s: Seconds after which it ends, finished or not.
    ///     streams: Outputs come with every step, and `max_token_gap_ms` holds between them. Else each sequence has one
    ///         output, at its end.
    ///     into: Where the request is put instead, to be handed in with others by `submit_all`; then its place there is returned.
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
        logprobs = None, logprobs_original = false, speculate = false, deadline_s = None, streams = true, into = None
    ))]
    #[expect(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "keywords of Python"
    )]
    fn submit(
        &self,
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
        logprobs: Option<(i64, Vec<i64>, Option<i64>)>,
        logprobs_original: bool,
        speculate: bool,
        deadline_s: Option<f64>,
        streams: bool,
        into: Option<PyRef<'_, Requests>>,
    ) -> PyResult<u64> {
        let logprobs = logprobs.map(|(top_logprobs_num, token_ids_logprob, start)| RawLogprobs {
            top_logprobs_num,
            token_ids_logprob,
            logprob_start_len: start.unwrap_or(-1),
            original: logprobs_original,
        });
        let ingress = self.ingress()?;
        let deadline = deadline_s.map(|limit| seconds("deadline_s", limit));
        let grammar = grammar.map(|(kind, text)| grammar_of(&kind, text));
        let raw = RawRequest {
            sampling: Sampling {
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
            logprobs,
            priority,
            routing_key,
            extra_key: namespace,
            adapter: adapter_id,
            session,
            speculates: speculate,
            streams,
            deadline: deadline.transpose()?,
            ..RawRequest::new(String::new(), token_ids.0)
        };
        let spec = ingress.validate(raw, |grammar, after| self.service.bind(grammar, after));
        let spec = spec.map_err(value_error)?;
        if let Some(requests) = into {
            return Ok(requests.add(spec));
        }
        let (arrival, deadline) = spec.into_request();
        let submitted = self.service.submit(arrival, deadline);
        submitted.map_err(|rejected| from_rejected(&rejected))
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

    /// Metrics of each replica. Those that are rates are about the time since the last call.
    ///
    /// Returns:
    ///     For each replica a list of name, whether it is a counter, what it counts, a label with its value or None, and the
    ///     value.
    fn figures(&self) -> Vec<Vec<Shown>> {
        let (stats, now) = (self.service.stats(), Instant::now());
        let mut readers = self.figures.lock().unwrap_or_else(PoisonError::into_inner);
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
    fn start_trace(&self, path: PathBuf, skip: u64, steps: Option<u64>) -> PyResult<()> {
        let settings = TraceSettings { path, skip, steps };
        let started = self.service.start_trace(&settings);
        started.map_err(|error| from_runtime(&error))
    }

    /// Ends a trace, or tells of one that ended by itself: for each replica its file, the steps in it, and why it ended early.
    /// Nothing where there was no trace.
    fn end_trace(&self, py: Python<'_>) -> Vec<(PathBuf, u64, Option<String>)> {
        let ends = py.detach(|| self.service.end_trace(Duration::from_secs(10)));
        let shown = |end: TraceEnd| (end.path, end.steps, end.failure);
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

impl Runtime {
    /// What its frontends hold requests to.
    pub(crate) const fn limits(&self) -> &RequestLimits {
        &self.limits
    }

    /// By which `submit` validates requests. It takes the vocabulary of a driver that is ready.
    fn ingress(&self) -> PyResult<&Ingress> {
        if let Some(ingress) = self.ingress.get() {
            return Ok(ingress);
        }
        let Some(caps) = self.service.capabilities() else {
            return Err(match self.service.wait_ready(Duration::ZERO) {
                Err(error) => from_runtime(&error),
                Ok(_) if self.service.is_stopped() => from_rejected(&Rejected::Stopped),
                Ok(_) => from_rejected(&Rejected::NotReady),
            });
        };
        let facts = ModelInfo {
            vocab_size: caps.vocab_size,
            eos_token_ids: self.stop_tokens.clone(),
            // The scheduler knows its pool.
            max_prompt_tokens: None,
            context_length: None,
        };
        Ok(self
            .ingress
            .get_or_init(|| Ingress::new(self.limits.clone(), facts)))
    }
}

fn from_rejected(rejected: &Rejected) -> PyErr {
    match rejected {
        Rejected::Gone(error) | Rejected::Forked(error) => from_runtime(error),
        _ => PyRuntimeError::new_err(rejected.to_string()),
    }
}
