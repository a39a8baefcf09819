//! Settings of a runtime, from the keywords of its constructor.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pie_engine::{
    CompilerSettings, Config as SchedulerConfig, DriverSettings, GrammarLimits, GrammarSettings,
    JsonSpace, ServiceSettings,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::grammars::compiler_command;
use super::settings::{
    at_least_one, log, milliseconds, seconds, share, table, token_bytes, value_error, with_special,
};

/// A struct of keywords with their defaults. Unknown keywords are a `TypeError`.
macro_rules! keywords {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $type:ty = $default:expr,)* }) => {
        $(#[$meta])*
        pub(super) struct $name { $($(#[$doc])* pub(super) $field: $type,)* }

        impl $name {
            pub(super) const NAMES: &[&str] = &[$(stringify!($field)),*];

            pub(super) fn extract(keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
                let mut config = Self { $($field: $default,)* };
                for (name, value) in keywords.into_iter().flatten() {
                    match name.extract::<&str>()? {
                        $(stringify!($field) => config.$field = argument(stringify!($field), &value)?,)*
                        name => return Err(PyTypeError::new_err(format!(
                            "Runtime.__new__() got an unexpected keyword argument '{name}'"
                        ))),
                    }
                }
                Ok(config)
            }
        }
    };
}

keywords! {
    /// Names and meanings are those of `docs/engine.md`.
    Config {
        /// `cuda:N` or `cpu`, as many as all replicas need; the first ones are the first replica's.
        devices: Vec<String> = vec!["cuda:0".to_owned()],
        /// Drivers, each with the whole model; SGLang's `dp_size`.
        replicas: usize = 1,
        /// Devices of a driver; SGLang's `tp_size`.
        tensor_parallel_size: usize = 1,
        /// Type of the activations; None for bfloat16, on the CPU float32.
        dtype: Option<String> = None,
        /// Seed of sampling; SGLang's `random_seed`.
        seed: i64 = 42,
        /// Microseconds that both sides of the ring spin before they park; 0 parks at once, 2**64 - 1 never.
        spin_budget_us: u64 = 1000,
        /// The package that a driver's interpreter runs by `-m`.
        driver_package: String = "pie_driver_sglang".to_owned(),
        /// Folder that a driver's interpreter searches before all others; None for its environment's alone.
        library_path: Option<PathBuf> = None,
        /// The table `[driver.options]`: bool, int, float, str, and lists of them.
        options: Option<Py<PyDict>> = None,
        /// Requests may bring a custom logit processor; the option of that name allows it in the driver.
        enable_custom_logit_processor: bool = false,
        /// Numbers of a hidden state of the model, if requests may have them returned; else 0.
        hidden_size: u32 = 0,
        /// `fcfs`, `lpm`, `dfs-weight`, `lof`, `random` or `routing-key`.
        schedule_policy: String = "fcfs".to_owned(),
        /// How much of the output of running requests is reserved at admission.
        schedule_conservativeness: f32 = 1.0,
        /// Most running sequences; None for as many as a step takes.
        max_running_requests: Option<u32> = None,
        /// Most waiting sequences.
        max_queued_requests: Option<u32> = None,
        /// Most prefill tokens of a step.
        chunked_prefill_size: u32 = 8192,
        /// Longest inter-token latency of a stream that prefills may cause; 0 for no limit. None is 6, and up to nine times a decode
        /// step while many requests wait for their first token.
        max_token_gap_ms: Option<f64> = None,
        /// While no request streams, a step has as many prefill tokens as take about so long, at least `chunked_prefill_size`; 0 for no
        /// more than these.
        max_step_ms: f64 = 250.0,
        /// `lru`, `lfu`, `fifo`, `filo`, `mru`, `slru` or `priority`.
        radix_eviction_policy: String = "lru".to_owned(),
        /// Disables the prefix cache.
        disable_radix_cache: bool = false,
        /// Record changes of the prefix index, for a `Gateway`; they cost a SHA-256 per page.
        kv_events: bool = false,
        /// `priority` of requests comes before the policy.
        enable_priority_scheduling: bool = false,
        /// The lowest value comes first.
        schedule_low_priority_values_first: bool = false,
        /// A request whose priority is better by more preempts running ones; None for never.
        priority_scheduling_preemption_threshold: Option<i32> = None,
        /// Most KV pages to use of a driver's pool.
        max_total_pages: Option<u32> = None,
        /// Most bytes of images in a step, pixels and positions; 0: images are refused.
        max_image_bytes: u32 = 0,
        /// End-of-sequence tokens; requests may ignore them.
        eos_token_ids: Vec<u32> = Vec::new(),
        /// The bytes of each token; needed for stop strings.
        vocabulary: Option<Vec<Vec<u8>>> = None,
        /// Special tokens, and their names in grammars.
        special_tokens: Vec<(u32, String)> = Vec::new(),
        /// The `tokenizer.json`, for jump-forward decoding.
        tokenizer_file: Option<PathBuf> = None,
        /// Regular expression of white space in JSON, under a schema.
        constrained_json_whitespace_pattern: Option<String> = None,
        /// No white space in JSON.
        constrained_json_disable_any_whitespace: bool = false,
        /// JSON schemas with keywords that no grammar enforces are refused; else these keywords are relaxed.
        strict_json_schema: bool = false,
        /// Most bytes of the text of one grammar; None for 1 MiB.
        max_grammar_bytes: Option<usize> = None,
        /// Time for one grammar from its first request on, queueing included; None for 30.
        grammar_timeout_s: Option<f64> = None,
        /// Time to compile one grammar; None for 10.
        grammar_compile_timeout_s: Option<f64> = None,
        /// MiB of memory to compile one grammar; None for 512.
        grammar_memory_mb: Option<u32> = None,
        /// Longest time in the queue, after which a request ends with the reason `deadline`; None for no limit.
        waiting_limit_s: Option<f64> = None,
        /// The same from its admission to its end.
        running_limit_s: Option<f64> = None,
        /// A stop in the last token that `max_new_tokens` allows ends a request with the reason `stop`, as in SGLang from 0.5.23 on; else with
        /// `length`, as in 0.5.17.
        stop_before_length: bool = false,
        /// Limits of requests, by their names in docs/limits.md, where they differ from the defaults; for every frontend.
        request_limits: Option<BTreeMap<String, u64>> = None,
        /// Most restarts of a driver in a row, without a reply in between.
        max_restarts: u32 = 3,
        /// Limit for one start.
        ready_timeout_s: f64 = 1200.0,
        /// A driver that does not reply so long is killed and restarted.
        step_timeout_s: f64 = 60.0,
        /// How long a driver may take to end after SIGTERM.
        stop_timeout_s: f64 = 5.0,
        /// Where the drivers' logs are appended.
        log_file: Option<PathBuf> = None,
    }
}

/// Extracts a keyword; a `TypeError` names it, as `PyO3`'s own do.
fn argument<'py, T: for<'a> FromPyObject<'a, 'py>>(
    name: &str,
    value: &Bound<'py, PyAny>,
) -> PyResult<T> {
    value.extract::<T>().map_err(|error| {
        let error: PyErr = error.into();
        if error.is_instance_of::<PyTypeError>(value.py()) {
            let text = error.value(value.py()).to_string();
            return PyTypeError::new_err(format!("argument '{name}': {text}"));
        }
        error
    })
}

impl Config {
    /// The settings of the service, whose last log lines go to `lines`.
    pub(super) fn service(
        mut self,
        py: Python<'_>,
        model: PathBuf,
        python: PathBuf,
        lines: Arc<Mutex<VecDeque<String>>>,
    ) -> PyResult<ServiceSettings> {
        let grammars = self.grammars(py, &python)?;
        let waiting_limit = optional_seconds("waiting_limit_s", self.waiting_limit_s)?;
        Ok(ServiceSettings {
            drivers: self.drivers(py, model, python)?,
            scheduler: self.scheduler()?,
            max_pages: self.max_pages()?,
            max_image_bytes: self.max_image_bytes,
            token_bytes: grammars
                .as_ref()
                .map(|grammars| with_special(&grammars.tokens, &grammars.special) as _),
            grammars,
            waiting_limit,
            max_restarts: self.max_restarts,
            log: log(lines, self.replicas, self.log_file)?,
        })
    }

    fn drivers(
        &self,
        py: Python<'_>,
        model: PathBuf,
        python: PathBuf,
    ) -> PyResult<Vec<DriverSettings>> {
        let options = self.options.as_ref();
        let driver = DriverSettings {
            dtype: self.dtype.clone(),
            seed: self.seed,
            spin_budget_us: self.spin_budget_us,
            max_pages: self.max_pages()?,
            options: options
                .map_or_else(|| Ok(toml::Table::new()), |options| table(options.bind(py)))?,
            ready_timeout: seconds("ready_timeout_s", self.ready_timeout_s)?,
            answer_timeout: seconds("step_timeout_s", self.step_timeout_s)?,
            stop_timeout: seconds("stop_timeout_s", self.stop_timeout_s)?,
            package: self.driver_package.clone(),
            library_path: self.library_path.clone(),
            ..DriverSettings::new(python, model)
        };
        share(
            &driver,
            &self.devices,
            self.replicas,
            self.tensor_parallel_size,
        )
    }

    fn max_pages(&self) -> PyResult<Option<u32>> {
        at_least_one("max_total_pages", self.max_total_pages)
    }

    fn scheduler(&self) -> PyResult<SchedulerConfig> {
        let defaults = SchedulerConfig::default();
        let gap_us = self.max_token_gap_ms;
        let gap_us = gap_us.map(|limit| milliseconds("max_token_gap_ms", limit));
        let running_limit = optional_seconds("running_limit_s", self.running_limit_s)?;
        let max_running = at_least_one("max_running_requests", self.max_running_requests)?;
        Ok(SchedulerConfig {
            policy: self.schedule_policy.parse().map_err(value_error)?,
            conservativeness: self.schedule_conservativeness,
            chunk_tokens: self.chunked_prefill_size,
            max_running: max_running.unwrap_or(0),
            max_queued: self.max_queued_requests,
            gap_us: gap_us.transpose()?.unwrap_or(defaults.gap_us),
            // An explicit limit holds, however many requests wait.
            gap_growth: self.max_token_gap_ms.map_or(defaults.gap_growth, |_| 0),
            step_us: milliseconds("max_step_ms", self.max_step_ms)?,
            prefix_cache: !self.disable_radix_cache,
            eviction: self.radix_eviction_policy.parse().map_err(value_error)?,
            kv_events: self.kv_events,
            priority: self.enable_priority_scheduling,
            low_priority_first: self.schedule_low_priority_values_first,
            preemption_threshold: self.priority_scheduling_preemption_threshold,
            running_limit_us: running_limit.map_or(0, |limit| {
                u64::try_from(limit.as_micros().max(1)).unwrap_or(u64::MAX)
            }),
            stop_before_length: self.stop_before_length,
            seed: self.seed.cast_unsigned(),
            ..defaults
        })
    }

    /// None without a vocabulary.
    fn grammars(&mut self, py: Python<'_>, python: &Path) -> PyResult<Option<GrammarSettings>> {
        let process = compiler_command(py, python)?;
        let defaults = GrammarLimits::default();
        let time = optional_seconds("grammar_timeout_s", self.grammar_timeout_s)?;
        let compile_time =
            optional_seconds("grammar_compile_timeout_s", self.grammar_compile_timeout_s)?;
        let memory = at_least_one("grammar_memory_mb", self.grammar_memory_mb)?;
        let limits = GrammarLimits {
            bytes: self.max_grammar_bytes.unwrap_or(defaults.bytes),
            time: time.unwrap_or(defaults.time),
            compile_time: compile_time.unwrap_or(defaults.compile_time),
            memory: memory.map_or(defaults.memory, |mebibytes| u64::from(mebibytes) << 20),
            ..defaults
        };
        Ok(self.vocabulary.take().map(|vocabulary| GrammarSettings {
            tokens: token_bytes(vocabulary),
            special: self.special_tokens.clone(),
            eos_token_ids: self.eos_token_ids.clone(),
            compiler: CompilerSettings {
                space: JsonSpace {
                    fixed: self.constrained_json_disable_any_whitespace,
                    pattern: self.constrained_json_whitespace_pattern.clone(),
                },
                strict_schemas: self.strict_json_schema,
                notice: None,
                tokenizer: self.tokenizer_file.clone(),
                limits,
                process: Some(process),
            },
        }))
    }
}

fn optional_seconds(name: &str, value: Option<f64>) -> PyResult<Option<Duration>> {
    value.map(|value| seconds(name, value)).transpose()
}
