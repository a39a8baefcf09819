//! Events for routers that send requests where their prefixes are.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use sha2::{Digest, Sha256};

/// Where a block is.
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

/// A change of what is cached, in the terms of `SGLang`'s KV events. A block is a page.
///
/// A block's hash is the first 8 bytes, most significant first, of the SHA-256 of its predecessor's whole digest and its
/// tokens as little-endian u32; of pairs of tokens, both. Hashes do not depend on the namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Blocks that follow each other were stored. `SGLang` sends an event for each of them; the predecessor of the first
    /// is `parent`, and of each other the one before.
    Stored {
        /// The blocks.
        hashes: Vec<i64>,
        /// The block before the first one; none at the start of a sequence.
        parent: Option<i64>,
        /// Tokens of all blocks. With pairs there is one more: unit `i` is `(tokens[i], tokens[i + 1])`.
        tokens: Vec<u32>,
        /// Tokens, or pairs, of a block.
        block_size: u32,
        /// Whether blocks are made of pairs.
        bigram: bool,
        /// The namespace of the sequence.
        namespace: Option<Arc<str>>,
        /// Where they are stored. If they were elsewhere before, they still are.
        medium: Medium,
    },
    /// Blocks were removed. One that moved was stored elsewhere before.
    Removed {
        /// The blocks.
        hashes: Vec<i64>,
        /// Where they are no longer.
        medium: Medium,
    },
    /// Everything was removed.
    Cleared,
}

type Hash = [u8; 32];

/// Digests of a node's pages: a range of a buffer that nodes share.
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

/// Events that were not taken yet, and the digests that they need. Empty and idle unless events are wanted.
#[derive(Debug, Clone)]
pub(crate) struct Journal {
    enabled: bool,
    events: Vec<Event>,
    hashes: FxHashMap<u32, Hashes>,
}

impl Journal {
    pub(crate) fn new(enabled: bool) -> Self {
        let mut journal = Self {
            enabled,
            events: Vec::new(),
            hashes: FxHashMap::default(),
        };
        journal.clear();
        journal
    }

    /// Everything was removed.
    pub(crate) fn clear(&mut self) {
        self.hashes.clear();
        if self.enabled {
            self.events.push(Event::Cleared);
        }
    }

    /// The first pages of a node became another one.
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

    /// A node took the pages of the one above.
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

    /// The events since the last call.
    pub(crate) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Has the digests of a node's pages, which lie below `parent`. Returns the number of the block before them.
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

    /// The numbers of a node's blocks.
    pub(crate) fn numbers(&self, at: u32) -> Vec<i64> {
        let hashes = self.hashes.get(&at).map_or(&[][..], Hashes::get);
        hashes.iter().map(number).collect()
    }
}

/// The number of a block in events.
fn number(hash: &Hash) -> i64 {
    hash.first_chunk()
        .map_or(0, |bytes| i64::from_be_bytes(*bytes))
}

/// The digests of pages of `size` units, each computed from the one before. For pairs, `tokens` has one token more than
/// units.
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
