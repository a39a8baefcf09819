//! Insertion: what is new comes below what was there.

use std::sync::Arc;

use crate::radix::config::{Insertion, Key};
use crate::radix::edge::Edge;
use crate::radix::error::RadixError;
use crate::radix::events::Medium;
use crate::radix::index::RadixIndex;
use crate::radix::node::{Kind, NONE, Node, NodeId};

/// The result of [`RadixIndex::insert`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Inserted {
    /// Number of pages of the key that were on the device before. As many of the given pages, from the first on, were not
    /// taken: they are duplicates, and still the caller's. All others are the index's now.
    pub existing: usize,
    /// Whole pages of the key.
    pub pages: usize,
    /// The node that the key ends in.
    pub node: NodeId,
}

impl RadixIndex {
    /// Inserts a key whose KV is in these device pages, one for each whole page of the key.
    ///
    /// Pages of the key that only the host held become device pages again, with the pages given here.
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

    /// [`insert`](Self::insert) of a key that begins with the path that ends in `node`, as after a match of its start.
    /// What is above the node is not compared again, so the time depends on the tokens after it.
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
        let (mut done, mut on_device) = (0, true);
        for at in self.path(bottom) {
            let node = &self.nodes[at as usize];
            done += node.edge.len();
            on_device &= node.on_device();
        }
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
        inserted.existing = if on_device {
            self.use_path(bottom, how);
            done
        } else {
            self.insert_path(bottom, pages, how)
        };
        // After a match there is rarely anything.
        let mut scout = if at == root {
            self.look_ahead(root, tokens).flatten()
        } else {
            None
        };
        while let Some((child, agreed)) = self.child(at, &tokens[done * self.size..]) {
            scout = self.go_ahead(scout);
            self.use_child(child);
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

    /// Counts an insertion of a path that is on the device: no pages change, so the order is of no matter.
    fn use_path(&mut self, bottom: u32, how: Insertion) {
        let mut at = bottom;
        while !self.nodes[at as usize].is_root() {
            self.use_child(at);
            self.nodes[at as usize].count(how);
            self.settle(at);
            at = self.nodes[at as usize].parent;
        }
    }

    /// Inserts the pages of the path that ends in a node, from the root on. Returns how many were on the device.
    fn insert_path(&mut self, bottom: u32, pages: &[u32], how: Insertion) -> usize {
        let mut path = std::mem::take(&mut self.scratch);
        path.clear();
        path.extend(self.path(bottom));
        let (mut done, mut existing) = (0, 0);
        for &at in path.iter().rev() {
            self.use_child(at);
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
        let existing = if node.on_device() {
            node.count(how);
            pages.len()
        } else {
            node.priority = node.priority.max(how.priority);
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

    fn enter_or_add<'a>(&mut self, key: Key<'a>) -> (u32, &'a [u32]) {
        let (first, units) = self.units(key).unwrap_or_default();
        let root = self.spaces.root(key.namespace, first).unwrap_or_else(|| {
            let root = self.add_root();
            self.spaces.add(root, key.namespace.map(Arc::from), first);
            root
        });
        (root, units)
    }

    fn add_leaf(&mut self, parent: u32, tokens: &[u32], pages: &[u32], how: Insertion) -> u32 {
        let hash = self.hash(parent, &tokens[..self.size]);
        // It comes while the tokens are copied.
        self.table.prefetch(hash);
        let edge = Edge::new(tokens, pages);
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
            two_below: NONE,
            next: NONE,
            previous: NONE,
            hash,
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
