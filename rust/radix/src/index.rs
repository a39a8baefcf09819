//! The tree: matching, inserting, locking.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use rustc_hash::FxHashMap;

use crate::config::{Config, Insertion, Key, MAX_PAGE_SIZE};
use crate::edge::Edge;
use crate::error::RadixError;
use crate::events::{Journal, Medium};
use crate::node::{Kind, NONE, Node, NodeId, Queue};
use crate::spaces::Spaces;

/// Children that [`RadixIndex::partial`] looks at.
const LOOKED_AT: usize = 16;

/// What [`RadixIndex::match_prefix`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Match {
    /// The deepest node that matched, on either tier; [`NodeId::ROOT`] if none did.
    pub node: NodeId,
    /// The deepest one whose pages are on the device. Without a host tier the same.
    pub device_node: NodeId,
    /// Pages on the device, from the start of the key.
    pub device_pages: usize,
    /// Pages behind them that are on the host alone; see [`RadixIndex::load`].
    pub host_pages: usize,
}

/// What [`RadixIndex::insert`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Inserted {
    /// So many pages of the key were on the device before. Of the pages that were given, the first so many were not
    /// taken: they are duplicates, and still the caller's. All others are the index's now.
    pub existing: usize,
    /// Whole pages of the key.
    pub pages: usize,
    /// The node that the key ends in.
    pub node: NodeId,
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

/// A child in the table of all nodes' children.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) hash: u32,
    pub(crate) node: u32,
}

impl Entry {
    /// A hash of 64 good bits from 32.
    pub(crate) fn spread(&self) -> u64 {
        spread(self.hash)
    }
}

pub(crate) fn spread(hash: u32) -> u64 {
    u64::from(hash).wrapping_mul(0x9E37_79B9_7F4A_7C15)
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
    pub(crate) table: HashTable<Entry>,
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
            table: HashTable::new(),
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
    /// What matches becomes the most recently used. Where a match ends inside a node, the node is cut there, as
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

    /// How many pages of a key are on the device, and how many behind them on the host alone. Changes nothing.
    pub fn peek(&self, key: Key<'_>) -> (usize, usize) {
        let (mut device, mut host) = (0, 0);
        let Some((mut at, mut rest)) = self.enter(key) else {
            return (0, 0);
        };
        while let Some(child) = self.child(at, rest) {
            let node = &self.nodes[child as usize];
            let agreed = node.edge.common(self.size, rest) / self.size;
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
    /// go on behind the tokens that agree.
    ///
    /// Of the nodes behind the match the 16 that came last are looked at. With one token to a page there is nothing to
    /// find.
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

    /// Inserts a key whose KV is in these device pages, one for each whole page of the key.
    ///
    /// Pages of the key that the host alone held become device pages again, with the pages given here.
    ///
    /// # Errors
    ///
    /// [`RadixError::PageCount`].
    pub fn insert(
        &mut self,
        key: Key<'_>,
        pages: &[u32],
        how: Insertion,
    ) -> Result<Inserted, RadixError> {
        self.insert_after(NodeId::ROOT, key, pages, how)
    }

    /// [`insert`](Self::insert) of a key that begins with the path that ends in `node`, as after a match of its start:
    /// what is above the node is not compared again, so the time depends on the tokens behind it.
    ///
    /// That the key begins so is up to the caller; debug builds check it. Hold a lock on the node from the match on.
    ///
    /// # Errors
    ///
    /// [`RadixError::UnknownNode`], and [`RadixError::PageCount`] for a wrong number of pages or a key that ends above
    /// the node.
    pub fn insert_after(
        &mut self,
        node: NodeId,
        key: Key<'_>,
        pages: &[u32],
        how: Insertion,
    ) -> Result<Inserted, RadixError> {
        let bottom = self.resolve(node)?;
        let wanted = self.page_count(key.tokens.len());
        let mut done = self
            .path(bottom)
            .map(|at| self.nodes[at as usize].edge.len())
            .sum();
        if pages.len() != wanted || done > wanted {
            return Err(RadixError::PageCount {
                pages: pages.len(),
                wanted: wanted.max(done),
            });
        }
        let mut inserted = Inserted {
            pages: wanted,
            ..Inserted::default()
        };
        if wanted == 0 {
            return Ok(inserted);
        }
        self.tick(how.now);
        let (root, tokens) = self.enter_or_add(key);
        let tokens = &tokens[..wanted * self.size];
        debug_assert!(self.begins_with(root, tokens, bottom));
        let mut at = if done == 0 { root } else { bottom };
        inserted.existing = self.insert_path(bottom, pages, how);
        while let Some(child) = self.child(at, &tokens[done * self.size..]) {
            let agreed = self.use_child(child, &tokens[done * self.size..]);
            at = self.cut(child, agreed);
            inserted.existing += self.insert_node(at, &pages[done..done + agreed], how);
            done += agreed;
        }
        if done < wanted {
            at = self.add_leaf(at, &tokens[done * self.size..], &pages[done..], how);
        }
        inserted.node = self.id(at);
        Ok(inserted)
    }

    /// Inserts the pages of the path that ends in a node, from the root on. Returns how many were on the device.
    fn insert_path(&mut self, bottom: u32, pages: &[u32], how: Insertion) -> usize {
        let mut path = std::mem::take(&mut self.scratch);
        path.clear();
        path.extend(self.path(bottom));
        let (mut done, mut existing) = (0, 0);
        for &at in path.iter().rev() {
            self.leave_queue(at);
            self.nodes[at as usize].accessed = self.now;
            let len = self.nodes[at as usize].edge.len();
            existing += self.insert_node(at, &pages[done..done + len], how);
            done += len;
        }
        self.scratch = path;
        existing
    }

    /// Counts an insertion of a node that was used, and gives it these pages if it was not on the device. Returns how
    /// many of its pages were.
    fn insert_node(&mut self, at: u32, pages: &[u32], how: Insertion) -> usize {
        let node = &mut self.nodes[at as usize];
        node.priority = node.priority.max(how.priority);
        let existing = if node.on_device() {
            node.hits = node.hits.saturating_add(u32::from(!how.chunked));
            pages.len()
        } else {
            self.adopt(at, pages);
            0
        };
        self.settle(at);
        existing
    }

    /// Whether a key in the namespace of `root` begins with the path that ends in a node.
    fn begins_with(&self, root: u32, tokens: &[u32], bottom: u32) -> bool {
        let mut end: usize = self
            .path(bottom)
            .map(|at| self.nodes[at as usize].edge.len())
            .sum();
        let top = self
            .path(bottom)
            .last()
            .map_or(root, |top| self.nodes[top as usize].parent);
        top == root
            && self.path(bottom).all(|at| {
                let edge = &self.nodes[at as usize].edge;
                let start = end - edge.len();
                let own = &tokens[start * self.size..end * self.size];
                end = start;
                edge.common(self.size, own) == own.len()
            })
    }

    /// Locks a node and all above it: they stay where they are. Locks are counted.
    ///
    /// Returns how many device pages became protected by it.
    ///
    /// # Errors
    ///
    /// [`RadixError::UnknownNode`].
    pub fn lock(&mut self, node: NodeId) -> Result<usize, RadixError> {
        let at = self.resolve(node)?;
        Ok(self.lock_path(at))
    }

    /// Takes a lock back. Returns how many device pages became evictable by it.
    ///
    /// # Errors
    ///
    /// [`RadixError::UnknownNode`] and [`RadixError::NotLocked`].
    pub fn unlock(&mut self, node: NodeId) -> Result<usize, RadixError> {
        let mut at = self.resolve(node)?;
        let start = &self.nodes[at as usize];
        if start.locks == 0 && !start.is_root() {
            return Err(RadixError::NotLocked { index: at });
        }
        let mut freed = 0;
        while !self.nodes[at as usize].is_root() {
            let node = &mut self.nodes[at as usize];
            node.locks -= 1;
            if node.locks == 0 {
                freed += if node.on_device() { node.edge.len() } else { 0 };
                self.settle(at);
            }
            at = self.nodes[at as usize].parent;
        }
        self.evictable += freed;
        self.protected -= freed;
        Ok(freed)
    }

    /// Walks down a key, uses what it meets, and cuts the last node if it agrees in part.
    ///
    /// The nodes on the path may be out of the orders of eviction then, those beside it are not.
    fn walk(&mut self, key: Key<'_>, now: u64, pages: &mut Vec<u32>) -> Match {
        pages.clear();
        self.tick(now);
        let mut found = Match::default();
        let Some((mut at, mut rest)) = self.enter(key) else {
            return found;
        };
        while let Some(child) = self.child(at, rest) {
            let agreed = self.use_child(child, rest);
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

    /// Marks a child as used now, and takes it out of its order. Returns how many pages of it agree.
    fn use_child(&mut self, child: u32, rest: &[u32]) -> usize {
        self.leave_queue(child);
        let node = &mut self.nodes[child as usize];
        node.accessed = self.now;
        node.edge.common(self.size, rest) / self.size
    }

    /// The node of the first `agreed` pages of a child: itself, or a new one above it.
    fn cut(&mut self, child: u32, agreed: usize) -> u32 {
        if agreed == self.nodes[child as usize].edge.len() {
            return child;
        }
        let upper = self.split(child, agreed);
        self.settle(child);
        upper
    }

    /// The child of a node whose first page begins `rest`.
    #[inline]
    pub(crate) fn child(&self, parent: u32, rest: &[u32]) -> Option<u32> {
        let page = rest.get(..self.size)?;
        let begins =
            |child: u32| self.nodes[child as usize].edge.common(self.size, page) == self.size;
        let first = self.nodes[parent as usize].first_child;
        if first == NONE {
            return None;
        }
        if self.nodes[first as usize].next == NONE {
            return begins(first).then_some(first);
        }
        let hash = self.hash(parent, page);
        let fits = |entry: &Entry| {
            entry.hash == hash
                && self.nodes[entry.node as usize].parent == parent
                && begins(entry.node)
        };
        self.table.find(spread(hash), fits).map(|entry| entry.node)
    }

    pub(crate) fn hash(&self, parent: u32, page: &[u32]) -> u32 {
        let mut hasher = self.hasher.build_hasher();
        if let [token] = page {
            hasher.write_u64(u64::from(parent) << 32 | u64::from(*token));
        } else {
            hasher.write_u32(parent);
            hasher.write(bytemuck::cast_slice(page));
        }
        hasher.finish() as u32
    }

    /// Whole pages of a key of so many tokens.
    pub(crate) fn page_count(&self, tokens: usize) -> usize {
        tokens.saturating_sub(self.config.bigram.into()) / self.size
    }

    /// The root of a key's namespace, if it has one, and its units.
    ///
    /// A pair of tokens needs no room of its own: behind an equal one, two pairs are equal if their second tokens are.
    /// So the units of a key of pairs are its tokens from the second on, in a namespace for each first token.
    pub(crate) fn enter<'a>(&self, key: Key<'a>) -> Option<(u32, &'a [u32])> {
        let (first, units) = self.units(key)?;
        Some((self.spaces.root(key.namespace, first)?, units))
    }

    fn units<'a>(&self, key: Key<'a>) -> Option<(Option<u32>, &'a [u32])> {
        if !self.config.bigram {
            return Some((None, key.tokens));
        }
        let (first, units) = key.tokens.split_first()?;
        Some((Some(*first), units))
    }

    fn enter_or_add<'a>(&mut self, key: Key<'a>) -> (u32, &'a [u32]) {
        let (first, units) = self.units(key).unwrap_or_default();
        let root = self.spaces.root(key.namespace, first).unwrap_or_else(|| {
            let root = self.add_root();
            self.spaces.add(root, key.namespace.map(Arc::from), first);
            root
        });
        (root, units)
    }

    fn add_root(&mut self) -> u32 {
        self.add(Node {
            kind: Kind::Root,
            parent: NONE,
            first_child: NONE,
            next: NONE,
            previous: NONE,
            ..Node::default()
        })
    }

    fn add_leaf(&mut self, parent: u32, tokens: &[u32], pages: &[u32], how: Insertion) -> u32 {
        let edge = Edge::new(tokens, pages, &mut self.scratch);
        self.edge_bytes += edge.bytes();
        self.evictable += edge.len();
        self.len += 1;
        let now = self.fresh();
        let leaf = self.add(Node {
            edge,
            kind: Kind::Device,
            accessed: now,
            created: now,
            parent,
            first_child: NONE,
            next: NONE,
            previous: NONE,
            hash: self.hash(parent, &tokens[..self.size]),
            hits: u32::from(!how.chunked),
            priority: how.priority,
            ..Node::default()
        });
        self.link(leaf);
        self.nodes[parent as usize].device_children += 1;
        self.settle(parent);
        self.settle(leaf);
        self.record_stored(leaf, Medium::Device);
        leaf
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
            device_children: lower.on_device().into(),
            queue: Queue::None,
            ..lower.clone()
        };
        let (upper_hash, parent) = (upper.hash, upper.parent);
        let upper = self.add(upper);
        self.len += 1;
        self.replace_child(parent, child, upper);
        if let Some(entry) = self
            .table
            .find_mut(spread(upper_hash), |entry| entry.node == child)
        {
            entry.node = upper;
        }
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

    /// Locks a path upwards, and takes it out of the orders of eviction.
    fn lock_path(&mut self, mut at: u32) -> usize {
        let mut locked = 0;
        while !self.nodes[at as usize].is_root() {
            let node = &mut self.nodes[at as usize];
            node.locks += 1;
            if node.locks == 1 {
                locked += if node.on_device() { node.edge.len() } else { 0 };
                self.leave_queue(at);
            }
            at = self.nodes[at as usize].parent;
        }
        self.evictable -= locked;
        self.protected += locked;
        locked
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

    /// Gives a node of the host device pages; the host keeps its copy.
    pub(crate) fn adopt(&mut self, at: u32, pages: &[u32]) {
        self.leave_queue(at);
        let node = &mut self.nodes[at as usize];
        let copy: Box<[u32]> = node.edge.pages().into();
        node.kind = Kind::Device;
        let (parent, locked) = (node.parent, node.locks > 0);
        *(if locked {
            &mut self.protected
        } else {
            &mut self.evictable
        }) += pages.len();
        self.copies.insert(at, copy);
        self.set_pages(at, pages);
        self.nodes[parent as usize].device_children += 1;
        self.settle(parent);
        self.settle(at);
        self.record_stored(at, Medium::Device);
    }
}
