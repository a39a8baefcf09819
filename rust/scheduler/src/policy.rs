//! Queue order: `SGLang`'s scheduling policies, and a limit on overtakes.

use std::cmp::Reverse;

use pie_kv_cache::radix::NodeId;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::admit::PREFIX_WAIT_TOKENS;
use crate::config::Policy;
use crate::scheduler::Scheduler;

/// Queue length above which `lpm` is `fcfs`; `SGLang`'s number.
const MATCHED: usize = 128;

impl<S> Scheduler<S> {
    /// Writes the waiting sequences in admission order to `order`.
    pub(crate) fn sort_waiting(&mut self, now: u64, order: &mut Vec<usize>) {
        order.clear();
        order.extend_from_slice(&self.waiting);
        let sequences = &self.sequences;
        match self.config.policy {
            Policy::Fcfs => {}
            Policy::Lpm if order.len() > MATCHED => {}
            Policy::Lpm => self.sort_by_prefix(order),
            Policy::DfsWeight => self.sort_by_dfs_weight(now, order),
            Policy::Lof => order.sort_by_key(|&slot| Reverse(sequences[slot].shared.max_tokens)),
            Policy::Random => self.random.shuffle(order),
            Policy::RoutingKey => self.sort_by_routing_key(order),
        }
        let sequences = &self.sequences;
        let most = self.config.max_overtakes;
        let overtaken = |slot: &usize| sequences[*slot].overtaken >= most;
        if order.iter().any(overtaken) {
            order.sort_by_key(|slot| {
                let order = sequences[*slot].order;
                if overtaken(slot) { order } else { u64::MAX }
            });
        }
        if self.config.priority {
            order.sort_by_key(|&slot| sequences[slot].shared.rank);
        }
    }

    /// Longest cached prefix first. Of requests with the same uncached prefix all but the first come last.
    fn sort_by_prefix(&self, order: &mut [usize]) {
        let size = self.kv_cache.page_size;
        let mut begun = FxHashSet::default();
        let mut keys = FxHashMap::default();
        for &slot in &*order {
            let sequence = &self.sequences[slot];
            let (device, host) = self.kv_cache.peek(sequence.cacheable());
            let begin = sequence.key(sequence.known().min(PREFIX_WAIT_TOKENS as u32));
            let follows = device * size <= PREFIX_WAIT_TOKENS
                && begin.tokens.len() == PREFIX_WAIT_TOKENS
                && !begun.insert((begin.namespace, begin.tokens));
            keys.insert(slot, (follows, Reverse(device + host)));
        }
        order.sort_by_key(|slot| keys.get(slot).copied());
    }

    /// Depth-first over the prefix index, by the number of waiting requests in each subtree; requests of a node after those
    /// below it.
    fn sort_by_dfs_weight(&mut self, now: u64, order: &mut Vec<usize>) {
        let mut path = Vec::new();
        // Twice: a match may split nodes on the path of an earlier one.
        for &slot in &*order {
            self.kv_cache
                .path(self.sequences[slot].cacheable(), now, &mut path);
        }
        let mut tree: FxHashMap<NodeId, Branch> = FxHashMap::default();
        for &slot in &*order {
            self.kv_cache
                .path(self.sequences[slot].cacheable(), now, &mut path);
            path.push(NodeId::ROOT);
            for (at, &node) in path.iter().enumerate() {
                let branch = tree.entry(node).or_default();
                branch.weight += 1;
                if let Some(child) = at.checked_sub(1).map(|below| path[below])
                    && !branch.children.contains(&child)
                {
                    branch.children.push(child);
                }
            }
            if let Some(last) = path.first().and_then(|node| tree.get_mut(node)) {
                last.own.push(slot);
            }
        }
        order.clear();
        let mut stack = vec![(NodeId::ROOT, false)];
        while let Some((node, children_done)) = stack.pop() {
            let Some(branch) = tree.get(&node) else {
                continue;
            };
            if children_done {
                order.extend_from_slice(&branch.own);
                continue;
            }
            stack.push((node, true));
            let mut children = branch.children.clone();
            children.sort_by_key(|child| Reverse(tree.get(child).map(|below| below.weight)));
            stack.extend(children.into_iter().rev().map(|child| (child, false)));
        }
    }

    /// Most running requests of the same routing key first.
    fn sort_by_routing_key(&self, order: &mut [usize]) {
        let key = |slot: usize| self.sequences[slot].shared.request.routing_key.as_deref();
        let mut counts: FxHashMap<&str, usize> = FxHashMap::default();
        for key in self.running.iter().filter_map(|&slot| key(slot)) {
            *counts.entry(key).or_default() += 1;
        }
        if counts.is_empty() {
            return;
        }
        order.sort_by_key(|&slot| {
            let name = key(slot).unwrap_or_default();
            match counts.get(name) {
                Some(&count) => (0, Reverse(count), name),
                None => (1, Reverse(0), name),
            }
        });
    }
}

/// A node of the prefix index with waiting requests in its subtree.
#[derive(Debug, Default)]
struct Branch {
    weight: usize,
    children: Vec<NodeId>,
    /// Sequences whose cached prefix ends here.
    own: Vec<usize>,
}
