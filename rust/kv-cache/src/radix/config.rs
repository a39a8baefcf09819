//! Parameters.

use std::str::FromStr;

use crate::radix::error::RadixError;

/// Eviction policy. Names and order are `SGLang`'s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Least recently used.
    #[default]
    Lru,
    /// Least frequently inserted, then LRU.
    Lfu,
    /// First in, first out.
    Fifo,
    /// First in, last out.
    Filo,
    /// Most recently used.
    Mru,
    /// Segmented LRU: nodes that were inserted once before the others, then LRU.
    Slru,
    /// Lowest priority, then LRU.
    Priority,
}

/// Insertions from which [`Policy::Slru`] protects a node.
pub(crate) const SLRU_PROTECTED_HITS: u32 = 2;

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
    /// Eviction policy.
    pub policy: Policy,
    /// Keys are bigrams, for EAGLE: `n` tokens are `n - 1` units.
    pub bigram: bool,
    /// Record [`Event`](crate::radix::Event)s, for a SHA-256 and 32 bytes per page.
    pub events: bool,
    /// Both parts of a split node have the time of its creation, as in `SGLang` 0.5.23. Without, the first part is new, as in 0.5.17.
    pub split_keeps_age: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            page_size: 1,
            policy: Policy::Lru,
            bigram: false,
            events: false,
            split_keeps_age: false,
        }
    }
}

/// A lookup key: tokens in a namespace (adapter, cache salt). Namespaces share nothing.
///
/// Sequences of different namespaces share nothing: adapters, cache salts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key<'a> {
    /// `SGLang`'s `extra_key`.
    pub namespace: Option<&'a str>,
    /// Token ids; a partial last page is ignored.
    pub tokens: &'a [u32],
}

impl<'a> Key<'a> {
    /// Tokens in the unnamed namespace.
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

/// Parameters of an insertion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InsertParams {
    /// A time in any unit. One that is not after the last call counts as just after it.
    pub now: u64,
    /// Least priority of the nodes on the path.
    pub priority: i32,
    /// A prefill chunk, which will be inserted again with more tokens: does not count as a hit.
    pub chunked: bool,
    /// Full pages that this sequence has inserted before: nodes that end there, or before, do not count a hit.
    pub inserted: usize,
}

impl InsertParams {
    /// The hit of a node that ends after so many pages of the key.
    pub(crate) fn hit(self, end: usize) -> u32 {
        u32::from(!self.chunked && end > self.inserted)
    }
}
