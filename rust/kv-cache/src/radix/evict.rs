//! Eviction of whole leaves by policy, to the host or away.
//!
//! The host tier (`HiCache` in `SGLang`) is write-back: pages are copied to the host when they are evicted from the device. Only
//! callers of [`RadixIndex::backup`] have write-through; our scheduler is none.

use crate::radix::events::Medium;
use crate::radix::index::RadixIndex;
use crate::radix::node::{EvictionQueue, NONE, NodeState};

/// Most leaves that are dequeued at once.
const BATCH: usize = 512;
/// Leaves that are prefetched together.
const AHEAD: usize = 8;

/// A page copy between the tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// Source page.
    pub from: u32,
    /// Destination page on the other tier.
    pub to: u32,
}

/// The result of an eviction; reusable, each call clears it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EvictResult {
    /// Evicted device pages, those of `moves` included. Do not write them before the copies are done.
    pub device: Vec<u32>,
    /// Copies from device to host that the caller must make, in this order.
    pub moves: Vec<PageCopy>,
    /// Freed host pages. Do not write them before the copies are done.
    pub host: Vec<u32>,
}

impl EvictResult {
    pub(crate) fn clear(&mut self) {
        self.device.clear();
        self.moves.clear();
        self.host.clear();
    }
}

/// Host pages for demoted nodes.
struct HostPages<'a> {
    given: &'a [u32],
    /// Pages of nodes that were evicted from the host.
    freed: Vec<u32>,
    /// Nodes that were demoted in this call.
    just_demoted: Vec<u32>,
}

/// The first leaves of the device queue, dequeued at once.
struct LeafBatch {
    ranks: Vec<u128>,
    /// Leaves that are done.
    done: usize,
    /// Length of the queue after dequeuing. If it differs, new leaves may precede the rest.
    left: usize,
}

impl RadixIndex {
    /// Evicts device leaves by policy until at least `pages` pages are evicted or no unlocked leaf is left. Returns the number
    /// of evicted pages; the last node may exceed the request.
    ///
    /// A node with a host copy stays in the index, on the host only. Others are removed with their descendants on the host.
    /// O(log leaves) for each node.
    pub fn evict(&mut self, pages: usize, out: &mut EvictResult) -> usize {
        out.clear();
        self.evict_device(pages, None, out)
    }

    /// [`evict`](Self::evict), but nodes are demoted to the host (write-back): to the pages `free`, then to those of nodes that
    /// are evicted from the host. Unused pages of `free` are returned in `out.host`.
    ///
    /// A node that does not fit the host is removed.
    pub fn evict_to_host(&mut self, pages: usize, free: &[u32], out: &mut EvictResult) -> usize {
        out.clear();
        let mut supply = HostPages {
            given: free,
            freed: Vec::new(),
            just_demoted: Vec::new(),
        };
        let evicted = self.evict_device(pages, Some(&mut supply), out);
        for at in supply.just_demoted {
            self.nodes[at as usize].just_demoted = false;
            if self.nodes[at as usize].state == NodeState::Host {
                self.requeue(at);
            }
        }
        out.host.extend(supply.freed);
        out.host.extend(supply.given);
        evicted
    }

    /// Evicts host leaves until at least `pages` host pages are free. Copies of device nodes are not evicted.
    pub fn evict_host(&mut self, pages: usize, out: &mut EvictResult) -> usize {
        out.clear();
        while out.host.len() < pages && self.evict_host_leaf(&mut out.host) {}
        out.host.len()
    }

    fn evict_device(
        &mut self,
        pages: usize,
        mut supply: Option<&mut HostPages>,
        out: &mut EvictResult,
    ) -> usize {
        let mut batch = LeafBatch {
            ranks: Vec::with_capacity(BATCH.min(pages)),
            done: 0,
            left: 0,
        };
        while out.device.len() < pages {
            let Some(at) = self.next_leaf(&mut batch, pages - out.device.len()) else {
                break;
            };
            let node = &mut self.nodes[at as usize];
            node.queue = EvictionQueue::None;
            out.device.extend_from_slice(node.edge.pages());
            self.evictable -= node.edge.len();
            if let Some(copy) = self.take_copy(at) {
                self.demote(at, &copy);
                self.requeue(at);
            } else if !self.demote_to_host(at, supply.as_deref_mut(), out) {
                self.drop_subtree(at, &mut out.host);
            }
        }
        self.device_leaves.extend(&batch.ranks[batch.done..]);
        out.device.len()
    }

    /// The next device leaf, with `wanted` pages to go.
    fn next_leaf(&mut self, batch: &mut LeafBatch, wanted: usize) -> Option<u32> {
        if batch.done == batch.ranks.len() {
            self.refill(batch, wanted);
        }
        let next = batch.ranks.get(batch.done);
        // A node becomes a leaf when its last child is evicted.
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

    /// Dequeues as many leaves as probably have `wanted` pages.
    fn refill(&mut self, batch: &mut LeafBatch, wanted: usize) {
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

    /// Prefetches what the next evictions need, in two steps: the leaf, then what it refers to, while leaves before it are
    /// evicted.
    fn read_ahead(&self, batch: &LeafBatch) {
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

    /// Prefetches what the eviction of a leaf touches, except for the leaf.
    fn prefetch_around(&self, at: u32) {
        if let Some(leaf) = self.nodes.get(at as usize) {
            for at in [leaf.next, leaf.previous, leaf.parent] {
                self.prefetch_node(at);
            }
            leaf.edge.prefetch_pages();
            self.child_table.prefetch(leaf.hash);
        }
    }

    /// Removes and returns a node's host copy.
    fn take_copy(&mut self, at: u32) -> Option<Box<[u32]>> {
        // Without a host tier there are none.
        (!self.copies.is_empty())
            .then(|| self.copies.remove(&at))
            .flatten()
    }

    /// Demotes a node to the host, if there is room.
    fn demote_to_host(
        &mut self,
        at: u32,
        supply: Option<&mut HostPages>,
        out: &mut EvictResult,
    ) -> bool {
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
            .map(|(&from, &to)| PageCopy { from, to });
        out.moves.extend(moves);
        self.on_host += wanted;
        self.record_stored(at, Medium::Host);
        self.demote(at, &target);
        self.nodes[at as usize].just_demoted = true;
        supply.just_demoted.push(at);
        true
    }

    /// Demotes a node to these host pages.
    fn demote(&mut self, at: u32, host: &[u32]) {
        self.record_removed(at, Medium::Device);
        // Its last child on the host may have been evicted for it.
        self.dequeue(at);
        self.nodes[at as usize].state = NodeState::Host;
        let parent = self.nodes[at as usize].parent;
        self.nodes[parent as usize].device_children -= 1;
        self.set_pages(at, host);
        self.requeue(parent);
    }

    /// Removes an evicted node and its descendants on the host.
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
            // Its parent, now a leaf, is removed next.
            self.dequeue(parent);
            at = parent;
        }
    }

    fn evict_host_leaf(&mut self, free: &mut Vec<u32>) -> bool {
        let Some(rank) = self.host_leaves.pop_first() else {
            return false;
        };
        self.nodes[rank as u32 as usize].queue = EvictionQueue::None;
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
