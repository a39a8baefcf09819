//! Consistency checks.

use std::collections::HashSet;

use crate::radix::index::RadixIndex;
use crate::radix::node::{EvictionQueue, NONE, NodeState};

impl RadixIndex {
    /// Panics if links, queues, counts or ids disagree. Visits everything: for tests.
    ///
    /// # Panics
    ///
    /// When links, orders, counts or ids disagree.
    pub fn check_invariants(&self) {
        self.check_links();
        self.check_orders();
        self.check_counts();
    }

    fn check_links(&self) {
        let mut reached = 0;
        for (at, node) in (0..).zip(&self.nodes) {
            if node.state == NodeState::Free {
                continue;
            }
            let (mut device_children, mut previous, mut locks) = (0, NONE, 0);
            let mut pages = HashSet::new();
            for child in self.children(at) {
                let below = &self.nodes[child as usize];
                assert_eq!(
                    (below.parent, below.previous),
                    (at, previous),
                    "links of {child}"
                );
                assert!(
                    matches!(below.state, NodeState::Device | NodeState::Host),
                    "state of {child}"
                );
                assert!(
                    !below.on_device() || node.is_root() || node.on_device(),
                    "{child} hangs in the air"
                );
                device_children += u32::from(below.on_device());
                locks += below.locks;
                previous = child;
                reached += 1;
                let mut page = Vec::new();
                below.edge.tokens(self.size, self.size, &mut page);
                assert_eq!(below.hash, self.hash(at, &page), "hash of {child}");
                let found = self.child_table.find(below.hash, |node| node == child);
                assert!(found.is_some(), "{child} is not in the table");
                assert_eq!(self.find_child(at, &page), Some((child, 1)));
                assert!(pages.insert(page), "two children share their first page");
            }
            assert_eq!(
                node.device_children, device_children,
                "device children of {at}"
            );
            assert!(node.is_root() || node.locks >= locks, "locks of {at}");
            assert!(node.is_root() || node.edge.len() > 0, "{at} is empty");
            assert!(
                at == 0 || !node.is_root() || node.first_child != NONE,
                "root {at} is empty"
            );
        }
        assert_eq!(reached, self.len);
        assert_eq!(self.child_table.len(), self.len);
        let roots = self.nodes.iter().filter(|node| node.is_root()).count();
        assert_eq!(self.namespaces.len() + 1, roots);
    }

    fn check_orders(&self) {
        let (mut device, mut host) = (0, 0);
        for at in self.live_nodes() {
            let node = &self.nodes[at as usize];
            assert_eq!(node.queue, node.wanted_queue(), "order of {at}");
            let rank = node.rank(self.config.policy, at);
            match node.queue {
                EvictionQueue::None => {}
                EvictionQueue::Device => {
                    assert!(
                        self.device_leaves.contains(&rank),
                        "{at} is not in its order"
                    );
                    device += 1;
                }
                EvictionQueue::Host => {
                    assert!(self.host_leaves.contains(&rank), "{at} is not in its order");
                    host += 1;
                }
            }
        }
        assert_eq!(
            (self.device_leaves.len(), self.host_leaves.len()),
            (device, host)
        );
    }

    fn check_counts(&self) {
        let (mut evictable, mut protected, mut on_host) = (0, 0, 0);
        let (mut device_ids, mut host_ids) = (HashSet::new(), HashSet::new());
        for at in self.live_nodes() {
            let node = &self.nodes[at as usize];
            let pages = node.edge.pages();
            if node.on_device() {
                *(if node.locks > 0 {
                    &mut protected
                } else {
                    &mut evictable
                }) += pages.len();
                assert!(
                    pages.iter().all(|page| device_ids.insert(*page)),
                    "a device page in two places"
                );
            }
            let copy = self.copies.get(&at);
            assert!(
                node.on_device() || copy.is_none(),
                "{at} is on the host twice"
            );
            let copy = if node.on_device() {
                copy.map_or(&[][..], |copy| &**copy)
            } else {
                pages
            };
            assert!(copy.is_empty() || copy.len() == pages.len(), "copy of {at}");
            assert!(
                copy.iter().all(|page| host_ids.insert(*page)),
                "a host page in two places"
            );
            on_host += copy.len();
        }
        assert_eq!(
            (self.evictable, self.protected, self.on_host),
            (evictable, protected, on_host)
        );
        assert!(
            self.copies
                .keys()
                .all(|at| self.nodes[*at as usize].on_device())
        );
        assert_eq!(self.edge_bytes, self.counted_edge_bytes(), "bytes of edges");
    }

    fn counted_edge_bytes(&self) -> usize {
        let mut seen: Vec<&crate::radix::edge::Edge> = Vec::new();
        for at in self.live_nodes() {
            let edge = &self.nodes[at as usize].edge;
            if edge.is_only() || !seen.iter().any(|other| other.shares(edge)) {
                seen.push(edge);
            }
        }
        seen.iter().map(|edge| edge.bytes()).sum()
    }
}
