//! What a runtime gives out: tokens and ends of requests, and counts.

use std::borrow::Cow;

use pie_engine::{FinishReason, LogprobShape, Metric, MetricKind, OutputDelta, ReplicaStats};
use pie_ingress::PooledRow;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use serde::Serialize;

use super::settings::value_error;
use crate::logprobs::{PositionLogprobs, position_logprobs};

/// New tokens of one sequence of a request, or its end, or both.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct Output {
    /// What `Runtime.submit` returned.
    request: u64,
    /// Which of the request's `n` sequences, from 0.
    sample: u32,
    /// New since the last output; a new list at every access. A stop token is the last one.
    token_ids: Vec<u32>,
    /// Log-probabilities of tokens of the prompt, as `prompt_logprobs` reads them; they come once.
    prompt_words: Vec<u32>,
    /// Those of `token_ids`, as `logprobs` reads them; of a request for no tokens those of the one that would come first.
    words: Vec<u32>,
    /// Of a request for no tokens, the one that would come first.
    scored: Option<u32>,
    /// `stop`, `length`, `abort`, `deadline` or `error` in the last output, else None.
    finish_reason: Option<&'static str>,
    /// The stop token that ended it.
    stop_token: Option<u32>,
    /// Index of the stop string that ended it.
    stop_string: Option<u32>,
    /// Index of the stop expression that ended it.
    stop_regex: Option<u32>,
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
    /// Log-probabilities of the tokens: of each its own, those of the most probable tokens with their ids, best first, and those
    /// of given tokens.
    ///
    /// Args:
    ///     top: Most probable tokens that the request asks for.
    ///     given: Tokens that it gives.
    ///     hidden: Numbers of a hidden state, if it asks for these.
    #[pyo3(signature = (top, given, hidden = 0))]
    fn logprobs(&self, top: u32, given: u32, hidden: u32) -> Vec<PositionLogprobs> {
        let shape = LogprobShape { top, given, hidden };
        position_logprobs(&self.words, shape).collect()
    }

    /// The embedding of a request of `submit_embedding`.
    ///
    /// Args:
    ///     dimensions: Leading numbers to return; None for all.
    ///     normalized: Embeddings of the model have norm 1, so one that is cut gets it again.
    #[pyo3(signature = (dimensions = None, *, normalized = false))]
    fn embedding(&self, dimensions: Option<u32>, normalized: bool) -> Vec<f32> {
        let row = PooledRow {
            dimensions: dimensions.unwrap_or(u32::MAX),
            normalized,
        };
        row.embedding(&self.words)
    }

    /// The same of tokens of the prompt, the first of which is the one after `logprob_start_len`.
    #[pyo3(signature = (top, given, hidden = 0))]
    fn prompt_logprobs(&self, top: u32, given: u32, hidden: u32) -> Vec<PositionLogprobs> {
        let shape = LogprobShape { top, given, hidden };
        position_logprobs(&self.prompt_words, shape).collect()
    }

    /// The hidden states of the rows that the tokens come from, with arguments as for `logprobs`: float32, those of the prompt's
    /// other rows, and those of `token_ids`.
    fn hidden_states<'py>(
        &self,
        py: Python<'py>,
        top: u32,
        given: u32,
        hidden: u32,
    ) -> [Bound<'py, PyBytes>; 2] {
        let shape = LogprobShape { top, given, hidden };
        [&self.prompt_words, &self.words].map(|words| {
            let states: Vec<u32> = shape.hidden_states(words).flatten().copied().collect();
            PyBytes::new(py, bytemuck::cast_slice(&states))
        })
    }

    fn __repr__(&self) -> String {
        format!(
            "Output(request={}, sample={}, token_ids={:?}, finish_reason={:?})",
            self.request, self.sample, self.token_ids, self.finish_reason
        )
    }
}

impl From<OutputDelta> for Output {
    fn from(delta: OutputDelta) -> Self {
        let mut output = Self {
            request: delta.request,
            sample: delta.sample,
            token_ids: delta.tokens,
            prompt_words: delta.prompt_logprobs,
            words: delta.logprobs,
            scored: delta.scored,
            finish_reason: None,
            stop_token: None,
            stop_string: None,
            stop_regex: None,
            text_bytes: None,
            held_bytes: delta.held_bytes,
            error: None,
            cached_tokens: delta.cached_tokens,
        };
        output.error = delta
            .finish
            .as_ref()
            .and_then(FinishReason::message)
            .map(Cow::into_owned);
        output.finish_reason = delta.finish.map(|end| match end {
            FinishReason::Length => "length",
            FinishReason::StopToken(token) => {
                output.stop_token = Some(token);
                "stop"
            }
            FinishReason::StopString { index, text_bytes } => {
                output.stop_string = Some(index);
                output.text_bytes = Some(text_bytes);
                "stop"
            }
            FinishReason::StopRegex { index } => {
                output.stop_regex = Some(index);
                "stop"
            }
            FinishReason::Aborted | FinishReason::Unready => "abort",
            FinishReason::Deadline => "deadline",
            FinishReason::Refused(_)
            | FinishReason::Displaced
            | FinishReason::Grammar(_)
            | FinishReason::Processor(_)
            | FinishReason::Busy(_)
            | FinishReason::Failed(_) => "error",
        });
        output
    }
}

/// A figure: name, whether it is a counter, what it counts, a label with its value, and the value.
pub(super) type Shown = (
    &'static str,
    bool,
    &'static str,
    Option<(&'static str, &'static str)>,
    f64,
);

pub(super) fn shown(figure: &Metric) -> Shown {
    let is_counter = figure.kind == MetricKind::Counter;
    (
        figure.name,
        is_counter,
        figure.help,
        figure.label,
        figure.value,
    )
}

/// What `Runtime.stats` shows.
#[derive(Default, Serialize)]
pub(super) struct Stats {
    #[serde(flatten)]
    all: Counts,
    replicas: Vec<Counts>,
}

#[derive(Clone, Default, Serialize)]
struct Counts {
    running: usize,
    waiting: usize,
    /// Of those that wait: retracted ones, and ones that wait for their grammar.
    retracted: usize,
    unbound: usize,
    /// Tokens of those that run.
    running_tokens: u64,
    steps: u64,
    prompt_steps: u64,
    rows: u64,
    /// Sequences that began to run, retracted ones again, and their cached tokens.
    admissions: u64,
    matched_tokens: u64,
    /// Prompt tokens of steps, and those that wait for theirs.
    prefill_tokens: u64,
    pending_tokens: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    /// Of the cached ones, those that were loaded from the host.
    loaded_tokens: u64,
    output_tokens: u64,
    retractions: u64,
    finished: u64,
    forced_tokens: u64,
    drafted: u64,
    accepted: u64,
    restarts: u64,
    pages_total: u64,
    pages_free: u64,
    pages_cached: u64,
    host_pages_total: u64,
    host_pages_used: u64,
    new_token_ratio: f32,
    /// Of all replicas the longest.
    gap_us_p50: f64,
    gap_us_p99: f64,
    /// Seconds, of all steps.
    host_s: f64,
    driver_s: f64,
    driver_pids: Vec<u32>,
}

impl Stats {
    pub(super) fn of(replicas: &[ReplicaStats]) -> Self {
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
            retracted: counts.retracted,
            unbound: counts.grammar_queue,
            running_tokens: counts.running_tokens,
            steps: counts.steps,
            prompt_steps: counts.prompt_steps,
            rows: counts.total_rows,
            admissions: counts.admissions,
            matched_tokens: counts.matched_tokens,
            prefill_tokens: counts.prefill_tokens,
            pending_tokens: counts.pending_tokens,
            prompt_tokens: counts.prompt_tokens,
            cached_tokens: counts.cached_tokens,
            loaded_tokens: counts.loaded_tokens,
            output_tokens: counts.output_tokens,
            retractions: counts.retractions,
            finished: counts.finished,
            forced_tokens: counts.forced_tokens,
            drafted: counts.drafts,
            accepted: counts.accepted,
            restarts: stats.restarts,
            pages_total: stats.total_pages.into(),
            pages_free: counts.free_pages as u64,
            pages_cached: counts.cached_pages as u64,
            host_pages_total: stats.host_pages.into(),
            host_pages_used: counts.host_pages as u64,
            new_token_ratio: counts.new_token_ratio,
            gap_us_p50: stats.gaps_ns[0] as f64 / 1e3,
            gap_us_p99: stats.gaps_ns[1] as f64 / 1e3,
            host_s: stats.host_ns as f64 / 1e9,
            driver_s: stats.driver_ns as f64 / 1e9,
            driver_pids: vec![stats.driver_pid],
        }
    }

    fn plus(mut self, other: &Self) -> Self {
        self.running += other.running;
        self.waiting += other.waiting;
        self.retracted += other.retracted;
        self.unbound += other.unbound;
        self.new_token_ratio = self.new_token_ratio.max(other.new_token_ratio);
        self.driver_pids.extend(&other.driver_pids);
        self.gap_us_p50 = self.gap_us_p50.max(other.gap_us_p50);
        self.gap_us_p99 = self.gap_us_p99.max(other.gap_us_p99);
        self.host_s += other.host_s;
        self.driver_s += other.driver_s;
        for (sum, more) in [
            (&mut self.steps, other.steps),
            (&mut self.prompt_steps, other.prompt_steps),
            (&mut self.rows, other.rows),
            (&mut self.admissions, other.admissions),
            (&mut self.matched_tokens, other.matched_tokens),
            (&mut self.prefill_tokens, other.prefill_tokens),
            (&mut self.pending_tokens, other.pending_tokens),
            (&mut self.prompt_tokens, other.prompt_tokens),
            (&mut self.cached_tokens, other.cached_tokens),
            (&mut self.loaded_tokens, other.loaded_tokens),
            (&mut self.running_tokens, other.running_tokens),
            (&mut self.host_pages_total, other.host_pages_total),
            (&mut self.host_pages_used, other.host_pages_used),
            (&mut self.output_tokens, other.output_tokens),
            (&mut self.retractions, other.retractions),
            (&mut self.finished, other.finished),
            (&mut self.forced_tokens, other.forced_tokens),
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

/// Through JSON, whose reader Python has.
pub(super) fn dict<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyDict>> {
    let text = serde_json::to_string(value).map_err(value_error)?;
    let loads = py.import("json")?.getattr("loads")?;
    Ok(loads.call1((text,))?.cast_into::<PyDict>()?)
}
