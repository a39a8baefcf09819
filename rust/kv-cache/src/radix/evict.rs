//! Eviction: whole leaves, by policy, from the device to the host or away.

use crate::radix::events::Medium;
use crate::radix::index::RadixIndex;
use crate::radix::node::{Kind, NONE, Queue};

/// Most leaves that are taken from their order at once.
const BATCH: usize = 512;
/// Leaves whose memory is asked for together, while those before them are evicted.
const AHEAD: usize = 8;

/// A page to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The page to read, of the one tier.
    pub from: u32,
    /// The page to write, of the other tier.
    pub to: u32,
}

/// The result of an eviction. Reuse one: each call clears it first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Pages that left the device, those of `moves` too. Do not write to them before the moves are done.
    pub device: Vec<u32>,
    /// Copies from the device to the host that the caller is to make, in this order.
    pub moves: Vec<Move>,
    /// Host pages that are free now. Do not write to them before the moves are done.
    pub host: Vec<u32>,
}

impl Evicted {
    pub(crate) fn clear(&mut self) {
        self.device.clear();
        self.moves.clear();
        self.host.clear();
    }
}

/// Host pages for what leaves the device.
struct Supply<'a> {
    given: &'a [u32],
    /// Pages of nodes that were evicted from the host to make room.
    freed: Vec<u32>,
    /// Nodes that came to the host in this call.
    arrived: Vec<u32>,
}

/// The first leaves of the device's order, taken from it at once.
struct Batch {
    ranks: Vec<u128>,
    /// How many of them are done.
    done: usize,
    /// Leaves in the order after they were taken. More means that others came to be, which may come before the rest.
    left: usize,
}

impl RadixIndex {
    /// Evicts leaves from the device, in the order of the policy, until at least `pages` pages have left it or no leaf
    /// is left that can be evicted. Returns how many pages left; the last node may bring more than were asked for.
    ///
    /// A node with a copy on the host stays in the index, only on the host. Others are gone, with what the host holds
    /// below them. Takes O(log leaves) for each node.
    pub fn evict(&mut self, pages: usize, out: &mut Evicted) -> usize {
        out.clear();
        self.evict_device(pages, None, out)
    }

    /// [`evict`](Self::evict), but nodes move to the host: to the pages `free`, and then to those of nodes that are
    /// evicted from there, in the order of the policy. Pages of `free` that were not needed come back in `out.host`.
    ///
    /// A node that finds no room on the host is gone.
    pub fn evict_to_host(&mut self, pages: usize, free: &[u32], out: &mut Evicted) -> usize {
        out.clear();
        let mut supply = Supply {
            given: free,
            freed: Vec::new(),
            arrived: Vec::new(),
        };
        let evicted = self.evict_device(pages, Some(&mut supply), out);
        for at in supply.arrived {
            self.nodes[at as usize].arrived = false;
            if self.nodes[at as usize].kind == Kind::Host {
                self.settle(at);
            }
        }
        out.host.extend(supply.freed);
        out.host.extend(supply.given);
        evicted
    }

    /// Evicts leaves from the host until at least `pages` of its pages are free, as [`evict`](Self::evict) does from
    /// the device. What is on the device, too, is not touched.
    pub fn evict_host(&mut self, pages: usize, out: &mut Evicted) -> usize {
        out.clear();
        while out.host.len() < pages && self.evict_host_leaf(&mut out.host) {}
        out.host.len()
    }

    fn evict_device(
        &mut self,
        pages: usize,
        mut supply: Option<&mut Supply>,
        out: &mut Evicted,
    ) -> usize {
        let mut batch = Batch {
            ranks: Vec::with_capacity(BATCH.min(pages)),
            done: 0,
            left: 0,
        };
        while out.device.len() < pages {
            let Some(at) = self.next_leaf(&mut batch, pages - out.device.len()) else {
                break;
            };
            let node = &mut self.nodes[at as usize];
            node.queue = Queue::None;
            out.device.extend_from_slice(node.edge.pages());
            self.evictable -= node.edge.len();
            if let Some(copy) = self.take_copy(at) {
                self.demote(at, &copy);
                self.settle(at);
            } else if !self.move_out(at, supply.as_deref_mut(), out) {
                self.drop_subtree(at, &mut out.host);
            }
        }
        self.device_leaves.extend(&batch.ranks[batch.done..]);
        out.device.len()
    }

    /// The next leaf of the device, when `wanted` pages are still to go.
    fn next_leaf(&mut self, batch: &mut Batch, wanted: usize) -> Option<u32> {
        if batch.done == batch.ranks.len() {
            self.refill(batch, wanted);
        }
        let next = batch.ranks.get(batch.done);
        // A node becomes a leaf when its last child goes.
        let is_late = self.device_leaves.len() != batch.left
            && next.is_none_or(|next| self.device_leaves.first() < Some(next));
        if is_late {
            return self.device_leaves.pop_first().map(|rank| rank as u32);
        }
        let next = *next?;
        if batch.done.is_multiple_of(AHEAD) {
            self.read_ahead(batch);
        }
        batch.done += 1;
        Some(next as u32)
    }

    /// Takes as many leaves as have so many pages, if they are like the others.
    fn refill(&mut self, batch: &mut Batch, wanted: usize) {
        let leaves = self.device_leaves.len();
        let wanted = wanted.min(self.evictable);
        let count = wanted * leaves / self.evictable.max(1);
        batch.ranks.clear();
        batch.done = 0;
        let after = || self.device_leaves.iter().nth(count.min(BATCH)).copied();
        if count <= 1 {
            batch.ranks.extend(self.device_leaves.pop_first());
        } else if let Some(after) = after() {
            let rest = self.device_leaves.split_off(&after);
            let first = std::mem::replace(&mut self.device_leaves, rest);
            batch.ranks.extend(first);
        } else {
            batch.ranks.extend(std::mem::take(&mut self.device_leaves));
        }
        batch.left = self.device_leaves.len();
    }

    /// Has the memory come that the evictions after the next ones need. Nodes are scattered, so each costs a few cache misses:
    /// those of a leaf come in two steps, the node and then what it names, while leaves before it are evicted.
    fn read_ahead(&self, batch: &Batch) {
        let leaves = |from: usize, to: usize| {
            let end = batch.ranks.len();
            let ranks = &batch.ranks[from.min(end)..to.min(end)];
            ranks.iter().map(|rank| *rank as u32)
        };
        let (next, later) = (batch.done + AHEAD, batch.done + 2 * AHEAD);
        if batch.done == 0 {
            leaves(0, later).for_each(|at| self.prefetch_node(at));
            leaves(0, next).for_each(|at| self.prefetch_around(at));
        }
        leaves(later, later + AHEAD).for_each(|at| self.prefetch_node(at));
        leaves(next, later).for_each(|at| self.prefetch_around(at));
    }

    /// Has the memory come that a leaf's eviction needs, except for the leaf itself.
    fn prefetch_around(&self, at: u32) {
        if let Some(leaf) = self.nodes.get(at as usize) {
            for at in [leaf.next, leaf.previous, leaf.parent] {
                self.prefetch_node(at);
            }
            leaf.edge.prefetch_pages();
            self.table.prefetch(leaf.hash);
        }
    }

    /// Takes a node's copy on the host out of the books, if it has one.
    fn take_copy(&mut self, at: u32) -> Option<Box<[u32]>> {
        // Without a host tier there are none.
        (!self.copies.is_empty())
            .then(|| self.copies.remove(&at))
            .flatten()
    }

    /// Moves a node to the host, if there is room.
    fn move_out(&mut self, at: u32, supply: Option<&mut Supply>, out: &mut Evicted) -> bool {
        let Some(supply) = supply else {
            return false;
        };
        let wanted = self.nodes[at as usize].edge.len();
        while supply.given.len() + supply.freed.len() < wanted {
            if !self.evict_host_leaf(&mut supply.freed) {
                return false;
            }
        }
        let (given, rest) = supply.given.split_at(wanted.min(supply.given.len()));
        let mut target = given.to_vec();
        target.extend(supply.freed.drain(..wanted - given.len()));
        supply.given = rest;
        let from = self.nodes[at as usize].edge.pages();
        let moves = from
            .iter()
            .zip(&target)
            .map(|(&from, &to)| Move { from, to });
        out.moves.extend(moves);
        self.on_host += wanted;
        self.record_stored(at, Medium::Host);
        self.demote(at, &target);
        self.nodes[at as usize].arrived = true;
        supply.arrived.push(at);
        true
    }

    /// A node leaves the device for these pages of the host.
    fn demote(&mut self, at: u32, host: &[u32]) {
        self.record_removed(at, Medium::Device);
        // Its last child on the host may have gone to make room for it.
        self.leave_queue(at);
        self.nodes[at as usize].kind = Kind::Host;
        let parent = self.nodes[at as usize].parent;
        self.nodes[parent as usize].device_children -= 1;
        self.set_pages(at, host);
        self.settle(parent);
    }

    /// Removes a node that left the device, and what the host holds below it.
    fn drop_subtree(&mut self, top: u32, host: &mut Vec<u32>) {
        let mut at = top;
        loop {
            let below = self.nodes[at as usize].first_child;
            if below != NONE {
                at = below;
                continue;
            }
            let parent = self.nodes[at as usize].parent;
            if at == top {
                self.record_removed(at, Medium::Device);
                self.remove(at);
                return;
            }
            self.remove_from_host(at, host);
            // Its parent, a leaf of the host now, is on its way out.
            self.leave_queue(parent);
            at = parent;
        }
    }

    fn evict_host_leaf(&mut self, free: &mut Vec<u32>) -> bool {
        let Some(rank) = self.host_leaves.pop_first() else {
            return false;
        };
        self.nodes[rank as u32 as usize].queue = Queue::None;
        self.remove_from_host(rank as u32, free);
        true
    }

    fn remove_from_host(&mut self, at: u32, free: &mut Vec<u32>) {
        let pages = self.nodes[at as usize].edge.pages();
        self.on_host -= pages.len();
        free.extend_from_slice(pages);
        self.record_removed(at, Medium::Host);
        self.remove(at);
    }
}
