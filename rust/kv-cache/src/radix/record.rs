//! What an index says to its journal.

use crate::radix::events::{Event, Medium};
use crate::radix::index::RadixIndex;

impl RadixIndex {
    /// Takes the events since the last call, in their order. Without [`Config::events`](crate::radix::Config::events) there
    /// are none.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.journal.take()
    }

    pub(crate) fn record_stored(&mut self, at: u32, medium: Medium) {
        if !self.journal.is_enabled() {
            return;
        }
        let node = &self.nodes[at as usize];
        let (parent, bigram) = (node.parent, self.config.bigram);
        let space = self.spaces.space(
            self.path(at)
                .last()
                .map_or(0, |top| self.nodes[top as usize].parent),
        );
        let mut tokens = Vec::with_capacity(node.edge.len() * self.size + 1);
        if bigram {
            let above = &self.nodes[parent as usize];
            let first = space.and_then(|space| space.first).unwrap_or_default();
            tokens.push(if above.is_root() {
                first
            } else {
                above.edge.last_token(self.size)
            });
        }
        node.edge
            .tokens(self.size, node.edge.len() * self.size, &mut tokens);
        let namespace = space.and_then(|space| space.name.clone());
        let before = self.journal.digest(at, parent, &tokens, self.size, bigram);
        self.journal.push(Event::Stored {
            hashes: self.journal.numbers(at),
            parent: before,
            tokens,
            block_size: self.config.page_size,
            bigram,
            namespace,
            medium,
        });
    }

    pub(crate) fn record_removed(&mut self, at: u32, medium: Medium) {
        if self.journal.is_enabled() {
            let hashes = self.journal.numbers(at);
            self.journal.push(Event::Removed { hashes, medium });
        }
    }
}
