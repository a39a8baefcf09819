//! Nodes, in one array, named by their places.

use crate::radix::config::{Insertion, PROTECTED, Policy};
use crate::radix::edge::Edge;

/// No node.
pub(crate) const NONE: u32 = u32::MAX;

/// A node of an index. The id of an evicted node is unknown to the index for ever, though its place is used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct NodeId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl NodeId {
    /// The root, which a key matches that matches nothing else. Locking it changes nothing.
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

/// The content of a place in the array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Kind {
    /// Nothing; `next` is the next free place.
    #[default]
    Free,
    /// The top of a namespace, without pages.
    Root,
    /// Pages on the device, with or without a copy on the host.
    Device,
    /// Pages only on the host.
    Host,
}

/// One of the two orders of eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Queue {
    #[default]
    None,
    Device,
    Host,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Node {
    /// Tokens and pages: device pages, or host pages where there are no others.
    pub(crate) edge: Edge,
    /// When it was matched or inserted last.
    pub(crate) accessed: u64,
    pub(crate) created: u64,
    pub(crate) parent: u32,
    /// The child that came last.
    pub(crate) first_child: u32,
    /// What came last two below it, if it is still there: a guess, by which memory is prefetched.
    pub(crate) two_below: u32,
    /// Neighbours among the parent's children.
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
    pub(crate) kind: Kind,
    pub(crate) queue: Queue,
    /// It came to the host in the call that runs, which must not send it away again.
    pub(crate) arrived: bool,
}

impl Node {
    pub(crate) fn is_root(&self) -> bool {
        self.kind == Kind::Root
    }

    pub(crate) fn on_device(&self) -> bool {
        self.kind == Kind::Device
    }

    /// Counts an insertion of what is on the device.
    pub(crate) fn count(&mut self, how: Insertion) {
        self.priority = self.priority.max(how.priority);
        self.hits = self.hits.saturating_add(u32::from(!how.chunked));
    }

    /// The order of eviction that the node belongs into.
    pub(crate) fn wanted_queue(&self) -> Queue {
        match self.kind {
            _ if self.locks > 0 || self.arrived => Queue::None,
            Kind::Device if self.device_children == 0 => Queue::Device,
            Kind::Host if self.first_child == NONE => Queue::Host,
            _ => Queue::None,
        }
    }

    /// The key that orders evictions: a class, a time and, for equal ones, the node's place.
    pub(crate) fn rank(&self, policy: Policy, index: u32) -> u128 {
        let (class, time) = match policy {
            Policy::Lru => (0, self.accessed),
            Policy::Lfu => (self.hits, self.accessed),
            Policy::Fifo => (0, self.created),
            Policy::Filo => (0, !self.created),
            Policy::Mru => (0, !self.accessed),
            Policy::Slru => (u32::from(self.hits >= PROTECTED), self.accessed),
            Policy::Priority => (self.priority as u32 ^ 1 << 31, self.accessed),
        };
        u128::from(class) << 96 | u128::from(time) << 32 | u128::from(index)
    }
}
