//! Decode steps by batch size and context.

use pie_engine::{Capabilities, FrameBudget, Link, PreparedFrame, StepTiming};
use serde::Serialize;

use crate::args::StepsArgs;
use crate::context::{Context, prompt};
use crate::error::LoadError;
use crate::pages::PagePool;
use crate::summary::Summary;

/// One batch size and context.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) batch: u32,
    pub(crate) context: u32,
    /// Why there are no figures.
    pub(crate) skipped: Option<String>,
    #[serde(flatten)]
    pub(crate) figures: Option<Figures>,
    #[serde(skip)]
    pub(crate) samples: Samples,
}

/// What the timed steps of a row took.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    pub(crate) steps: usize,
    pub(crate) round_trip_us: Summary,
    pub(crate) client_us: Summary,
    pub(crate) tokens_per_s: f64,
    pub(crate) request_bytes: usize,
    /// Whether every answer was the fast reply.
    pub(crate) fast: bool,
}

/// Every timed step, in order.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Samples {
    pub(crate) round_trip_ns: Vec<u64>,
    pub(crate) client_ns: Vec<u64>,
}

impl Samples {
    fn of(exchanges: &[StepTiming]) -> Self {
        let mut samples = Self::default();
        for exchange in exchanges {
            samples.push(exchange);
        }
        samples
    }

    pub(crate) fn push(&mut self, exchange: &StepTiming) {
        self.round_trip_ns.push(exchange.round_trip_ns);
        self.client_ns.push(exchange.client_ns);
    }

    /// Seconds of all steps, with the load's own work.
    pub(crate) fn seconds(&self) -> f64 {
        let series = self.round_trip_ns.iter().chain(&self.client_ns);
        series.sum::<u64>() as f64 / 1e9
    }
}

/// Why the driver cannot serve `batch` contexts together, whose prompts of `prompt` tokens grow to `length`.
pub(crate) fn skip_reason(
    caps: &Capabilities,
    batch: u32,
    prompt: u32,
    length: u32,
) -> Option<String> {
    let pages = u64::from(batch) * u64::from(length.div_ceil(caps.kv_page_size));
    let limits = [
        ("tokens in a frame", prompt.into(), caps.max_forward_tokens),
        (
            "requests in a frame",
            batch.into(),
            caps.max_forward_requests,
        ),
        ("positions", length.into(), caps.max_model_len),
        ("pages", pages, caps.total_pages.min(caps.max_page_refs)),
    ];
    let (what, needed, limit) = limits
        .into_iter()
        .find(|&(_, needed, limit)| needed > u64::from(limit))?;
    Some(format!("{needed} {what}, the driver has {limit}"))
}

/// Plays every combination; `done` takes each row, so that a failure loses no earlier one.
pub(crate) fn play(
    link: &mut Link<'_>,
    caps: &Capabilities,
    args: &StepsArgs,
    mut done: impl FnMut(Row) -> Result<(), LoadError>,
) -> Result<(), LoadError> {
    let mut pool = PagePool::new(caps.total_pages);
    for &context in &args.context {
        let longest = context + args.warm_up + args.steps;
        for &batch in &args.batch {
            let mut row = Row {
                batch,
                context,
                skipped: skip_reason(caps, batch, context, longest),
                figures: None,
                samples: Samples::default(),
            };
            if row.skipped.is_none() {
                let mut player = Player {
                    link,
                    pool: &mut pool,
                    caps,
                    args,
                    contexts: Vec::new(),
                };
                row.figures = Some(player.play(&mut row)?);
            }
            done(row)?;
        }
    }
    Ok(())
}

struct Player<'a, 'c> {
    link: &'a mut Link<'c>,
    pool: &'a mut PagePool,
    caps: &'a Capabilities,
    args: &'a StepsArgs,
    contexts: Vec<Context>,
}

impl Player<'_, '_> {
    fn play(&mut self, row: &mut Row) -> Result<Figures, LoadError> {
        self.contexts = (0..row.batch as usize)
            .map(|index| {
                let id = index as u64 + 1;
                let tokens = prompt(id, row.context, self.caps.vocab_size);
                Context::new(id, tokens, self.args.sampler.of(index), u32::MAX)
            })
            .collect();
        prefill(self.link, self.caps, self.pool, &mut self.contexts)?;
        let all = self.several_steps(self.args.warm_up + self.args.steps)?;
        for context in &mut self.contexts {
            context.release(self.pool);
        }
        let timed = &all[self.args.warm_up as usize..];
        row.samples = Samples::of(timed);
        Ok(figures(row, timed))
    }

    /// Steps in one series.
    fn several_steps(&mut self, count: u32) -> Result<Vec<StepTiming>, LoadError> {
        let Self {
            link,
            pool,
            caps,
            contexts,
            ..
        } = self;
        let mut steps = 0..count;
        let mut exchanges = Vec::with_capacity(steps.len());
        link.end_series();
        link.pipeline(
            |link| {
                let step = steps.next();
                step.map(|_| prepare_step(link, caps, pool, contexts))
                    .transpose()
            },
            |exchange| exchanges.push(*exchange),
        )?;
        Ok(exchanges)
    }
}

/// One token for every context.
fn prepare_step<'c>(
    link: &mut Link<'c>,
    caps: &Capabilities,
    pool: &mut PagePool,
    contexts: &mut [Context],
) -> Result<PreparedFrame<'c>, LoadError> {
    for context in &mut *contexts {
        context.reserve(pool, caps.kv_page_size)?;
    }
    let prepared = link.prepare(contexts.iter().map(Context::turn))?;
    for (request, context) in contexts.iter_mut().enumerate() {
        context.advance(request);
    }
    Ok(prepared)
}

/// Stores the prompts, as many in a frame as the driver takes.
pub(crate) fn prefill(
    link: &mut Link<'_>,
    caps: &Capabilities,
    pool: &mut PagePool,
    contexts: &mut [Context],
) -> Result<(), LoadError> {
    let page_size = caps.kv_page_size;
    let mut rest = contexts;
    while !rest.is_empty() {
        let mut budget = FrameBudget::new(caps);
        let fit = rest
            .iter()
            .take_while(|context| budget.reserve(context.tokens(), context.pages_needed(page_size)))
            .count();
        let (now, later) = rest.split_at_mut(fit.max(1));
        for context in &mut *now {
            context.reserve(pool, page_size)?;
        }
        link.forward(now.iter().map(Context::turn))?;
        for (request, context) in now.iter_mut().enumerate() {
            let answer = link.reply();
            context.take(answer.tokens_of(request), answer.drafts_of(request));
        }
        rest = later;
    }
    Ok(())
}

fn figures(row: &Row, timed: &[StepTiming]) -> Figures {
    Figures {
        steps: timed.len(),
        round_trip_us: Summary::of(&row.samples.round_trip_ns),
        client_us: Summary::of(&row.samples.client_ns),
        tokens_per_s: f64::from(row.batch) * timed.len() as f64 / row.samples.seconds(),
        request_bytes: timed.last().map_or(0, |step| step.request_bytes),
        fast: timed.iter().all(|step| step.probes.is_none()),
    }
}
