//! Comparisons of the index with the model.

use pie_kv_cache::radix::{Event, MatchResult, Medium};
use sha2::{Digest, Sha256};

use super::{Entry, Model, Text};

/// Children of a node that are looked at for a page that agrees in part.
const LOOKED_AT: usize = 16;

impl Model {
    pub(super) fn compare_partial(&self, text: &Text, found: &MatchResult, pages: usize) {
        let start = self.tokens(pages);
        let below = self.entries.iter().filter(|(prefix, _)| {
            prefix.namespace == text.namespace
                && prefix.tokens.len() == self.tokens(pages + 1)
                && prefix.tokens.starts_with(&text.tokens[..start])
        });
        let agreeing = |prefix: &Text| {
            let both = prefix.tokens.iter().zip(&text.tokens);
            let agreed = both.take_while(|(one, other)| one == other).count();
            agreed.saturating_sub(if pages == 0 {
                self.config.bigram.into()
            } else {
                start
            })
        };
        let below: Vec<_> = below
            .map(|(prefix, entry)| (agreeing(prefix), *entry))
            .collect();
        let best = below.iter().map(|(agreed, _)| *agreed).max().unwrap_or(0);
        let Some(partial) = self.index.partial(text.key(), found) else {
            assert!(best == 0 || below.len() > LOOKED_AT, "{best} tokens agree");
            return;
        };
        assert!(partial.tokens == best || below.len() > LOOKED_AT);
        let page = |entry: &Entry| {
            if partial.on_device {
                entry.device
            } else {
                entry.host
            }
        };
        let named = |(agreed, entry): &(usize, Entry)| {
            *agreed == partial.tokens && page(entry) == Some(partial.page)
        };
        assert!(below.iter().any(named));
    }

    pub(super) fn compare(&self) {
        self.index.check_invariants();
        let (locked, free) = self.locked_pages();
        assert_eq!(
            (self.index.protected_pages(), self.index.evictable_pages()),
            (locked, free)
        );
        assert_eq!(self.index.device_pages(), locked + free);
        let on_host = self.entries.values().filter(|entry| entry.host.is_some());
        assert_eq!(self.index.host_pages(), on_host.count());
        let device = self.entries.values().filter_map(|entry| entry.device);
        self.device
            .check_invariants(device)
            .expect("no page is lost");
        let host = self.entries.values().filter_map(|entry| entry.host);
        self.host.check_invariants(host).expect("no page is lost");
        assert_eq!(self.device.stats().cached, self.device.stats().used);
        assert_eq!(self.index.is_empty(), self.entries.is_empty());
    }

    /// What a router makes of the events, each of which must fit what it knows.
    pub(super) fn read_events(&mut self) {
        for event in self.index.take_events() {
            assert!(self.config.events);
            match event {
                Event::Stored {
                    hashes,
                    parent,
                    tokens,
                    namespace,
                    medium,
                    block_size,
                    bigram,
                } => {
                    assert_eq!(
                        (block_size, bigram),
                        (self.config.page_size, self.config.bigram)
                    );
                    assert!(namespace.is_none_or(|name| self.namespaces.contains(&*name)));
                    self.check_stored(&hashes, parent, &tokens);
                    for hash in hashes {
                        *self
                            .blocks
                            .entry((hash, medium == Medium::Host))
                            .or_insert(0) += 1;
                    }
                }
                Event::Removed { hashes, medium } => {
                    for hash in hashes {
                        let count = self.blocks.get_mut(&(hash, medium == Medium::Host));
                        *count.expect("it was stored") -= 1;
                    }
                }
                Event::Cleared => self.blocks.clear(),
            }
        }
    }

    /// The hashes of blocks follow from their tokens and the block before.
    pub(super) fn check_stored(&mut self, hashes: &[i64], parent: Option<i64>, tokens: &[u32]) {
        assert_eq!(tokens.len(), self.tokens(hashes.len()));
        let mut digest = parent.map_or_else(Vec::new, |parent| self.digests[&parent].clone());
        let size = self.config.page_size as usize;
        for (page, hash) in hashes.iter().enumerate() {
            let tokens = &tokens[page * size..][..self.tokens(1)];
            digest = self.next_digest(&digest, tokens);
            assert_eq!(*hash, number(&digest));
            self.digests.insert(*hash, digest.clone());
        }
    }

    /// The digest of a page.
    pub(super) fn next_digest(&self, before: &[u8], tokens: &[u32]) -> Vec<u8> {
        let mut bytes = before.to_vec();
        for unit in tokens.windows(if self.config.bigram { 2 } else { 1 }) {
            bytes.extend(unit.iter().flat_map(|token| token.to_le_bytes()));
        }
        Sha256::digest(&bytes).to_vec()
    }

    /// The number of the last block of a prefix.
    pub(super) fn hash(&self, prefix: &Text) -> i64 {
        let size = self.config.page_size as usize;
        let pages = (0..self.page_count(prefix))
            .map(|page| &prefix.tokens[page * size..][..self.tokens(1)]);
        number(&pages.fold(Vec::new(), |digest, page| self.next_digest(&digest, page)))
    }
}

fn number(digest: &[u8]) -> i64 {
    digest
        .first_chunk()
        .map_or(0, |bytes| i64::from_be_bytes(*bytes))
}
