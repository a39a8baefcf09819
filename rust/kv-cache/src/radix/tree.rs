//! Places, links and orders: what keeps the nodes together.

use crate::radix::edge::Edge;
use crate::radix::error::RadixError;
use crate::radix::index::RadixIndex;
use crate::radix::node::{Kind, NONE, Node, NodeId, Queue};

impl RadixIndex {
    pub(crate) fn id(&self, at: u32) -> NodeId {
        NodeId {
            index: at,
            generation: self.nodes[at as usize].generation,
        }
    }

    /// The place of a node that is still there.
    pub(crate) fn resolve(&self, id: NodeId) -> Result<u32, RadixError> {
        match self.nodes.get(id.index as usize) {
            Some(node) if node.generation == id.generation && node.kind != Kind::Free => {
                Ok(id.index)
            }
            _ => Err(RadixError::UnknownNode {
                index: id.index,
                generation: id.generation,
            }),
        }
    }

    /// Goes on to a time. No two calls have the same, so that no order depends on places.
    pub(crate) fn tick(&mut self, now: u64) {
        self.now = now.max(self.now + 1);
    }

    /// The time of a node that comes to be within a call: after the time of the call.
    pub(crate) fn fresh(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// The children of a node, the last one first.
    pub(crate) fn children(&self, at: u32) -> impl Iterator<Item = u32> + '_ {
        let known = |at: u32| (at != NONE).then_some(at);
        let first = known(self.nodes[at as usize].first_child);
        std::iter::successors(first, move |at| known(self.nodes[*at as usize].next))
    }

    /// Gives a node a place.
    pub(crate) fn add(&mut self, mut node: Node) -> u32 {
        node.generation = self.generation;
        if self.free == NONE {
            // Less than doubling: where there is memory for a million nodes, there may be none for two.
            if self.nodes.len() == self.nodes.capacity() {
                self.nodes.reserve_exact(self.nodes.len() / 8 + 64);
            }
            self.nodes.push(node);
            return self.nodes.len() as u32 - 1;
        }
        let at = self.free;
        let place = &mut self.nodes[at as usize];
        self.free = place.next;
        node.generation = place.generation;
        *place = node;
        at
    }

    /// Frees a node's place; its id is never valid again.
    pub(crate) fn free_place(&mut self, at: u32) {
        // The rest is written when the place is used again.
        let node = &mut self.nodes[at as usize];
        node.edge = Edge::default();
        node.kind = Kind::Free;
        node.queue = Queue::None;
        node.generation = node.generation.wrapping_add(1);
        node.next = self.free;
        self.generation = self.generation.max(node.generation);
        self.free = at;
    }

    /// Puts a node, whose parent and hash are set, among its parent's children.
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

    /// Takes a node out of its parent's children.
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

    /// Puts `new` where `old` stands among the children of `parent`. Both are on the same tier; entries of the table
    /// are the caller's.
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

    /// Sets what follows a child, or is the first one.
    fn set_next(&mut self, parent: u32, previous: u32, next: u32) {
        if previous == NONE {
            self.nodes[parent as usize].first_child = next;
        } else {
            self.nodes[previous as usize].next = next;
        }
    }

    pub(crate) fn insert_entry(&mut self, at: u32) {
        self.table.insert(self.nodes[at as usize].hash, at);
    }

    pub(crate) fn remove_entry(&mut self, at: u32) {
        self.table.remove(self.nodes[at as usize].hash, at);
    }

    /// Takes a node out of its order of eviction, before what it is ordered by changes.
    #[inline]
    pub(crate) fn leave_queue(&mut self, at: u32) {
        let node = &mut self.nodes[at as usize];
        let queue = std::mem::take(&mut node.queue);
        if queue == Queue::None {
            return;
        }
        let rank = node.rank(self.config.policy, at);
        match queue {
            Queue::None => {}
            Queue::Device => {
                self.device_leaves.remove(&rank);
            }
            Queue::Host => {
                self.host_leaves.remove(&rank);
            }
        }
    }

    /// Puts a node into the order of eviction that it belongs into.
    #[inline]
    pub(crate) fn settle(&mut self, at: u32) {
        let wanted = self.nodes[at as usize].wanted_queue();
        if wanted == self.nodes[at as usize].queue {
            return;
        }
        self.leave_queue(at);
        let node = &mut self.nodes[at as usize];
        node.queue = wanted;
        let rank = node.rank(self.config.policy, at);
        match wanted {
            Queue::None => {}
            Queue::Device => {
                self.device_leaves.insert(rank);
            }
            Queue::Host => {
                self.host_leaves.insert(rank);
            }
        }
    }

    /// Removes a node without children. Its pages and counts are the caller's.
    pub(crate) fn remove(&mut self, at: u32) {
        self.leave_queue(at);
        self.unlink(at);
        let node = &mut self.nodes[at as usize];
        let (edge, parent) = (std::mem::take(&mut node.edge), node.parent);
        self.journal.forget(at);
        self.free_place(at);
        self.len -= 1;
        self.release(&edge, parent);
        let above = &self.nodes[parent as usize];
        if above.is_root() && parent != 0 && above.first_child == NONE {
            self.spaces.remove(parent);
            self.free_place(parent);
        } else {
            self.settle(parent);
        }
    }

    /// Changes the ids of a node's pages.
    pub(crate) fn set_pages(&mut self, at: u32, pages: &[u32]) {
        let node = &mut self.nodes[at as usize];
        let parent = node.parent;
        if let Some(left) = node.edge.set_pages(self.size, pages) {
            self.edge_bytes += node.edge.bytes();
            self.release(&left, parent);
        }
    }

    /// Drops a range of a buffer. Those that share it are ancestors: if they use no more than half of it, what they use
    /// moves to a buffer of its own. So a buffer is never mostly unused, and a page is copied for one dropped.
    fn release(&mut self, edge: &Edge, parent: u32) {
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
