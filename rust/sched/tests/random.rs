//! Random requests and events on a scheduler with a simulated driver.
//!
//! `PIE_SCHED_REQUESTS=1000000 cargo test --release -p pie-sched --test random -- --nocapture long` plays as many requests.

#[allow(dead_code, unreachable_pub, reason = "other tests use it, too")]
mod sim;

use pie_radix::Policy as Eviction;
use pie_sched::{Config, Limits, Policy};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use sim::{Ask, Event, Sim};

fn ask() -> impl Strategy<Value = Event> {
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
    );
    (lengths, kinds, flags, images).prop_map(|(lengths, kinds, flags, images)| {
        let (drafts, stops, strings, whole) = flags;
        let (family, common, own, max_tokens, min_tokens) = lengths;
        let (samples, salt, priority, routing_key, session, (deadline, admit_by)) = kinds;
        Event::Submit(Box::new(Ask {
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
        }))
    })
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        20 => ask(),
        30 => Just(Event::Lay),
        30 => Just(Event::Answer),
        2 => any::<usize>().prop_map(Event::Abort),
        1 => any::<usize>().prop_map(Event::Refuse),
        1 => any::<bool>().prop_map(Event::Fail),
        1 => Just(Event::Die),
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
        0_u64..300,
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
        let (policy, conservativeness, prefix_cache, eviction, gap_us) = kinds;
        let (priority, low_priority_first, preemption_threshold, max_overtakes, limit) = order;
        Config {
            policy,
            conservativeness,
            chunk_tokens,
            max_running,
            max_queued,
            gap_us,
            prefix_cache,
            eviction,
            priority: priority && matches!(policy, Policy::Fcfs | Policy::Lof),
            low_priority_first,
            preemption_threshold,
            max_overtakes,
            running_limit_us: limit,
            seed,
        }
    })
}

fn limits() -> impl Strategy<Value = Limits> {
    let pages = (4_u32..40, prop_oneof![Just(0_u32), 1_u32..30], 1_u32..6);
    let frame = (1_u32..40, 1_u32..8, 4_u32..80, 20_u32..80);
    (pages, frame).prop_map(|((total_pages, host_pages, page_size), frame)| {
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
        }
    })
}

fn case(events: usize) -> impl Strategy<Value = (Config, Limits, u64, Vec<Event>)> {
    let events = prop::collection::vec(event(), 1..events);
    (config(), limits(), any::<u64>(), events)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_request_gets_the_tokens_of_the_rule((config, limits, seed, events) in case(150)) {
        Sim::new(config, limits, seed % 1000).play(&events);
    }
}

/// `PIE_SCHED_REQUESTS` requests, ten thousand by default.
#[test]
fn long() {
    let asked = std::env::var("PIE_SCHED_REQUESTS").ok();
    let wanted: usize = asked.map_or(10_000, |count| count.parse().expect("a number of requests"));
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[11; 32]);
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
    let (mut requests, mut tally) = (0, sim::Tally::default());
    while requests < wanted {
        let case = case(3000).new_tree(&mut runner).expect("a case");
        let (config, limits, seed, events) = case.current();
        let mut sim = Sim::new(config, limits, seed % 1000);
        sim.play(&events);
        requests += events
            .iter()
            .filter(|event| matches!(event, Event::Submit(_)))
            .count();
        let counts = sim.tally.0.iter();
        counts.for_each(|(name, count)| tally.add(name, *count));
        let stats = sim.scheduler.stats();
        tally.add("accepted drafts", stats.accepted);
    }
    eprintln!("{requests} requests: {:#?}", tally.0);
    // What never happens proves nothing.
    assert_eq!(tally.0.len(), 18);
    assert!(tally.0.values().all(|&count| count >= wanted as u64 / 1000));
}
