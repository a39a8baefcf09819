//! The edges of a trie, (node, first token) to child: extendible hashing.
//!
//! A directory over the leading bits of the hash names segments; a full segment is split in two, and below its largest size
//! grows by half. So no insertion moves more than one segment, and the load stays near a half: a missing edge, which every new
//! context looks up twice, is detected after two or three slots. Within a segment: linear probing with backward-shift deletion.
//!
//! An edge also holds its child's depth, so that a descent does not wait for the child's node.

/// Slots of the largest segment.
const SEGMENT: usize = 1024;
/// Slots of the first segment, allocated with the first edge.
const SMALLEST: usize = 8;
/// A segment grows or is split above this load, in percent.
const FULL: usize = 65;
/// Splits stop here, so that equal hashes cannot grow the directory without end.
const MAX_BITS: u32 = 24;

/// An inner node of the trie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inner {
    pub(crate) id: u32,
    /// Tokens from the root, 1 to 256.
    pub(crate) depth: u32,
}

/// The child that an edge leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Child {
    Node(Inner),
    /// The context that ends at this position of the text.
    Leaf(u32),
}

/// The largest token of an edge: the depth is in the bits above.
pub(crate) const LARGEST: u32 = (1 << TOKEN_BITS) - 1;
const TOKEN_BITS: u32 = 24;
const LEAF: u32 = 1 << 31;

/// An edge, without the node that it starts at; or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Edge {
    /// First token, and above it the depth of an inner child minus 1.
    token: u32,
    /// An inner node of the trie.
    child: u32,
}

impl Edge {
    /// No child has this word: positions end below it.
    pub(crate) const NONE: Self = Self {
        token: 0,
        child: u32::MAX,
    };

    pub(crate) fn new(token: u32, child: Child) -> Self {
        let (child, depth) = match child {
            Child::Node(Inner { id, depth }) => (id, depth - 1),
            Child::Leaf(position) => (position | LEAF, 0),
        };
        let token = token | depth << TOKEN_BITS;
        Self { token, child }
    }

    fn token(self) -> u32 {
        self.token & LARGEST
    }

    /// Whether this is an edge that starts with `token`.
    pub(crate) fn starts_with(self, token: u32) -> bool {
        self.token() == token && !self.is_none()
    }

    pub(crate) fn child(self) -> Child {
        if self.child & LEAF != 0 {
            return Child::Leaf(self.child & !LEAF);
        }
        let depth = (self.token >> TOKEN_BITS) + 1;
        let id = self.child;
        Child::Node(Inner { id, depth })
    }

    pub(crate) fn is_none(self) -> bool {
        self.child == Self::NONE.child
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    node: u32,
    edge: Edge,
}

const EMPTY: Slot = Slot {
    node: 0,
    edge: Edge::NONE,
};

impl Slot {
    fn is_empty(self) -> bool {
        self.edge.is_none()
    }

    fn hash(self) -> u64 {
        hash(self.node, self.edge.token())
    }
}

/// The wyhash mixing step.
fn hash(node: u32, token: u32) -> u64 {
    let key = u64::from(node) << 32 | u64::from(token);
    let wide = u128::from(key ^ 0x9e37_79b9_7f4a_7c15) * 0xe703_7ed1_a0b4_28db;
    (wide as u64) ^ (wide >> 64) as u64
}

#[derive(Clone, Debug)]
struct Segment {
    slots: Box<[Slot]>,
    taken: usize,
    /// Leading bits that its hashes share.
    bits: u32,
}

impl Segment {
    fn new(slots: usize, bits: u32) -> Self {
        Self {
            slots: vec![EMPTY; slots].into_boxed_slice(),
            taken: 0,
            bits,
        }
    }

    fn home_slot(&self, hash: u64) -> usize {
        (((hash & 0xffff_ffff) * self.slots.len() as u64) >> 32) as usize
    }

    fn after(&self, index: usize) -> usize {
        if index + 1 == self.slots.len() {
            0
        } else {
            index + 1
        }
    }

    /// The slot of a key, or the empty one where it belongs; there is always one.
    fn find(&self, node: u32, token: u32, hash: u64) -> usize {
        let mut index = self.home_slot(hash);
        loop {
            let slot = self.slots[index];
            if slot.is_empty() || (slot.node == node && slot.edge.token() == token) {
                return index;
            }
            index = self.after(index);
        }
    }

    fn put(&mut self, slot: Slot) {
        let index = self.find(slot.node, slot.edge.token(), slot.hash());
        self.taken += usize::from(self.slots[index].is_empty());
        self.slots[index] = slot;
    }

    fn is_full(&self) -> bool {
        (self.taken + 1) * 100 > self.slots.len() * FULL
    }

    /// Clears a slot by backward-shift deletion.
    fn clear(&mut self, mut hole: usize) {
        self.taken -= 1;
        let mut index = hole;
        loop {
            index = self.after(index);
            let slot = self.slots[index];
            if slot.is_empty() {
                break;
            }
            let length = self.slots.len();
            let distance = |from: usize| (index + length - from) % length;
            // It may move if the hole is between its home slot and its slot.
            if distance(self.home_slot(slot.hash())) >= distance(hole) {
                self.slots[hole] = slot;
                hole = index;
            }
        }
        self.slots[hole] = EMPTY;
    }

    /// Copies to a segment of another size. With `split`, slots whose next hash bit is set go to a second one.
    fn rebuilt(&self, slots: usize, split: bool) -> (Self, Self) {
        let bits = self.bits + u32::from(split);
        let mut low = Self::new(slots, bits);
        let mut high = Self::new(if split { slots } else { 0 }, bits);
        for &slot in self.slots.iter().filter(|slot| !slot.is_empty()) {
            let upper = split && prefix(slot.hash(), bits) & 1 == 1;
            let half = if upper { &mut high } else { &mut low };
            while half.is_full() {
                *half = half.rebuilt(larger(half.slots.len()), false).0;
            }
            half.put(slot);
        }
        (low, high)
    }
}

/// The leading bits of a hash.
fn prefix(hash: u64, bits: u32) -> usize {
    (hash >> 1 >> (63 - bits)) as usize
}

/// Doubles while small, then grows by half.
fn larger(slots: usize) -> usize {
    match slots {
        0..SMALLEST => SMALLEST,
        SMALLEST..64 => 2 * slots,
        _ => slots + slots / 2,
    }
}

/// A map from (node, token) to child.
#[derive(Clone, Debug, Default)]
pub(crate) struct EdgeTable {
    segments: Vec<Segment>,
    /// Segment by the leading `bits` bits.
    directory: Vec<u32>,
    bits: u32,
    /// Slots of all segments.
    slots: usize,
    /// Entries of the directory that splits have looked at.
    #[cfg(test)]
    visited: usize,
}

impl EdgeTable {
    /// Heap memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.slots * size_of::<Slot>()
            + self.segments.capacity() * size_of::<Segment>()
            + self.directory.capacity() * size_of::<u32>()
    }

    pub(crate) fn get(&self, node: u32, token: u32) -> Option<Child> {
        let hash = hash(node, token);
        let &segment = self.directory.get(prefix(hash, self.bits))?;
        let segment = &self.segments[segment as usize];
        let slot = segment.slots[segment.find(node, token, hash)];
        (!slot.is_empty()).then(|| slot.edge.child())
    }

    /// Adds an edge, or changes its child.
    pub(crate) fn set(&mut self, node: u32, token: u32, child: Child) {
        let hash = hash(node, token);
        if self.directory.is_empty() {
            self.segments.push(Segment::new(SMALLEST, 0));
            self.directory.push(0);
            self.slots = SMALLEST;
        }
        let mut number = self.directory[prefix(hash, self.bits)] as usize;
        while self.segments[number].is_full() {
            self.make_space(number, hash);
            number = self.directory[prefix(hash, self.bits)] as usize;
        }
        self.segments[number].put(Slot {
            node,
            edge: Edge::new(token, child),
        });
    }

    /// Removes an edge, if it exists.
    pub(crate) fn remove(&mut self, node: u32, token: u32) {
        let hash = hash(node, token);
        let Some(&number) = self.directory.get(prefix(hash, self.bits)) else {
            return;
        };
        let segment = &mut self.segments[number as usize];
        let index = segment.find(node, token, hash);
        if !segment.slots[index].is_empty() {
            segment.clear(index);
        }
    }

    /// Grows or splits the segment of `hash`.
    fn make_space(&mut self, number: usize, hash: u64) {
        let segment = &self.segments[number];
        let size = segment.slots.len();
        self.slots -= size;
        if size < SEGMENT || segment.bits >= MAX_BITS {
            let grown = segment.rebuilt(larger(size), false).0;
            self.slots += grown.slots.len();
            self.segments[number] = grown;
            return;
        }
        let (low, high) = segment.rebuilt((size * 5).div_ceil(8), true);
        self.slots += low.slots.len() + high.slots.len();
        self.double_directory(low.bits);
        // The segment's directory entries are adjacent; their upper half goes to the new segment.
        let added = self.segments.len() as u32;
        let shift = self.bits - low.bits;
        let upper = (prefix(hash, low.bits) | 1) << shift;
        let entries = &mut self.directory[upper..upper + (1 << shift)];
        entries.fill(added);
        #[cfg(test)]
        {
            self.visited += entries.len();
        }
        self.segments[number] = low;
        self.segments.push(high);
    }

    /// Doubles the directory until it distinguishes hashes by `bits` bits.
    fn double_directory(&mut self, bits: u32) {
        while self.bits < bits {
            self.directory = self
                .directory
                .iter()
                .flat_map(|&entry| [entry; 2])
                .collect();
            self.bits += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn it_is_a_map(operations in prop::collection::vec((0..60_u32, 0..40_u32, 0..3_u32), 0..6000)) {
            let (mut table, mut model) = (EdgeTable::default(), HashMap::new());
            for (step, (node, token, kind)) in operations.into_iter().enumerate() {
                if kind == 0 {
                    table.remove(node, token);
                    model.remove(&(node, token));
                } else {
                    let child = if kind == 1 { Child::Leaf(step as u32) } else { Child::Node(Inner { id: step as u32, depth: 1 + step as u32 % 256 }) };
                    table.set(node, token, child);
                    model.insert((node, token), child);
                }
            }
            for node in 0..61 {
                for token in 0..40 {
                    prop_assert_eq!(table.get(node, token), model.get(&(node, token)).copied());
                }
            }
        }
    }

    #[test]
    fn a_split_visits_its_own_entries_only() {
        let mut table = EdgeTable::default();
        for count in 0..1_500_000_u32 {
            table.set(count, count % 97, Child::Leaf(count));
        }
        let splits = table.segments.len() - 1;
        assert!(splits > 1000, "{splits}");
        // Hashes are spread evenly, so a segment has few entries however many there are in all.
        let each = table.visited / splits;
        assert!(each < 8, "{each} for each of {splits} splits");
    }

    #[test]
    fn the_load_is_neither_high_nor_low_at_any_size() {
        let mut table = EdgeTable::default();
        for count in 1..200_000_u32 {
            table.set(count, count % 97, Child::Leaf(count));
            if count > 1000 {
                let load = 100.0 * f64::from(count) / table.slots as f64;
                assert!((42.0..=FULL as f64).contains(&load), "{load} % at {count}");
            }
        }
        let slots: usize = table
            .segments
            .iter()
            .map(|segment| segment.slots.len())
            .sum();
        assert_eq!(slots, table.slots);
        let sizes = table.segments.iter().map(|segment| segment.slots.len());
        assert!(sizes.max() < Some(2 * SEGMENT), "no insertion moves more");
        assert!(table.bytes() < 200_000 * 30);
        for count in 1..200_000 {
            assert_eq!(table.get(count, count % 97), Some(Child::Leaf(count)));
        }
    }
}
