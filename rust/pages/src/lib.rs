//! A pool of page ids: reference counts, copy-on-write, pages that a running step still writes.
//!
//! KV caches are cut into pages, and everybody who uses one holds its id: requests, the prefix index, steps that the
//! device has not finished. [`Pool`] counts who does, and a page is free when nobody does. It owns no memory and knows
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
