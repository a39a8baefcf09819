//! A pool of page ids: reference counts, copy-on-write, pages that a running step still writes.
//!
//! KV caches are cut into pages, and each user of one holds its id: requests, the prefix index, steps that the device
//! has not finished. [`Pool`] counts these references, and a page without any is free. It owns no memory and knows
//! neither tokens nor requests.
//!
//! **One owner.** All methods that change a pool take `&mut self`, so the borrow checker keeps two threads, and two
//! calls, apart: there are no locks and no atomics, and every call happens as a whole. A pool is [`Send`]; who shares
//! one wraps it in a mutex.

mod bitmap;
mod error;
mod pool;

pub use error::PoolError;
pub use pool::{Order, Pool, Stats, Unique};
