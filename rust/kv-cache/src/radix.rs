//! The prefix cache index: a radix tree that maps token sequences to KV pages, as `SGLang`'s `RadixCache`.
//!
//! Page ids go in and out. [`RadixIndex`] owns no memory and knows no device and no clock.
//!
//! ```
//! use pie_kv_cache::radix::{Config, EvictResult, InsertParams, Key, RadixIndex};
//!
//! let mut index = RadixIndex::new(Config { page_size: 2, ..Config::default() })?;
//! let at = |now| InsertParams { now, ..InsertParams::default() };
//! index.insert(Key::new(&[1, 2, 3, 4, 5, 6]), &[70, 71, 72], at(1))?;
//!
//! // Another request shares the prefix: it computes from the fifth token on, into a page of its own.
//! let mut pages = Vec::new();
//! let request = [1, 2, 3, 4, 9, 9];
//! let found = index.match_and_lock(Key::new(&request), 2, &mut pages);
//! assert_eq!((&pages[..], found.device_pages), (&[70, 71][..], 2));
//! let inserted = index.insert(Key::new(&request), &[70, 71, 80], at(3))?;
//! assert_eq!(inserted.existing, 2);
//! index.unlock(found.node)?;
//!
//! // The least recently used leaf is evicted first.
//! let mut evicted = EvictResult::default();
//! index.evict(1, &mut evicted);
//! assert_eq!(evicted.device, [72]);
//! # Ok::<(), pie_kv_cache::radix::RadixError>(())
//! ```
//!
//! All changes take `&mut self`: no locks, no atomics. An index is [`Send`] and [`Sync`].
//!
//! # Modules
//!
//! | module | what it is |
//! |---|---|
//! | `index`, `insert`, `lock` | match, insert, lock |
//! | `evict`, `host_tier` | eviction by policy; the host tier; `reset` and `merge` |
//! | `tree`, `node`, `edge`, `planes` | nodes, links, eviction queues; tokens and pages of a node |
//! | `child_table`, `namespaces` | the hash table of children; a root for each namespace |
//! | `events` | KV cache events for routers |
//! | `info`, `export`, `invariants` | queries, DOT and JSON, consistency checks |
//! | `config`, `error` | parameters, errors |

mod child_table;
mod config;
mod edge;
mod error;
mod events;
mod evict;
mod export;
mod host_tier;
mod index;
mod info;
mod insert;
#[cfg(any(test, feature = "check"))]
mod invariants;
mod lock;
mod namespaces;
mod node;
mod planes;
mod tree;

pub use config::{Config, InsertParams, Key, MAX_PAGE_SIZE, Policy};
pub use error::RadixError;
pub use events::{Event, Medium};
pub use evict::{EvictResult, PageCopy};
pub use index::{MatchResult, PartialMatch, RadixIndex};
pub use info::NodeInfo;
pub use insert::InsertResult;
pub use node::NodeId;
