//! The hash table of the children of all nodes.

use prefetch_index::prefetch_index;

use crate::radix::node::NONE;

/// Fewest slots of a non-empty table.
const FEWEST: usize = 16;

/// Slots of a cache line.
const LINE: usize = 8;

/// A node by the hash of its parent and first page; `NONE` for an empty slot.
#[derive(Debug, Clone, Copy)]
struct Entry {
    hash: u32,
    node: u32,
}

const EMPTY: Entry = Entry {
    hash: 0,
    node: NONE,
};

/// Nodes by hash: open addressing with linear probing, at most three quarters full. The cache line of an entry follows from its
/// hash, so it can be prefetched.
#[derive(Debug, Clone, Default)]
pub(crate) struct ChildTable {
    /// Empty, or a power of two.
    slots: Vec<Entry>,
    len: usize,
}

impl ChildTable {
    /// The first node of this hash that fits.
    #[inline]
    pub(crate) fn find(&self, hash: u32, mut fits: impl FnMut(u32) -> bool) -> Option<u32> {
        let mut at = hash as usize;
        while let Some(entry) = self.slots.get(at & self.mask()) {
            if entry.node == NONE {
                return None;
            }
            if entry.hash == hash && fits(entry.node) {
                return Some(entry.node);
            }
            at += 1;
        }
        None
    }

    /// The first node of this hash: most likely the right one.
    #[inline]
    pub(crate) fn guess(&self, hash: u32) -> Option<u32> {
        self.find(hash, |_| true)
    }

    /// Prefetches the slots of a hash: few searches go further than the next cache line.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u32) {
        let at = hash as usize & self.mask();
        prefetch_index(&self.slots, at);
        prefetch_index(&self.slots, at + LINE);
    }

    /// Inserts a new node.
    pub(crate) fn insert(&mut self, hash: u32, node: u32) {
        if (self.len + 1) * 4 > self.slots.len() * 3 {
            self.grow();
        }
        self.len += 1;
        self.place(Entry { hash, node });
    }

    /// Replaces `old` by `new`, which has the same hash.
    pub(crate) fn replace(&mut self, hash: u32, old: u32, new: u32) {
        if let Some(at) = self.slot(hash, old) {
            self.slots[at].node = new;
        }
    }

    /// Removes a node by backward-shift deletion.
    pub(crate) fn remove(&mut self, hash: u32, node: u32) {
        let Some(mut hole) = self.slot(hash, node) else {
            return;
        };
        let mask = self.mask();
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let entry = self.slots[at];
            if entry.node == NONE {
                break;
            }
            let distance = at.wrapping_sub(entry.hash as usize) & mask;
            if distance >= at.wrapping_sub(hole) & mask {
                self.slots[hole] = entry;
                hole = at;
            }
        }
        self.slots[hole] = EMPTY;
        self.len -= 1;
    }

    /// Removes all nodes, keeping the memory.
    pub(crate) fn clear(&mut self) {
        self.slots.fill(EMPTY);
        self.len = 0;
    }

    /// Heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Entry>()
    }

    #[cfg(any(test, feature = "check"))]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Mean probe distance.
    #[cfg(test)]
    pub(crate) fn mean_distance(&self) -> f64 {
        let entries = self.slots.iter().zip(0..);
        let distances = entries
            .filter(|(entry, _)| entry.node != NONE)
            .map(|(entry, at): (_, usize)| at.wrapping_sub(entry.hash as usize) & self.mask());
        distances.sum::<usize>() as f64 / self.len as f64
    }

    fn mask(&self) -> usize {
        self.slots.len().wrapping_sub(1)
    }

    /// The slot of a node.
    fn slot(&self, hash: u32, node: u32) -> Option<usize> {
        let mask = self.mask();
        let mut at = hash as usize & mask;
        loop {
            let entry = self.slots.get(at)?;
            if entry.node == node {
                return Some(at);
            }
            if entry.node == NONE {
                return None;
            }
            at = (at + 1) & mask;
        }
    }

    /// Writes an entry to the first empty slot from its home slot on.
    fn place(&mut self, entry: Entry) {
        let mask = self.mask();
        let mut at = entry.hash as usize & mask;
        while self.slots[at].node != NONE {
            at = (at + 1) & mask;
        }
        self.slots[at] = entry;
    }

    fn grow(&mut self) {
        let slots = vec![EMPTY; (self.slots.len() * 2).max(FEWEST)];
        for entry in std::mem::replace(&mut self.slots, slots) {
            if entry.node != NONE {
                self.place(entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::ChildTable;

    #[derive(Debug, Clone)]
    enum Step {
        Insert(u32, u32),
        Remove(prop::sample::Index),
        Replace(prop::sample::Index, u32),
        Clear,
    }

    /// Few hashes, near the end of a small table, for long probes that wrap around.
    fn step() -> impl Strategy<Value = Step> {
        let hash = prop_oneof![0_u32..6, 10_u32..16, 60_u32..66, u32::MAX - 3..=u32::MAX];
        let node = 0_u32..1000;
        prop_oneof![
            30 => (hash, node.clone()).prop_map(|(hash, node)| Step::Insert(hash, node)),
            20 => any::<prop::sample::Index>().prop_map(Step::Remove),
            5 => (any::<prop::sample::Index>(), node).prop_map(|(at, node)| Step::Replace(at, node)),
            1 => Just(Step::Clear),
        ]
    }

    proptest! {
        #[test]
        fn a_table_is_a_map(steps in prop::collection::vec(step(), 1..300)) {
            let (mut table, mut naive) = (ChildTable::default(), BTreeMap::new());
            for step in steps {
                let pick = |at: prop::sample::Index| {
                    naive.iter().nth(at.index(naive.len().max(1))).map(|(node, hash)| (*node, *hash))
                };
                match step {
                    Step::Insert(hash, node) if !naive.contains_key(&node) => {
                        table.insert(hash, node);
                        naive.insert(node, hash);
                    }
                    Step::Remove(at) => if let Some((node, hash)) = pick(at) {
                        table.remove(hash, node);
                        naive.remove(&node);
                    },
                    Step::Replace(at, new) => if let Some((old, hash)) = pick(at).filter(|_| !naive.contains_key(&new)) {
                        table.replace(hash, old, new);
                        naive.remove(&old);
                        naive.insert(new, hash);
                    },
                    Step::Clear => {
                        table.clear();
                        naive.clear();
                    }
                    Step::Insert(..) => table.remove(1 << 20, 1000),
                }
                prop_assert_eq!(table.len(), naive.len());
                for (&node, &hash) in &naive {
                    prop_assert_eq!(table.find(hash, |found| found == node), Some(node));
                    prop_assert_eq!(table.find(hash ^ 1 << 20, |found| found == node), None);
                }
            }
        }
    }
}
