//! Draft tokens for speculative decoding: an n-gram index over the text of contexts, which proposes how they go on.
//!
//! ```
//! use pie_speculation::{Config, Drafter, Drafts, Step};
//!
//! let mut drafter = Drafter::new(Config::default())?;
//! let mut drafts = Drafts::default();
//! let step = |position, tokens| Step { context: 7, position, tokens, drafts: 4 };
//! drafter.step(&[step(0, &[1, 2, 3, 4, 1, 2])], &mut drafts);
//! assert_eq!((drafts.tokens(0), drafts.match_length(0)), (&[3, 4, 1, 2][..], 2));
//! // The model accepted two of them, and its own token came after.
//! drafter.step(&[step(6, &[3, 4, 9])], &mut drafts);
//! assert_eq!(drafts.tokens(0), []);
//! # Ok::<(), pie_speculation::ConfigError>(())
//! ```
//!
//! [`Drafter`] remembers contexts and drafts; [`Policy`] chooses how many of the drafts are worth verifying. Neither reads a
//! clock.
//!
//! | module | what it is |
//! |---|---|
//! | `drafter`, `context`, `history` | drafts for batches: the text of each context, and what all of them have said |
//! | `index`, `table`, `undo`, `growth` | the index of a text: a trie in a hash table, which can go back |
//! | `copying`, `tree` | copies with changes; drafts as trees |
//! | `policy` | how many drafts are worth verifying |
//! | `config` | limits |

mod config;
mod context;
mod copying;
mod drafter;
mod growth;
mod history;
mod index;
#[cfg(test)]
mod naive;
mod policy;
mod table;
mod tree;
mod undo;

pub use config::{Config, ConfigError};
pub use drafter::{Drafter, Drafts, Step};
pub use policy::{Counters, Kind, Offer, Policy};
pub use tree::{ROOT, Tree};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
