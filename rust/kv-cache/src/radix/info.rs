//! Queries.

use crate::radix::config::Config;
use crate::radix::error::RadixError;
use crate::radix::index::RadixIndex;
use crate::radix::node::{Node, NodeId};

/// A node, as [`RadixIndex::info`] describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeInfo {
    /// The node above; [`NodeId::ROOT`] at the top of a namespace.
    pub parent: NodeId,
    /// Number of pages.
    pub pages: usize,
    /// Pages from the root to its end.
    pub depth: usize,
    /// Locks of the node and its descendants.
    pub locks: u32,
    /// Insertions through it.
    pub hits: u32,
    /// Highest priority of these.
    pub priority: i32,
    /// Time of the last match or insertion.
    pub last_access: u64,
    /// Time of its insertion or split.
    pub created: u64,
    /// Whether its pages are on the device.
    pub on_device: bool,
    /// Whether they are on the host.
    pub on_host: bool,
    /// Number of children.
    pub children: usize,
}

impl RadixIndex {
    /// The index's parameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no node.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Unlocked device pages.
    pub fn evictable_pages(&self) -> usize {
        self.evictable
    }

    /// Locked device pages.
    pub fn protected_pages(&self) -> usize {
        self.protected
    }

    /// Device pages.
    pub fn device_pages(&self) -> usize {
        self.evictable + self.protected
    }

    /// Host pages, copies of device pages included.
    pub fn host_pages(&self) -> usize {
        self.on_host
    }

    /// Describes a node; [`NodeId::ROOT`] is the root of the unnamed namespace.
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

    /// Heap bytes; the overhead of ordered sets and maps is estimated.
    pub fn memory_bytes(&self) -> usize {
        let leaves = self.device_leaves.len() + self.host_leaves.len();
        let copies: usize = self.copies.values().map(|copy| size_of_val(&**copy)).sum();
        self.nodes.capacity() * size_of::<Node>()
            + self.child_table.bytes()
            + self.edge_bytes
            // Nodes of a B-tree are two thirds full.
            + leaves * size_of::<u128>() * 3 / 2
            + self.copies.capacity() * size_of::<(u32, Box<[u32]>)>()
            + copies
            + self.namespaces.bytes()
            + self.event_log.bytes()
            + self.scratch.capacity() * size_of::<u32>()
    }
}
