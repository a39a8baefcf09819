//! The policy against simulated contexts and costs.

use super::*;

/// Rows of the graphs.
const SIZES: [usize; 14] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];
const MOST: usize = 8;

/// Pseudo-random numbers from 0 to 1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The proposal of a context by the length of its match.
fn matching(context: u64, match_length: usize) -> DraftProposal {
    DraftProposal {
        context,
        match_length,
        ..DraftProposal::default()
    }
}

/// Seconds of a step, by the rows of its graph.
type Curve = fn(f64) -> f64;

/// Small steps wait for the weights, large ones compute.
const ROOFLINE: Curve = |rows| 1e-3 * (1.0 + rows / 400.0).max(rows / 40.0);
const FLAT: Curve = |_| 1e-3;
/// Every row costs as much as the first.
const LINEAR: Curve = |rows| 1e-4 * rows;

struct World {
    /// Probability that a draft of each context is right.
    rates: Vec<f64>,
    curve: Curve,
    random: Random,
}

/// The gain of a stretch of steps.
#[derive(Clone, Copy, Default)]
struct Outcome {
    tokens: f64,
    seconds: f64,
    drafts: f64,
    rows: f64,
}

impl Outcome {
    fn speed(self) -> f64 {
        self.tokens / self.seconds
    }
}

impl World {
    fn new(rates: &[f64], curve: Curve) -> Self {
        Self {
            rates: rates.to_vec(),
            curve,
            random: Random(42),
        }
    }

    fn seconds(&mut self, rows: usize) -> f64 {
        let size = SIZES.into_iter().find(|&size| size >= rows);
        let noise = 0.95 + 0.1 * self.random.next();
        (self.curve)(size.expect("a graph") as f64) * noise
    }

    fn accepted(&mut self, context: usize, drafts: usize) -> usize {
        (0..drafts)
            .take_while(|_| self.random.next() < self.rates[context])
            .count()
    }

    /// Every context drafts `drafts` tokens in every step.
    fn fixed(&mut self, drafts: usize, steps: usize) -> Outcome {
        let mut outcome = Outcome::default();
        let contexts = self.rates.len();
        for _ in 0..steps {
            let accepted: usize = (0..contexts)
                .map(|context| self.accepted(context, drafts))
                .sum();
            outcome.tokens += (contexts + accepted) as f64;
            outcome.seconds += self.seconds(contexts * (1 + drafts));
        }
        outcome
    }

    /// The best that one length for all can do.
    fn best_fixed(&mut self, steps: usize) -> f64 {
        let contexts = self.rates.len();
        let largest = SIZES[SIZES.len() - 1];
        let lengths = (0..=MOST).filter(|drafts| contexts * (1 + drafts) <= largest);
        lengths
            .map(|drafts| self.fixed(drafts, steps).speed())
            .fold(0.0, f64::max)
    }

    fn run(&mut self, policy: &mut Policy, steps: usize) -> Outcome {
        let (mut outcome, mut lengths) = (Outcome::default(), Vec::new());
        for step in 0..steps {
            let offer = |context: usize| DraftProposal {
                context: context as u64 + 1,
                match_length: 1 + (step + context) % 20,
                drafts: MOST,
                ..DraftProposal::default()
            };
            let offers: Vec<_> = (0..self.rates.len()).map(offer).collect();
            policy.choose(&offers, &mut lengths);
            let (mut rows, mut tokens) = (offers.len(), 0);
            for (context, (offer, &drafts)) in offers.iter().zip(&lengths).enumerate() {
                let accepted = self.accepted(context, drafts);
                if drafts > 0 {
                    policy.verified(offer, drafts, accepted);
                }
                rows += drafts;
                tokens += 1 + accepted;
                outcome.drafts += drafts as f64;
            }
            let seconds = self.seconds(rows);
            outcome.tokens += tokens as f64;
            outcome.seconds += seconds;
            outcome.rows += rows as f64;
            let time = Duration::from_secs_f64(seconds);
            policy.timed(rows, false, time);
            policy.answered(tokens, time);
        }
        outcome
    }
}

fn policy() -> Policy {
    Policy::new(MOST, &SIZES)
}

#[test]
fn rejected_drafts_cost_nothing() {
    for curve in [ROOFLINE, FLAT, LINEAR] {
        for contexts in [1, 3, 8, 32, 64, 200, 256] {
            let mut world = World::new(&vec![0.0; contexts], curve);
            let (mut policy, steps) = (policy(), 3000);
            let plain = world.fixed(0, steps).speed();
            let first = world.run(&mut policy, steps);
            let gained = first.speed() / plain;
            assert!(
                gained > 0.98,
                "{gained} with {contexts} contexts from the start"
            );
            world.run(&mut policy, steps);
            let later = world.run(&mut policy, steps);
            let gained = later.speed() / plain;
            assert!(gained > 0.99, "{gained} with {contexts} contexts");
            assert!(
                later.drafts < 0.01 * later.rows,
                "{} of {} rows",
                later.drafts,
                later.rows
            );
            let Counters {
                quiet, requests, ..
            } = policy.counters();
            // With all rows of the largest graph taken nothing is ever tried.
            let tried = contexts < SIZES[SIZES.len() - 1];
            assert_eq!(quiet, if tried { requests } else { 0 });
        }
    }
}

#[test]
fn it_is_as_good_as_the_best_fixed_length() {
    let mixed = |count: usize| (0..count).map(|at| [0.95, 0.7, 0.3, 0.0][at % 4]).collect();
    let worlds: [Vec<f64>; 7] = [
        vec![0.9],
        vec![0.5; 4],
        vec![0.95; 16],
        vec![0.8; 64],
        mixed(8),
        mixed(32),
        mixed(64),
    ];
    for curve in [ROOFLINE, FLAT, LINEAR] {
        for rates in &worlds {
            let mut world = World::new(rates, curve);
            let best = world.best_fixed(2000);
            let mut policy = policy();
            world.run(&mut policy, 1000);
            let found = world.run(&mut policy, 4000).speed() / best;
            assert!(found > 0.96, "{found} of the best with {rates:?}");
        }
    }
}

#[test]
fn it_beats_every_fixed_length_when_contexts_differ() {
    let rates: Vec<_> = (0..32)
        .map(|at| if at % 2 == 0 { 0.98 } else { 0.02 })
        .collect();
    let mut world = World::new(&rates, ROOFLINE);
    let best = world.best_fixed(2000);
    let mut policy = policy();
    world.run(&mut policy, 1000);
    let found = world.run(&mut policy, 4000).speed() / best;
    assert!(found > 1.3, "{found}");
}

#[test]
fn a_quiet_context_is_probed_again() {
    let mut world = World::new(&[0.0; 4], ROOFLINE);
    let mut policy = policy();
    world.run(&mut policy, 3000);
    world.rates = vec![0.95; 4];
    world.run(&mut policy, 6000);
    let best = world.best_fixed(2000);
    let found = world.run(&mut policy, 1000).speed() / best;
    assert!(found > 0.95, "{found}");
    assert_eq!(policy.counters().quiet, 0);
}

#[test]
fn costs_are_separate_for_each_kind_of_step() {
    for kind in [StepKind::Probed, StepKind::Adapters] {
        let mut policy = policy();
        let chosen = |policy: &mut Policy, kind| {
            let mut lengths = Vec::new();
            policy.set_kind(kind);
            let offer = DraftProposal {
                drafts: 8,
                ..matching(1, 5)
            };
            policy.choose(&[offer], &mut lengths);
            lengths[0]
        };
        for _ in 0..50 {
            policy.verified(&matching(1, 5), 8, 8);
        }
        for rows in SIZES {
            policy.timed(rows, false, Duration::from_millis(1));
        }
        assert!(chosen(&mut policy, StepKind::Plain) > 2, "rows are free");
        assert_eq!(chosen(&mut policy, kind), 0, "nothing is known of these");
        for rows in [1, 2, 4, 8, 12].repeat(50) {
            policy.timed(rows, false, Duration::from_millis(30 * rows as u64));
        }
        assert_eq!(chosen(&mut policy, kind), 0, "a row is too dear");
        assert!(chosen(&mut policy, StepKind::Plain) > 2, "as before");
    }
}

#[test]
fn steps_with_drafts_may_have_their_own_cost() {
    let mut policy = policy();
    // Steps without drafts are graphs, however many contexts they are of.
    let chosen = |policy: &mut Policy, requests: usize, times: [u64; 2]| {
        let (mut lengths, mut drafted) = (Vec::new(), 0);
        let offers = vec![
            DraftProposal {
                drafts: 3,
                ..matching(1, 5)
            };
            requests
        ];
        for _ in 0..100 {
            policy.choose(&offers, &mut lengths);
            let drafts = lengths.iter().sum::<usize>();
            let milliseconds = times[usize::from(drafts > 0)];
            let time = Duration::from_millis(milliseconds);
            policy.timed(requests + drafts, drafts > 0, time);
            drafted += usize::from(drafts > 0);
        }
        drafted
    };
    (0..50).for_each(|_| policy.verified(&matching(1, 5), 3, 3));
    policy.set_kind(StepKind::Adapters);
    (0..50).for_each(|_| policy.timed(12, false, Duration::from_millis(5)));
    let dear = chosen(&mut policy, 9, [5, 30]);
    assert!(
        (1..=3).contains(&dear),
        "{dear} of 100 steps six times as long"
    );
    assert!(policy.cost(false).of(9, 9).is_some_and(|cost| cost < 6e-3));
    assert!(
        policy
            .cost(false)
            .of(16, 12)
            .is_some_and(|cost| cost < 6e-3),
        "steps without drafts are as long as they were"
    );
    policy.set_kind(StepKind::Probed);
    let cheap = chosen(&mut policy, 9, [5, 8]);
    assert!(
        cheap > 80,
        "{cheap} of 100 steps of four tokens, not twice as long"
    );
}

#[test]
fn drafts_go_to_those_who_use_them() {
    let mut world = World::new(&[0.95, 0.05], LINEAR);
    let mut policy = policy();
    world.run(&mut policy, 2000);
    policy.costs[0].alone = StepCost::new(&SIZES);
    policy.timed(2, false, Duration::from_millis(1));
    policy.timed(4, false, Duration::from_millis(1));
    let offers = [1, 2].map(|context| DraftProposal {
        drafts: 8,
        ..matching(context, 5)
    });
    let mut lengths = Vec::new();
    policy.choose(&offers, &mut lengths);
    assert_eq!(lengths, [6, 0], "the free rows and the next graph size");
    policy.timed(8, false, Duration::from_millis(3));
    policy.choose(&offers, &mut lengths);
    assert_eq!(lengths, [2, 0], "the free rows");
}

#[test]
fn no_more_drafts_than_proposed() {
    let mut policy = Policy::new(3, &SIZES);
    let mut lengths = vec![7];
    policy.choose(&[], &mut lengths);
    assert_eq!(lengths, []);
    for rows in SIZES {
        policy.timed(rows, false, Duration::from_millis(1));
    }
    let offer = |drafts| DraftProposal {
        drafts,
        ..matching(1, 4)
    };
    policy.choose(&[offer(0), offer(2), offer(9)], &mut lengths);
    assert_eq!(lengths, [0, 2, 3]);
    policy.choose(&[offer(9); 300], &mut lengths);
    assert_eq!(lengths, [0; 300], "no graph is as large");
    policy.choose(&[offer(9); 200], &mut lengths);
    assert_eq!(
        lengths.iter().sum::<usize>(),
        56,
        "the rows that the largest has left"
    );
    let mut none = Policy::new(0, &SIZES);
    none.timed(4, false, Duration::from_millis(1));
    for _ in 0..1000 {
        none.choose(&[offer(9); 4], &mut lengths);
        assert_eq!(lengths, [0; 4]);
    }
}

#[test]
fn the_same_history_gives_the_same_choices() {
    let run = || {
        let mut policy = policy();
        let outcome = World::new(&[0.9, 0.4, 0.0], ROOFLINE).run(&mut policy, 500);
        (outcome.tokens, outcome.drafts, policy.counters())
    };
    assert_eq!(run(), run());
}

#[test]
fn counters_make_a_line() {
    let mut policy = policy();
    policy.verified(&matching(1, 3), 4, 3);
    policy.verified(&matching(1, 3), 2, 9);
    let mut lengths = Vec::new();
    policy.choose(
        &[DraftProposal {
            drafts: 1,
            ..matching(1, 3)
        }],
        &mut lengths,
    );
    let line = "5 of 6 drafts accepted (83 %) in 1 steps, 0 probes, 0 of 1 contexts quiet";
    assert_eq!(policy.counters().to_string(), line);
}

#[test]
fn probes_are_round_robin() {
    let mut world = World::new(&[0.0; 5], ROOFLINE);
    let mut policy = policy();
    world.run(&mut policy, 3000);
    let offers: Vec<_> = (1..=5)
        .map(|context| DraftProposal {
            drafts: 8,
            ..matching(context, 5)
        })
        .collect();
    let (mut lengths, mut probes) = (Vec::new(), [0; 5]);
    for _ in 0..5000 {
        policy.choose(&offers, &mut lengths);
        for (probes, length) in probes.iter_mut().zip(&lengths) {
            *probes += length;
        }
        policy.timed(
            5 + lengths.iter().sum::<usize>(),
            false,
            Duration::from_millis(1),
        );
    }
    let fewest = probes.iter().min().copied().unwrap_or(0);
    assert!(
        fewest > 30 && probes.iter().all(|&count| count <= fewest + 1),
        "{probes:?}"
    );
}

#[test]
fn preselection_keeps_likely_drafts() {
    let mut policy = Policy::new(MOST, &SIZES);
    let offers = |lengths: [usize; 4]| {
        [1, 2, 3, 4]
            .into_iter()
            .zip(lengths)
            .map(|(context, match_length)| DraftProposal {
                context,
                match_length,
                drafts: usize::from(match_length > 0),
                ..DraftProposal::default()
            })
            .collect::<Vec<_>>()
    };
    let mut marks = Vec::new();
    // Of costs nothing is known yet.
    policy.preselect(&offers([3, 3, 0, 3]), &mut marks);
    assert_eq!(marks, [true; 4]);
    policy.timed(4, false, Duration::from_millis(1));
    policy.timed(8, false, Duration::from_millis(2));
    for _ in 0..400 {
        policy.verified(&matching(1, 3), 4, 4);
        policy.verified(&matching(2, 3), 4, 0);
        policy.verified(&matching(4, 3), 4, 0);
    }
    let mut marked = [0; 4];
    for _ in 0..2000 {
        let offered = offers([3, 3, 0, 3]);
        policy.preselect(&offered, &mut marks);
        for (marked, &mark) in marked.iter_mut().zip(&marks) {
            *marked += usize::from(mark);
        }
        // Where it does not listen nothing is drafted.
        let drafted = offered
            .iter()
            .zip(&marks)
            .map(|(offer, &mark)| DraftProposal {
                drafts: if mark { offer.drafts } else { 0 },
                ..*offer
            });
        let drafted: Vec<_> = drafted.collect();
        policy.choose(&drafted, &mut Vec::new());
        let silent = drafted.iter().filter(|offer| offer.drafts == 0).count() - 1;
        assert!(policy.counters().quiet >= silent);
        policy.timed(4, false, Duration::from_millis(1));
    }
    assert_eq!((marked[0], marked[2]), (2000, 0));
    assert!(
        (1..200).contains(&marked[1]) && (1..200).contains(&marked[3]),
        "{marked:?}"
    );
    // There is no graph for one row more.
    policy.timed(256, false, Duration::from_millis(1));
    policy.preselect(&offers([3; 4]).repeat(64), &mut marks);
    assert_eq!(marks, [false; 256]);
}

#[test]
fn probes_are_round_robin_with_few_requests() {
    let mut policy = Policy::new(MOST, &SIZES);
    for context in [1, 3] {
        (0..400).for_each(|_| policy.verified(&matching(context, 3), 4, 0));
    }
    policy.timed(4, false, Duration::from_millis(1));
    policy.timed(8, false, Duration::from_millis(2));
    let (mut marked, mut marks) = ([0; 4], Vec::new());
    for _ in 0..5000 {
        // The others do not ask for drafts.
        let mut offers = [0, 1, 0, 3].map(|context| DraftProposal {
            drafts: usize::from(context > 0),
            ..matching(context, 3)
        });
        policy.preselect(&offers, &mut marks);
        for (request, offer) in offers.iter_mut().enumerate() {
            marked[request] += usize::from(marks[request]);
            offer.drafts *= usize::from(marks[request]);
        }
        policy.choose(&offers, &mut Vec::new());
        policy.timed(4, false, Duration::from_millis(1));
        policy.timed(8, false, Duration::from_millis(2));
    }
    assert_eq!((marked[0], marked[2]), (0, 0));
    assert!(
        marked[1].min(marked[3]) > 5 && marked[1].abs_diff(marked[3]) < 5,
        "{marked:?}"
    );
}
