//! Insertion.

use std::sync::Arc;

use crate::radix::config::{InsertParams, Key};
use crate::radix::edge::Edge;
use crate::radix::error::RadixError;
use crate::radix::events::Medium;
use crate::radix::index::RadixIndex;
use crate::radix::node::{NONE, Node, NodeId, NodeState};

/// The result of [`RadixIndex::insert`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InsertResult {
    /// Pages of the key that were on the device already. As many leading pages of the caller's list are duplicates and stay the
    /// caller's; all others are the index's now.
    pub existing: usize,
    /// Full pages of the key.
    pub pages: usize,
    /// The node at the end of the key.
    pub node: NodeId,
}

impl RadixIndex {
    /// Inserts a key whose KV is in these device pages, one for each full page of the key.
    ///
    /// Pages that are only on the host get the device pages given here.
    ///
    /// # Errors
    ///
    /// [`RadixError::PageCount`].
    pub fn insert(
        &mut self,
        key: Key<'_>,
        pages: &[u32],
        how: InsertParams,
    ) -> Result<InsertResult, RadixError> {
        self.insert_after(NodeId::ROOT, key, pages, how)
    }

    /// [`insert`](Self::insert) of a key that starts with the path to `node`, as after a match. The path is not compared again,
    /// so the time depends on the tokens after it.
    ///
    /// The caller guarantees that (debug builds check it) and holds a lock on the node since the match.
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
        how: InsertParams,
    ) -> Result<InsertResult, RadixError> {
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
        let mut inserted = InsertResult {
            pages: wanted,
            ..InsertResult::default()
        };
        if wanted == 0 {
            return Ok(inserted);
        }
        self.advance_clock(how.now);
        let (root, tokens) = self.root_or_insert(key);
        let tokens = &tokens[..wanted * self.size];
        debug_assert!(self.begins_with(root, tokens, bottom));
        let mut at = if done == 0 { root } else { bottom };
        inserted.existing = if on_device {
            self.touch_path(bottom, how, done);
            done
        } else {
            self.insert_path(bottom, pages, how)
        };
        // After a match there is rarely a child to continue with.
        let mut lookahead = if at == root {
            self.start_lookahead(root, tokens).flatten()
        } else {
            None
        };
        while let Some((child, matched)) = self.find_child(at, &tokens[done * self.size..]) {
            lookahead = self.advance_lookahead(lookahead);
            self.touch(child);
            at = self.split_at_match(child, matched);
            let start = done;
            done += matched;
            inserted.existing += self.insert_node(at, &pages[start..done], how, done);
        }
        if done < wanted {
            let rest = &tokens[done * self.size..];
            at = self.add_leaf(at, rest, &pages[done..], how, wanted);
        }
        inserted.node = self.id(at);
        Ok(inserted)
    }

    /// Counts an insertion of a path of so many pages on the device.
    fn touch_path(&mut self, bottom: u32, how: InsertParams, pages: usize) {
        let (mut at, mut end) = (bottom, pages);
        while !self.nodes[at as usize].is_root() {
            self.touch(at);
            let node = &mut self.nodes[at as usize];
            node.count(how, end);
            end -= node.edge.len();
            self.requeue(at);
            at = self.nodes[at as usize].parent;
        }
    }

    /// Inserts the pages of the path to a node. Returns how many were on the device.
    fn insert_path(&mut self, bottom: u32, pages: &[u32], how: InsertParams) -> usize {
        let mut path = std::mem::take(&mut self.scratch);
        path.clear();
        path.extend(self.path(bottom));
        let (mut done, mut existing) = (0, 0);
        for &at in path.iter().rev() {
            self.touch(at);
            let len = self.nodes[at as usize].edge.len();
            let start = done;
            done += len;
            existing += self.insert_node(at, &pages[start..done], how, done);
        }
        self.scratch = path;
        existing
    }

    /// Counts an insertion of a node, which ends after so many pages of the key, and gives it these pages if it was not on the
    /// device. Returns how many of its pages were.
    fn insert_node(&mut self, at: u32, pages: &[u32], how: InsertParams, end: usize) -> usize {
        let node = &mut self.nodes[at as usize];
        let existing = if node.on_device() {
            node.count(how, end);
            pages.len()
        } else {
            node.priority = node.priority.max(how.priority);
            self.restore_to_device(at, pages);
            0
        };
        self.requeue(at);
        existing
    }

    /// Whether a key starts with the path to a node.
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
                edge.common_prefix(self.size, own) == own.len()
            })
    }

    fn root_or_insert<'a>(&mut self, key: Key<'a>) -> (u32, &'a [u32]) {
        let (first, units) = self.units(key).unwrap_or_default();
        let root = self
            .namespaces
            .root(key.namespace, first)
            .unwrap_or_else(|| {
                let root = self.add_root();
                self.namespaces
                    .add(root, key.namespace.map(Arc::from), first);
                root
            });
        (root, units)
    }

    fn add_leaf(
        &mut self,
        parent: u32,
        tokens: &[u32],
        pages: &[u32],
        how: InsertParams,
        end: usize,
    ) -> u32 {
        let hash = self.hash(parent, &tokens[..self.size]);
        // Arrives while the tokens are copied.
        self.child_table.prefetch(hash);
        let edge = Edge::new(tokens, pages);
        self.edge_bytes += edge.bytes();
        self.evictable += edge.len();
        self.len += 1;
        let now = self.next_time();
        let leaf = self.allocate_node(Node {
            edge,
            state: NodeState::Device,
            accessed: now,
            created: now,
            parent,
            first_child: NONE,
            two_below: NONE,
            next: NONE,
            previous: NONE,
            hash,
            hits: how.hit(end),
            priority: how.priority,
            ..Node::default()
        });
        self.link(leaf);
        self.nodes[parent as usize].device_children += 1;
        self.requeue(parent);
        self.requeue(leaf);
        self.record_stored(leaf, Medium::Device);
        leaf
    }

    /// Gives a host node device pages; the host keeps its copy.
    pub(crate) fn restore_to_device(&mut self, at: u32, pages: &[u32]) {
        self.dequeue(at);
        let node = &mut self.nodes[at as usize];
        let copy: Box<[u32]> = node.edge.pages().into();
        node.state = NodeState::Device;
        let (parent, locked) = (node.parent, node.locks > 0);
        *(if locked {
            &mut self.protected
        } else {
            &mut self.evictable
        }) += pages.len();
        self.copies.insert(at, copy);
        self.set_pages(at, pages);
        self.nodes[parent as usize].device_children += 1;
        self.requeue(parent);
        self.requeue(at);
        self.record_stored(at, Medium::Device);
    }
}
