//! Plays the Pie runtime against a real driver process: spawns it as the runtime does, reads its handshake, opens the
//! ring as its client and sends the frames that the runtime would send.
//!
//! | module | what it is |
//! |---|---|
//! | `args`, `config` | the command line, and the driver's configuration made of it |
//! | `driver`, `handshake` | the process: spawned, watched, stopped; what it announces |
//! | `pages`, `context`, `frame` | the runtime's state: free pages, sequences, frames |
//! | `link`, `answer` | one frame there, the next one prepared meanwhile, one answer back, with their times |
//! | `steps`, `throughput`, `drafts`, `sampler`, `prompts` | the workloads |
//! | `summary`, `trace`, `report` | percentiles, the driver's own trace, tables and files |

mod answer;
mod args;
mod config;
mod context;
mod drafts;
mod driver;
mod error;
mod frame;
mod handshake;
mod link;
mod pages;
mod prompts;
mod report;
mod sampler;
mod steps;
mod summary;
mod throughput;
mod trace;

use std::fs;
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;

use crate::args::{Args, Workload};
use crate::driver::Driver;
use crate::error::LoadError;
use crate::handshake::Capabilities;
use crate::link::Link;
use crate::report::Report;
use crate::throughput::Lengths;
use crate::trace::Trace;

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
    let (driver, pipe) = Driver::spawn(&args.driver)?;
    let caps = driver.wait_ready(pipe)?;
    let ready_s = begin.elapsed().as_secs_f64();
    print_start(&caps, ready_s);
    let client = driver.connect()?;
    let mut link = Link::new(&client, caps.kv_page_size);
    let mut report = Report::new(args, caps.clone(), ready_s, started);
    let played = args
        .workloads
        .iter()
        .try_for_each(|workload| match workload {
            Workload::Steps => play_steps(&mut link, &caps, args, &mut report),
            Workload::Throughput => play_throughput(&mut link, &caps, args, &lengths, &mut report),
            Workload::Drafts => play_drafts(&mut link, &caps, args, &mut report),
        });
    let played = played.map_err(|error| driver.explain(error));
    report.exit = Some(driver.stop());
    if let Some(path) = driver.trace() {
        match fs::read_to_string(path).map(|text| Trace::parse(&text)) {
            Ok(Ok(trace)) => report.add_trace(&trace),
            Ok(Err(error)) => eprintln!("the driver's trace cannot be read: {error}"),
            Err(error) => eprintln!("the driver left no trace: {error}"),
        }
    }
    report.print_rest();
    report.save()?;
    played
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
