//! Drafts from repetition: what contexts have said, indexed, and what they will most likely say next.
//!
//! ```
//! use pie_ngram::{Config, Drafter, Drafts, Step};
//!
//! let mut drafter = Drafter::new(Config::default())?;
//! let mut drafts = Drafts::default();
//! let step = |position, tokens| Step { context: 7, position, tokens, drafts: 4 };
//! drafter.step(&[step(0, &[1, 2, 3, 4, 1, 2])], &mut drafts);
//! assert_eq!((drafts.tokens(0), drafts.match_length(0)), (&[3, 4, 1, 2][..], 2));
//! // Two of them came true, and the model's own token behind.
//! drafter.step(&[step(6, &[3, 4, 9])], &mut drafts);
//! assert_eq!(drafts.tokens(0), []);
//! # Ok::<(), pie_ngram::ConfigError>(())
//! ```

mod config;
mod context;
mod copying;
mod drafter;
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
