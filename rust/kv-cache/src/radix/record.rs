//! KV cache events of an index: what is recorded as blocks are stored and removed.

use crate::radix::events::{Event, Medium};
use crate::radix::index::RadixIndex;

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
