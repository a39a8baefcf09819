//! Plays the Pie runtime against a real driver process: spawns it as the runtime does, and sends the frames that the
//! runtime would send. The process, the frames and the token feedback are those of `pie-engine`; here are workloads and reports.
//!
//! | module | what it is |
//! |---|---|
//! | `args`, `config` | the command line, and the driver's settings made of it |
//! | `pages`, `context` | the runtime's state: free pages, sequences |
//! | `steps`, `throughput`, `drafts`, `sampler`, `prompts` | the workloads |
//! | `plans` | a test: the throughput workload's plan compared with that of the runtime's scheduler |
//! | `summary`, `report` | percentiles, tables and files |

mod args;
mod config;
mod context;
mod drafts;
mod error;
mod pages;
#[cfg(test)]
mod plans;
mod prompts;
mod report;
mod sampler;
mod steps;
mod summary;
mod throughput;

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;
use pie_engine::{Capabilities, Driver, FrameBuilder, Link, LogSink};

use crate::args::{Args, Workload};
use crate::error::LoadError;
use crate::report::Report;
use crate::throughput::Lengths;

fn main() -> ExitCode {
    match run(&Args::parse().complete()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pie_load: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), LoadError> {
    let lengths = Lengths::load(&args.throughput)?;
    let started = SystemTime::now().duration_since(UNIX_EPOCH);
    let started = started.map_or(0, |since| since.as_secs());
    let begin = Instant::now();
    let settings = config::settings(&args.driver)?;
    let mut driver = Driver::spawn(settings, log_sink(args.driver.log.as_deref())?)?;
    let caps = driver.wait_ready()?;
    let ready_s = begin.elapsed().as_secs_f64();
    print_start(&caps, ready_s);
    let client = driver.connect()?;
    let mut link = Link::new(&client, FrameBuilder::as_pie(caps.kv_page_size));
    let mut report = Report::new(args, caps.clone(), ready_s, started);
    let played = args
        .workloads
        .iter()
        .try_for_each(|workload| match workload {
            Workload::Steps => play_steps(&mut link, &caps, args, &mut report),
            Workload::Throughput => play_throughput(&mut link, &caps, args, &lengths, &mut report),
            Workload::Drafts => play_drafts(&mut link, &caps, args, &mut report),
        });
    let played = played.map_err(|error| match error {
        LoadError::Runtime(error) => driver.explain(error).into(),
        error => error,
    });
    report.exit = Some(driver.stop());
    report.print_exit();
    report.save()?;
    played
}

/// Writes the driver's log to a file, if there is a path.
fn log_sink(path: Option<&Path>) -> Result<LogSink, LoadError> {
    let Some(path) = path else {
        return Ok(Arc::new(|_: &str| ()));
    };
    let file = File::create(path).map_err(|source| LoadError::File {
        action: "cannot write",
        path: path.to_owned(),
        source,
    })?;
    Ok(Arc::new(move |line: &str| {
        // What a full disk loses is still shown after a failure.
        let _ = writeln!(&file, "{line}");
    }))
}

fn print_start(caps: &Capabilities, ready_s: f64) {
    println!(
        "{} ready in {ready_s:.1} s: {} pages of {} tokens, frames of up to {} requests, {} tokens, {} page references",
        caps.arch_name,
        caps.total_pages,
        caps.kv_page_size,
        caps.max_forward_requests,
        caps.max_forward_tokens,
        caps.max_page_refs
    );
}

fn play_steps(
    link: &mut Link<'_>,
    caps: &Capabilities,
    args: &Args,
    report: &mut Report<'_>,
) -> Result<(), LoadError> {
    println!("decode steps, {}", args.steps.sampler.name);
    report::print_row_head();
    steps::play(link, caps, &args.steps, |row| {
        report::print_row(&row);
        report.steps.push(row);
        report.save()
    })
}

fn play_throughput(
    link: &mut Link<'_>,
    caps: &Capabilities,
    args: &Args,
    lengths: &Lengths,
    report: &mut Report<'_>,
) -> Result<(), LoadError> {
    let sampler = &args.throughput.throughput_sampler;
    println!("throughput, {}", sampler.name);
    for repeat in 0..args.throughput.repeats as usize {
        let run = throughput::play(link, caps, lengths, sampler)?;
        report::print_run(repeat, &run);
        report.throughput.push(run);
        report.save()?;
    }
    Ok(())
}

fn play_drafts(
    link: &mut Link<'_>,
    caps: &Capabilities,
    args: &Args,
    report: &mut Report<'_>,
) -> Result<(), LoadError> {
    report::print_drafts_head(&args.drafts);
    drafts::play(link, caps, &args.drafts, |row| {
        report::print_drafts(&row);
        report.drafts.push(row);
        report.save()
    })
}
