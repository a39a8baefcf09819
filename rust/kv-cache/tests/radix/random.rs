//! Random steps on an index that is held to the dictionary of all prefixes.
//!
//! `PIE_RADIX_STEPS=10000000 cargo test --release -p pie-kv-cache --test radix_random -- --nocapture long` takes as many steps.

#[allow(unreachable_pub, reason = "fuzz targets use it, too")]
mod model;

use std::time::Instant;

use model::{Model, Step, Text};
use pie_kv_cache::radix::{Config, InsertParams, Policy};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

/// Tokens of a text, few enough to meet again.
fn text() -> impl Strategy<Value = Text> {
    let namespace = prop_oneof![
        4 => Just(None),
        1 => Just(Some("lora-1".to_string())),
        1 => Just(Some("salt".to_string())),
    ];
    let token = prop_oneof![8 => 0_u32..2, 1 => 0_u32..70_000, 1 => any::<u32>()];
    let common = (0_usize..14, prop::collection::vec(token, 0..8));
    (namespace, common).prop_map(|(namespace, (shared, own))| {
        let shared = (0..shared as u32).map(|at| at * at % 7 + 100_000);
        Text {
            namespace,
            tokens: shared.chain(own).collect(),
        }
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (text(), any::<bool>()).prop_map(|(text, locks)| Step::Match { text, locks }),
        10 => (text(), -2_i32..3, any::<bool>(), any::<bool>()).prop_map(|(text, priority, chunked, after)| {
            let how = InsertParams { priority, chunked, ..InsertParams::default() };
            Step::Insert { text, how, after }
        }),
        2 => text().prop_map(Step::Lock),
        6 => any::<usize>().prop_map(Step::Unlock),
        2 => (0_usize..20).prop_map(Step::Evict),
        3 => (0_usize..20, 0_usize..20).prop_map(|(pages, host_pages)| Step::EvictToHost { pages, host_pages }),
        1 => (0_usize..10).prop_map(Step::EvictHost),
        2 => text().prop_map(Step::Backup),
        3 => text().prop_map(Step::Load),
        1 => Just(Step::Merge),
        1 => prop_oneof![30 => Just(Step::Merge), 1 => Just(Step::Reset)],
    ]
}

fn config() -> impl Strategy<Value = Config> {
    let policy = prop::sample::select(vec![
        Policy::Lru,
        Policy::Lfu,
        Policy::Fifo,
        Policy::Filo,
        Policy::Mru,
        Policy::Slru,
        Policy::Priority,
    ]);
    let page_size = prop_oneof![Just(1_u32), Just(2), Just(3), Just(5), Just(16)];
    (policy, page_size, any::<bool>(), any::<bool>()).prop_map(
        |(policy, page_size, bigram, events)| Config {
            page_size,
            policy,
            bigram,
            events,
            ..Config::default()
        },
    )
}

fn case(steps: usize) -> impl Strategy<Value = (Config, u32, u32, Vec<Step>)> {
    (
        config(),
        20_u32..60,
        0_u32..40,
        prop::collection::vec(step(), 1..steps),
    )
}

fn play(config: Config, device: u32, host: u32, steps: &[Step]) {
    let mut model = Model::new(config, device, host);
    for step in steps {
        model.step(step);
    }
    model.finish();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn an_index_is_a_dictionary_of_prefixes((config, device, host, steps) in case(120)) {
        play(config, device, host, &steps);
    }
}

/// As many steps as the environment asks for, ten thousand by default.
#[test]
fn long() {
    let asked = std::env::var("PIE_RADIX_STEPS").ok();
    let wanted: usize = asked.map_or(10_000, |steps| steps.parse().expect("a number of steps"));
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
    let (mut done, started) = (0, Instant::now());
    while done < wanted {
        let tree = case(2000).new_tree(&mut runner).expect("a case");
        let (config, device, host, steps) = tree.current();
        play(config, device, host, &steps);
        done += steps.len();
    }
    eprintln!("{done} steps in {:?}", started.elapsed());
}
