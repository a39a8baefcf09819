//! A request of three pages that forks, writes and ends while a step is running.

use std::io::{Write, stdout};

use pie_kv_cache::pages::{Order, Pool, PoolError, Unique};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = stdout().lock();
    let mut pool = Pool::new(0..8, Order::LowestFirst);
    let mut request = Vec::new();
    pool.allocate_many(3, &mut request)?;
    writeln!(out, "request {request:?}")?;

    pool.share(&request)?;
    let mut fork = request.clone();
    if let Unique::Copy { from, to } = pool.make_unique(fork[2])? {
        writeln!(out, "fork    copies page {from} to {to} before it writes")?;
        fork[2] = to;
    }
    writeln!(out, "fork    {fork:?}: {:?}", pool.stats())?;

    pool.free_after(&request, 1)?;
    writeln!(out, "request ends in step 1: {:?}", pool.stats())?;
    writeln!(out, "step 1 is complete: {} page is free", pool.complete(1))?;

    pool.cache(&fork[..2])?;
    pool.free(&fork[2..])?;
    writeln!(
        out,
        "fork    ends, the index keeps {:?}: {:?}",
        &fork[..2],
        pool.stats()
    )?;
    match pool.free(&fork[..1]) {
        Err(error @ PoolError::Cached { .. }) => writeln!(out, "freeing it now: {error}")?,
        other => writeln!(out, "{other:?}")?,
    }
    pool.check_invariants(fork[..2].iter().copied())?;
    Ok(())
}
