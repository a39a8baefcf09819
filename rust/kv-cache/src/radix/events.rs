//! KV cache events for prefix-aware routers.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use sha2::{Digest, Sha256};

use crate::radix::index::RadixIndex;

/// The tier of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// The device's memory.
    Device,
    /// The host's memory.
    Host,
}

impl Medium {
    /// `SGLang`'s name of the medium.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "GPU",
            Self::Host => "CPU_PINNED",
        }
    }
}

/// A KV cache event, as `SGLang`'s. A block is a page.
///
/// A block's hash is the first 8 bytes, big-endian, of the SHA-256 of its predecessor's digest and its tokens as little-endian
/// u32; of both tokens of each bigram. Hashes do not depend on the namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Consecutive blocks were stored. `SGLang` sends an event for each; `parent` is the predecessor of the first.
    Stored {
        /// The blocks.
        hashes: Vec<i64>,
        /// The predecessor; none at the start of a sequence.
        parent: Option<i64>,
        /// Tokens of all blocks. With bigrams there is one more: unit `i` is `(tokens[i], tokens[i + 1])`.
        tokens: Vec<u32>,
        /// Tokens, or bigrams, of a block.
        block_size: u32,
        /// Whether units are bigrams.
        bigram: bool,
        /// The namespace of the sequence.
        namespace: Option<Arc<str>>,
        /// The tier. Blocks may be on the other one, too.
        medium: Medium,
    },
    /// Blocks were removed from a tier.
    Removed {
        /// The blocks.
        hashes: Vec<i64>,
        /// The tier.
        medium: Medium,
    },
    /// Everything was removed.
    Cleared,
}

type Hash = [u8; 32];

/// Digests of a node's pages: a range of a shared buffer.
#[derive(Debug, Clone)]
struct Hashes {
    buffer: Arc<[Hash]>,
    start: usize,
    len: usize,
}

impl Hashes {
    fn get(&self) -> &[Hash] {
        &self.buffer[self.start..][..self.len]
    }
}

/// Recorded events, and the digests that they need. Empty unless events are enabled.
#[derive(Debug, Clone)]
pub(crate) struct EventLog {
    enabled: bool,
    events: Vec<Event>,
    hashes: FxHashMap<u32, Hashes>,
}

impl EventLog {
    pub(crate) fn new(enabled: bool) -> Self {
        let mut event_log = Self {
            enabled,
            events: Vec::new(),
            hashes: FxHashMap::default(),
        };
        event_log.clear();
        event_log
    }

    /// Everything was removed.
    pub(crate) fn clear(&mut self) {
        self.hashes.clear();
        if self.enabled {
            self.events.push(Event::Cleared);
        }
    }

    /// A node was split.
    pub(crate) fn split(&mut self, lower: u32, upper: u32, at: usize) {
        let Some(hashes) = self.hashes.get_mut(&lower) else {
            return;
        };
        let first = Hashes {
            len: at,
            ..hashes.clone()
        };
        hashes.start += at;
        hashes.len -= at;
        self.hashes.insert(upper, first);
    }

    /// A node was merged with its parent.
    pub(crate) fn join(&mut self, upper: u32, lower: u32) {
        let (Some(first), Some(rest)) = (self.hashes.remove(&upper), self.hashes.get_mut(&lower))
        else {
            return;
        };
        let buffer: Arc<[Hash]> = [first.get(), rest.get()].concat().into();
        *rest = Hashes {
            start: 0,
            len: buffer.len(),
            buffer,
        };
    }

    pub(crate) fn forget(&mut self, at: u32) {
        if self.enabled {
            self.hashes.remove(&at);
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        let hashes: usize = self.hashes.values().map(|hashes| hashes.len).sum();
        hashes * size_of::<Hash>()
            + self.hashes.capacity() * size_of::<(u32, Hashes)>()
            + self.events.capacity() * size_of::<Event>()
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }

    pub(crate) fn push(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Takes the recorded events.
    pub(crate) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Computes the digests of a node's pages below `parent`. Returns the hash of the block before them.
    pub(crate) fn digest(
        &mut self,
        at: u32,
        parent: u32,
        tokens: &[u32],
        size: usize,
        bigram: bool,
    ) -> Option<i64> {
        let above = self.hashes.get(&parent);
        let before = above.and_then(|hashes| hashes.get().last()).copied();
        self.hashes.entry(at).or_insert_with(|| {
            let buffer = chain(tokens, size, bigram, before.as_ref());
            let (start, len) = (0, buffer.len());
            Hashes { buffer, start, len }
        });
        before.as_ref().map(number)
    }

    /// Hashes of a node's blocks.
    pub(crate) fn numbers(&self, at: u32) -> Vec<i64> {
        let hashes = self.hashes.get(&at).map_or(&[][..], Hashes::get);
        hashes.iter().map(number).collect()
    }
}

/// The hash of a block in events.
fn number(hash: &Hash) -> i64 {
    hash.first_chunk()
        .map_or(0, |bytes| i64::from_be_bytes(*bytes))
}

/// Chained digests of pages of `size` units. For bigrams, `tokens` has one token more.
fn chain(tokens: &[u32], size: usize, bigram: bool, parent: Option<&Hash>) -> Arc<[Hash]> {
    let units = tokens.len() - usize::from(bigram);
    let mut last = parent.copied();
    let hash = |page: usize| {
        let mut sha = Sha256::new();
        if let Some(last) = &last {
            sha.update(last);
        }
        for unit in page * size..(page + 1) * size {
            for token in &tokens[unit..=unit + usize::from(bigram)] {
                sha.update(token.to_le_bytes());
            }
        }
        *last.insert(sha.finalize().into())
    };
    (0..units / size).map(hash).collect()
}

impl RadixIndex {
    /// Takes the events since the last call, in order. None without [`Config::events`](crate::radix::Config::events).
    pub fn take_events(&mut self) -> Vec<Event> {
        self.event_log.take()
    }

    pub(crate) fn record_stored(&mut self, at: u32, medium: Medium) {
        if !self.event_log.is_enabled() {
            return;
        }
        let node = &self.nodes[at as usize];
        let (parent, bigram) = (node.parent, self.config.bigram);
        let namespace = self.namespaces.namespace(
            self.path(at)
                .last()
                .map_or(0, |top| self.nodes[top as usize].parent),
        );
        let mut tokens = Vec::with_capacity(node.edge.len() * self.size + 1);
        if bigram {
            let above = &self.nodes[parent as usize];
            let first = namespace
                .and_then(|namespace| namespace.first)
                .unwrap_or_default();
            tokens.push(if above.is_root() {
                first
            } else {
                above.edge.last_token(self.size)
            });
        }
        node.edge
            .tokens(self.size, node.edge.len() * self.size, &mut tokens);
        let namespace = namespace.and_then(|namespace| namespace.name.clone());
        let before = self
            .event_log
            .digest(at, parent, &tokens, self.size, bigram);
        self.event_log.push(Event::Stored {
            hashes: self.event_log.numbers(at),
            parent: before,
            tokens,
            block_size: self.config.page_size,
            bigram,
            namespace,
            medium,
        });
    }

    pub(crate) fn record_removed(&mut self, at: u32, medium: Medium) {
        if self.event_log.is_enabled() {
            let hashes = self.event_log.numbers(at);
            self.event_log.push(Event::Removed { hashes, medium });
        }
    }
}
