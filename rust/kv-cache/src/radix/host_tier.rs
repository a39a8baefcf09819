//! The host tier: backup and load; reset and merge of the whole index.

use crate::radix::error::RadixError;
use crate::radix::events::Medium;
use crate::radix::evict::{EvictResult, PageCopy};
use crate::radix::index::RadixIndex;
use crate::radix::node::{NONE, NodeId, NodeState};

impl RadixIndex {
    /// Backs up a device node to these host pages (write-through), one for each of its own: it can then be evicted without a
    /// copy. Appends the copies that the caller must make to `moves`; lock the node until they are done.
    ///
    /// # Errors
    ///
    /// [`RadixError::UnknownNode`], [`RadixError::NotOnDevice`], [`RadixError::OnHost`], [`RadixError::PageCount`].
    pub fn backup(
        &mut self,
        node: NodeId,
        host: &[u32],
        moves: &mut Vec<PageCopy>,
    ) -> Result<(), RadixError> {
        let at = self.resolve(node)?;
        let node = &self.nodes[at as usize];
        if !node.on_device() {
            return Err(RadixError::NotOnDevice { index: at });
        }
        if self.copies.contains_key(&at) {
            return Err(RadixError::OnHost { index: at });
        }
        let pages = node.edge.pages();
        check_count(host.len(), pages.len())?;
        moves.extend(
            pages
                .iter()
                .zip(host)
                .map(|(&from, &to)| PageCopy { from, to }),
        );
        self.on_host += host.len();
        self.copies.insert(at, host.into());
        self.record_stored(at, Medium::Host);
        Ok(())
    }

    /// Loads a node and its ancestors from the host to these device pages,
    /// [`MatchResult::host_pages`](crate::radix::MatchResult::host_pages) of the match. The host keeps its copies. Appends the
    /// copies that the caller must make to `moves`; hold a lock on the node until they are done.
    ///
    /// # Errors
    ///
    /// [`RadixError::UnknownNode`] and [`RadixError::PageCount`].
    pub fn load(
        &mut self,
        node: NodeId,
        device: &[u32],
        moves: &mut Vec<PageCopy>,
    ) -> Result<(), RadixError> {
        let bottom = self.resolve(node)?;
        let mut path = Vec::new();
        let (mut at, mut wanted) = (bottom, 0);
        while self.nodes[at as usize].state == NodeState::Host {
            path.push(at);
            wanted += self.nodes[at as usize].edge.len();
            at = self.nodes[at as usize].parent;
        }
        check_count(device.len(), wanted)?;
        let mut rest = device;
        for at in path.into_iter().rev() {
            let pages = self.nodes[at as usize].edge.pages();
            let (first, after) = rest.split_at(pages.len());
            moves.extend(
                pages
                    .iter()
                    .zip(first)
                    .map(|(&from, &to)| PageCopy { from, to }),
            );
            self.restore_to_device(at, first);
            rest = after;
        }
        Ok(())
    }

    /// Writes the device pages of the path to a node to `pages`, which is cleared. Returns the number of pages after them that
    /// are only on the host.
    ///
    /// # Errors
    ///
    /// [`RadixError::UnknownNode`].
    pub fn path_pages(&self, node: NodeId, pages: &mut Vec<u32>) -> Result<usize, RadixError> {
        let bottom = self.resolve(node)?;
        let (mut device, mut host) = (0, 0);
        for at in self.path(bottom) {
            let node = &self.nodes[at as usize];
            *(if node.on_device() {
                &mut device
            } else {
                &mut host
            }) += node.edge.len();
        }
        pages.clear();
        pages.resize(device, 0);
        for at in self.path(bottom) {
            let node = &self.nodes[at as usize];
            if node.on_device() {
                let start = device - node.edge.len();
                pages[start..device].copy_from_slice(node.edge.pages());
                device = start;
            }
        }
        Ok(host)
    }

    /// Removes all nodes, locked or not, and returns all page ids. Time and settings stay.
    pub fn reset(&mut self, out: &mut EvictResult) {
        out.clear();
        for (at, node) in (0..).zip(&self.nodes) {
            match node.state {
                NodeState::Device => out.device.extend_from_slice(node.edge.pages()),
                NodeState::Host => out.host.extend_from_slice(node.edge.pages()),
                NodeState::Free | NodeState::Root => {}
            }
            if let Some(copy) = self.copies.get(&at) {
                out.host.extend_from_slice(copy);
            }
        }
        self.generation = self.generation.wrapping_add(1);
        self.nodes.truncate(1);
        self.nodes[0].first_child = NONE;
        self.nodes[0].device_children = 0;
        self.free = NONE;
        self.child_table.clear();
        self.namespaces.clear();
        self.device_leaves.clear();
        self.host_leaves.clear();
        self.copies.clear();
        self.event_log.clear();
        (self.evictable, self.protected, self.on_host) = (0, 0, 0);
        (self.len, self.edge_bytes) = (0, 0);
    }

    /// Merges unlocked nodes with their only child, where both are on the same tier and in one buffer, so that nothing is
    /// copied. Returns the number of removed nodes.
    ///
    /// A merged node has the later time and the higher counts of both, and the id of the lower. Visits every node: for idle
    /// times.
    pub fn merge(&mut self) -> usize {
        let before = self.len;
        for at in 0..self.nodes.len() as u32 {
            while self.merge_with_parent(at) {}
        }
        before - self.len
    }

    /// Merges a node with its parent; the id of the node stays.
    fn merge_with_parent(&mut self, at: u32) -> bool {
        let lower = &self.nodes[at as usize];
        if matches!(lower.state, NodeState::Free | NodeState::Root) {
            return false;
        }
        let parent = lower.parent;
        let upper = &self.nodes[parent as usize];
        let fits = upper.state == lower.state
            && upper.locks == 0
            && upper.first_child == at
            && lower.next == NONE
            && self.copies.contains_key(&at) == self.copies.contains_key(&parent);
        let mut edge = lower.edge.clone();
        if !fits || !edge.join(&upper.edge) {
            return false;
        }
        self.dequeue(at);
        self.remove_entry(at);
        self.remove_entry(parent);
        let upper = self.nodes[parent as usize].clone();
        self.replace_child(upper.parent, parent, at);
        let lower = &mut self.nodes[at as usize];
        lower.edge = edge;
        lower.hash = upper.hash;
        lower.accessed = lower.accessed.max(upper.accessed);
        lower.created = lower.created.min(upper.created);
        lower.hits = lower.hits.max(upper.hits);
        lower.priority = lower.priority.max(upper.priority);
        self.insert_entry(at);
        if let (Some(first), Some(rest)) = (self.copies.remove(&parent), self.copies.get_mut(&at)) {
            *rest = [&first[..], &rest[..]].concat().into();
        }
        self.event_log.join(parent, at);
        drop(upper);
        self.free_node(parent);
        self.len -= 1;
        self.requeue(at);
        true
    }

    /// A node and its ancestors, without the root.
    pub(crate) fn path(&self, at: u32) -> impl Iterator<Item = u32> + '_ {
        let below_root = |at: u32| (!self.nodes[at as usize].is_root()).then_some(at);
        std::iter::successors(below_root(at), move |at| {
            below_root(self.nodes[*at as usize].parent)
        })
    }
}

fn check_count(pages: usize, wanted: usize) -> Result<(), RadixError> {
    if pages == wanted {
        return Ok(());
    }
    Err(RadixError::PageCount { pages, wanted })
}
