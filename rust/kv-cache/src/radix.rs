//! A prefix index: which KV pages hold the KV of which tokens.
//!
//! Requests that begin alike share their KV. [`RadixIndex`] is a radix tree over pages of tokens that says where the KV
//! of a prefix is: ids of pages go in, ids come out. It owns no memory, knows no device and no clock.
//!
//! ```
//! use pie_kv_cache::radix::{Config, Evicted, Insertion, Key, RadixIndex};
//!
//! let mut index = RadixIndex::new(Config { page_size: 2, ..Config::default() })?;
//! let at = |now| Insertion { now, ..Insertion::default() };
//! index.insert(Key::new(&[1, 2, 3, 4, 5, 6]), &[70, 71, 72], at(1))?;
//!
//! // Another request begins alike: it computes from the fifth token on, into a page of its own.
//! let mut pages = Vec::new();
//! let request = [1, 2, 3, 4, 9, 9];
//! let found = index.match_and_lock(Key::new(&request), 2, &mut pages);
//! assert_eq!((&pages[..], found.device_pages), (&[70, 71][..], 2));
//! let inserted = index.insert(Key::new(&request), &[70, 71, 80], at(3))?;
//! assert_eq!(inserted.existing, 2);
//! index.unlock(found.node)?;
//!
//! // The leaf that was used least recently goes first.
//! let mut evicted = Evicted::default();
//! index.evict(1, &mut evicted);
//! assert_eq!(evicted.device, [72]);
//! # Ok::<(), pie_kv_cache::radix::RadixError>(())
//! ```
//!
//! **One owner.** All methods that change an index take `&mut self`: there are no locks and no atomics on its path, and
//! every call happens as a whole. An index is [`Send`] and [`Sync`].
//!
//! # Modules
//!
//! | module | what it is |
//! |---|---|
//! | `index`, `insert`, `lock` | what callers do: match, insert, lock |
//! | `evict`, `tier` | what leaves, by policy; copies on the host, and the whole index at once |
//! | `tree`, `node`, `edge`, `planes` | nodes, their links and orders, and the tokens and pages that they hold |
//! | `table`, `spaces` | the children of all nodes; a root for each namespace |
//! | `record`, `events` | changes for a journal, and as events for routers |
//! | `info`, `picture`, `check` | questions, pictures, and all that must always hold |
//! | `config`, `limits` | parameters |

#[cfg(any(test, feature = "check"))]
mod check;
mod config;
mod edge;
mod error;
mod events;
mod evict;
mod index;
mod info;
mod insert;
mod limits;
mod lock;
mod node;
mod picture;
mod planes;
mod record;
mod spaces;
mod table;
mod tier;
mod tree;

pub use config::{Config, Insertion, Key, Policy};
pub use error::RadixError;
pub use events::{Event, Medium};
pub use evict::{Evicted, Move};
pub use index::{Match, Partial, RadixIndex};
pub use info::NodeInfo;
pub use insert::Inserted;
pub use limits::MAX_PAGE_SIZE;
pub use node::NodeId;
