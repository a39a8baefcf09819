//! Metrics of a replica: one list for every endpoint.
//!
//! Metrics that `SGLang`'s scheduler has, too, bear its names; the others begin with `pie_runtime:`.

use std::time::{Duration, Instant};

use pie_scheduler::Stats;

use crate::shared::ReplicaStats;

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Monotonic.
    Counter,
    /// Any value.
    Gauge,
}

/// A metric with its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    /// Its name; a counter's ends with `_total`.
    pub name: &'static str,
    /// Its type.
    pub kind: MetricKind,
    /// Its help text.
    pub help: &'static str,
    /// A label and its value, where several metrics have one name.
    pub label: Option<(&'static str, &'static str)>,
    /// The value.
    pub value: f64,
}

/// Reads metrics, some of which are rates since the last reading.
#[derive(Debug)]
pub struct MetricsReader {
    at: Instant,
    before: Stats,
    rates: Rates,
}

/// Rates of an interval.
#[derive(Clone, Copy, Debug, Default)]
struct Rates {
    tokens_per_s: f64,
    hit_rate: f64,
    accepted_per_step: f64,
    accepted_share: f64,
    retracted: f64,
}

/// Shortest interval of rates.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

impl MetricsReader {
    /// Rates count from `now` on.
    pub fn new(now: Instant) -> Self {
        Self {
            at: now,
            before: Stats::default(),
            rates: Rates::default(),
        }
    }

    /// All metrics of a replica.
    pub fn read(&mut self, stats: &ReplicaStats, now: Instant) -> Vec<Metric> {
        let took = now.saturating_duration_since(self.at);
        if took >= MIN_INTERVAL {
            self.rates = Rates::of(&self.before, &stats.scheduler, took);
            (self.at, self.before) = (now, stats.scheduler);
        }
        let mut metrics = Vec::with_capacity(48);
        let mut list = List(&mut metrics);
        requests(&mut list, stats, &self.rates);
        memory(&mut list, stats);
        work(&mut list, stats, &self.rates);
        times(&mut list, stats);
        metrics
    }
}

impl Rates {
    fn of(before: &Stats, now: &Stats, took: Duration) -> Self {
        let grown = |count: fn(&Stats) -> u64| count(now).saturating_sub(count(before)) as f64;
        let drafts = grown(|stats| stats.drafts);
        let rows = grown(|stats| stats.total_rows);
        Self {
            tokens_per_s: grown(|stats| stats.output_tokens) / took.as_secs_f64(),
            hit_rate: ratio(
                grown(|stats| stats.cached_tokens),
                grown(|stats| stats.prompt_tokens),
            ),
            accepted_per_step: ratio(grown(|stats| stats.accepted) + rows, rows),
            accepted_share: ratio(grown(|stats| stats.accepted), drafts),
            retracted: grown(|stats| stats.retractions),
        }
    }
}

/// A ratio; 0 where `whole` is 0.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

struct List<'a>(&'a mut Vec<Metric>);

impl List<'_> {
    fn gauge(&mut self, name: &'static str, help: &'static str, value: f64) {
        self.add(MetricKind::Gauge, name, help, None, value);
    }

    fn count(&mut self, name: &'static str, help: &'static str, value: u64) {
        self.add(MetricKind::Counter, name, help, None, value as f64);
    }

    fn counts<const N: usize>(
        &mut self,
        (name, label): (&'static str, &'static str),
        help: &'static str,
        values: [(&'static str, u64); N],
    ) {
        for (word, value) in values {
            let label = Some((label, word));
            self.add(MetricKind::Counter, name, help, label, value as f64);
        }
    }

    fn add(
        &mut self,
        kind: MetricKind,
        name: &'static str,
        help: &'static str,
        label: Option<(&'static str, &'static str)>,
        value: f64,
    ) {
        self.0.push(Metric {
            name,
            kind,
            help,
            label,
            value,
        });
    }
}

fn requests(list: &mut List<'_>, stats: &ReplicaStats, rates: &Rates) {
    let counts = &stats.scheduler;
    let waiting = counts.waiting.saturating_sub(counts.grammar_queue);
    list.gauge(
        "sglang:num_running_reqs",
        "Sequences that hold pages.",
        counts.running as f64,
    );
    list.gauge(
        "sglang:num_queue_reqs",
        "Sequences that wait.",
        waiting as f64,
    );
    list.gauge(
        "sglang:num_grammar_queue_reqs",
        "Sequences that wait for their grammar.",
        counts.grammar_queue as f64,
    );
    list.gauge(
        "sglang:num_retracted_reqs",
        "Sequences that lost their pages since the last reading.",
        rates.retracted,
    );
    list.count(
        "sglang:num_retracted_requests_total",
        "Retractions: running sequences that lost their pages.",
        counts.retractions,
    );
    list.gauge(
        "sglang:utilization",
        "Running sequences, as a share of those that may run.",
        ratio(counts.running as f64, stats.max_running.into()),
    );
    list.gauge(
        "sglang:new_token_ratio",
        "The share of outputs that is taken for certain when a request is admitted.",
        counts.new_token_ratio.into(),
    );
    list.count(
        "pie_runtime:finished_total",
        "Sequences that ended.",
        counts.finished,
    );
    list.count(
        "pie_runtime:restarts_total",
        "Restarts of the driver.",
        stats.restarts,
    );
}

fn memory(list: &mut List<'_>, stats: &ReplicaStats) {
    let counts = &stats.scheduler;
    let size = f64::from(stats.page_size);
    let total = f64::from(stats.total_pages) * size;
    let (free, cached) = (
        counts.free_pages as f64 * size,
        counts.cached_pages as f64 * size,
    );
    let used = (total - free - cached).max(0.0);
    for name in ["sglang:num_used_tokens", "sglang:kv_used_tokens"] {
        list.gauge(
            name,
            "KV slots that running sequences and sessions hold.",
            used,
        );
    }
    for name in ["sglang:token_usage", "sglang:full_token_usage"] {
        list.gauge(
            name,
            "The same as a share of the pool, from 0 to 1.",
            ratio(used, total),
        );
    }
    list.gauge(
        "sglang:kv_available_tokens",
        "KV slots that nothing holds.",
        free,
    );
    list.gauge(
        "sglang:kv_evictable_tokens",
        "KV slots that only the prefix index holds.",
        cached,
    );
    list.gauge(
        "sglang:max_total_num_tokens",
        "KV slots of the pool.",
        total,
    );
    list.gauge("sglang:page_size", "Tokens of a page.", size);
    list.gauge(
        "sglang:num_pages",
        "Pages of the pool.",
        stats.total_pages.into(),
    );
    list.gauge(
        "sglang:context_len",
        "Positions of a sequence.",
        stats.max_model_len.into(),
    );
    list.gauge(
        "sglang:hicache_host_used_tokens",
        "KV slots in use on the host.",
        counts.host_pages as f64 * size,
    );
    list.gauge(
        "sglang:hicache_host_total_tokens",
        "KV slots on the host.",
        f64::from(stats.host_pages) * size,
    );
}

fn work(list: &mut List<'_>, stats: &ReplicaStats, rates: &Rates) {
    list.gauge(
        "sglang:gen_throughput",
        "Tokens given out in a second.",
        rates.tokens_per_s,
    );
    list.gauge(
        "sglang:cache_hit_rate",
        "Share of prompt tokens whose KV was there.",
        rates.hit_rate,
    );
    list.gauge(
        "sglang:decode_sum_seq_lens",
        "Tokens of running sequences.",
        stats.scheduler.running_tokens as f64,
    );
    list.gauge(
        "sglang:spec_accept_length",
        "Tokens of a row: accepted drafts and the one that the model adds.",
        rates.accepted_per_step,
    );
    list.gauge(
        "sglang:spec_accept_rate",
        "Share of drafts that were accepted.",
        rates.accepted_share,
    );
    totals(list, stats);
}

fn totals(list: &mut List<'_>, stats: &ReplicaStats) {
    let counts = &stats.scheduler;
    list.counts(
        ("sglang:realtime_tokens_total", "mode"),
        "Tokens of prompts that were computed, tokens of prompts whose KV was there, tokens given out.",
        [
            (
                "prefill_compute",
                counts.prompt_tokens.saturating_sub(counts.cached_tokens),
            ),
            ("prefill_cache", counts.cached_tokens),
            ("decode", counts.output_tokens),
        ],
    );
    list.counts(
        ("pie_runtime:cached_tokens_total", "tier"),
        "Tokens of prompts whose KV was there, by where it was.",
        [
            (
                "device",
                counts.cached_tokens.saturating_sub(counts.loaded_tokens),
            ),
            ("host", counts.loaded_tokens),
        ],
    );
    list.counts(
        ("pie_runtime:steps_total", "kind"),
        "Steps, by whether they had a part of a prompt.",
        [
            ("decode", counts.steps.saturating_sub(counts.prompt_steps)),
            ("prompt", counts.prompt_steps),
        ],
    );
    list.count(
        "pie_runtime:rows_total",
        "Sequences of all steps.",
        counts.total_rows,
    );
    list.count(
        "pie_runtime:draft_tokens_total",
        "Draft tokens that were verified.",
        counts.drafts,
    );
    list.count(
        "pie_runtime:accepted_draft_tokens_total",
        "Draft tokens that were accepted.",
        counts.accepted,
    );
    list.count(
        "pie_runtime:forced_tokens_total",
        "Tokens that a grammar left no alternative to, and that were not sampled.",
        counts.forced_tokens,
    );
}

fn times(list: &mut List<'_>, stats: &ReplicaStats) {
    for (name, help, nanos) in [
        (
            "pie_runtime:host_seconds_total",
            "From the answer to a step seen to the next one's request made: the device waits so long for the host.",
            stats.host_ns,
        ),
        (
            "pie_runtime:driver_seconds_total",
            "From the request for a step made to its answer seen: ring, driver and device.",
            stats.driver_ns,
        ),
    ] {
        let seconds = nanos as f64 / 1e9;
        list.add(MetricKind::Counter, name, help, None, seconds);
    }
    for (quantile, nanos) in ["0.5", "0.99"].into_iter().zip(stats.gaps_ns) {
        list.add(
            MetricKind::Gauge,
            "pie_runtime:host_gap_seconds",
            "The host's time of a step that this share of steps does not exceed, since the start.",
            Some(("quantile", quantile)),
            nanos as f64 / 1e9,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(metrics: &[Metric], name: &str) -> f64 {
        metrics
            .iter()
            .find(|metric| metric.name == name)
            .unwrap()
            .value
    }

    #[test]
    fn rates_are_of_the_time_since_the_last_reading() {
        let start = Instant::now();
        let mut reader = MetricsReader::new(start);
        let mut stats = ReplicaStats {
            page_size: 16,
            total_pages: 100,
            max_running: 8,
            ..ReplicaStats::default()
        };
        stats.scheduler.running = 2;
        stats.scheduler.free_pages = 60;
        stats.scheduler.cached_pages = 15;
        stats.scheduler.output_tokens = 50;
        stats.scheduler.prompt_tokens = 80;
        stats.scheduler.cached_tokens = 20;
        stats.scheduler.loaded_tokens = 8;
        let first = reader.read(&stats, start + Duration::from_secs(2));
        assert!((value(&first, "sglang:gen_throughput") - 25.0).abs() < 1e-9);
        assert!((value(&first, "sglang:cache_hit_rate") - 0.25).abs() < 1e-9);
        assert!((value(&first, "sglang:token_usage") - 0.25).abs() < 1e-9);
        assert!((value(&first, "sglang:utilization") - 0.25).abs() < 1e-9);
        let tiers: Vec<f64> = first
            .iter()
            .filter(|metric| metric.name == "pie_runtime:cached_tokens_total")
            .map(|metric| metric.value)
            .collect();
        assert_eq!(tiers, [12.0, 8.0]);
        // Too soon for a rate; then one without work.
        let soon = reader.read(&stats, start + Duration::from_millis(2500));
        assert!((value(&soon, "sglang:gen_throughput") - 25.0).abs() < 1e-9);
        let later = reader.read(&stats, start + Duration::from_secs(4));
        assert!(value(&later, "sglang:gen_throughput").abs() < 1e-9);
    }

    #[test]
    fn metrics_of_one_name_have_one_type_and_different_labels() {
        let now = Instant::now();
        let metrics = MetricsReader::new(now).read(&ReplicaStats::default(), now);
        for (at, metric) in metrics.iter().enumerate() {
            let counter = metric.kind == MetricKind::Counter;
            assert_eq!(counter, metric.name.ends_with("_total"), "{}", metric.name);
            assert!(metric.value.is_finite(), "{}", metric.name);
            for other in &metrics[..at] {
                if other.name == metric.name {
                    assert_eq!((other.kind, other.help), (metric.kind, metric.help));
                    assert_ne!(other.label, metric.label, "{}", metric.name);
                }
            }
        }
    }
}
