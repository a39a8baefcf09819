//! Requests in a pool that is too small for all of them: what each step has.
//!
//! A column is a request: a number for tokens of its prompt, `.` for one token, `|` for its end.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{Write, stdout};

use pie_scheduler::{Config, FrameBytes, Limits, NewRequest, Outputs, Scheduler, StepOutput};

const REQUESTS: u64 = 12;

const LIMITS: Limits = Limits {
    total_pages: 40,
    host_pages: 64,
    page_size: 8,
    max_forward_tokens: 512,
    max_forward_requests: 8,
    max_page_refs: 4096,
    max_image_bytes: 0,
    max_model_len: 2048,
    vocab_size: 1000,
    max_logprob_words: 1 << 16,
    frame: FrameBytes::UNLIMITED,
};

fn main() -> Result<(), Box<dyn Error>> {
    let config = Config {
        chunk_tokens: 96,
        conservativeness: 0.0,
        ..Config::default()
    };
    let mut scheduler: Scheduler<()> = Scheduler::new(config, LIMITS, None)?;
    for id in 0..REQUESTS {
        let prompt = (0..40 + 25 * (id as u32 % 3)).map(|at| at * 7 % 990 + id as u32 % 2);
        let output = 20 + 15 * (id as u32 % 4);
        scheduler.submit(NewRequest::new(id, prompt.collect(), (), output))?;
    }
    let (mut out, mut outputs, mut now) = (stdout().lock(), Outputs::default(), 0);
    while let Some(step) = scheduler.schedule(now)? {
        let mut cells = BTreeMap::new();
        let (mut tokens, mut token_ends, copies) = (Vec::new(), vec![0], step.copies.len());
        for row in step.rows() {
            let cell = match row.tokens.len() {
                1 => ".".to_owned(),
                count => count.to_string(),
            };
            cells.insert(row.id, cell);
            tokens.extend(row.sampling.map(|()| row.tokens[0]));
            token_ends.push(tokens.len() as u32);
        }
        now += 1000 + 10 * u64::from(scheduler.stats().prompt_budget);
        let answer = StepOutput {
            tokens: &tokens,
            token_ends: &token_ends,
            ..StepOutput::default()
        };
        scheduler.process_output(now, &answer)?;
        scheduler.outputs(&mut outputs);
        for output in outputs.iter().filter(|output| output.finish.is_some()) {
            cells.insert(output.id, "|".to_owned());
        }
        let stats = scheduler.stats();
        write!(out, "{:4}", stats.steps)?;
        for id in 0..REQUESTS {
            write!(out, "{:>4}", cells.get(&id).map_or("", String::as_str))?;
        }
        writeln!(
            out,
            "   {:2} pages free, {:2} cached, {copies} copied, {} retractions",
            stats.free_pages, stats.cached_pages, stats.retractions
        )?;
    }
    let stats = scheduler.stats();
    writeln!(
        out,
        "{} requests in {} steps; {} of {} prompt tokens were there",
        stats.finished, stats.steps, stats.cached_tokens, stats.prompt_tokens
    )?;
    Ok(())
}
