//! Evictions in the order of `SGLang`: its algorithm, transcribed node by node, scanning every leaf.

use std::collections::BTreeMap;

use pie_kv_cache::radix::{Config, EvictResult, InsertParams, Key, NodeId, Policy, RadixIndex};
use proptest::prelude::*;

const POLICIES: [Policy; 7] = [
    Policy::Lru,
    Policy::Lfu,
    Policy::Fifo,
    Policy::Filo,
    Policy::Mru,
    Policy::Slru,
    Policy::Priority,
];

/// `TreeNode` of `radix_cache.py`, with a page id where that has the indices of a page's slots.
#[derive(Debug, Clone, Default)]
struct TreeNode {
    children: BTreeMap<Vec<u32>, usize>,
    parent: usize,
    key: Vec<u32>,
    value: Vec<u32>,
    lock_ref: u32,
    last_access_time: u64,
    creation_time: u64,
    hit_count: u32,
    priority: i32,
    gone: bool,
}

/// `RadixCache` of `radix_cache.py`.
struct RadixCache {
    page_size: usize,
    policy: Policy,
    /// As in the unified cache of 0.5.23: a split keeps the time of creation.
    split_keeps_age: bool,
    nodes: Vec<TreeNode>,
    clock: u64,
}

impl RadixCache {
    fn new(config: Config) -> Self {
        Self {
            page_size: config.page_size as usize,
            policy: config.policy,
            split_keeps_age: config.split_keeps_age,
            nodes: vec![TreeNode::default()],
            clock: 0,
        }
    }

    /// `time.monotonic`.
    fn monotonic(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn add(&mut self, node: TreeNode) -> usize {
        let now = self.monotonic();
        self.nodes.push(TreeNode {
            last_access_time: now,
            creation_time: now,
            ..node
        });
        self.nodes.len() - 1
    }

    fn common(&self, node: usize, key: &[u32]) -> usize {
        let both = self.nodes[node].key.iter().zip(key);
        both.take_while(|(one, other)| one == other).count() / self.page_size * self.page_size
    }

    fn match_prefix(&mut self, key: &[u32]) -> (Vec<u32>, usize) {
        let mut key = &key[..key.len() / self.page_size * self.page_size];
        let (mut node, mut value) = (0, Vec::new());
        if key.is_empty() {
            return (value, node);
        }
        let access_time = self.monotonic();
        while !key.is_empty()
            && let Some(&child) = self.nodes[node].children.get(&key[..self.page_size])
        {
            self.nodes[child].last_access_time = access_time;
            let prefix_len = self.common(child, key);
            node = if prefix_len < self.nodes[child].key.len() {
                self.split(child, prefix_len)
            } else {
                child
            };
            value.extend(&self.nodes[node].value);
            key = &key[prefix_len..];
        }
        (value, node)
    }

    fn split(&mut self, child: usize, split_len: usize) -> usize {
        let pages = split_len / self.page_size;
        let below = self.nodes[child].clone();
        let new_node = self.add(TreeNode {
            children: BTreeMap::from([(below.key[split_len..][..self.page_size].to_vec(), child)]),
            parent: below.parent,
            key: below.key[..split_len].to_vec(),
            value: below.value[..pages].to_vec(),
            lock_ref: below.lock_ref,
            hit_count: below.hit_count,
            priority: below.priority,
            ..TreeNode::default()
        });
        if self.split_keeps_age {
            self.nodes[new_node].creation_time = below.creation_time;
        }
        let child = &mut self.nodes[child];
        child.parent = new_node;
        child.key.drain(..split_len);
        child.value.drain(..pages);
        let first = below.key[..self.page_size].to_vec();
        self.nodes[below.parent].children.insert(first, new_node);
        new_node
    }

    fn insert(&mut self, key: &[u32], value: &[u32], how: InsertParams) -> usize {
        let InsertParams { priority, .. } = how;
        let mut key = &key[..key.len() / self.page_size * self.page_size];
        let mut value = value;
        let (mut node, mut total) = (0, 0);
        if key.is_empty() {
            return 0;
        }
        let access_time = self.monotonic();
        while !key.is_empty()
            && let Some(&child) = self.nodes[node].children.get(&key[..self.page_size])
        {
            self.nodes[child].last_access_time = access_time;
            let prefix_len = self.common(child, key);
            node = if prefix_len < self.nodes[child].key.len() {
                self.split(child, prefix_len)
            } else {
                child
            };
            total += prefix_len / self.page_size;
            let node = &mut self.nodes[node];
            node.priority = node.priority.max(priority);
            node.hit_count += u32::from(!how.chunked && total > how.inserted);
            key = &key[prefix_len..];
            value = &value[prefix_len / self.page_size..];
        }
        if !key.is_empty() {
            let first = key[..self.page_size].to_vec();
            let leaf = self.add(TreeNode {
                parent: node,
                key: key.to_vec(),
                value: value.to_vec(),
                hit_count: u32::from(
                    !how.chunked && total + key.len() / self.page_size > how.inserted,
                ),
                priority,
                ..TreeNode::default()
            });
            self.nodes[node].children.insert(first, leaf);
        }
        total
    }

    fn change_locks(&mut self, mut node: usize, by: i64) {
        while node != 0 {
            let locks = &mut self.nodes[node].lock_ref;
            *locks = u32::try_from(i64::from(*locks) + by).expect("as many unlocks as locks");
            node = self.nodes[node].parent;
        }
    }

    /// `get_priority` of `evict_policy.py`.
    fn rank(&self, node: usize) -> (i64, i64) {
        let node = &self.nodes[node];
        let (accessed, created) = (node.last_access_time as i64, node.creation_time as i64);
        match self.policy {
            Policy::Lru => (accessed, 0),
            Policy::Lfu => (node.hit_count.into(), accessed),
            Policy::Fifo => (created, 0),
            Policy::Filo => (-created, 0),
            Policy::Mru => (-accessed, 0),
            Policy::Slru => ((node.hit_count >= 2).into(), accessed),
            Policy::Priority => (node.priority.into(), accessed),
        }
    }

    fn evict(&mut self, num_pages: usize) -> Vec<u32> {
        let mut evicted = Vec::new();
        while evicted.len() < num_pages {
            let leaves = (1..self.nodes.len()).filter(|node| {
                let node = &self.nodes[*node];
                !node.gone && node.children.is_empty() && node.lock_ref == 0
            });
            let Some(leaf) = leaves.min_by_key(|leaf| self.rank(*leaf)) else {
                break;
            };
            let node = std::mem::take(&mut self.nodes[leaf]);
            self.nodes[leaf].gone = true;
            let first = &node.key[..self.page_size];
            self.nodes[node.parent].children.remove(first);
            evicted.extend(node.value);
        }
        evicted
    }
}

#[derive(Debug, Clone)]
enum Step {
    Match {
        key: Vec<u32>,
        locks: bool,
    },
    Insert {
        key: Vec<u32>,
        priority: i32,
        chunked: bool,
        inserted: usize,
    },
    Unlock(usize),
    Evict(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let key = || {
        (0_usize..10, prop::collection::vec(0_u32..2, 0..10)).prop_map(|(shared, own)| {
            let shared = (0..shared as u32).map(|at| at % 3 + 5);
            shared.chain(own).collect::<Vec<u32>>()
        })
    };
    prop_oneof![
        3 => (key(), any::<bool>()).prop_map(|(key, locks)| Step::Match { key, locks }),
        5 => (key(), -1_i32..3, any::<bool>(), 0_usize..4).prop_map(
            |(key, priority, chunked, inserted)| Step::Insert { key, priority, chunked, inserted }
        ),
        2 => any::<usize>().prop_map(Step::Unlock),
        2 => (0_usize..8).prop_map(Step::Evict),
    ]
}

fn play(config: Config, steps: &[Step]) {
    let page_size = config.page_size as usize;
    let mut index = RadixIndex::new(config).expect("a valid config");
    let mut naive = RadixCache::new(config);
    let (mut pages, mut evicted) = (Vec::new(), EvictResult::default());
    let mut locks: Vec<(NodeId, usize)> = Vec::new();
    let mut next = 0;
    for step in steps {
        match step {
            Step::Match { key, locks: false } => {
                index.match_prefix(Key::new(key), 0, &mut pages);
                assert_eq!(pages, naive.match_prefix(key).0);
            }
            Step::Match { key, locks: true } => {
                let found = index.match_and_lock(Key::new(key), 0, &mut pages);
                let (value, node) = naive.match_prefix(key);
                assert_eq!(pages, value);
                naive.change_locks(node, 1);
                locks.push((found.node, node));
            }
            Step::Insert {
                key,
                priority,
                chunked,
                inserted,
            } => {
                let fresh: Vec<u32> = (next..next + (key.len() / page_size) as u32).collect();
                next += fresh.len() as u32;
                let how = InsertParams {
                    now: 0,
                    priority: *priority,
                    chunked: *chunked,
                    inserted: *inserted,
                };
                let inserted = index
                    .insert(Key::new(key), &fresh, how)
                    .expect("whole pages");
                let existing = naive.insert(key, &fresh, how);
                assert_eq!(inserted.existing, existing);
            }
            Step::Unlock(which) if !locks.is_empty() => {
                let (ours, theirs) = locks.swap_remove(which % locks.len());
                index.unlock(ours).expect("it is locked");
                naive.change_locks(theirs, -1);
            }
            Step::Unlock(_) => {}
            Step::Evict(count) => {
                index.evict(*count, &mut evicted);
                assert_eq!(evicted.device, naive.evict(*count));
            }
        }
        index.check_invariants();
    }
    while let Some((ours, theirs)) = locks.pop() {
        index.unlock(ours).expect("it is locked");
        naive.change_locks(theirs, -1);
    }
    // One by one, so that the whole order is compared.
    while index.evict(1, &mut evicted) > 0 {
        assert_eq!(evicted.device, naive.evict(1));
    }
    assert!(naive.evict(1).is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_policy_evicts_in_the_order_of_sglang(
        page_size in 1_usize..4,
        steps in prop::collection::vec(step(), 1..80),
    ) {
        for (policy, split_keeps_age) in POLICIES.iter().flat_map(|&policy| [(policy, false), (policy, true)]) {
            let config = Config {
                page_size: page_size as u32,
                policy,
                split_keeps_age,
                ..Config::default()
            };
            play(config, &steps);
        }
    }
}
