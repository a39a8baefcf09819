//! The prefix index and the page pool: whatever is done to them, they agree with their models.

use arbitrary::{Arbitrary, Result, Unstructured};
use pie_kv_cache::pages::Order;
use pie_kv_cache::radix::{Config, InsertParams, Policy};

use crate::pool_model::{Both, Step as PoolStep};
use crate::radix_model::{Model, Step, Text};

/// Most steps of an input: what a step is compared with grows with those before.
const STEPS: usize = 200;
const POLICIES: [Policy; 7] = [
    Policy::Lru,
    Policy::Lfu,
    Policy::Fifo,
    Policy::Filo,
    Policy::Mru,
    Policy::Slru,
    Policy::Priority,
];

fn config(input: &mut Unstructured) -> Result<Config> {
    Ok(Config {
        page_size: u32::from(u8::arbitrary(input)? % 20) + 1,
        policy: *input.choose(&POLICIES)?,
        bigram: bool::arbitrary(input)?,
        events: bool::arbitrary(input)?,
        ..Config::default()
    })
}

/// A start that many texts share, and tokens of its own.
fn text(input: &mut Unstructured) -> Result<Text> {
    let shared = u32::from(u8::arbitrary(input)? % 48);
    let own = u8::arbitrary(input)? % 24;
    let mut tokens: Vec<u32> = (0..shared).map(|at| at * at % 7 + 100_000).collect();
    for _ in 0..own {
        let byte = u8::arbitrary(input)?;
        tokens.push(match byte {
            0..250 => u32::from(byte % 3),
            250..254 => 70_000,
            _ => u32::arbitrary(input)?,
        });
    }
    let namespace = match u8::arbitrary(input)? % 4 {
        0 => Some("lora-1".to_owned()),
        1 => Some(String::new()),
        _ => None,
    };
    Ok(Text { namespace, tokens })
}

fn step(input: &mut Unstructured) -> Result<Step> {
    let small = |input: &mut Unstructured| Ok(usize::from(u8::arbitrary(input)? % 40));
    Ok(match u8::arbitrary(input)? % 16 {
        0..3 => Step::Match {
            text: text(input)?,
            locks: bool::arbitrary(input)?,
        },
        3..7 => Step::Insert {
            text: text(input)?,
            how: InsertParams {
                now: 0,
                priority: i8::arbitrary(input)?.into(),
                chunked: bool::arbitrary(input)?,
                ..InsertParams::default()
            },
            after: bool::arbitrary(input)?,
        },
        7 => Step::Lock(text(input)?),
        8 => Step::Unlock(small(input)?),
        9 => Step::Evict(small(input)?),
        10 | 11 => Step::EvictToHost {
            pages: small(input)?,
            host_pages: small(input)?,
        },
        12 => Step::EvictHost(small(input)?),
        13 => Step::Backup(text(input)?),
        14 => Step::Load(text(input)?),
        _ if u8::arbitrary(input)? > 240 => Step::Reset,
        _ => Step::Merge,
    })
}

fn play_index(input: &mut Unstructured) -> Result<()> {
    let (device, host) = (u8::arbitrary(input)?, u8::arbitrary(input)?);
    let mut model = Model::new(config(input)?, device.into(), host.into());
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        model.step(&step(input)?);
    }
    model.finish();
    Ok(())
}

/// Steps on an index and its pools.
pub(crate) fn index(data: &[u8]) {
    // An input that ends within a step is as good as one that ends before.
    let _ = play_index(&mut Unstructured::new(data));
}

fn indices(input: &mut Unstructured) -> Result<Vec<usize>> {
    let count = u8::arbitrary(input)? % 6;
    (0..count)
        .map(|_| Ok(u8::arbitrary(input)?.into()))
        .collect()
}

fn pool_step(input: &mut Unstructured) -> Result<PoolStep> {
    let time = |input: &mut Unstructured| Ok(u64::from(u8::arbitrary(input)? % 32));
    Ok(match u8::arbitrary(input)? % 11 {
        0 | 1 => PoolStep::Allocate(usize::from(u8::arbitrary(input)? % 10)),
        2 => PoolStep::Share(indices(input)?),
        3 => PoolStep::Free(indices(input)?),
        4 => PoolStep::FreeAfter(indices(input)?, time(input)?),
        5 => PoolStep::Complete(time(input)?),
        6 => PoolStep::Cache(indices(input)?),
        7 => PoolStep::Uncache(indices(input)?),
        8 => PoolStep::UncacheAfter(indices(input)?, time(input)?),
        9 => PoolStep::MakeUnique(u8::arbitrary(input)?.into()),
        _ if u8::arbitrary(input)? > 240 => PoolStep::Reset,
        _ => PoolStep::Allocate(1),
    })
}

fn play_pool(input: &mut Unstructured) -> Result<()> {
    let order = *input.choose(&[Order::LowestFirst, Order::Lifo])?;
    let mut both = Both::new((u8::arbitrary(input)? % 80).into(), order);
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        both.step(&pool_step(input)?);
    }
    Ok(())
}

/// Steps on a pool.
pub(crate) fn pool(data: &[u8]) {
    let _ = play_pool(&mut Unstructured::new(data));
}
