//! The layer patterns of a PEFT configuration (`rank_pattern`, `alpha_pattern`), matched in linear time.
//!
//! An adapter brings these regular expressions, so they may be hostile: Python's `re` backtracks, for ever if it must.
//! Here they run as automata. What PEFT says of them holds: a pattern matches a layer's name as
//! `re.match(rf"(.*\.)?({pattern})$", name)` does, and the first one that matches counts. What Python and this engine
//! read in different ways, or what has no automaton (look-around, back-references), is refused with the reason.

mod dialect;

use regex::bytes::{RegexSet, RegexSetBuilder};
use thiserror::Error;

/// Most patterns of a configuration. One for each layer of the largest models is a quarter of it.
pub const MOST_PATTERNS: usize = 4096;
/// Most bytes of a pattern.
pub const MOST_BYTES: usize = 512;
/// Most bytes of a layer's name that is looked up.
pub const MOST_NAME_BYTES: usize = 512;
/// Most memory of the automaton of all patterns. Its size times a name's length bounds the time of a look-up.
const MOST_STATE_BYTES: usize = 2 << 20;
/// Deepest nesting of groups.
const MOST_NESTING: u32 = 32;

/// Why patterns are refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PatternError {
    /// There are too many.
    #[error("there are {count} patterns, but at most {MOST_PATTERNS} are taken")]
    Count {
        /// How many there are.
        count: usize,
    },
    /// One is too long.
    #[error("a pattern has {bytes} bytes, but at most {MOST_BYTES} are taken: '{start}'")]
    Length {
        /// Its length.
        bytes: usize,
        /// How it begins, on one line.
        start: String,
    },
    /// One cannot be read, or Python reads it in another way.
    #[error("the pattern '{pattern}' is not taken: {reason}")]
    Syntax {
        /// How it begins, on one line.
        pattern: String,
        /// Why it is refused.
        reason: String,
    },
    /// Counted repetitions make them too large.
    #[error("together the patterns need more than {} KiB as automata", MOST_STATE_BYTES >> 10)]
    Size,
    /// The name is too long.
    #[error("a layer's name has {bytes} bytes, but at most {MOST_NAME_BYTES} are looked up")]
    Name {
        /// Its length.
        bytes: usize,
    },
}

/// The patterns of a configuration, in its order.
#[derive(Debug)]
pub struct LayerPatterns(RegexSet);

impl LayerPatterns {
    /// Compiles the patterns, given as in the configuration.
    ///
    /// # Errors
    /// [`PatternError`] when one of them is not taken, or there are too many.
    pub fn new<S: AsRef<str>>(patterns: &[S]) -> Result<Self, PatternError> {
        if patterns.len() > MOST_PATTERNS {
            let count = patterns.len();
            return Err(PatternError::Count { count });
        }
        let anchored = patterns.iter().map(|pattern| anchored(pattern.as_ref()));
        let anchored = anchored.collect::<Result<Vec<_>, _>>()?;
        let set = RegexSetBuilder::new(anchored)
            // Layers have ASCII names, for which this changes nothing but the size.
            .unicode(false)
            .nest_limit(MOST_NESTING + 2)
            .size_limit(MOST_STATE_BYTES)
            .build();
        set.map(Self).map_err(|_| PatternError::Size)
    }

    /// The number of the first pattern that matches a layer's name; `None` if none does.
    ///
    /// # Errors
    /// [`PatternError::Name`] when the name is too long.
    pub fn first(&self, name: &str) -> Result<Option<usize>, PatternError> {
        if name.len() > MOST_NAME_BYTES {
            let bytes = name.len();
            return Err(PatternError::Name { bytes });
        }
        Ok(self.0.matches(name.as_bytes()).iter().next())
    }
}

/// The expression by which PEFT looks a pattern up.
fn anchored(pattern: &str) -> Result<String, PatternError> {
    if pattern.len() > MOST_BYTES {
        let (start, bytes) = (start_of(pattern), pattern.len());
        return Err(PatternError::Length { bytes, start });
    }
    dialect::check(pattern, MOST_NESTING).map_err(|reason| PatternError::Syntax {
        pattern: start_of(pattern),
        reason,
    })?;
    Ok(format!(r"^(?:.*\.)?(?:{pattern})$"))
}

/// The part of a pattern that an error shows.
fn start_of(pattern: &str) -> String {
    const SHOWN: usize = 80;
    let mut start: String = pattern
        .chars()
        .take(SHOWN)
        .flat_map(char::escape_debug)
        .collect();
    if pattern.chars().nth(SHOWN).is_some() {
        start.push_str("...");
    }
    start
}
