//! The policy on simulated devices, clients and texts: drafts never cost throughput, and bring it where they can.
//!
//! Time is simulated, and random numbers come from seeds, so a run is the same on every machine.

mod common;

use std::time::Duration;

use common::Random;
use pie_speculation::{DraftProposal, Policy};

/// Rows that a step may be padded to, as those of the driver.
const GRAPH_SIZES: [usize; 22] = [
    1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256,
];
const NUM_DRAFTS: usize = 4;
/// Share of the throughput without drafts that must be left, probes included.
const KEPT: f64 = 0.98;

/// Seconds of a step by rows, KV tokens of all rows, and seconds since the start.
type Device = fn(f64, f64, f64) -> f64;
/// Seconds until a context's next request, by the tokens that it was answered and the drafts that were verified for it.
type Client = fn(f64, f64) -> f64;
/// Probability that a draft is right, by context and steps since the start.
type Text = fn(usize, usize) -> f64;

/// A device, its clients, and what they say.
struct World {
    contexts: usize,
    device: Device,
    noise: Noise,
    client: Client,
    text: Text,
}

#[derive(Clone, Copy, PartialEq)]
enum Noise {
    /// A few percent, as on a GPU.
    Quiet,
    /// Steps take up to several times as long, some twenty times, as where other processes want the cores, too.
    Busy,
}

impl Noise {
    fn factor(self, random: &mut Random) -> f64 {
        let spread = random.next() + random.next() + random.next() - 1.5;
        if self == Self::Quiet {
            return 1.0 + 0.03 * spread;
        }
        let outlier = if random.next() < 0.02 {
            1.0 + 19.0 * random.next()
        } else {
            1.0
        };
        (0.8 * spread).exp() * outlier
    }
}

struct Context {
    /// When its next request comes.
    ready: f64,
    kv: usize,
    drafts: usize,
    match_length: usize,
    /// It is another one after so many tokens.
    id: u64,
}

/// Tokens of a context until the next takes its place.
const LENGTH: usize = 600;

impl World {
    /// Tokens per second over so many seconds. The device's noise is what the policy sees; it does not count.
    fn run(&self, mut policy: Option<&mut Policy>, seconds: f64) -> f64 {
        let mut random = Random(0x2545_f491_4f6c_dd1d);
        let mut contexts: Vec<Context> = (0..self.contexts)
            .map(|index| Context {
                ready: 0.0,
                // They do not end together.
                kv: index * LENGTH / self.contexts,
                drafts: 0,
                match_length: 0,
                id: index as u64 + 1,
            })
            .collect();
        let (mut now, mut answered, mut tokens, mut lengths) = (0.0_f64, 0.0, 0.0, Vec::new());
        for step in 0.. {
            if now >= seconds {
                break;
            }
            let first = contexts
                .iter()
                .map(|context| context.ready)
                .fold(f64::MAX, f64::min);
            now = now.max(first);
            let batch: Vec<usize> = (0..contexts.len())
                .filter(|&at| contexts[at].ready <= now)
                .collect();
            let drafted: usize = batch.iter().map(|&at| contexts[at].drafts).sum();
            let rows = batch.len() + drafted;
            let seen: usize = batch
                .iter()
                .map(|&at| contexts[at].kv * (1 + contexts[at].drafts))
                .sum();
            let padded = GRAPH_SIZES
                .into_iter()
                .find(|&size| size >= rows)
                .expect("a graph size");
            let idle = now - answered;
            let busy = (self.device)(padded as f64, seen as f64, now);
            now += busy;
            let busy = busy * self.noise.factor(&mut random);
            let mut produced = 0;
            for &at in &batch {
                let rate = (self.text)(at, step);
                let context = &mut contexts[at];
                let right = (0..context.drafts)
                    .take_while(|_| random.next() < rate)
                    .count();
                if let Some(policy) = policy.as_deref_mut()
                    && context.drafts > 0
                {
                    let proposal = DraftProposal {
                        context: context.id,
                        match_length: context.match_length,
                        ..DraftProposal::default()
                    };
                    policy.verified(&proposal, context.drafts, right);
                }
                produced += 1 + right;
                context.kv += 1 + right;
                context.ready = now + (self.client)((1 + right) as f64, context.drafts as f64);
                context.drafts = 0;
                if context.kv >= LENGTH {
                    (context.kv, context.id) = (0, context.id + self.contexts as u64);
                }
            }
            tokens += produced as f64;
            if let Some(policy) = policy.as_deref_mut() {
                let offers: Vec<_> = batch
                    .iter()
                    .map(|&at| DraftProposal {
                        context: contexts[at].id,
                        match_length: 1 + (step + at) % 20,
                        drafts: NUM_DRAFTS,
                        ..DraftProposal::default()
                    })
                    .collect();
                let mut marks = Vec::new();
                policy.preselect(&offers, &mut marks);
                policy.choose(&offers, &mut lengths);
                for ((&at, offer), &drafts) in batch.iter().zip(&offers).zip(&lengths) {
                    contexts[at].drafts = drafts;
                    contexts[at].match_length = offer.match_length;
                }
                policy.timed(rows, drafted > 0, Duration::from_secs_f64(busy));
                let cycle = busy + idle.min(16.0 * busy);
                policy.answered(produced, Duration::from_secs_f64(cycle));
            }
            answered = now;
        }
        tokens / answered
    }

    /// Throughput with drafts by that without.
    fn ratio(&self, seconds: f64) -> f64 {
        let mut policy = Policy::new(NUM_DRAFTS, &GRAPH_SIZES);
        let with = self.run(Some(&mut policy), seconds);
        with / self.run(None, seconds)
    }
}

/// Small steps wait for the weights, large ones compute.
const GPU: Device = |rows, _, _| 1e-3 * (1.0 + rows / 400.0).max(rows / 40.0);
/// Every row costs, besides a part that all have in common.
const CPU: Device = |rows, _, _| 5e-3 + 3e-3 * rows;
/// A row costs by the KV that it reads.
const CPU_KV: Device = |rows, kv, _| 8e-3 + 1e-3 * rows + 2e-5 * kv;
/// Other processes come and go: for a while everything takes up to four times as long.
const LOADED: Device = |rows, kv, at| {
    let load = if (at / 20.0) as u64 % 3 == 1 {
        4.0
    } else {
        1.0
    };
    load * CPU(rows, kv, at)
};
/// Rows are all but free, then cost as much as the first; the device changes every half minute.
const CHANGING: Device = |rows, _, at| match (at / 30.0) as u64 % 2 {
    0 => 10e-3 + 0.1e-3 * rows,
    _ => 10e-3 * rows,
};
const AT_ONCE: Client = |_, _| 0.0;
/// The client works on every token.
const BY_TOKEN: Client = |tokens, _| 20e-3 * tokens;
/// The client works on every draft.
const BY_DRAFT: Client = |_, drafts| 2e-3 * drafts;
const BY_DRAFT_OF_GPU: Client = |_, drafts| 0.5e-3 * drafts;

const NEVER: Text = |_, _| 0.0;
const SELDOM: Text = |_, _| 0.3;
const OFTEN: Text = |_, _| 0.6;
const NEARLY_ALWAYS: Text = |_, _| 0.95;
/// Contexts repeat themselves for some steps in turns.
const IN_TURNS: Text = |context, step| {
    if (step / 300 + context).is_multiple_of(3) {
        0.95
    } else {
        0.05
    }
};
const TEXTS: [(&str, Text); 5] = [
    ("never", NEVER),
    ("seldom", SELDOM),
    ("often", OFTEN),
    ("nearly always", NEARLY_ALWAYS),
    ("in turns", IN_TURNS),
];

/// Holds the device to what it does without drafts, whatever the texts and the number of contexts, and to a gain in texts that
/// are nearly always foretold, of so many contexts.
fn check(device: Device, noise: Noise, client: Client, gains: [f64; 3]) {
    let mut failures = Vec::new();
    for (contexts, gain) in [1, 8, 32].into_iter().zip(gains) {
        for (name, text) in TEXTS {
            let world = World {
                contexts,
                device,
                noise,
                client,
                text,
            };
            let seconds = 12_000.0 * device(contexts as f64, 0.0, 0.0);
            // Whole minutes, for what changes with them.
            let minutes = (seconds / 60.0).ceil();
            let ratio = world.ratio(if minutes > 1.0 {
                60.0 * minutes
            } else {
                seconds
            });
            let least = if name == "nearly always" { gain } else { KEPT };
            if ratio < least {
                failures.push(format!(
                    "{ratio:.3} with {contexts} contexts, drafts right {name}"
                ));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn on_a_gpu() {
    check(GPU, Noise::Quiet, AT_ONCE, [4.0, 3.8, 1.25]);
}

#[test]
fn on_a_gpu_whose_clients_are_slow() {
    check(GPU, Noise::Quiet, BY_TOKEN, [KEPT; 3]);
    check(GPU, Noise::Quiet, BY_DRAFT_OF_GPU, [KEPT; 3]);
}

#[test]
fn on_a_busy_cpu() {
    check(CPU, Noise::Busy, AT_ONCE, [1.6, KEPT, KEPT]);
}

#[test]
fn on_a_busy_cpu_whose_clients_are_slow() {
    check(CPU, Noise::Busy, BY_TOKEN, [1.05, 1.1, 1.05]);
    check(CPU, Noise::Busy, BY_DRAFT, [1.1, KEPT, KEPT]);
}

#[test]
fn where_rows_cost_by_their_kv() {
    check(CPU_KV, Noise::Busy, AT_ONCE, [1.3, KEPT, KEPT]);
    check(CPU_KV, Noise::Busy, BY_TOKEN, [1.05, 1.1, KEPT]);
}

#[test]
fn where_other_processes_come_and_go() {
    check(LOADED, Noise::Busy, AT_ONCE, [1.6, KEPT, KEPT]);
    check(LOADED, Noise::Busy, BY_TOKEN, [1.05, 1.1, KEPT]);
}

#[test]
fn where_the_device_changes() {
    check(CHANGING, Noise::Busy, AT_ONCE, [1.5, 1.5, 1.5]);
    check(CHANGING, Noise::Busy, BY_TOKEN, [1.05, 1.1, 1.05]);
}
