//! What a drafter is made with.

use thiserror::Error;

/// Longest match that an index can look for.
const DEEPEST: usize = 255;
/// Tokens of the shared history at most. Positions of an index are 31 bits, of one that can be rewound 30.
pub(crate) const LARGEST_HISTORY: usize = 1 << 30;
/// Tokens of a context at most; one that grows beyond starts anew.
pub(crate) const LONGEST_CONTEXT: usize = 1 << 29;

/// Limits of a [`Drafter`](crate::Drafter).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Longest match in tokens, from 1 to 255 (`spec_ngram_max_depth`).
    pub max_depth: usize,
    /// Shortest match that drafts (`spec_ngram_min_n`).
    pub min_n: usize,
    /// Longest match if that is less than `max_depth` (`spec_ngram_max_n`).
    pub max_n: Option<usize>,
    /// Tokens of the history that contexts share; 0 for none (`spec_ngram_capacity`).
    pub capacity: usize,
    /// Memory of contexts in bytes, above which the one that was not used for longest is released.
    pub context_bytes: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_depth: 18,
            min_n: 1,
            max_n: None,
            capacity: 1_000_000,
            context_bytes: 1 << 30,
        }
    }
}

/// A limit that no drafter can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// `max_depth`.
    #[error("spec_ngram_max_depth is {0}; it must be from 1 to {DEEPEST}")]
    Depth(usize),
    /// `min_n` against `max_n` and `max_depth`.
    #[error("spec_ngram_min_n is {shortest}; it must be from 1 to the longest match, {longest}")]
    Shortest {
        /// `min_n`.
        shortest: usize,
        /// The smaller one of `max_n` and `max_depth`.
        longest: usize,
    },
    /// `capacity`.
    #[error("spec_ngram_capacity is {0}; it must be at most {LARGEST_HISTORY}")]
    Capacity(usize),
}

impl Config {
    /// The longest match in tokens.
    pub(crate) fn depth(&self) -> usize {
        self.max_n
            .map_or(self.max_depth, |longest| longest.min(self.max_depth))
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let (shortest, longest) = (self.min_n, self.depth());
        if !(1..=DEEPEST).contains(&self.max_depth) {
            return Err(ConfigError::Depth(self.max_depth));
        }
        if !(1..=longest).contains(&shortest) {
            return Err(ConfigError::Shortest { shortest, longest });
        }
        if self.capacity > LARGEST_HISTORY {
            return Err(ConfigError::Capacity(self.capacity));
        }
        Ok(())
    }
}
