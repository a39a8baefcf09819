//! The command line.

use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use serde::Serialize;

use crate::config::Profile;
use crate::sampler::SamplerMix;

/// Numbers that add up without overflow.
fn count(least: u64) -> RangedU64ValueParser<u32> {
    RangedU64ValueParser::new().range(least..=1_000_000)
}

/// Plays the Pie runtime against a driver process that it spawns, and takes the time.
#[derive(Parser)]
#[command(version)]
pub(crate) struct Args {
    /// What to play, one after the other, on one driver.
    #[arg(required = true)]
    pub(crate) workloads: Vec<Workload>,
    #[command(flatten)]
    pub(crate) driver: DriverArgs,
    #[command(flatten)]
    pub(crate) steps: StepsArgs,
    #[command(flatten)]
    pub(crate) throughput: ThroughputArgs,
    #[command(flatten)]
    pub(crate) drafts: DraftsArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

impl Args {
    /// Has the driver draft, when that is played; an `--option` may still say otherwise.
    pub(crate) fn complete(mut self) -> Self {
        if self.workloads.contains(&Workload::Drafts) {
            let enabled = "spec_ngram_enabled=true".to_owned();
            self.driver.options.insert(0, enabled);
        }
        self
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Workload {
    /// Decode steps by batch size and context: round trips.
    Steps,
    /// Requests of mixed lengths with continuous batching: tokens per second.
    Throughput,
    /// The same prompts without and with the driver's drafts.
    Drafts,
}

/// The driver process.
#[derive(clap::Args, Clone, Serialize)]
#[command(next_help_heading = "Driver")]
pub(crate) struct DriverArgs {
    /// Interpreter that has `pie_driver_sglang`.
    #[arg(long, default_value = "python3")]
    pub(crate) python: PathBuf,
    /// Model folder.
    #[arg(long)]
    pub(crate) model: PathBuf,
    /// `cuda:N` or `cpu`; several, with commas between, share the model.
    #[arg(long, default_value = "cuda:0")]
    pub(crate) device: String,
    /// Activation type; bfloat16, on the CPU float32, where half precision is emulated.
    #[arg(long)]
    pub(crate) dtype: Option<String>,
    /// How long both sides spin.
    #[arg(long, value_enum, default_value_t = Profile::Latency)]
    pub(crate) profile: Profile,
    /// Tokens of a KV page.
    #[arg(long, default_value_t = 16, value_parser = count(1))]
    pub(crate) page_size: u32,
    /// A line for `[driver.options]`, as in `load_format="dummy"`; may be repeated.
    #[arg(long = "option", value_name = "KEY=VALUE")]
    pub(crate) options: Vec<String>,
    /// The driver's `random_seed`.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: i64,
    /// Seconds until the driver must be ready.
    #[arg(long, default_value_t = 1200.0, value_parser = seconds)]
    pub(crate) ready_timeout_s: f64,
    /// Seconds until a frame must be answered.
    #[arg(long, default_value_t = 60.0, value_parser = seconds)]
    pub(crate) timeout_s: f64,
    /// Where the driver's log goes. Its end is shown after a failure in any case.
    #[arg(long)]
    pub(crate) log: Option<PathBuf>,
}

/// The workload `steps`.
#[derive(clap::Args, Serialize)]
#[command(next_help_heading = "steps")]
pub(crate) struct StepsArgs {
    /// Batch sizes.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64,256", value_parser = count(1))]
    pub(crate) batch: Vec<u32>,
    /// Stored tokens of every context before its first step.
    #[arg(long, value_delimiter = ',', default_value = "512,2048", value_parser = count(1))]
    pub(crate) context: Vec<u32>,
    /// Timed steps.
    #[arg(long, default_value_t = 200, value_parser = count(1))]
    pub(crate) steps: u32,
    /// Steps before them that are not timed.
    #[arg(long, default_value_t = 10, value_parser = count(0))]
    pub(crate) warm_up: u32,
    /// Sampler: greedy, multinomial:T, top-k:T:K, top-p:T:P, min-p:T:P, top-k-top-p:T:K:P. Several with commas, or `mixed`
    /// for every kind, are dealt out to the contexts.
    #[arg(long, default_value = "greedy", value_parser = SamplerMix::parse)]
    #[serde(serialize_with = "name")]
    pub(crate) sampler: SamplerMix,
}

/// The workload `throughput`.
#[derive(clap::Args, Serialize)]
#[command(next_help_heading = "throughput")]
pub(crate) struct ThroughputArgs {
    /// JSON file with the arrays `prompts` and `outputs`; without it the standard workload of 256 requests.
    #[arg(long)]
    pub(crate) lengths: Option<PathBuf>,
    /// Only the first requests.
    #[arg(long)]
    pub(crate) requests: Option<usize>,
    /// Times to play it.
    #[arg(long, default_value_t = 3, value_parser = count(1))]
    pub(crate) repeats: u32,
    /// Sampler of this workload.
    #[arg(long, default_value = "multinomial:0.6", value_parser = SamplerMix::parse)]
    #[serde(serialize_with = "name")]
    pub(crate) throughput_sampler: SamplerMix,
}

/// The workload `drafts`.
#[derive(clap::Args, Serialize)]
#[command(next_help_heading = "drafts")]
pub(crate) struct DraftsArgs {
    /// Batch sizes.
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64", value_parser = count(1))]
    pub(crate) draft_batch: Vec<u32>,
    /// Times to play each, with other prompts while there are some.
    #[arg(long, default_value_t = 3, value_parser = count(1))]
    pub(crate) draft_repeats: u32,
    /// JSON file with a list of prompts, each a list of token ids; without it prompts are random.
    #[arg(long)]
    pub(crate) prompts: Option<PathBuf>,
    /// Tokens of a random prompt.
    #[arg(long, default_value_t = 128, value_parser = count(1))]
    pub(crate) draft_prompt: u32,
    /// Tokens that every context produces; the first is not timed.
    #[arg(long, default_value_t = 512, value_parser = count(2))]
    pub(crate) draft_output: u32,
    /// Sampler of this workload. At a high temperature no text repeats itself.
    #[arg(long, default_value = "greedy", value_parser = SamplerMix::parse)]
    #[serde(serialize_with = "name")]
    pub(crate) draft_sampler: SamplerMix,
}

/// Where figures go.
#[derive(clap::Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// Figures for programs; the samples go to a file next to it, with the ending `.samples.json`.
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
    /// The driver's commit, for the JSON file.
    #[arg(long)]
    pub(crate) commit: Option<String>,
}

/// A time limit that the clock can count.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds @ 0.0..=1e6) => Ok(seconds),
        _ => Err("expected seconds from 0 to 1000000".to_owned()),
    }
}

fn name<S: serde::Serializer>(mix: &SamplerMix, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&mix.name)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn several_workloads_run_on_one_driver() {
        let line = [
            "pie_load",
            "steps",
            "throughput",
            "--model",
            "m",
            "--batch",
            "1,2",
        ];
        let args = Args::try_parse_from(line).unwrap();
        assert!(args.workloads == [Workload::Steps, Workload::Throughput]);
        assert_eq!(args.steps.batch, [1, 2]);
        assert_eq!(args.steps.context, [512, 2048]);
        assert!(args.complete().driver.options.is_empty());
        assert!(Args::try_parse_from(["pie_load", "--model", "m"]).is_err());
        for limit in ["-1", "NaN", "inf", "soon"] {
            let limit = format!("--timeout-s={limit}");
            assert!(
                Args::try_parse_from(line.into_iter().chain([&*limit])).is_err(),
                "{limit}"
            );
        }
    }

    #[test]
    fn who_plays_drafts_has_them_drafted() {
        let line = [
            "pie_load",
            "drafts",
            "--model",
            "m",
            "--option",
            "spec_ngram_capacity=0",
        ];
        let args = Args::try_parse_from(line).unwrap().complete();
        let expected = ["spec_ngram_enabled=true", "spec_ngram_capacity=0"];
        assert_eq!(args.driver.options, expected);
        assert!(Args::try_parse_from([&line[..], &["--draft-output", "1"]].concat()).is_err());
    }
}
