//! The policy for a draft model on simulated devices: drafting never costs more than its budget against plain decoding, however wrong
//! its predictions are, and brings throughput where it can.
//!
//! Time is simulated, and random numbers come from seeds.

mod common;

use std::time::Duration;

use common::Random;
use pie_speculation::{DecodeStep, DraftProposal, Policy};
use proptest::prelude::*;

/// Rows that a step may be padded to, and those in which the draft model runs.
const SIZES: [usize; 22] = [
    1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256,
];
const MODEL_SIZES: usize = 19;
const NUM_DRAFTS: usize = 3;
/// Share of time that drafts and probes may lose, and plain steps that they may lose at the start.
const SHARE: f64 = 1.0 / 256.0;
const RESERVE: f64 = 8.0;

fn size(rows: usize) -> usize {
    SIZES.partition_point(|&size| size < rows)
}

/// A stretch of steps with the same load.
#[derive(Clone, Debug)]
struct Load {
    steps: usize,
    requests: usize,
    /// Probability that a draft is right, if those before it are.
    rate: f64,
    /// Seconds of a step without the draft model by size, and how many times as long one with it takes.
    plain: Vec<f64>,
    factors: Vec<f64>,
    /// Relative noise of times.
    noise: f64,
}

impl Load {
    /// One in which a step with the draft model takes `factor` times as long.
    fn new(requests: usize, rate: f64, factor: f64) -> Self {
        let seconds = |rows: usize| 1e-3 * (1.0 + rows as f64 / 400.0).max(rows as f64 / 40.0);
        Self {
            steps: 4000,
            requests,
            rate,
            plain: SIZES.map(seconds).to_vec(),
            factors: vec![factor; MODEL_SIZES],
            noise: 0.03,
        }
    }

    fn seconds(&self, rows: usize, ran_model: bool) -> f64 {
        let size = size(rows);
        self.plain[size] * if ran_model { self.factors[size] } else { 1.0 }
    }

    /// Tokens per second without drafts.
    fn speed(&self) -> f64 {
        self.requests as f64 / self.seconds(self.requests, false)
    }

    /// Tokens per second of the best number of drafts that is the same for all requests and steps, drafting in each.
    fn best_fixed(&self) -> f64 {
        let speed = |drafts: usize| {
            let rows = self.requests * (1 + drafts);
            let tokens: f64 = (0..=drafts).map(|draft| self.rate.powi(draft as i32)).sum();
            let fits = rows <= SIZES[MODEL_SIZES - 1];
            fits.then(|| self.requests as f64 * tokens / self.seconds(rows, true))
        };
        (1..=NUM_DRAFTS)
            .filter_map(speed)
            .fold(self.speed(), f64::max)
    }
}

/// What some steps gave.
#[derive(Clone, Copy, Debug, Default)]
struct Outcome {
    tokens: f64,
    seconds: f64,
    /// What plain decoding needs for as many tokens.
    plain: f64,
    /// The longest steps without and with the draft model.
    longest: [f64; 2],
    ran_model: usize,
    drafts: usize,
}

struct World {
    policy: Policy,
    random: Random,
    /// Drafts of each request that the next step verifies.
    drafts: Vec<usize>,
}

impl World {
    fn new() -> Self {
        let policy = Policy::for_model(NUM_DRAFTS, &SIZES, &SIZES[..MODEL_SIZES]);
        Self {
            policy,
            random: Random(0x2545_f491_4f6c_dd1d),
            drafts: Vec::new(),
        }
    }

    fn run(&mut self, load: &Load) -> Outcome {
        let mut outcome = Outcome::default();
        let requests = load.requests;
        self.drafts = vec![0; requests];
        let offers = |drafts: usize| -> Vec<_> {
            let offer = |context: usize| DraftProposal {
                context: context as u64 + 1,
                match_length: 1,
                drafts,
                ..DraftProposal::default()
            };
            (0..requests).map(offer).collect()
        };
        for _ in 0..load.steps {
            let rows = requests + self.drafts.iter().sum::<usize>();
            let captured = size(rows) < MODEL_SIZES;
            let expected = offers(NUM_DRAFTS);
            let ran_model = captured && self.policy.runs_model(&expected, rows, true);
            let seconds = load.seconds(rows, ran_model);
            let mut tokens = requests;
            for (offer, drafts) in expected.iter().zip(&mut self.drafts) {
                let right = (0..*drafts).take_while(|_| self.random.next() < load.rate);
                let right = right.count();
                if *drafts > 0 {
                    self.policy.verified(offer, *drafts, right);
                }
                tokens += right;
            }
            let offered = if ran_model { NUM_DRAFTS } else { 0 };
            let drafted = self.drafts.iter().sum::<usize>();
            self.drafts.fill(0);
            if captured {
                self.policy.choose(&offers(offered), &mut self.drafts);
            }
            let noise = 1.0 + load.noise * (2.0 * self.random.next() - 1.0);
            let time = Duration::from_secs_f64(seconds * noise);
            let step = DecodeStep {
                requests,
                rows,
                tokens,
                ran_model,
            };
            self.policy.decoded(step, time);
            if captured {
                self.policy.answered(tokens, time);
            }
            outcome.tokens += tokens as f64;
            outcome.seconds += seconds;
            outcome.plain += tokens as f64 / load.speed();
            let longest = &mut outcome.longest[usize::from(ran_model)];
            *longest = longest.max(seconds);
            outcome.ran_model += usize::from(ran_model);
            outcome.drafts += drafted;
        }
        outcome
    }
}

impl Outcome {
    fn speed(self) -> f64 {
        self.tokens / self.seconds
    }
}

#[test]
fn drafts_that_gain_are_taken() {
    for (requests, rate, factor) in [
        (1, 0.75, 1.3),
        (4, 0.75, 1.3),
        (16, 0.75, 1.3),
        (1, 0.9, 2.0),
    ] {
        let load = Load::new(requests, rate, factor);
        let mut world = World::new();
        world.run(&load);
        let found = world.run(&load).speed() / load.best_fixed();
        assert!(
            found > 0.92,
            "{found} of the best for {requests} at {rate} of {factor}"
        );
    }
}

#[test]
fn drafting_that_does_not_pay_ends() {
    for (requests, rate, factor) in [
        (1, 0.0, 1.3),
        (1, 0.75, 4.0),
        (8, 0.2, 1.5),
        (32, 0.0, 1.1),
        (64, 0.75, 1.3),
        (128, 0.9, 1.1),
        (200, 0.9, 1.1),
        (256, 0.9, 1.1),
    ] {
        let load = Load::new(requests, rate, factor);
        let mut world = World::new();
        let first = world.run(&load).speed() / load.speed();
        assert!(first > 0.99, "{first} for {requests} at {rate} of {factor}");
        let Outcome { ran_model, .. } = world.run(&load);
        assert!(
            ran_model < load.steps / 10,
            "{ran_model} of {} steps",
            load.steps
        );
    }
}

#[test]
fn a_full_batch_runs_no_draft_model() {
    let mut world = World::new();
    world.run(&Load::new(4, 0.9, 1.2));
    for requests in [128, 256] {
        world.drafts.clear();
        let full = world.run(&Load::new(requests, 0.9, 1.2));
        assert_eq!((full.drafts, full.ran_model), (0, 0));
    }
    let few = world.run(&Load::new(4, 0.9, 1.2));
    assert!(
        few.speed() > 1.5 * Load::new(4, 0.9, 1.2).speed(),
        "{few:?}"
    );
}

#[test]
fn drafting_is_tried_again() {
    for requests in [1, 4, 16] {
        let [wrong, right] = [0.0, 0.9].map(|rate| Load::new(requests, rate, 1.3));
        let mut world = World::new();
        world.run(&wrong);
        world.run(&wrong);
        world.run(&right);
        let found = world.run(&right).speed() / right.best_fixed();
        assert!(found > 0.95, "{found} of {requests} requests");
    }
}

#[test]
fn a_load_that_changes_is_followed() {
    for (rate, least) in [(0.0, 0.985), (0.85, 1.8)] {
        let mut world = World::new();
        let (mut seconds, mut plain) = (0.0, 0.0);
        for stretch in 0..24 {
            let mut load = Load::new(4, rate, 1.4);
            load.steps = 1000;
            // Other processes come and go.
            let slowness = if stretch % 3 == 1 { 2.5 } else { 1.0 };
            load.plain.iter_mut().for_each(|plain| *plain *= slowness);
            let outcome = world.run(&load);
            (seconds, plain) = (seconds + outcome.seconds, plain + outcome.plain);
        }
        let found = plain / seconds;
        assert!(found > least, "{found} of plain decoding at {rate}");
    }
}

#[test]
fn one_slow_step_does_not_end_it() {
    let load = Load::new(2, 0.8, 1.3);
    let mut world = World::new();
    let mut slow = load.clone();
    (slow.steps, slow.factors) = (1, vec![20.0; MODEL_SIZES]);
    while world.run(&slow).ran_model == 0 {}
    world.run(&load);
    let found = world.run(&load).speed() / load.best_fixed();
    assert!(found > 0.95, "{found}");
}

fn loads() -> impl Strategy<Value = Vec<Load>> {
    let device = (
        prop::collection::vec(0.0..1.0, SIZES.len()),
        prop::collection::vec(0.0..2.0, MODEL_SIZES),
        0.0..0.1,
    );
    let stretch = (
        500..3000_usize,
        prop_oneof![1..8_usize, 1..256_usize],
        0.0..1.0,
    );
    let stretches = prop::collection::vec(stretch, 1..5);
    (device, stretches).prop_map(|((rises, factors, noise), stretches)| {
        let plain = rises.iter().scan(1e-3, |seconds, rise| {
            // Flat, or by up to a third with each size.
            *seconds *= 1.0 + (rise - 0.5_f64).max(0.0) * 0.6;
            Some(*seconds)
        });
        let plain: Vec<f64> = plain.collect();
        // Up to 7.4 times as long.
        let factors: Vec<f64> = factors.into_iter().map(f64::exp).collect();
        let load = |(steps, requests, rate)| Load {
            steps,
            requests,
            rate,
            plain: plain.clone(),
            factors: factors.clone(),
            noise,
        };
        stretches.into_iter().map(load).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Costs of every size are anything, and so are acceptance and the number of requests, which change.
    #[test]
    fn it_never_loses_more_than_its_budget(loads in loads()) {
        let mut world = World::new();
        for load in &loads {
            let outcome = world.run(load);
            let lost = outcome.seconds - outcome.plain;
            // A step may overdraw it, and what is above the usual time of a size is not charged at once.
            let [plain, with_model] = outcome.longest;
            let budget = SHARE * outcome.seconds + RESERVE * plain + 3.0 * with_model;
            prop_assert!(lost <= budget, "{lost} s lost of {outcome:?}, which may lose {budget} s");
        }
    }
}
