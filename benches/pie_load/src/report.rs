//! Tables for people, files for programs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use pie_engine::{Capabilities, Exit};
use serde::Serialize;

use crate::args::{Args, DraftsArgs, DriverArgs, StepsArgs, ThroughputArgs};
use crate::drafts;
use crate::error::LoadError;
use crate::steps::Row;
use crate::throughput::Run;

/// Everything that a run has found out.
#[derive(Serialize)]
pub(crate) struct Report<'a> {
    pub(crate) version: u32,
    pub(crate) commit: Option<&'a str>,
    /// Seconds since 1970.
    pub(crate) started: u64,
    #[serde(skip)]
    path: Option<&'a Path>,
    /// The raw samples, next to this file.
    samples: Option<PathBuf>,
    pub(crate) driver: &'a DriverArgs,
    pub(crate) capabilities: Capabilities,
    pub(crate) ready_s: f64,
    pub(crate) exit: Option<Exit>,
    pub(crate) steps_args: &'a StepsArgs,
    pub(crate) steps: Vec<Row>,
    pub(crate) throughput_args: &'a ThroughputArgs,
    pub(crate) throughput: Vec<Run>,
    pub(crate) drafts_args: &'a DraftsArgs,
    pub(crate) drafts: Vec<drafts::Row>,
}

impl<'a> Report<'a> {
    pub(crate) fn new(
        args: &'a Args,
        capabilities: Capabilities,
        ready_s: f64,
        started: u64,
    ) -> Self {
        Self {
            version: 1,
            commit: args.output.commit.as_deref(),
            started,
            path: args.output.json.as_deref(),
            samples: args.output.json.as_deref().map(samples_path),
            driver: &args.driver,
            capabilities,
            ready_s,
            exit: None,
            steps_args: &args.steps,
            steps: Vec::new(),
            throughput_args: &args.throughput,
            throughput: Vec::new(),
            drafts_args: &args.drafts,
            drafts: Vec::new(),
        }
    }

    /// Writes the figures and, next to them, the samples; called after every row, so that nothing is lost with the process.
    pub(crate) fn save(&self) -> Result<(), LoadError> {
        let (Some(path), Some(samples_path)) = (self.path, &self.samples) else {
            return Ok(());
        };
        let rows = self.steps.iter().filter(|row| row.figures.is_some());
        let samples = Samples {
            steps: rows
                .map(|row| (format!("{}x{}", row.batch, row.context), &row.samples))
                .collect(),
            throughput: self.throughput.iter().map(|run| &run.record).collect(),
            drafts: self.drafts.iter().flat_map(pair_samples).collect(),
        };
        write_json(path, self)?;
        write_json(samples_path, &samples)
    }

    /// Prints how the driver ended.
    pub(crate) fn print_exit(&self) {
        if let Some(exit) = &self.exit {
            let left = if exit.region_left {
                "its region was left over"
            } else {
                "no region left"
            };
            println!(
                "SIGTERM: {} after {:.2} s, {left}",
                exit.status, exit.seconds
            );
        }
    }
}

/// Steps by `<batch>x<context>`, drafts by batch.
#[derive(Serialize)]
struct Samples<'a> {
    steps: BTreeMap<String, &'a crate::steps::Samples>,
    throughput: Vec<&'a crate::throughput::Record>,
    drafts: Vec<PairSamples<'a>>,
}

/// A repeat of the drafts.
#[derive(Serialize)]
struct PairSamples<'a> {
    batch: u32,
    without: &'a crate::steps::Samples,
    with: &'a crate::steps::Samples,
}

fn pair_samples(row: &drafts::Row) -> impl Iterator<Item = PairSamples<'_>> {
    row.repeats.iter().map(|pair| PairSamples {
        batch: row.batch,
        without: &pair.without.samples,
        with: &pair.with.samples,
    })
}

fn samples_path(json: &Path) -> PathBuf {
    json.with_extension("samples.json")
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), LoadError> {
    let text = serde_json::to_vec(value).map_err(Into::into);
    text.and_then(|text| fs::write(path, text))
        .map_err(|source| LoadError::File {
            action: "cannot write",
            path: path.to_owned(),
            source,
        })
}

/// The head of the table of [`print_row`].
pub(crate) fn print_row_head() {
    println!(
        "{:>5} {:>7} | {:>9} {:>9} {:>9} | {:>9} | {:>10} | {:>8} | reply",
        "batch", "context", "p50 µs", "p90", "p99", "client µs", "tokens/s", "request"
    );
}

pub(crate) fn print_row(row: &Row) {
    print!("{:>5} {:>7} | ", row.batch, row.context);
    let Some(figures) = &row.figures else {
        println!("skipped: {}", row.skipped.as_deref().unwrap_or_default());
        return;
    };
    let trip = figures.round_trip_us;
    println!(
        "{:>9.1} {:>9.1} {:>9.1} | {:>9.1} | {:>10.0} | {:>8} | {}",
        trip.p50,
        trip.p90,
        trip.p99,
        figures.client_us.p50,
        figures.tokens_per_s,
        figures.request_bytes,
        if figures.fast { "fast" } else { "archive" }
    );
}

pub(crate) fn print_run(repeat: usize, run: &Run) {
    println!(
        "throughput {repeat}: {} requests, {} output tokens in {:.3} s = {:.0} tokens/s, client p50 {:.1}, p99 {:.1} µs a step",
        run.requests,
        run.output_tokens,
        run.seconds,
        run.tokens_per_s,
        run.client_us.p50,
        run.client_us.p99
    );
    for (what, share) in [
        ("with prompts", run.with_prompts),
        ("decode only", run.decode),
    ] {
        let steps = f64::from(share.steps.max(1));
        println!(
            "  {what}: {} steps, {:.3} s, {:.1} requests and {:.1} tokens a frame",
            share.steps,
            share.seconds,
            share.requests as f64 / steps,
            share.tokens as f64 / steps
        );
    }
}

/// What the rows of [`print_drafts`] are, and what they are not.
pub(crate) fn print_drafts_head(args: &DraftsArgs) {
    println!(
        "drafts, {}, {} tokens of output. Every repeat plays its prompts without drafts and with them. What was said with \
         drafts may be drafted from later, unless spec_ngram_capacity is 0: `new` counts only repeats whose prompts had \
         not been played.",
        args.draft_sampler.name, args.draft_output
    );
    println!(
        "{:>5} | {:>9} {:>9} {:>6} {:>6} | {:>13} | {:>8} {:>8} {:>6} | {:>19} | {:>19} | greedy tokens",
        "batch",
        "tokens/s",
        "drafts",
        "ratio",
        "new",
        "steps",
        "drafted",
        "accepted",
        "a step",
        "step p50, p99 µs",
        "with drafts"
    );
}

pub(crate) fn print_drafts(row: &drafts::Row) {
    print!("{:>5} | ", row.batch);
    let Some(figures) = &row.figures else {
        println!("skipped: {}", row.skipped.as_deref().unwrap_or_default());
        return;
    };
    let (without, with) = (&figures.without, &figures.with);
    let new = figures.ratio_of_new;
    println!(
        "{:>9.0} {:>9.0} {:>6.3} {:>6} | {:>6.0} {:>6.0} | {:>8} {:>8} {:>6.2} | {:>9.1} {:>9.1} | {:>9.1} {:>9.1} | {}",
        without.tokens_per_s,
        with.tokens_per_s,
        figures.ratio,
        new.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}")),
        without.steps,
        with.steps,
        figures.drafted,
        figures.accepted,
        figures.accepted_per_step,
        without.p50_us,
        without.p99_us,
        with.p50_us,
        with.p99_us,
        figures.agreement.map_or_else(String::new, agreed)
    );
}

fn agreed(agreement: drafts::Agreement) -> String {
    let drafts::Agreement {
        contexts,
        differ,
        equal,
    } = agreement;
    format!(
        "{differ} of {contexts} contexts differ, {:.1} % equal before",
        100.0 * equal
    )
}
