//! Random requests and events on a scheduler with a simulated driver.
//!
//! `PIE_SCHED_REQUESTS=1000000 cargo test --release -p pie-scheduler --test random -- --nocapture long` plays as many requests, with
//! `PIE_SCHED_SEED=8` others. A case that fails is shrunk and shown.

#[allow(dead_code, unreachable_pub, reason = "other tests use it, too")]
mod sim;

use std::cell::{Cell, RefCell};

use pie_kv_cache::radix::Policy as Eviction;
use pie_scheduler::{Config, FrameBytes, Limits, Policy};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use sim::{Event, Poison, Sim, TestRequest};

fn request() -> impl Strategy<Value = Event> {
    let lengths = (0_u8..3, 0_u8..24, 0_u8..12, 0_u8..24, 0_u8..3);
    let kinds = (
        prop_oneof![8 => Just(1_u8), 1 => 2_u8..4],
        prop::bool::weighted(0.2),
        prop::option::of(-2_i8..3),
        prop::option::of(0_u8..3),
        prop::option::weighted(0.2, 0_u8..3),
        (
            prop::option::weighted(0.1, 0_u16..3000),
            prop::option::weighted(0.1, 0_u16..3000),
        ),
    );
    let images = prop_oneof![
        3 => Just(Vec::new()),
        1 => prop::collection::vec((0_u8..12, 1_u8..14), 1..4),
    ];
    let flags = (
        prop::bool::weighted(0.2),
        prop::bool::weighted(0.3),
        prop::bool::weighted(0.3),
        prop::bool::weighted(0.3),
        prop::option::weighted(0.03, (0_u8..30, any::<bool>())),
        prop_oneof![2 => Just(0_u8), 1 => any::<u8>()],
    );
    let logprobs = (0_u8..5, prop::option::of(0_u8..30));
    let logprobs = prop_oneof![3 => Just((0, None)), 1 => logprobs];
    (lengths, kinds, flags, images, logprobs).prop_map(
        |(lengths, kinds, flags, images, logprobs)| {
            let (drafts, stops, strings, whole, poison, params_bytes) = flags;
            let (family, common, own, max_tokens, min_tokens) = lengths;
            let (samples, salt, priority, routing_key, session, (deadline, admit_by)) = kinds;
            Event::Submit(Box::new(TestRequest {
                family,
                common,
                own,
                max_tokens,
                min_tokens: min_tokens.min(max_tokens),
                samples,
                salt,
                priority,
                routing_key,
                session,
                deadline,
                admit_by,
                images,
                drafts,
                stops,
                strings,
                whole,
                params_bytes,
                poison: poison.map(|(from, kills)| Poison { from, kills }),
                logprobs,
            }))
        },
    )
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        20 => request(),
        30 => Just(Event::Schedule),
        30 => Just(Event::Answer),
        2 => any::<usize>().prop_map(Event::Abort),
        1 => any::<usize>().prop_map(Event::DropRow),
        1 => any::<bool>().prop_map(Event::StepFailed),
        1 => any::<bool>().prop_map(Event::DriverDied),
        1 => (0_u64..3).prop_map(Event::EndSession),
        1 => Just(Event::Flush),
        1 => (0_u16..2000).prop_map(Event::Wait),
    ]
}

fn policy() -> impl Strategy<Value = Policy> {
    prop_oneof![
        Just(Policy::Fcfs),
        Just(Policy::Lpm),
        Just(Policy::DfsWeight),
        Just(Policy::Lof),
        Just(Policy::Random),
        Just(Policy::RoutingKey),
    ]
}

fn config() -> impl Strategy<Value = Config> {
    let sizes = (1_u32..40, 1_u32..10, prop::option::weighted(0.3, 1_u32..6));
    let kinds = (
        policy(),
        0.0_f32..1.5,
        prop::bool::weighted(0.8),
        prop_oneof![
            Just(Eviction::Lru),
            Just(Eviction::Lfu),
            Just(Eviction::Priority)
        ],
        (0_u64..300, 0_u64..600, 0_u8..10),
    );
    let order = (
        prop::bool::weighted(0.4),
        any::<bool>(),
        prop::option::of(0_i32..2),
        0_u32..5,
        prop_oneof![4 => Just(0_u64), 1 => 1_u64..3000],
    );
    (sizes, kinds, order, any::<u64>()).prop_map(|(sizes, kinds, order, seed)| {
        let (chunk_tokens, max_running, max_queued) = sizes;
        let (policy, conservativeness, prefix_cache, eviction, (gap_us, step_us, gap_growth)) =
            kinds;
        let (priority, low_priority_first, preemption_threshold, max_overtakes, limit) = order;
        Config {
            policy,
            conservativeness,
            chunk_tokens,
            max_running,
            max_queued,
            gap_us,
            gap_growth,
            step_us,
            prefix_cache,
            eviction,
            kv_events: false,
            priority: priority && matches!(policy, Policy::Fcfs | Policy::Lof),
            low_priority_first,
            preemption_threshold,
            max_overtakes,
            running_limit_us: limit,
            stop_before_length: seed % 2 == 1,
            seed,
        }
    })
}

fn limits() -> impl Strategy<Value = Limits> {
    let pages = (4_u32..40, prop_oneof![Just(0_u32), 1_u32..30], 1_u32..6);
    let frame = (1_u32..40, 1_u32..8, 4_u32..80, 20_u32..80);
    let words = prop_oneof![Just(1 << 16), 3_u32..60];
    let params = prop_oneof![Just(u64::MAX), 1_u64..400];
    let bytes = (40_u32..600, 0_u32..9, 0_u32..5, 0_u32..4, 0_u32..30, params);
    let bytes = bytes.prop_map(|(max, row, token, page, mask, params)| FrameBytes {
        max,
        row,
        token,
        draft: token,
        page,
        listed: page.min(1),
        mask,
        params,
    });
    let bytes = prop_oneof![Just(FrameBytes::UNLIMITED), bytes];
    (pages, frame, words, bytes).prop_map(
        |((total_pages, host_pages, page_size), frame, max_logprob_words, bytes)| {
            let (max_forward_tokens, max_forward_requests, max_page_refs, max_model_len) = frame;
            Limits {
                total_pages,
                host_pages,
                page_size,
                max_forward_tokens,
                max_forward_requests,
                max_page_refs,
                max_image_bytes: 40,
                max_model_len,
                vocab_size: sim::rule::VOCAB,
                max_logprob_words,
                frame: bytes,
            }
        },
    )
}

fn case(events: usize) -> impl Strategy<Value = Case> {
    let events = prop::collection::vec(event(), 1..events);
    (config(), limits(), any::<u64>(), events)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_request_gets_the_expected_tokens((config, limits, seed, events) in case(150)) {
        Sim::new(config, limits, seed % 1000).play(&events);
    }
}

type Case = (Config, Limits, u64, Vec<Event>);

/// Plays a case. One that fails is made as small as it can be, and printed.
fn play<T: ValueTree<Value = Case>>(
    runner: &mut TestRunner,
    case: T,
    play: impl Fn(Case) -> Result<(), TestCaseError>,
) -> Result<(), Box<TestError<Case>>> {
    runner.run_one(case, play)?;
    Ok(())
}

fn runner(seed: u8) -> TestRunner {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let config = ProptestConfig {
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    };
    TestRunner::new_with_rng(config, rng)
}

/// `PIE_SCHED_REQUESTS` requests, ten thousand by default, of `PIE_SCHED_SEED`.
#[test]
fn long() {
    let number = |name: &str, default: usize| {
        let asked = std::env::var(name).ok();
        asked.map_or(default, |count| count.parse().expect("a number"))
    };
    let wanted = number("PIE_SCHED_REQUESTS", 10_000);
    let mut runner = runner(number("PIE_SCHED_SEED", 7) as u8);
    let requests = Cell::new(0);
    let tally = RefCell::new(sim::Tally::default());
    while requests.get() < wanted {
        let case = case(1000).new_tree(&mut runner).expect("a case");
        let played = play(&mut runner, case, |(config, limits, seed, events)| {
            let mut sim = Sim::new(config, limits, seed % 1000);
            sim.play(&events);
            let submits = events.iter().filter(|e| matches!(e, Event::Submit(_)));
            requests.set(requests.get() + submits.count());
            let mut tally = tally.borrow_mut();
            let counts = sim.tally.0.iter();
            counts.for_each(|(name, count)| tally.add(name, *count));
            tally.add("accepted drafts", sim.scheduler.stats().accepted);
            Ok(())
        });
        if let Err(error) = played {
            panic!("after {} requests: {error}", requests.get());
        }
    }
    let tally = tally.into_inner();
    eprintln!("{} requests: {:#?}", requests.get(), tally.0);
    // What never happens proves nothing.
    assert_eq!(tally.0.len(), 25);
    assert!(tally.0.values().all(|&count| count >= wanted as u64 / 1000));
}

/// With a rule that no abort may break, of hundreds of events one is left.
#[test]
fn a_case_that_fails_is_shrunk() {
    let mut runner = runner(1);
    let aborts = |events: &[Event]| events.iter().any(|e| matches!(e, Event::Abort(_)));
    let case = loop {
        let case = case(300).new_tree(&mut runner).expect("a case");
        if aborts(&case.current().3) {
            break case;
        }
    };
    let played = play(&mut runner, case, |(.., events)| {
        prop_assert!(!aborts(&events));
        Ok(())
    });
    let failed = played.map_err(|error| *error);
    let Err(TestError::Fail(_, (.., events))) = failed else {
        panic!("{failed:?}");
    };
    assert!(matches!(events[..], [Event::Abort(0)]), "{events:?}");
}
