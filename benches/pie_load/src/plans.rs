//! The standard workload as this load generator plays it, and as the scheduler of the runtime does: steps, rows, and what they
//! would take on a GPU by a model of its costs. Nothing is timed.

use pie_runtime::Capabilities;
use pie_sched::{Answer, Arrival, Config, Limits, Outputs, Scheduler};

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
};

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
    /// the notebook. They are of steps of 1 and 256 rows, contexts of 512 and 2,048, passes of 8,192 and 16,384 tokens, and a
    /// prompt of 256 to 2,048 among 64 decodes.
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
            8000.0 * f64::from(passes) + 1.53 * f64::from(prompts)
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

/// As the runtime does, with a step laid out ahead. `streams` says whether requests stream, `every_us` when they come.
fn play_scheduler(lengths: &Lengths, config: Config, streams: bool, every_us: u64) -> Played {
    let limits = Limits {
        total_pages: CAPS.total_pages,
        host_pages: CAPS.swap_pool_size,
        page_size: CAPS.kv_page_size,
        max_forward_tokens: CAPS.max_forward_tokens,
        max_forward_requests: CAPS.max_forward_requests,
        max_page_refs: CAPS.max_page_refs,
        max_model_len: CAPS.max_model_len,
        vocab_size: CAPS.vocab_size,
    };
    let mut scheduler = Scheduler::new(config, limits, None).unwrap();
    let both = lengths.prompts.iter().zip(&lengths.outputs);
    let mut coming = (0..).zip(both).map(|(id, (&length, &output))| Arrival {
        streams,
        ..Arrival::new(id, prompt(id + 1, length, CAPS.vocab_size), (), output)
    });
    let (mut now, mut next_at, mut played) = (0, 0, Played::default());
    let (mut outputs, mut out) = (Outputs::default(), std::collections::VecDeque::new());
    loop {
        while next_at <= now
            && let Some(arrival) = coming.next()
        {
            scheduler.submit(arrival).unwrap();
            next_at += every_us;
        }
        if let Some(step) = scheduler.step(now).unwrap() {
            let draws: Vec<u32> = step
                .rows()
                .map(|row| row.sampling.is_some().into())
                .collect();
            let took = played.add(step.rows().map(|row| (row.tokens.len() as u32, row.start)));
            out.push_back((draws, took as u64));
            if out.len() == 1 {
                continue;
            }
        }
        let Some((draws, took)) = out.pop_front() else {
            break;
        };
        now += took;
        let count: u32 = draws.iter().sum();
        let ends = (0..=draws.len() as u32).map(|row| row.min(count));
        let (tokens, ends) = (vec![7; count as usize], ends.collect::<Vec<u32>>());
        let answer = Answer {
            tokens: &tokens,
            token_ends: &ends,
            ..Answer::default()
        };
        scheduler.answer(now, &answer).unwrap();
        scheduler.outputs(&mut outputs);
        let new = outputs.iter().map(|output| output.tokens.len() as u64);
        played.output += new.sum::<u64>();
    }
    played
}

fn config(gap_us: u64, chunk_tokens: u32) -> Config {
    Config {
        gap_us,
        chunk_tokens,
        ..Config::default()
    }
}

/// What does not stream needs no more steps than the load generator's plan, which knows every request beforehand, and no more
/// time by the model, but 1 %.
#[test]
fn the_schedulers_plan_is_as_short_as_the_load_generators() {
    let lengths = Lengths::parse(STANDARD).unwrap();
    let plan = play_plan(&lengths);
    assert_eq!(plan.steps, 1025);
    let limited = play_scheduler(&lengths, config(6000, PASS), true, 0);
    let [at_once, coming] =
        [0, 20].map(|every_us| play_scheduler(&lengths, config(6000, PASS), false, every_us));
    for (name, played) in [
        ("plan", &plan),
        ("streams", &limited),
        ("at once", &at_once),
        ("coming", &coming),
    ] {
        eprintln!("{name}: {:.0} tokens/s {played:?}", played.tokens_per_s());
        assert_eq!(played.output, plan.output);
    }
    for played in [&at_once, &coming] {
        assert!(f64::from(played.steps) <= 1.01 * f64::from(plan.steps));
        assert!(played.tokens_per_s() >= 0.99 * plan.tokens_per_s());
    }
    // Prompts come in parts next to streams, so that these go on.
    assert!(limited.with_prompts > 2 * at_once.with_prompts);
}
