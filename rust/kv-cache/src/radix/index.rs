//! The tree: matching, inserting, locking.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher};

use foldhash::quality::RandomState;
use prefetch_index::prefetch_index;
use rustc_hash::FxHashMap;

use crate::radix::config::{Config, Key};
use crate::radix::error::RadixError;
use crate::radix::events::Journal;
use crate::radix::limits::MAX_PAGE_SIZE;
use crate::radix::node::{Kind, NONE, Node, NodeId, Queue};
use crate::radix::spaces::Spaces;
use crate::radix::table::Table;

/// Children that [`RadixIndex::partial`] looks at.
const LOOKED_AT: usize = 16;
/// Nodes of which the memory is asked for before the first of them is compared.
const AHEAD: usize = 3;

/// A node that a key most likely goes through, and what follows it.
pub(crate) type Scout<'a> = Option<(u32, &'a [u32])>;

/// The result of [`RadixIndex::match_prefix`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Match {
    /// The deepest node that matched, on either tier; [`NodeId::ROOT`] if none did.
    pub node: NodeId,
    /// The deepest one whose pages are on the device. Without a host tier the same.
    pub device_node: NodeId,
    /// Pages on the device, from the start of the key.
    pub device_pages: usize,
    /// Pages after them that are only on the host; see [`RadixIndex::load`].
    pub host_pages: usize,
}

/// A page that begins as a key goes on, for copy-on-write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partial {
    /// The page's id, on its tier.
    pub page: u32,
    /// How many tokens (or pairs) of it agree: fewer than a page has.
    pub tokens: usize,
    /// The node that begins with it. Lock it until the page is copied.
    pub node: NodeId,
    /// Whether the id is that of a device page; else of a host page.
    pub on_device: bool,
}

/// A prefix index: which pages hold the KV of which tokens. See the [crate](crate).
#[derive(Debug, Clone)]
pub struct RadixIndex {
    pub(crate) config: Config,
    /// Tokens of a page.
    pub(crate) size: usize,
    pub(crate) nodes: Vec<Node>,
    /// First of the free places.
    pub(crate) free: u32,
    /// Larger than every generation that was used.
    pub(crate) generation: u32,
    /// Children by hash of parent and first page.
    pub(crate) table: Table,
    pub(crate) hasher: RandomState,
    pub(crate) spaces: Spaces,
    /// Ranks of the leaves of the device that nothing locks, and of those of the host.
    pub(crate) device_leaves: BTreeSet<u128>,
    pub(crate) host_leaves: BTreeSet<u128>,
    /// Host pages of nodes that are on the device, too.
    pub(crate) copies: FxHashMap<u32, Box<[u32]>>,
    pub(crate) journal: Journal,
    pub(crate) now: u64,
    pub(crate) evictable: usize,
    pub(crate) protected: usize,
    pub(crate) on_host: usize,
    /// Nodes that are not roots.
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
            table: Table::default(),
            hasher: RandomState::default(),
            spaces: Spaces::default(),
            device_leaves: BTreeSet::new(),
            host_leaves: BTreeSet::new(),
            copies: FxHashMap::default(),
            journal: Journal::new(config.events),
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

    /// Finds the longest prefix of a key, and writes its device pages to `pages`, whose content is dropped.
    ///
    /// The nodes that match become the most recently used. Where a match ends inside a node, the node is cut there, as
    /// `SGLang` does; else nothing is allocated, as long as `pages` has room.
    pub fn match_prefix(&mut self, key: Key<'_>, now: u64, pages: &mut Vec<u32>) -> Match {
        let found = self.walk(key, now, pages);
        self.settle_path(found.node);
        found
    }

    /// [`match_prefix`](Self::match_prefix), with a [`lock`](Self::lock) on the node that it finds: nothing of the
    /// match is evicted before the node is [unlocked](Self::unlock).
    pub fn match_and_lock(&mut self, key: Key<'_>, now: u64, pages: &mut Vec<u32>) -> Match {
        let found = self.walk(key, now, pages);
        self.lock_path(found.node.index);
        found
    }

    /// How many pages of a key are on the device, and how many after them only on the host. Changes nothing.
    pub fn peek(&self, key: Key<'_>) -> (usize, usize) {
        let (mut device, mut host) = (0, 0);
        let Some((mut at, mut rest)) = self.enter(key) else {
            return (0, 0);
        };
        let Some(mut scout) = self.look_ahead(at, rest) else {
            return (0, 0);
        };
        while let Some((child, agreed)) = self.child(at, rest) {
            scout = self.go_ahead(scout);
            let node = &self.nodes[child as usize];
            *(if node.on_device() {
                &mut device
            } else {
                &mut host
            }) += agreed;
            if agreed < node.edge.len() {
                break;
            }
            (at, rest) = (child, &rest[agreed * self.size..]);
        }
        (device, host)
    }

    /// Looks, after a match of this key, for a page that begins as the key goes on: a request may copy that page and
    /// go on after the tokens that agree.
    ///
    /// Only the 16 newest nodes below the match are looked at. With one token to a page there is nothing to find.
    pub fn partial(&self, key: Key<'_>, found: &Match) -> Option<Partial> {
        let (root, tokens) = self.enter(key)?;
        let rest =
            &tokens[((found.device_pages + found.host_pages) * self.size).min(tokens.len())..];
        let at = match self.resolve(found.node).ok()? {
            0 => root,
            at => at,
        };
        let mut best: Option<Partial> = None;
        for child in self.children(at).take(LOOKED_AT) {
            let node = &self.nodes[child as usize];
            let tokens = node
                .edge
                .common(self.size, &rest[..rest.len().min(self.size)]);
            if tokens > best.map_or(0, |best| best.tokens) && tokens < self.size {
                best = Some(Partial {
                    page: node.edge.pages()[0],
                    tokens,
                    node: self.id(child),
                    on_device: node.on_device(),
                });
            }
        }
        best
    }

    /// Walks down a key, uses what it meets, and cuts the last node if it agrees in part.
    ///
    /// The nodes on the path may be out of the orders of eviction then, all others are in theirs.
    fn walk(&mut self, key: Key<'_>, now: u64, pages: &mut Vec<u32>) -> Match {
        pages.clear();
        self.tick(now);
        let mut found = Match::default();
        let Some((mut at, mut rest)) = self.enter(key) else {
            return found;
        };
        let Some(mut scout) = self.look_ahead(at, rest) else {
            return found;
        };
        while let Some((child, agreed)) = self.child(at, rest) {
            scout = self.go_ahead(scout);
            self.use_child(child);
            at = self.cut(child, agreed);
            let node = &self.nodes[at as usize];
            found.node = NodeId {
                index: at,
                generation: node.generation,
            };
            if node.on_device() {
                pages.extend_from_slice(node.edge.pages());
                found.device_node = found.node;
                found.device_pages += agreed;
            } else {
                found.host_pages += agreed;
            }
            rest = &rest[agreed * self.size..];
        }
        found
    }

    /// The child of a node that a key most likely goes on with. Nothing is compared.
    #[inline]
    fn likely_child(&self, parent: u32, rest: &[u32]) -> Option<u32> {
        let first = self.nodes[parent as usize].first_child;
        if self.nodes.get(first as usize)?.next == NONE {
            return Some(first);
        }
        let page = rest.get(..self.size)?;
        self.table.guess(self.hash(parent, page))
    }

    /// Has the memory come that a walk needs first: nodes and tokens. What is far apart comes while what is before it is compared.
    /// `None` says that there is no child to go on with.
    #[inline]
    pub(crate) fn look_ahead<'a>(&self, at: u32, rest: &'a [u32]) -> Option<Scout<'a>> {
        let mut scout = self.ask_for(self.likely_child(at, rest)?, rest);
        for _ in 1..AHEAD {
            scout = self.go_ahead(scout);
        }
        Some(scout)
    }

    /// Goes a node on, and has the memory come that a walk needs there.
    #[inline]
    pub(crate) fn go_ahead<'a>(&self, scout: Scout<'a>) -> Scout<'a> {
        let (at, rest) = scout?;
        self.ask_for(self.likely_child(at, rest)?, rest)
    }

    /// Has the memory of a node's tokens come, and of what is two below it: in a conversation each turn has a node, so most have one
    /// child.
    #[inline]
    fn ask_for<'a>(&self, at: u32, rest: &'a [u32]) -> Scout<'a> {
        let node = &self.nodes[at as usize];
        node.edge.prefetch(self.size);
        self.prefetch_node(node.two_below);
        Some((at, rest.get(node.edge.len() * self.size..)?))
    }

    /// Has the memory of a node come, if there is one.
    #[inline]
    pub(crate) fn prefetch_node(&self, at: u32) {
        // Its begin, and its end, which is the begin of its neighbour.
        prefetch_index(&self.nodes, at as usize);
        prefetch_index(&self.nodes, at as usize + 1);
    }

    /// Marks a child as used now, and takes it out of its order.
    #[inline]
    pub(crate) fn use_child(&mut self, child: u32) {
        self.leave_queue(child);
        self.nodes[child as usize].accessed = self.now;
    }

    /// The node of the first `agreed` pages of a child: itself, or a new one above it.
    #[inline]
    pub(crate) fn cut(&mut self, child: u32, agreed: usize) -> u32 {
        if agreed == self.nodes[child as usize].edge.len() {
            return child;
        }
        let upper = self.split(child, agreed);
        self.settle(child);
        upper
    }

    /// The child of a node whose first page begins `rest`, and how many pages of it agree.
    #[inline]
    pub(crate) fn child(&self, parent: u32, rest: &[u32]) -> Option<(u32, usize)> {
        let page = rest.get(..self.size)?;
        let first = self.nodes[parent as usize].first_child;
        if first == NONE {
            return None;
        }
        if self.nodes[first as usize].next == NONE {
            let agreed = self.agreed(first, rest);
            return (agreed > 0).then_some((first, agreed));
        }
        let (hash, mut agreed) = (self.hash(parent, page), 0);
        let child = self.table.find(hash, |child| {
            if self.nodes[child as usize].parent == parent {
                agreed = self.agreed(child, rest);
            }
            agreed > 0
        })?;
        Some((child, agreed))
    }

    /// How many pages of a node begin `rest`.
    #[inline]
    fn agreed(&self, at: u32, rest: &[u32]) -> usize {
        let agreed = self.nodes[at as usize].edge.common(self.size, rest);
        if self.size == 1 {
            agreed
        } else {
            agreed / self.size
        }
    }

    pub(crate) fn hash(&self, parent: u32, page: &[u32]) -> u32 {
        hash_page(self.hasher.build_hasher(), parent, page)
    }

    /// Whole pages of a key of this many tokens.
    pub(crate) fn page_count(&self, tokens: usize) -> usize {
        tokens.saturating_sub(self.config.bigram.into()) / self.size
    }

    /// The root of a key's namespace, if it has one, and its units.
    ///
    /// A pair of tokens needs no room of its own: after an equal one, two pairs are equal if their second tokens are.
    /// So the units of a key of pairs are its tokens from the second on, in a namespace for each first token.
    pub(crate) fn enter<'a>(&self, key: Key<'a>) -> Option<(u32, &'a [u32])> {
        let (first, units) = self.units(key)?;
        Some((self.spaces.root(key.namespace, first)?, units))
    }

    pub(crate) fn units<'a>(&self, key: Key<'a>) -> Option<(Option<u32>, &'a [u32])> {
        if !self.config.bigram {
            return Some((None, key.tokens));
        }
        let (first, units) = key.tokens.split_first()?;
        Some((Some(*first), units))
    }

    pub(crate) fn add_root(&mut self) -> u32 {
        self.add(Node {
            kind: Kind::Root,
            parent: NONE,
            first_child: NONE,
            two_below: NONE,
            next: NONE,
            previous: NONE,
            ..Node::default()
        })
    }

    /// Puts a new node above a child, with its first pages. Locks, hits and priority hold for both.
    fn split(&mut self, child: u32, at: usize) -> u32 {
        let now = self.fresh();
        let lower = &mut self.nodes[child as usize];
        let edge = lower.edge.split(at);
        let upper = Node {
            edge,
            accessed: now,
            created: now,
            first_child: child,
            two_below: lower.first_child,
            device_children: lower.on_device().into(),
            queue: Queue::None,
            ..lower.clone()
        };
        let (upper_hash, parent) = (upper.hash, upper.parent);
        let upper = self.add(upper);
        self.len += 1;
        self.replace_child(parent, child, upper);
        self.table.replace(upper_hash, child, upper);
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
        self.journal.split(child, upper, at);
        upper
    }

    /// Puts the nodes of a path that were used back into their orders: the last of either tier.
    fn settle_path(&mut self, node: NodeId) {
        let mut at = node.index;
        while !self.nodes[at as usize].is_root() {
            self.settle(at);
            if self.nodes[at as usize].on_device() {
                break;
            }
            at = self.nodes[at as usize].parent;
        }
    }
}

/// The hash of a node by its parent and its first page.
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
    use crate::radix::table::Table;

    const CHILDREN: u32 = 20_000;

    /// Tokens that follow each other, and nodes with many or few children, must not gather in one part of the table: a search
    /// reads on from the slot of a hash. With hashes that are random an entry lies 0.8 slots after its own, at this load.
    #[test]
    fn searches_are_short_whatever_the_seed() {
        for seed in 1..=100 {
            let shared = SharedSeed::from_u64(seed);
            let hasher = FoldHasher::with_seed(seed, &shared);
            for siblings in [100, CHILDREN] {
                let mut table = Table::default();
                for token in 0..CHILDREN {
                    table.insert(hash_page(hasher.clone(), token / siblings, &[token]), token);
                }
                let distance = table.mean_distance();
                assert!(distance < 1.0, "{distance} for the seed {seed}");
            }
        }
    }
}
