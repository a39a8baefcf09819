//! A page pool: reference counts and free list of KV pages, copy-on-write, and deferred frees for pages that a running step
//! writes.
//!
//! [`Pool`] counts the references of requests, the prefix index and running steps to each page id; a page without any is free.
//! It owns no memory and knows neither tokens nor requests.
//!
//! All changes take `&mut self`: no locks, no atomics. A pool is [`Send`].

mod bitmap;
mod error;
mod pool;

pub use error::PoolError;
pub use pool::{Order, Pool, Stats, Unique};
