//! N-gram (prompt-lookup) speculative decoding: an n-gram index over the text of contexts proposes draft tokens.
//!
//! ```
//! use pie_speculation::{Config, Drafter, Drafts, Step};
//!
//! let mut drafter = Drafter::new(Config::default())?;
//! let mut drafts = Drafts::default();
//! let step = |position, tokens| Step { context: 7, position, tokens, drafts: 4 };
//! drafter.step(&[step(0, &[1, 2, 3, 4, 1, 2])], &mut drafts);
//! assert_eq!((drafts.tokens(0), drafts.match_length(0)), (&[3, 4, 1, 2][..], 2));
//! // The model accepted two drafts and sampled 9.
//! drafter.step(&[step(6, &[3, 4, 9])], &mut drafts);
//! assert_eq!(drafts.tokens(0), []);
//! # Ok::<(), pie_speculation::ConfigError>(())
//! ```
//!
//! [`Drafter`] indexes contexts and drafts tokens; [`Policy`] chooses how many drafts of each request to verify. Neither reads
//! a clock.
//!
//! | module | what it is |
//! |---|---|
//! | `drafter`, `context`, `history` | drafts for batches, from the text of each context and a shared history |
//! | `index`, `edge_table`, `undo_log`, `growth` | the n-gram index: a trie over reversed contexts, with rewind; suffix decoding in it |
//! | `copy_tracker`, `tree` | copies with edits; draft trees |
//! | `policy` | how many drafts to verify |
//! | `config` | limits |

mod config;
mod context;
mod copy_tracker;
mod drafter;
mod edge_table;
mod growth;
mod history;
mod index;
mod policy;
#[cfg(test)]
mod reference;
mod tree;
mod undo_log;

pub use config::{Config, ConfigError, SuffixConfig};
pub use drafter::{Drafter, Drafts, Step};
pub use policy::{Counters, DecodeStep, DraftProposal, Grades, Policy, StepKind};
pub use tree::{ROOT, Tree};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
