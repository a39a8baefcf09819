//! The standard workload as this load generator plays it, and as the scheduler of the runtime does: steps, rows, and what they
//! would take on a GPU by a model of its costs. Nothing is timed.

use std::collections::VecDeque;

use pie_engine::Capabilities;
use pie_scheduler::{Config, FrameBytes, Limits, NewRequest, Outputs, Scheduler, StepOutput};

use crate::context::prompt;
use crate::sampler::SamplerMix;
use crate::throughput::{self, Lengths, STANDARD};

/// The capabilities of a driver with the Qwen3-0.6B shape on a GPU of 141 GB.
static CAPS: Capabilities = Capabilities {
    total_pages: 70_000,
    kv_page_size: 16,
    swap_pool_size: 0,
    max_forward_tokens: 121_300,
    max_forward_requests: 256,
    max_page_refs: 600_000,
    max_model_len: 40_960,
    vocab_size: 151_936,
    arch_name: String::new(),
    activation_dtype: String::new(),
    snapshot_dir: String::new(),
    rs_cache_slots: 0,
    system_speculation_supported: false,
    enable_system_speculation: false,
    embedding_size: 0,
    embedding_normalized: false,
    hidden_size: 0,
    embed_size: 0,
};

/// A step is laid out so long before the answer to the one in front of it, in µs.
const EARLY: u64 = 800;

/// Tokens of the largest graph, and of a pass without one.
const GRAPH: u32 = 2304;
const PASS: u32 = 16_384;

/// What was played.
#[derive(Debug, Default)]
struct Played {
    steps: u32,
    rows: u64,
    /// Steps with prompts.
    with_prompts: u32,
    output: u64,
    us: f64,
}

impl Played {
    /// Adds a step of rows: tokens and start of each. Returns what it takes in µs, by the figures of an H200 in
    /// the notebook. They are of steps of 1 and 256 rows, contexts of 512 and 2,048, and a prompt of 256 to 2,048 among 64 decodes.
    /// What prompts take follows from this workload's, in 2 frames and in 11: a frame that is no graph takes 24 ms besides its
    /// passes.
    fn add(&mut self, rows: impl Iterator<Item = (u32, u32)>) -> f64 {
        let (mut decodes, mut context, mut prompts) = (0, 0, 0);
        for (tokens, start) in rows {
            self.rows += 1;
            if tokens == 1 {
                decodes += 1;
                context += start;
            } else {
                prompts += tokens;
            }
        }
        let reading = 4.9 * f64::from(decodes) + 0.0255 * f64::from(context);
        let us = if decodes + prompts > GRAPH {
            let passes = (decodes + prompts).div_ceil(PASS);
            24_000.0 + 8000.0 * f64::from(passes) + 2.0 * f64::from(prompts)
        } else if prompts > 0 {
            1270.0 + 2.7 * f64::from(prompts)
        } else {
            870.0
        };
        self.steps += 1;
        self.with_prompts += u32::from(prompts > 0);
        self.us += reading + us;
        reading + us
    }

    fn tokens_per_s(&self) -> f64 {
        self.output as f64 / self.us * 1e6
    }
}

/// As the load generator plays it.
fn play_plan(lengths: &Lengths) -> Played {
    let sampler = SamplerMix::parse("greedy").unwrap();
    let mut plan = throughput::Scheduler::new(&CAPS, lengths, &sampler).unwrap();
    let mut played = Played::default();
    while plan.form().unwrap() {
        let turns = plan.turns();
        played.add(turns.map(|turn| (turn.tokens.len() as u32, turn.start)));
        plan.advance();
    }
    played.output = lengths.outputs.iter().map(|&count| u64::from(count)).sum();
    played
}

/// As the runtime does, with a step laid out ahead.
struct Runtime {
    scheduler: Scheduler<()>,
    now: u64,
    requests: u64,
}

impl Runtime {
    fn new(config: Config) -> Self {
        let limits = Limits {
            total_pages: CAPS.total_pages,
            host_pages: CAPS.swap_pool_size,
            page_size: CAPS.kv_page_size,
            max_forward_tokens: CAPS.max_forward_tokens,
            max_forward_requests: CAPS.max_forward_requests,
            max_page_refs: CAPS.max_page_refs,
            max_image_bytes: 0,
            max_model_len: CAPS.max_model_len,
            vocab_size: CAPS.vocab_size,
            max_logprob_words: 1 << 16,
            frame: FrameBytes::UNLIMITED,
        };
        Self {
            scheduler: Scheduler::new(config, limits, None).unwrap(),
            now: 0,
            requests: 0,
        }
    }

    /// Plays the workload once. `streams` says whether requests stream, `every_us` when they come.
    fn play(&mut self, lengths: &Lengths, streams: bool, every_us: u64) -> Played {
        let first = self.requests + 1;
        let both = lengths.prompts.iter().zip(&lengths.outputs);
        let mut coming = (first..)
            .zip(both)
            .map(|(id, (&length, &output))| NewRequest {
                streams,
                ..NewRequest::new(id, prompt(id, length, CAPS.vocab_size), (), output)
            });
        self.requests += lengths.prompts.len() as u64;
        let (mut next_at, mut played) = (self.now, Played::default());
        let (mut outputs, mut out) = (Outputs::default(), VecDeque::new());
        loop {
            let took = out.front().map_or(0, |(_, took)| *took);
            let laid_at = self.now + u64::saturating_sub(took, EARLY);
            while next_at <= laid_at
                && let Some(arrival) = coming.next()
            {
                self.scheduler.submit(arrival).unwrap();
                next_at += every_us;
            }
            if let Some(step) = self.scheduler.schedule(laid_at).unwrap() {
                let draws: Vec<u32> = step
                    .rows()
                    .map(|row| row.sampling.is_some().into())
                    .collect();
                let rows = step.rows().map(|row| (row.tokens.len() as u32, row.start));
                out.push_back((draws, played.add(rows) as u64));
                if out.len() == 1 {
                    continue;
                }
            }
            let Some((draws, took)) = out.pop_front() else {
                break;
            };
            self.now += took;
            played.output += self.answer(&draws, &mut outputs);
        }
        played
    }

    /// Answers a step. Returns the tokens that come out.
    fn answer(&mut self, draws: &[u32], outputs: &mut Outputs) -> u64 {
        let count: u32 = draws.iter().sum();
        let ends = (0..=draws.len() as u32).map(|row| row.min(count));
        let (tokens, ends) = (vec![7; count as usize], ends.collect::<Vec<u32>>());
        let answer = StepOutput {
            tokens: &tokens,
            token_ends: &ends,
            ..StepOutput::default()
        };
        self.scheduler.process_output(self.now, &answer).unwrap();
        self.scheduler.outputs(outputs);
        outputs
            .iter()
            .map(|output| output.tokens.len() as u64)
            .sum()
    }
}

fn config(gap_us: u64, step_us: u64) -> Config {
    Config {
        gap_us,
        step_us,
        chunk_tokens: PASS,
        ..Config::default()
    }
}

/// What does not stream needs no more steps than the load generator's plan, which knows every request beforehand, and no more
/// time by the model, but 1 %. Requests that come one after the other, as those whose texts are tokenized meanwhile, cost 4 %.
#[test]
fn the_schedulers_plan_is_as_short_as_the_load_generators() {
    let lengths = Lengths::parse(STANDARD).unwrap();
    let plan = play_plan(&lengths);
    assert_eq!((plan.steps, plan.with_prompts), (1025, 2));
    let play = |step_us, streams, every_us| {
        let mut runtime = Runtime::new(config(6000, step_us));
        // Before that it is not known what prompts cost.
        runtime.play(&lengths, streams, every_us);
        let played = runtime.play(&lengths, streams, every_us);
        let share = played.tokens_per_s() / plan.tokens_per_s();
        eprintln!("{step_us} {streams} {every_us}: {share:.3} of the plan's, {played:?}");
        assert_eq!(played.output, plan.output);
        (played, share)
    };
    eprintln!("plan: {:.0} tokens/s {plan:?}", plan.tokens_per_s());
    let (at_once, share) = play(2_000_000, false, 0);
    assert_eq!(at_once.steps, plan.steps);
    assert!(share >= 0.99);
    // 300 ms for all texts.
    let (coming, share) = play(2_000_000, false, 1200);
    assert!(coming.steps <= plan.steps + 8 && share >= 0.96);
    // A server's default.
    assert!(play(250_000, false, 0).1 >= 0.98);
    // Steps of a pass each, as they were.
    let (passes, share) = play(0, false, 0);
    assert!(passes.with_prompts >= 9 && share < 0.97);
    // Prompts come in parts next to streams, so that these continue.
    let (limited, _) = play(2_000_000, true, 0);
    assert!(limited.with_prompts > 2 * passes.with_prompts);
}
