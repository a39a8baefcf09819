//! Limits of a drafter.

use thiserror::Error;

/// Largest value of [`Config::max_depth`].
const DEEPEST: usize = 255;
/// Most tokens of the shared history. Positions of an index have 31 bits, of a rewindable one 30.
pub(crate) const LARGEST_HISTORY: usize = 1 << 30;
/// Most tokens of a context; a longer one restarts.
pub(crate) const LONGEST_CONTEXT: usize = 1 << 29;

/// Limits of a [`Drafter`](crate::Drafter).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Longest match in tokens, 1 to 255.
    pub max_depth: usize,
    /// Shortest match that is continued, in tokens, at least 1.
    pub min_n: usize,
    /// Limits `max_depth`, if it is less.
    pub max_n: Option<usize>,
    /// Tokens of the shared history, at most 2^30; 0 for none. A token takes at most 64 bytes.
    pub capacity: usize,
    /// Bytes of all contexts. Beyond it the least recently used one is released.
    pub context_bytes: usize,
    /// Suffix decoding; `None` for n-gram drafts only.
    pub suffix: Option<SuffixConfig>,
}

/// Limits of suffix decoding, by the names that vLLM and Arctic Inference give them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SuffixConfig {
    /// Most drafts for each token of the match, more than 0.
    pub max_spec_factor: f32,
    /// Least estimated probability that a draft and all before it are right, 0 to 1.
    pub min_token_prob: f32,
}

impl Default for SuffixConfig {
    fn default() -> Self {
        Self {
            max_spec_factor: 4.0,
            min_token_prob: 0.1,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_depth: 18,
            min_n: 1,
            max_n: None,
            capacity: 1_000_000,
            context_bytes: 1 << 30,
            suffix: None,
        }
    }
}

/// A limit out of its range.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
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
        /// The smaller of `max_n` and `max_depth`.
        longest: usize,
    },
    /// [`Config::capacity`] is above 2^30.
    #[error("capacity is {0}; it must be at most {LARGEST_HISTORY}")]
    Capacity(usize),
    /// [`SuffixConfig::max_spec_factor`] is not above 0.
    #[error("max_spec_factor is {0}; it must be a number above 0")]
    SpecFactor(f32),
    /// [`SuffixConfig::min_token_prob`] is no probability.
    #[error("min_token_prob is {0}; it must be from 0 to 1")]
    TokenProbability(f32),
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
        self.suffix.map_or(Ok(()), SuffixConfig::check)
    }
}

impl SuffixConfig {
    fn check(self) -> Result<(), ConfigError> {
        let Self {
            max_spec_factor,
            min_token_prob,
        } = self;
        if max_spec_factor.is_nan() || max_spec_factor <= 0.0 {
            return Err(ConfigError::SpecFactor(max_spec_factor));
        }
        if !(0.0..=1.0).contains(&min_token_prob) {
            return Err(ConfigError::TokenProbability(min_token_prob));
        }
        Ok(())
    }
}
