//! Random steps on a pool that is held to lists of who holds what.
//!
//! `PIE_PAGES_STEPS=10000000 cargo test --release -p pie-kv-cache --test pages_random -- --nocapture long` takes as many steps.

#[allow(unreachable_pub, reason = "fuzz targets use it, too")]
mod model;

use model::{Both, Step};
use pie_kv_cache::pages::{Order, Pool, PoolError};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

fn step() -> impl Strategy<Value = Step> {
    let indices = || prop::collection::vec(any::<usize>(), 0..5);
    prop_oneof![
        4 => (0_usize..8).prop_map(Step::Allocate),
        3 => indices().prop_map(Step::Share),
        4 => indices().prop_map(Step::Free),
        2 => (indices(), 0_u64..20).prop_map(|(indices, step)| Step::FreeAfter(indices, step)),
        1 => (0_u64..20).prop_map(Step::Complete),
        3 => indices().prop_map(Step::Cache),
        2 => indices().prop_map(Step::Uncache),
        1 => (indices(), 0_u64..20).prop_map(|(indices, step)| Step::UncacheAfter(indices, step)),
        2 => any::<usize>().prop_map(Step::MakeUnique),
        1 => prop_oneof![20 => Just(Step::Allocate(1)), 1 => Just(Step::Reset)],
    ]
}

fn play(pages: u32, order: Order, steps: &[Step]) {
    let mut both = Both::new(pages, order);
    for step in steps {
        both.step(step);
    }
}

fn order() -> impl Strategy<Value = Order> {
    prop_oneof![Just(Order::LowestFirst), Just(Order::Lifo)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn reference_counts_match_the_holders(
        pages in 0_u32..12,
        order in order(),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        play(pages, order, &steps);
    }
}

/// `PIE_PAGES_STEPS` steps, ten thousand by default.
#[test]
fn long() {
    let asked = std::env::var("PIE_PAGES_STEPS").ok();
    let wanted: usize = asked.map_or(10_000, |steps| steps.parse().expect("a number of steps"));
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[9; 32]);
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
    let mut done = 0;
    while done < wanted {
        let case = (0_u32..40, order(), prop::collection::vec(step(), 1..5000));
        let (pages, order, steps) = case.new_tree(&mut runner).expect("a case").current();
        play(pages, order, &steps);
        done += steps.len();
    }
    eprintln!("{done} steps");
}

#[test]
fn a_lifo_pool_allocates_the_page_that_was_freed_last() -> Result<(), PoolError> {
    let mut pool = Pool::new(0..4, Order::Lifo);
    let mut pages = Vec::new();
    pool.allocate_many(3, &mut pages)?;
    assert_eq!(pages, [0, 1, 2]);
    pool.free(&[0, 2])?;
    assert_eq!(
        (pool.allocate()?, pool.allocate()?, pool.allocate()?),
        (2, 0, 3)
    );
    Ok(())
}

#[test]
fn a_pool_allocates_no_memory_while_it_works() -> Result<(), PoolError> {
    let mut pool = Pool::new(0..10_000, Order::LowestFirst);
    let mut pages = Vec::with_capacity(10_000);
    let mut round = |step| -> Result<(), PoolError> {
        pages.clear();
        pool.allocate_many(5000, &mut pages)?;
        pool.cache(&pages[..2000])?;
        pool.uncache(&pages[..2000])?;
        pool.free_after(&pages[2000..4000], step)?;
        pool.complete(step);
        pool.free(&pages[4000..])
    };
    round(1)?;
    let mut result = Ok(());
    assert_eq!(
        allocation_counter::measure(|| result = round(2)).count_total,
        0
    );
    result
}
