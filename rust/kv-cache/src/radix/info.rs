//! Questions about an index and its nodes.

use crate::radix::config::Config;
use crate::radix::error::RadixError;
use crate::radix::index::RadixIndex;
use crate::radix::node::{Node, NodeId};

/// A node, as [`RadixIndex::info`] describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeInfo {
    /// The node above; [`NodeId::ROOT`] at the top of a namespace.
    pub parent: NodeId,
    /// Its pages.
    pub pages: usize,
    /// Pages from the start of the sequence to its end.
    pub depth: usize,
    /// Locks on it and on nodes below.
    pub locks: u32,
    /// Insertions that went through it.
    pub hits: u32,
    /// The highest priority of these.
    pub priority: i32,
    /// When it was matched or inserted last.
    pub last_access: u64,
    /// When it came to be, by an insertion or because a node was cut.
    pub created: u64,
    /// Whether its pages are on the device.
    pub on_device: bool,
    /// Whether they are on the host.
    pub on_host: bool,
    /// Nodes right below.
    pub children: usize,
}

impl RadixIndex {
    /// The index's parameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Nodes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no node.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Device pages that nothing locks.
    pub fn evictable_pages(&self) -> usize {
        self.evictable
    }

    /// Device pages that are locked.
    pub fn protected_pages(&self) -> usize {
        self.protected
    }

    /// Pages on the device.
    pub fn device_pages(&self) -> usize {
        self.evictable + self.protected
    }

    /// Pages on the host, those that are on the device, too, among them.
    pub fn host_pages(&self) -> usize {
        self.on_host
    }

    /// Facts about a node; of [`NodeId::ROOT`] those of the top of what has no namespace.
    ///
    /// # Errors
    ///
    /// [`RadixError::UnknownNode`].
    pub fn info(&self, node: NodeId) -> Result<NodeInfo, RadixError> {
        let at = self.resolve(node)?;
        let node = &self.nodes[at as usize];
        let parent = self
            .path(at)
            .nth(1)
            .map_or(NodeId::ROOT, |parent| self.id(parent));
        Ok(NodeInfo {
            parent,
            pages: node.edge.len(),
            depth: self
                .path(at)
                .map(|at| self.nodes[at as usize].edge.len())
                .sum(),
            locks: node.locks,
            hits: node.hits,
            priority: node.priority,
            last_access: node.accessed,
            created: node.created,
            on_device: node.on_device(),
            on_host: !node.is_root() && !node.on_device() || self.copies.contains_key(&at),
            children: self.children(at).count(),
        })
    }

    /// Heap bytes of the index. The overhead of ordered sets and maps is estimated.
    pub fn memory_bytes(&self) -> usize {
        let leaves = self.device_leaves.len() + self.host_leaves.len();
        let copies: usize = self.copies.values().map(|copy| size_of_val(&**copy)).sum();
        self.nodes.capacity() * size_of::<Node>()
            + self.table.bytes()
            + self.edge_bytes
            // Nodes of a B-tree are two thirds full.
            + leaves * size_of::<u128>() * 3 / 2
            + self.copies.capacity() * size_of::<(u32, Box<[u32]>)>()
            + copies
            + self.spaces.bytes()
            + self.journal.bytes()
            + self.scratch.capacity() * size_of::<u32>()
    }
}
