//! Requests of mixed lengths with continuous batching.

use std::collections::VecDeque;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use pie_engine::{Capabilities, FrameBudget, FrameRow, Link, PreparedFrame, StepTiming};
use serde::{Deserialize, Serialize};

use crate::args::ThroughputArgs;
use crate::context::{Context, prompt};
use crate::error::LoadError;
use crate::pages::PagePool;
use crate::sampler::SamplerMix;
use crate::steps::Samples;
use crate::summary::Summary;

/// The lengths of the standard workload, by `lengths.py`.
pub(crate) const STANDARD: &str = include_str!("../lengths.json");

/// Prompt and output length of every request.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lengths {
    pub(crate) prompts: Vec<u32>,
    pub(crate) outputs: Vec<u32>,
}

impl Lengths {
    /// The file's, or the standard ones.
    pub(crate) fn load(args: &ThroughputArgs) -> Result<Self, LoadError> {
        let read = |path: &PathBuf| {
            fs::read_to_string(path).map_err(|source| LoadError::File {
                action: "cannot read",
                path: path.clone(),
                source,
            })
        };
        let text = args.lengths.as_ref().map(read).transpose()?;
        let lengths = Self::parse(text.as_deref().unwrap_or(STANDARD))?;
        Ok(lengths.first(args.requests.unwrap_or(usize::MAX)))
    }

    pub(crate) fn parse(text: &str) -> Result<Self, LoadError> {
        let wrong = |why: String| LoadError::Lengths(why);
        let lengths: Self = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        if lengths.prompts.len() != lengths.outputs.len() {
            return Err(wrong("there are not as many prompts as outputs".to_owned()));
        }
        let mut all = lengths.prompts.iter().chain(&lengths.outputs);
        if let Some(length) = all.find(|&length| !(1..=1_000_000).contains(length)) {
            return Err(wrong(format!("{length} is not from 1 to 1000000")));
        }
        Ok(lengths)
    }

    fn first(mut self, count: usize) -> Self {
        self.prompts.truncate(count);
        self.outputs.truncate(count);
        self
    }
}

/// The figures of one repeat.
#[derive(Debug, Serialize)]
pub(crate) struct Run {
    pub(crate) requests: usize,
    pub(crate) output_tokens: u64,
    pub(crate) seconds: f64,
    pub(crate) tokens_per_s: f64,
    /// Steps of one token each.
    pub(crate) decode: Share,
    /// Steps that brought prompts.
    pub(crate) with_prompts: Share,
    /// Between an answer and the next request.
    pub(crate) client_us: Summary,
    #[serde(skip)]
    pub(crate) record: Record,
}

/// What a kind of steps took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Share {
    pub(crate) steps: u32,
    /// Seconds of round trips.
    pub(crate) seconds: f64,
    /// Requests of all frames.
    pub(crate) requests: u64,
    /// Input tokens of all frames.
    pub(crate) tokens: u64,
}

/// Every step, in order.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Record {
    #[serde(flatten)]
    pub(crate) samples: Samples,
    pub(crate) requests: Vec<u32>,
    pub(crate) tokens: Vec<u32>,
}

impl Record {
    fn push(&mut self, exchange: &StepTiming) {
        self.samples.push(exchange);
        self.requests.push(exchange.requests);
        self.tokens.push(exchange.tokens);
    }
}

/// Plays the workload once.
pub(crate) fn play(
    link: &mut Link<'_>,
    caps: &Capabilities,
    lengths: &Lengths,
    sampler: &SamplerMix,
) -> Result<Run, LoadError> {
    let mut scheduler = Scheduler::new(caps, lengths, sampler)?;
    let mut record = Record::default();
    link.end_series();
    let started = Instant::now();
    link.pipeline(
        |link| scheduler.prepare(link),
        |exchange| record.push(exchange),
    )?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(figures(record, seconds, lengths))
}

fn figures(record: Record, seconds: f64, lengths: &Lengths) -> Run {
    let output_tokens = lengths
        .outputs
        .iter()
        .map(|&length| u64::from(length))
        .sum();
    let (mut decode, mut with_prompts) = (Share::default(), Share::default());
    let trips = record.samples.round_trip_ns.iter();
    for ((&trip, &requests), &tokens) in trips.zip(&record.requests).zip(&record.tokens) {
        let share = if tokens > requests {
            &mut with_prompts
        } else {
            &mut decode
        };
        share.steps += 1;
        share.seconds += trip as f64 / 1e9;
        share.requests += u64::from(requests);
        share.tokens += u64::from(tokens);
    }
    Run {
        requests: lengths.prompts.len(),
        output_tokens,
        seconds,
        tokens_per_s: output_tokens as f64 / seconds,
        decode,
        with_prompts,
        client_us: Summary::of(&record.samples.client_ns),
        record,
    }
}

/// Forms frames: every running context, and the next ones as far as they fit. Pages for a whole output are promised when
/// a context starts, so that none must be suspended.
pub(crate) struct Scheduler<'a> {
    caps: &'a Capabilities,
    waiting: VecDeque<Context>,
    running: Vec<Context>,
    pool: PagePool,
    promised: u32,
}

impl<'a> Scheduler<'a> {
    pub(crate) fn new(
        caps: &'a Capabilities,
        lengths: &Lengths,
        sampler: &SamplerMix,
    ) -> Result<Self, LoadError> {
        let waiting = lengths.prompts.iter().zip(&lengths.outputs).enumerate();
        let waiting = waiting.map(|(index, (&length, &output))| {
            let id = index as u64 + 1;
            let tokens = prompt(id, length, caps.vocab_size);
            Context::new(id, tokens, sampler.of(index), output)
        });
        let scheduler = Self {
            caps,
            waiting: waiting.collect(),
            running: Vec::new(),
            pool: PagePool::new(caps.total_pages),
            promised: 0,
        };
        scheduler
            .waiting
            .iter()
            .try_for_each(|context| scheduler.check(context))?;
        Ok(scheduler)
    }

    /// Whether a context can be served when nothing else runs.
    fn check(&self, context: &Context) -> Result<(), LoadError> {
        let (prompt, output) = (context.tokens(), context.remaining);
        let pages = context.lifetime_pages(self.caps.kv_page_size);
        let limits = [
            ("tokens in a frame", prompt, self.caps.max_forward_tokens),
            ("positions", prompt + output - 1, self.caps.max_model_len),
            ("pages", pages, self.caps.total_pages),
            ("pages in a frame", pages, self.caps.max_page_refs),
        ];
        match limits.into_iter().find(|(_, needed, limit)| needed > limit) {
            None => Ok(()),
            Some((what, needed, limit)) => Err(LoadError::NeverFits {
                prompt,
                output,
                why: format!("{needed} {what}, the driver has {limit}"),
            }),
        }
    }

    /// Makes the next frame and moves on past it; `None` when all is done.
    fn prepare<'c>(&mut self, link: &mut Link<'c>) -> Result<Option<PreparedFrame<'c>>, LoadError> {
        if !self.form()? {
            return Ok(None);
        }
        let prepared = link.prepare(self.turns())?;
        self.advance();
        Ok(Some(prepared))
    }

    pub(crate) fn turns(&self) -> impl Iterator<Item = FrameRow<'_>> + Clone {
        self.running.iter().map(Context::turn)
    }

    /// Forms the next frame; false when all is done.
    pub(crate) fn form(&mut self) -> Result<bool, LoadError> {
        let page_size = self.caps.kv_page_size;
        let mut budget = FrameBudget::new(self.caps);
        for context in &self.running {
            // Requests were only let in as far as all last pages fit.
            let _ = budget.reserve(context.tokens(), context.lifetime_pages(page_size));
        }
        while let Some(next) = self.waiting.front() {
            let pages = next.lifetime_pages(page_size);
            let promised = self.promised + pages;
            if promised > self.caps.total_pages || !budget.reserve(next.tokens(), pages) {
                break;
            }
            self.promised = promised;
            self.running.extend(self.waiting.pop_front());
        }
        for context in &mut self.running {
            context.reserve(&mut self.pool, page_size)?;
        }
        Ok(!self.running.is_empty())
    }

    /// Moves on before the frame is answered: only which token each context gets is not known. The pages of those that end
    /// by it are free for the next frame, which the driver computes after this one.
    pub(crate) fn advance(&mut self) {
        for (request, context) in self.running.iter_mut().enumerate() {
            context.advance(request);
        }
        self.let_go();
    }

    /// Ends the contexts that have all of their tokens.
    fn let_go(&mut self) {
        let page_size = self.caps.kv_page_size;
        for mut context in self
            .running
            .extract_if(.., |context| context.remaining == 0)
        {
            self.promised -= context.lifetime_pages(page_size);
            context.release(&mut self.pool);
        }
    }
}

#[cfg(test)]
mod tests;
