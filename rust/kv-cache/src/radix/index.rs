//! The index: prefix matching, with prefetches, and node splits.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher};

use foldhash::quality::RandomState;
use prefetch_index::prefetch_index;
use rustc_hash::FxHashMap;

use crate::radix::child_table::ChildTable;
use crate::radix::config::{Config, Key};
use crate::radix::error::RadixError;
use crate::radix::events::EventLog;
use crate::radix::limits::MAX_PAGE_SIZE;
use crate::radix::namespaces::Namespaces;
use crate::radix::node::{EvictionQueue, NONE, Node, NodeId, NodeState};

/// Most children that [`RadixIndex::partial`] compares.
const LOOKED_AT: usize = 16;
/// Nodes that are prefetched ahead of the comparison.
const AHEAD: usize = 3;

/// A predicted node on the path of a key, and the tokens after it.
pub(crate) type Lookahead<'a> = Option<(u32, &'a [u32])>;

/// The result of [`RadixIndex::match_prefix`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MatchResult {
    /// The deepest matching node on either tier; [`NodeId::ROOT`] if none matches.
    pub node: NodeId,
    /// The deepest matching node with device pages.
    pub device_node: NodeId,
    /// Matching device pages.
    pub device_pages: usize,
    /// Matching pages after them that are only on the host; see [`RadixIndex::load`].
    pub host_pages: usize,
}

/// A page that matches in part, for copy-on-write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartialMatch {
    /// The page's id, on its tier.
    pub page: u32,
    /// Matching tokens (or bigrams): fewer than a page.
    pub tokens: usize,
    /// The node of the page. Lock it until the page is copied.
    pub node: NodeId,
    /// Whether it is a device page; otherwise a host page.
    pub on_device: bool,
}

/// A prefix cache index. See the [module](crate::radix).
#[derive(Debug, Clone)]
pub struct RadixIndex {
    pub(crate) config: Config,
    /// Tokens of a page.
    pub(crate) size: usize,
    pub(crate) nodes: Vec<Node>,
    /// Head of the free list.
    pub(crate) free: u32,
    /// Larger than every generation in use.
    pub(crate) generation: u32,
    /// Children by hash of parent and first page.
    pub(crate) child_table: ChildTable,
    pub(crate) hasher: RandomState,
    pub(crate) namespaces: Namespaces,
    /// Eviction queues: ranks of the unlocked leaves of each tier.
    pub(crate) device_leaves: BTreeSet<u128>,
    pub(crate) host_leaves: BTreeSet<u128>,
    /// Host copies of nodes on the device.
    pub(crate) copies: FxHashMap<u32, Box<[u32]>>,
    pub(crate) event_log: EventLog,
    pub(crate) now: u64,
    pub(crate) evictable: usize,
    pub(crate) protected: usize,
    pub(crate) on_host: usize,
    /// Nodes without roots.
    pub(crate) len: usize,
    /// Heap bytes of the edges' buffers.
    pub(crate) edge_bytes: usize,
    pub(crate) scratch: Vec<u32>,
}

impl RadixIndex {
    /// An empty index.
    ///
    /// # Errors
    ///
    /// [`RadixError::PageSize`].
    pub fn new(config: Config) -> Result<Self, RadixError> {
        let page_size = config.page_size;
        if !(1..=MAX_PAGE_SIZE).contains(&page_size) {
            return Err(RadixError::PageSize { page_size });
        }
        let mut index = Self {
            config,
            size: page_size as usize,
            nodes: Vec::new(),
            free: NONE,
            generation: 0,
            child_table: ChildTable::default(),
            hasher: RandomState::default(),
            namespaces: Namespaces::default(),
            device_leaves: BTreeSet::new(),
            host_leaves: BTreeSet::new(),
            copies: FxHashMap::default(),
            event_log: EventLog::new(config.events),
            now: 0,
            evictable: 0,
            protected: 0,
            on_host: 0,
            len: 0,
            edge_bytes: 0,
            scratch: Vec::new(),
        };
        index.add_root();
        Ok(index)
    }

    /// Matches the longest cached prefix of a key and writes its device pages to `pages`, which is cleared.
    ///
    /// Matching nodes become the most recently used. A node that matches in part is split, as in `SGLang`; otherwise nothing is
    /// allocated if `pages` has the capacity.
    pub fn match_prefix(&mut self, key: Key<'_>, now: u64, pages: &mut Vec<u32>) -> MatchResult {
        let found = self.match_nodes(key, now, pages);
        self.requeue_path(found.node);
        found
    }

    /// [`match_prefix`](Self::match_prefix) with a [`lock`](Self::lock) on the result: nothing of the match is evicted before
    /// the node is [unlocked](Self::unlock).
    pub fn match_and_lock(&mut self, key: Key<'_>, now: u64, pages: &mut Vec<u32>) -> MatchResult {
        let found = self.match_nodes(key, now, pages);
        self.lock_path(found.node.index);
        found
    }

    /// Matching pages on the device, and after them only on the host. Changes nothing.
    pub fn peek(&self, key: Key<'_>) -> (usize, usize) {
        let (mut device, mut host) = (0, 0);
        let Some((mut at, mut rest)) = self.root_and_units(key) else {
            return (0, 0);
        };
        let Some(mut lookahead) = self.start_lookahead(at, rest) else {
            return (0, 0);
        };
        while let Some((child, matched)) = self.find_child(at, rest) {
            lookahead = self.advance_lookahead(lookahead);
            let node = &self.nodes[child as usize];
            *(if node.on_device() {
                &mut device
            } else {
                &mut host
            }) += matched;
            if matched < node.edge.len() {
                break;
            }
            (at, rest) = (child, &rest[matched * self.size..]);
        }
        (device, host)
    }

    /// Finds, after a match of this key, the child page with the longest partial match: a request may copy it and continue
    /// after the matching tokens.
    ///
    /// Compares the 16 newest children only. With a page size of 1 there is nothing to find.
    pub fn partial(&self, key: Key<'_>, found: &MatchResult) -> Option<PartialMatch> {
        let (root, tokens) = self.root_and_units(key)?;
        let rest =
            &tokens[((found.device_pages + found.host_pages) * self.size).min(tokens.len())..];
        let at = match self.resolve(found.node).ok()? {
            0 => root,
            at => at,
        };
        let mut best: Option<PartialMatch> = None;
        for child in self.children(at).take(LOOKED_AT) {
            let node = &self.nodes[child as usize];
            let tokens = node
                .edge
                .common_prefix(self.size, &rest[..rest.len().min(self.size)]);
            if tokens > best.map_or(0, |best| best.tokens) && tokens < self.size {
                best = Some(PartialMatch {
                    page: node.edge.pages()[0],
                    tokens,
                    node: self.id(child),
                    on_device: node.on_device(),
                });
            }
        }
        best
    }

    /// Matches nodes along a key, marks them as used, and splits the last if it matches in part.
    ///
    /// Nodes on the path may be missing from the eviction queues afterwards.
    fn match_nodes(&mut self, key: Key<'_>, now: u64, pages: &mut Vec<u32>) -> MatchResult {
        pages.clear();
        self.advance_clock(now);
        let mut found = MatchResult::default();
        let Some((mut at, mut rest)) = self.root_and_units(key) else {
            return found;
        };
        let Some(mut lookahead) = self.start_lookahead(at, rest) else {
            return found;
        };
        while let Some((child, matched)) = self.find_child(at, rest) {
            lookahead = self.advance_lookahead(lookahead);
            self.touch(child);
            at = self.split_at_match(child, matched);
            let node = &self.nodes[at as usize];
            found.node = NodeId {
                index: at,
                generation: node.generation,
            };
            if node.on_device() {
                pages.extend_from_slice(node.edge.pages());
                found.device_node = found.node;
                found.device_pages += matched;
            } else {
                found.host_pages += matched;
            }
            rest = &rest[matched * self.size..];
        }
        found
    }

    /// Predicts the child that a key continues with, without a comparison.
    #[inline]
    fn likely_child(&self, parent: u32, rest: &[u32]) -> Option<u32> {
        let first = self.nodes[parent as usize].first_child;
        if self.nodes.get(first as usize)?.next == NONE {
            return Some(first);
        }
        let page = rest.get(..self.size)?;
        self.child_table.guess(self.hash(parent, page))
    }

    /// Prefetches the first nodes and tokens of a match. `None`: there is no child.
    #[inline]
    pub(crate) fn start_lookahead<'a>(&self, at: u32, rest: &'a [u32]) -> Option<Lookahead<'a>> {
        let mut lookahead = self.prefetch_edge(self.likely_child(at, rest)?, rest);
        for _ in 1..AHEAD {
            lookahead = self.advance_lookahead(lookahead);
        }
        Some(lookahead)
    }

    /// Predicts one node further and prefetches it.
    #[inline]
    pub(crate) fn advance_lookahead<'a>(&self, lookahead: Lookahead<'a>) -> Lookahead<'a> {
        let (at, rest) = lookahead?;
        self.prefetch_edge(self.likely_child(at, rest)?, rest)
    }

    /// Prefetches the tokens of a node and its newest grandchild: in a conversation each turn is a node, so most have one
    /// child.
    #[inline]
    fn prefetch_edge<'a>(&self, at: u32, rest: &'a [u32]) -> Lookahead<'a> {
        let node = &self.nodes[at as usize];
        node.edge.prefetch(self.size);
        self.prefetch_node(node.two_below);
        Some((at, rest.get(node.edge.len() * self.size..)?))
    }

    /// Prefetches a node, if there is one.
    #[inline]
    pub(crate) fn prefetch_node(&self, at: u32) {
        // A node may span two cache lines.
        prefetch_index(&self.nodes, at as usize);
        prefetch_index(&self.nodes, at as usize + 1);
    }

    /// Marks a node as used now, and removes it from its eviction queue.
    #[inline]
    pub(crate) fn touch(&mut self, child: u32) {
        self.dequeue(child);
        self.nodes[child as usize].accessed = self.now;
    }

    /// Splits a child after `matched` pages, unless all match. Returns the matching node.
    #[inline]
    pub(crate) fn split_at_match(&mut self, child: u32, matched: usize) -> u32 {
        if matched == self.nodes[child as usize].edge.len() {
            return child;
        }
        let upper = self.split(child, matched);
        self.requeue(child);
        upper
    }

    /// The child whose first page is the start of `rest`, and how many of its pages match.
    #[inline]
    pub(crate) fn find_child(&self, parent: u32, rest: &[u32]) -> Option<(u32, usize)> {
        let page = rest.get(..self.size)?;
        let first = self.nodes[parent as usize].first_child;
        if first == NONE {
            return None;
        }
        if self.nodes[first as usize].next == NONE {
            let matched = self.matched(first, rest);
            return (matched > 0).then_some((first, matched));
        }
        let (hash, mut matched) = (self.hash(parent, page), 0);
        let child = self.child_table.find(hash, |child| {
            if self.nodes[child as usize].parent == parent {
                matched = self.matched(child, rest);
            }
            matched > 0
        })?;
        Some((child, matched))
    }

    /// Pages of a node that match the start of `rest`.
    #[inline]
    fn matched(&self, at: u32, rest: &[u32]) -> usize {
        let matched = self.nodes[at as usize].edge.common_prefix(self.size, rest);
        if self.size == 1 {
            matched
        } else {
            matched / self.size
        }
    }

    pub(crate) fn hash(&self, parent: u32, page: &[u32]) -> u32 {
        hash_page(self.hasher.build_hasher(), parent, page)
    }

    /// Full pages of a key of so many tokens.
    pub(crate) fn page_count(&self, tokens: usize) -> usize {
        tokens.saturating_sub(self.config.bigram.into()) / self.size
    }

    /// The root of a key's namespace, if it exists, and its units.
    ///
    /// Bigrams need no storage of their own: after an equal bigram, two are equal if their second tokens are. So the units of a
    /// bigram key are its tokens from the second on, in a namespace for each first token.
    pub(crate) fn root_and_units<'a>(&self, key: Key<'a>) -> Option<(u32, &'a [u32])> {
        let (first, units) = self.units(key)?;
        Some((self.namespaces.root(key.namespace, first)?, units))
    }

    pub(crate) fn units<'a>(&self, key: Key<'a>) -> Option<(Option<u32>, &'a [u32])> {
        if !self.config.bigram {
            return Some((None, key.tokens));
        }
        let (first, units) = key.tokens.split_first()?;
        Some((Some(*first), units))
    }

    pub(crate) fn add_root(&mut self) -> u32 {
        self.allocate_node(Node {
            state: NodeState::Root,
            parent: NONE,
            first_child: NONE,
            two_below: NONE,
            next: NONE,
            previous: NONE,
            ..Node::default()
        })
    }

    /// Splits a child: a new parent gets its first pages. Locks, hits and priority hold for both.
    fn split(&mut self, child: u32, at: usize) -> u32 {
        let (now, keeps_age) = (self.next_time(), self.config.split_keeps_age);
        let lower = &mut self.nodes[child as usize];
        let edge = lower.edge.split(at);
        let upper = Node {
            edge,
            accessed: now,
            created: if keeps_age { lower.created } else { now },
            first_child: child,
            two_below: lower.first_child,
            device_children: lower.on_device().into(),
            queue: EvictionQueue::None,
            ..lower.clone()
        };
        let (upper_hash, parent) = (upper.hash, upper.parent);
        let upper = self.allocate_node(upper);
        self.len += 1;
        self.replace_child(parent, child, upper);
        self.child_table.replace(upper_hash, child, upper);
        let mut page = std::mem::take(&mut self.scratch);
        page.clear();
        let lower = &mut self.nodes[child as usize];
        (lower.parent, lower.next, lower.previous) = (upper, NONE, NONE);
        lower.edge.tokens(self.size, self.size, &mut page);
        let hash = self.hash(upper, &page);
        self.nodes[child as usize].hash = hash;
        self.scratch = page;
        self.insert_entry(child);
        if let Some(copy) = self.copies.get_mut(&child) {
            let rest = copy[at..].into();
            let first = std::mem::replace(copy, rest)[..at].into();
            self.copies.insert(upper, first);
        }
        self.event_log.split(child, upper, at);
        upper
    }

    /// Puts the used nodes of a path back into the eviction queues; only the last of each tier can be a leaf.
    fn requeue_path(&mut self, node: NodeId) {
        let mut at = node.index;
        while !self.nodes[at as usize].is_root() {
            self.requeue(at);
            if self.nodes[at as usize].on_device() {
                break;
            }
            at = self.nodes[at as usize].parent;
        }
    }
}

/// Hash of parent and first page.
#[inline]
fn hash_page(mut hasher: impl Hasher, parent: u32, page: &[u32]) -> u32 {
    if let [token] = page {
        hasher.write_u64(u64::from(parent) << 32 | u64::from(*token));
    } else {
        hasher.write_u32(parent);
        hasher.write(bytemuck::cast_slice(page));
    }
    hasher.finish() as u32
}

#[cfg(test)]
mod tests {
    use foldhash::SharedSeed;
    use foldhash::quality::FoldHasher;

    use super::hash_page;
    use crate::radix::child_table::ChildTable;

    const CHILDREN: u32 = 20_000;

    /// Consecutive tokens must not cluster in the table, for nodes with many or few children. With random hashes an entry lies
    /// 0.8 slots after its home at this load.
    #[test]
    fn probes_are_short_for_every_seed() {
        for seed in 1..=100 {
            let shared = SharedSeed::from_u64(seed);
            let hasher = FoldHasher::with_seed(seed, &shared);
            for siblings in [100, CHILDREN] {
                let mut table = ChildTable::default();
                for token in 0..CHILDREN {
                    table.insert(hash_page(hasher.clone(), token / siblings, &[token]), token);
                }
                let distance = table.mean_distance();
                assert!(distance < 1.0, "{distance} for the seed {seed}");
            }
        }
    }
}
