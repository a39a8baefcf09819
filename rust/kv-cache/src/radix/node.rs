//! Nodes: an array with generational ids.

use crate::radix::config::{InsertParams, Policy, SLRU_PROTECTED_HITS};
use crate::radix::edge::Edge;

/// No node.
pub(crate) const NONE: u32 = u32::MAX;

/// The id of a node. The id of an evicted node is never valid again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct NodeId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl NodeId {
    /// The result of a match of nothing. Locking it has no effect.
    pub const ROOT: Self = Self {
        index: 0,
        generation: 0,
    };

    /// The id as one number.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// The id of a number from [`to_bits`](Self::to_bits).
    pub fn from_bits(bits: u64) -> Self {
        Self {
            index: bits as u32,
            generation: (bits >> 32) as u32,
        }
    }
}

/// The state of an array slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum NodeState {
    /// Free; `next` is the next free slot.
    #[default]
    Free,
    /// The root of a namespace, without pages.
    Root,
    /// Device pages, with or without a host copy.
    Device,
    /// Host pages only.
    Host,
}

/// The eviction queue of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum EvictionQueue {
    #[default]
    None,
    Device,
    Host,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Node {
    /// Tokens, and device pages or else host pages.
    pub(crate) edge: Edge,
    /// Time of the last match or insertion.
    pub(crate) accessed: u64,
    pub(crate) created: u64,
    pub(crate) parent: u32,
    /// The newest child.
    pub(crate) first_child: u32,
    /// The newest grandchild, if it still exists: a prefetch hint.
    pub(crate) two_below: u32,
    /// Siblings.
    pub(crate) next: u32,
    pub(crate) previous: u32,
    /// Children with pages on the device.
    pub(crate) device_children: u32,
    /// Hash of parent and first page.
    pub(crate) hash: u32,
    pub(crate) generation: u32,
    pub(crate) locks: u32,
    /// Insertions.
    pub(crate) hits: u32,
    pub(crate) priority: i32,
    pub(crate) state: NodeState,
    pub(crate) queue: EvictionQueue,
    /// Demoted to the host in the current call, which must not evict it.
    pub(crate) just_demoted: bool,
}

impl Node {
    pub(crate) fn is_root(&self) -> bool {
        self.state == NodeState::Root
    }

    pub(crate) fn on_device(&self) -> bool {
        self.state == NodeState::Device
    }

    /// Counts an insertion of a key, of which so many pages end with the node.
    pub(crate) fn count(&mut self, how: InsertParams, end: usize) {
        self.priority = self.priority.max(how.priority);
        self.hits = self.hits.saturating_add(how.hit(end));
    }

    /// The eviction queue that it belongs to.
    pub(crate) fn wanted_queue(&self) -> EvictionQueue {
        match self.state {
            _ if self.locks > 0 || self.just_demoted => EvictionQueue::None,
            NodeState::Device if self.device_children == 0 => EvictionQueue::Device,
            NodeState::Host if self.first_child == NONE => EvictionQueue::Host,
            _ => EvictionQueue::None,
        }
    }

    /// The eviction order: class, time and, for ties, node index.
    pub(crate) fn rank(&self, policy: Policy, index: u32) -> u128 {
        let (class, time) = match policy {
            Policy::Lru => (0, self.accessed),
            Policy::Lfu => (self.hits, self.accessed),
            Policy::Fifo => (0, self.created),
            Policy::Filo => (0, !self.created),
            Policy::Mru => (0, !self.accessed),
            Policy::Slru => (u32::from(self.hits >= SLRU_PROTECTED_HITS), self.accessed),
            Policy::Priority => (self.priority as u32 ^ 1 << 31, self.accessed),
        };
        u128::from(class) << 96 | u128::from(time) << 32 | u128::from(index)
    }
}
