//! Decode steps by batch size and context.

use std::collections::BTreeMap;
use std::ops::Range;

use pie_engine::{Capabilities, FrameBudget, FrameRow, Link, PreparedFrame, Probes, StepTiming};
use serde::Serialize;

use crate::args::StepsArgs;
use crate::context::{Context, prompt};
use crate::error::LoadError;
use crate::pages::PagePool;
use crate::summary::{Summary, mean, micros};
use crate::trace::clock_us;

/// One batch size and context.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) batch: u32,
    pub(crate) context: u32,
    /// Why there are no figures.
    pub(crate) skipped: Option<String>,
    #[serde(flatten)]
    pub(crate) figures: Option<Figures>,
    /// Means of the trace's events, in µs.
    pub(crate) trace_us: BTreeMap<String, f64>,
    #[serde(skip)]
    pub(crate) window: Range<f64>,
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
    /// Means of the probe steps, in µs.
    pub(crate) probes_us: Option<BTreeMap<&'static str, f64>>,
    /// p50 of the probe steps' round trips.
    pub(crate) probe_round_trip_us: Option<f64>,
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
        let longest = context + args.warm_up + args.steps + args.probe_steps;
        for &batch in &args.batch {
            let mut row = Row {
                batch,
                context,
                skipped: skip_reason(caps, batch, context, longest),
                figures: None,
                trace_us: BTreeMap::new(),
                window: 0.0..0.0,
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
        // A full frame has no place for the request that asks for probes.
        let has_place = row.batch < self.caps.max_forward_requests;
        let probe_steps = if has_place { self.args.probe_steps } else { 0 };
        let StepsArgs { warm_up, steps, .. } = *self.args;
        let all = self.several_steps(warm_up + steps, probe_steps)?;
        for context in &mut self.contexts {
            context.release(self.pool);
        }
        let (all, probed) = all.split_at((warm_up + steps) as usize);
        let timed = &all[warm_up as usize..];
        row.window = window(timed);
        row.samples = Samples::of(timed);
        Ok(figures(row, timed, probed))
    }

    /// Steps without a request that asks for probes, and then steps with one, in one series.
    fn several_steps(&mut self, plain: u32, probed: u32) -> Result<Vec<StepTiming>, LoadError> {
        let Self {
            link,
            pool,
            caps,
            contexts,
            ..
        } = self;
        let mut steps = 0..plain + probed;
        let mut exchanges = Vec::with_capacity(steps.len());
        link.end_series();
        link.pipeline(
            |link| {
                let step = steps.next();
                let with_probes = step.map(|step| step >= plain);
                with_probes
                    .map(|with_probes| prepare_step(link, caps, pool, contexts, with_probes))
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
    with_probes: bool,
) -> Result<PreparedFrame<'c>, LoadError> {
    for context in &mut *contexts {
        context.reserve(pool, caps.kv_page_size)?;
    }
    let turns = contexts.iter().map(Context::turn);
    let prepared = link.prepare(turns.chain(with_probes.then_some(FrameRow::EMPTY)))?;
    for (request, context) in contexts.iter_mut().enumerate() {
        context.advance(request);
    }
    Ok(prepared)
}

/// From the first step sent to the last one answered, by the clock of the trace.
fn window(timed: &[StepTiming]) -> Range<f64> {
    let sent = |step: Option<&StepTiming>| step.map_or(0.0, |step| clock_us(step.sent));
    let last = timed.last();
    sent(timed.first())..sent(last) + last.map_or(0.0, |step| micros(step.round_trip_ns))
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

fn figures(row: &Row, timed: &[StepTiming], probed: &[StepTiming]) -> Figures {
    let probes: Vec<Probes> = probed.iter().filter_map(|step| step.probes).collect();
    let probed = Samples::of(probed).round_trip_ns;
    Figures {
        steps: timed.len(),
        round_trip_us: Summary::of(&row.samples.round_trip_ns),
        client_us: Summary::of(&row.samples.client_ns),
        tokens_per_s: f64::from(row.batch) * timed.len() as f64 / row.samples.seconds(),
        request_bytes: timed.last().map_or(0, |step| step.request_bytes),
        fast: timed.iter().all(|step| step.probes.is_none()),
        probe_round_trip_us: (!probed.is_empty()).then(|| Summary::of(&probed).p50),
        probes_us: (!probes.is_empty()).then(|| probe_means(&probes)),
    }
}

fn probe_means(probes: &[Probes]) -> BTreeMap<&'static str, f64> {
    let of = |field: fn(&Probes) -> u32| mean(probes.iter().map(|probes| f64::from(field(probes))));
    BTreeMap::from([
        ("parse", of(|probes| probes.parse)),
        ("plan", of(|probes| probes.plan)),
        ("h2d", of(|probes| probes.h2d)),
        ("launch", of(|probes| probes.launch)),
        ("sync", of(|probes| probes.sync)),
        ("respond", of(|probes| probes.respond)),
    ])
}
