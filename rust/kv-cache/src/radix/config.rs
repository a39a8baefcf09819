//! The parameters of an index, and of its calls.

use std::str::FromStr;

use crate::radix::error::RadixError;

/// Which leaf is evicted first. Names and order are `SGLang`'s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// The one that was used least recently.
    #[default]
    Lru,
    /// The one that was inserted least often, then the least recently used.
    Lfu,
    /// The oldest.
    Fifo,
    /// The youngest.
    Filo,
    /// The one that was used most recently.
    Mru,
    /// Those that were inserted once before the others, then the least recently used.
    Slru,
    /// The one with the lowest priority, then the least recently used.
    Priority,
}

/// Insertions from which [`Policy::Slru`] protects a node.
pub(crate) const PROTECTED: u32 = 2;

impl Policy {
    const NAMES: [(&'static str, Self); 7] = [
        ("lru", Self::Lru),
        ("lfu", Self::Lfu),
        ("fifo", Self::Fifo),
        ("filo", Self::Filo),
        ("mru", Self::Mru),
        ("slru", Self::Slru),
        ("priority", Self::Priority),
    ];
}

impl FromStr for Policy {
    type Err = RadixError;

    fn from_str(name: &str) -> Result<Self, RadixError> {
        let known = Self::NAMES.iter().find(|(known, _)| *known == name);
        let (_, policy) = known.ok_or_else(|| RadixError::Policy { name: name.into() })?;
        Ok(*policy)
    }
}

/// The parameters of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Tokens of a page, 1 to [`MAX_PAGE_SIZE`](crate::radix::MAX_PAGE_SIZE).
    pub page_size: u32,
    /// The order of evictions.
    pub policy: Policy,
    /// Keys are pairs of neighbouring tokens, as EAGLE drafts want them: `n` tokens are `n - 1` units.
    pub bigram: bool,
    /// Record [`Event`](crate::radix::Event)s. They cost a SHA-256 per page, and 32 bytes to keep it.
    pub events: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            page_size: 1,
            policy: Policy::Lru,
            bigram: false,
            events: false,
        }
    }
}

/// A sequence of tokens, in a namespace.
///
/// Sequences of different namespaces share nothing: adapters, cache salts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key<'a> {
    /// `SGLang`'s `extra_key`.
    pub namespace: Option<&'a str>,
    /// Token ids. What is beyond the last whole page is ignored.
    pub tokens: &'a [u32],
}

impl<'a> Key<'a> {
    /// Tokens in the namespace without a name.
    pub fn new(tokens: &'a [u32]) -> Self {
        Self {
            namespace: None,
            tokens,
        }
    }

    /// The same tokens in another namespace.
    #[must_use]
    pub fn within(self, namespace: &'a str) -> Self {
        Self {
            namespace: Some(namespace),
            ..self
        }
    }
}

impl<'a> From<&'a [u32]> for Key<'a> {
    fn from(tokens: &'a [u32]) -> Self {
        Self::new(tokens)
    }
}

/// How a sequence is inserted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Insertion {
    /// The time, in any unit that grows. One that is not after the last call's counts as just after it.
    pub now: u64,
    /// Nodes on the path get at least this priority.
    pub priority: i32,
    /// A part of a request that will be inserted again with more tokens: it does not count as a hit.
    pub chunked: bool,
}
