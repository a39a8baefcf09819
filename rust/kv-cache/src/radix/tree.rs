//! Node allocation, links, and eviction queues.

use crate::radix::edge::Edge;
use crate::radix::error::RadixError;
use crate::radix::index::RadixIndex;
use crate::radix::node::{EvictionQueue, NONE, Node, NodeId, NodeState};

impl RadixIndex {
    pub(crate) fn id(&self, at: u32) -> NodeId {
        NodeId {
            index: at,
            generation: self.nodes[at as usize].generation,
        }
    }

    /// The index of a node that still exists.
    pub(crate) fn resolve(&self, id: NodeId) -> Result<u32, RadixError> {
        match self.nodes.get(id.index as usize) {
            Some(node) if node.generation == id.generation && node.state != NodeState::Free => {
                Ok(id.index)
            }
            _ => Err(RadixError::UnknownNode {
                index: id.index,
                generation: id.generation,
            }),
        }
    }

    /// Advances the time. No two calls have the same, so that no order depends on node indices.
    pub(crate) fn advance_clock(&mut self, now: u64) {
        self.now = now.max(self.now + 1);
    }

    /// The time of a node that is created within a call: after the time of the call.
    pub(crate) fn next_time(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// The children of a node, newest first.
    pub(crate) fn children(&self, at: u32) -> impl Iterator<Item = u32> + '_ {
        let known = |at: u32| (at != NONE).then_some(at);
        let first = known(self.nodes[at as usize].first_child);
        std::iter::successors(first, move |at| known(self.nodes[*at as usize].next))
    }

    /// Allocates an array slot for a node.
    pub(crate) fn allocate_node(&mut self, mut node: Node) -> u32 {
        node.generation = self.generation;
        if self.free == NONE {
            // Grows by an eighth: doubling a large array may exhaust memory.
            if self.nodes.len() == self.nodes.capacity() {
                self.nodes.reserve_exact(self.nodes.len() / 8 + 64);
            }
            self.nodes.push(node);
            return self.nodes.len() as u32 - 1;
        }
        let at = self.free;
        let slot = &mut self.nodes[at as usize];
        self.free = slot.next;
        node.generation = slot.generation;
        *slot = node;
        at
    }

    /// Frees a node's slot; its id is never valid again.
    pub(crate) fn free_node(&mut self, at: u32) {
        // Other fields are overwritten on reuse.
        let node = &mut self.nodes[at as usize];
        node.edge = Edge::default();
        node.state = NodeState::Free;
        node.queue = EvictionQueue::None;
        node.generation = node.generation.wrapping_add(1);
        node.next = self.free;
        self.generation = self.generation.max(node.generation);
        self.free = at;
    }

    /// Links a node, whose parent and hash are set, as the newest child of its parent.
    pub(crate) fn link(&mut self, at: u32) {
        let parent = self.nodes[at as usize].parent;
        let next = std::mem::replace(&mut self.nodes[parent as usize].first_child, at);
        self.nodes[at as usize].next = next;
        if next != NONE {
            self.nodes[next as usize].previous = at;
        }
        let above = self.nodes[parent as usize].parent;
        if let Some(above) = self.nodes.get_mut(above as usize) {
            above.two_below = at;
        }
        self.insert_entry(at);
    }

    /// Unlinks a node from its parent.
    pub(crate) fn unlink(&mut self, at: u32) {
        let node = &self.nodes[at as usize];
        let (parent, previous, next, on_device) =
            (node.parent, node.previous, node.next, node.on_device());
        if next != NONE {
            self.nodes[next as usize].previous = previous;
        }
        self.nodes[parent as usize].device_children -= u32::from(on_device);
        self.set_next(parent, previous, next);
        self.remove_entry(at);
    }

    /// Replaces a child in the sibling list. Both are on the same tier; table entries are up to the caller.
    pub(crate) fn replace_child(&mut self, parent: u32, old: u32, new: u32) {
        let node = &self.nodes[old as usize];
        let (previous, next) = (node.previous, node.next);
        let node = &mut self.nodes[new as usize];
        (node.parent, node.previous, node.next) = (parent, previous, next);
        if next != NONE {
            self.nodes[next as usize].previous = new;
        }
        self.set_next(parent, previous, new);
    }

    /// Sets the sibling after `previous`, or the first child.
    fn set_next(&mut self, parent: u32, previous: u32, next: u32) {
        if previous == NONE {
            self.nodes[parent as usize].first_child = next;
        } else {
            self.nodes[previous as usize].next = next;
        }
    }

    pub(crate) fn insert_entry(&mut self, at: u32) {
        self.child_table.insert(self.nodes[at as usize].hash, at);
    }

    pub(crate) fn remove_entry(&mut self, at: u32) {
        self.child_table.remove(self.nodes[at as usize].hash, at);
    }

    /// Removes a node from its eviction queue, before its rank changes.
    #[inline]
    pub(crate) fn dequeue(&mut self, at: u32) {
        let node = &mut self.nodes[at as usize];
        let queue = std::mem::take(&mut node.queue);
        if queue == EvictionQueue::None {
            return;
        }
        let rank = node.rank(self.config.policy, at);
        match queue {
            EvictionQueue::None => {}
            EvictionQueue::Device => {
                self.device_leaves.remove(&rank);
            }
            EvictionQueue::Host => {
                self.host_leaves.remove(&rank);
            }
        }
    }

    /// Moves a node to the eviction queue that it belongs to.
    #[inline]
    pub(crate) fn requeue(&mut self, at: u32) {
        let wanted = self.nodes[at as usize].wanted_queue();
        if wanted == self.nodes[at as usize].queue {
            return;
        }
        self.dequeue(at);
        let node = &mut self.nodes[at as usize];
        node.queue = wanted;
        let rank = node.rank(self.config.policy, at);
        match wanted {
            EvictionQueue::None => {}
            EvictionQueue::Device => {
                self.device_leaves.insert(rank);
            }
            EvictionQueue::Host => {
                self.host_leaves.insert(rank);
            }
        }
    }

    /// Removes a node without children. Page counts are up to the caller.
    pub(crate) fn remove(&mut self, at: u32) {
        self.dequeue(at);
        self.unlink(at);
        let node = &mut self.nodes[at as usize];
        let (edge, parent) = (std::mem::take(&mut node.edge), node.parent);
        self.event_log.forget(at);
        self.free_node(at);
        self.len -= 1;
        self.release_buffer(&edge, parent);
        let above = &self.nodes[parent as usize];
        if above.is_root() && parent != 0 && above.first_child == NONE {
            self.namespaces.remove(parent);
            self.free_node(parent);
        } else {
            self.requeue(parent);
        }
    }

    /// Replaces the page ids of a node.
    pub(crate) fn set_pages(&mut self, at: u32, pages: &[u32]) {
        let node = &mut self.nodes[at as usize];
        let parent = node.parent;
        if let Some(left) = node.edge.set_pages(self.size, pages) {
            self.edge_bytes += node.edge.bytes();
            self.release_buffer(&left, parent);
        }
    }

    /// Drops a range of a buffer. Its other users are ancestors: if they use no more than half of it, their part moves to a new
    /// buffer. So a buffer is never mostly unused, at the cost of one copied page for each dropped one.
    fn release_buffer(&mut self, edge: &Edge, parent: u32) {
        if edge.is_only() {
            self.edge_bytes -= edge.bytes();
            return;
        }
        let above = &self.nodes[parent as usize].edge;
        if !above.shares(edge) {
            return;
        }
        let (end, capacity) = above.reach();
        if end > capacity / 2 {
            return;
        }
        let used = above.head(end);
        let mut tokens = Vec::with_capacity(end * self.size);
        used.tokens(self.size, end * self.size, &mut tokens);
        let fresh = Edge::new(&tokens, used.pages());
        let mut at = parent;
        while self.nodes[at as usize].edge.shares(edge) {
            let node = &mut self.nodes[at as usize];
            node.edge = node.edge.moved_to(&fresh);
            if node.edge.start() == 0 || node.parent == NONE {
                break;
            }
            at = node.parent;
        }
        self.edge_bytes += fresh.bytes();
        drop(used);
        if edge.is_only() {
            self.edge_bytes -= edge.bytes();
        }
    }
}
