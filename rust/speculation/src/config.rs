//! The limits of a drafter.

use thiserror::Error;

/// Largest value of [`Config::max_depth`].
const DEEPEST: usize = 255;
/// Largest shared history in tokens. Positions of an index have 31 bits, of one that can be rewound 30.
pub(crate) const LARGEST_HISTORY: usize = 1 << 30;
/// Longest context in tokens; one that grows beyond starts anew.
pub(crate) const LONGEST_CONTEXT: usize = 1 << 29;

/// Limits of a [`Drafter`](crate::Drafter).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Longest match in tokens, from 1 to 255.
    pub max_depth: usize,
    /// Shortest match that drafts, in tokens: at least 1.
    pub min_n: usize,
    /// Longest match where that is less than `max_depth`.
    pub max_n: Option<usize>,
    /// Size in tokens of the history that contexts share, at most 2^30; 0 for none. A token takes at most 64 bytes.
    pub capacity: usize,
    /// Memory of contexts in bytes. Beyond it the least recently used context is released.
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

/// A limit out of its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// [`Config::max_depth`] is not from 1 to 255.
    #[error("max_depth is {0}; it must be from 1 to {DEEPEST}")]
    Depth(usize),
    /// [`Config::min_n`] is 0, or no match is as long.
    #[error(
        "min_n is {shortest}; it must be from 1 to {longest}, the smaller of max_depth and max_n"
    )]
    Shortest {
        /// `min_n`.
        shortest: usize,
        /// The smaller one of `max_n` and `max_depth`.
        longest: usize,
    },
    /// [`Config::capacity`] is above 2^30.
    #[error("capacity is {0}; it must be at most {LARGEST_HISTORY}")]
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
