//! The n-gram index of one text: for the end of any context, the longest earlier match and what most often followed it.
//!
//! A PATRICIA trie over reversed contexts. The path from the root along `text[i]`, `text[i-1]`, … names the context that ends
//! at position `i`, so the longest earlier match of a suffix is as long as its path is deep. Each position adds at most one
//! leaf, which is only a position in an edge, and one inner node. A node has its number of occurrences and their most
//! frequent continuation.
//!
//! **Continuations are kept while appending.** Token `a` followed context `x` as often as `xa` occurred: that is the count
//! on the path of the new context, one token deeper. So one descent gives all counts that an append changes, and the
//! nodes of the previous path compare them with their best. Ties go to the newer. `second` is the last continuation that
//! was not the best. When the best one occurs again after the second, its position moves there, so the larger of both
//! positions says which was last.
//!
//! **Paths are one token longer than matches,** because the continuations of the longest match are counted by contexts
//! that are one token longer.
//!
//! **Appending waits for memory** once an index outgrows the caches, so what is used together is stored together. A node holds
//! its first two edges, half a cache line in all, and only further ones are in a hash table. New nodes are adjacent.
//!
//! **Rewinding undoes appends in reverse.** Nodes are numbered in the order of their creation, so the last token's is the
//! last one; a position that was replaced is kept in `undo`.

pub(crate) mod search;

use std::mem;

use crate::growth::push;
use crate::table::{Child, Edge, Inner, LARGEST, Table};
use crate::undo::Undo;

pub(crate) use search::{Candidate, Draft, Match, Scratch, share};

/// Stands before the first token of a text, and between texts. It matches itself, and no match extends beyond it.
pub(crate) const BOUNDARY: u32 = LARGEST;

/// The root; the only node without an occurrence.
const ROOT: Inner = Inner { id: 0, depth: 0 };

/// Contexts that share their last `depth` tokens. Aligned, so that no node spans two cache lines.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
struct Node {
    /// Position of the most frequent continuation: its last occurrence that came after a different one. The position
    /// before it is an occurrence of the node.
    best: u32,
    /// How often that continuation followed; 0 if none ever did.
    best_count: u32,
    /// Occurrences, one without a continuation included.
    count: u32,
    /// Position of another continuation: the last one that was not the best, or was replaced as the best. A boundary if
    /// there is none. It is larger than `best` if it came last.
    second: u32,
    /// The first two edges; most nodes have no more. Edges are removed in the reverse order of their addition, so the table
    /// has none of a node with a free place here.
    edges: [Edge; 2],
}

impl Default for Node {
    fn default() -> Self {
        Self {
            best: 0,
            best_count: 0,
            count: 0,
            second: 0,
            edges: [Edge::NONE; 2],
        }
    }
}

impl Node {
    /// Reverts that `position` became the best or the second, by the word that this left in `undo`.
    fn restore(&mut self, position: u32, word: u32) {
        let before = word & !(ROSE | AGAIN);
        if word & AGAIN != 0 {
            self.best = before;
            self.best_count -= 1;
            return;
        }
        let second = mem::replace(&mut self.second, before);
        if self.best == position {
            self.best = second;
            self.best_count -= u32::from(word & ROSE != 0);
        }
    }
}

impl Inner {
    fn depth(self) -> usize {
        self.depth as usize
    }
}

/// How far a descent came; the nodes that it passed are in the path.
struct Reached {
    matched: usize,
    /// The end of the edge on which the match ends, if it ends on one.
    below: Option<Child>,
}

/// An index over one text, or over several with boundaries between.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    /// Longest match.
    depth: usize,
    text: Vec<u32>,
    /// Position of the last boundary.
    segment: usize,
    nodes: Vec<Node>,
    /// Edges beyond the two that a node holds.
    more_edges: Table,
    /// Positions that were replaced, with [`ROSE`] or [`AGAIN`]. `None` for an index that is never rewound.
    undo: Option<Undo>,
    /// The last position's nodes, from the root down.
    path: Vec<Inner>,
    spare: Vec<Inner>,
    /// Number of tokens that were appended or removed.
    #[cfg(test)]
    pub(crate) work: usize,
}

/// In a word of `undo`: the former best had one occurrence less.
const ROSE: u32 = 1 << 31;
/// In a word of `undo`: the best occurred again, and this is where it did before.
const AGAIN: u32 = 1 << 30;

impl Index {
    /// An empty index for matches of at most `depth` tokens.
    pub(crate) fn new(depth: usize, rewinds: bool) -> Self {
        Self {
            depth,
            text: vec![BOUNDARY],
            segment: 0,
            nodes: vec![Node::default()],
            more_edges: Table::default(),
            undo: rewinds.then(Undo::default),
            path: Vec::new(),
            spare: Vec::new(),
            #[cfg(test)]
            work: 0,
        }
    }

    /// The longest match in tokens.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// The text, which starts with a boundary.
    pub(crate) fn text(&self) -> &[u32] {
        &self.text
    }

    /// The end of the text, as much of it as a search reads.
    pub(crate) fn tail(&self) -> &[u32] {
        let start = self.text.len().saturating_sub(self.depth);
        &self.text[start.max(self.segment)..]
    }

    /// Tokens in the text, its first boundary not counted.
    pub(crate) fn len(&self) -> usize {
        self.text.len() - 1
    }

    /// Heap memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let undo = self.undo.as_ref().map_or(0, Undo::bytes);
        let paths = self.path.capacity() + self.spare.capacity();
        self.text.capacity() * size_of::<u32>()
            + paths * size_of::<Inner>()
            + undo
            + self.nodes.capacity() * size_of::<Node>()
            + self.more_edges.bytes()
    }

    fn node(&self, id: u32) -> &Node {
        &self.nodes[id as usize]
    }

    /// The child of node `id` by the edge that starts with `token`.
    fn edge(&self, id: u32, token: u32) -> Option<Child> {
        let edges = &self.node(id).edges;
        match edges.iter().find(|edge| edge.starts_with(token)) {
            Some(edge) => Some(edge.child()),
            None if edges[1].is_none() => None,
            None => self.more_edges.get(id, token),
        }
    }

    /// Adds an edge, or changes its child.
    fn set_edge(&mut self, id: u32, token: u32, child: Child) {
        let mut edges = self.nodes[id as usize].edges.iter_mut();
        match edges.find(|edge| edge.is_none() || edge.starts_with(token)) {
            Some(edge) => *edge = Edge::new(token, child),
            None => self.more_edges.set(id, token, child),
        }
    }

    /// Removes the edge that was added last to node `id`.
    fn remove_edge(&mut self, id: u32, token: u32) {
        let mut edges = self.nodes[id as usize].edges.iter_mut();
        match edges.find(|edge| edge.starts_with(token)) {
            Some(edge) => *edge = Edge::NONE,
            None => self.more_edges.remove(id, token),
        }
    }

    /// The token `back` positions before `at`.
    fn before(&self, at: u32, back: usize) -> u32 {
        self.text[at as usize - back]
    }

    /// How often the context at a leaf was continued: 0 or 1.
    fn continuations(&self, leaf: u32) -> u32 {
        let next = self.text.get(leaf as usize + 1);
        u32::from(next.is_some_and(|&token| token != BOUNDARY))
    }

    /// Descends along the end of `suffix`, at most `limit` tokens.
    fn descend(&self, suffix: &[u32], limit: usize, path: &mut Vec<Inner>) -> Reached {
        path.clear();
        let length = limit.min(suffix.len());
        let token = |depth: usize| suffix[suffix.len() - 1 - depth];
        let (mut node, mut below) = (ROOT, None);
        // The descent compares the first token of each edge only; one comparison at the end finds the first difference.
        while node.depth() < length {
            below = self.edge(node.id, token(node.depth()));
            let Some(Child::Node(inner)) = below else {
                break;
            };
            path.push(inner);
            node = inner;
        }
        let (occurrence, known) = match below {
            Some(Child::Leaf(position)) => (position, length),
            _ if node == ROOT => (0, 0),
            _ => (self.node(node.id).best - 1, length.min(node.depth())),
        };
        let matched = (0..known).find(|&depth| self.before(occurrence, depth) != token(depth));
        let matched = matched.unwrap_or(known);
        let whole = path.partition_point(|node| node.depth() <= matched);
        let below = match path.get(whole) {
            Some(&node) => Some(Child::Node(node)),
            None => below.filter(|child| matches!(child, Child::Leaf(_))),
        };
        path.truncate(whole);
        Reached { matched, below }
    }

    /// Ends the text: the next token starts another one.
    pub(crate) fn end_text(&mut self) {
        self.append(BOUNDARY);
    }

    /// Appends tokens. [`BOUNDARY`] ends the text.
    pub(crate) fn extend(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.append(token);
        }
    }

    /// Appends a token. [`BOUNDARY`] and larger tokens end the text.
    pub(crate) fn append(&mut self, token: u32) {
        #[cfg(test)]
        {
            self.work += 1;
        }
        let token = token.min(BOUNDARY);
        let position = self.text.len();
        push(&mut self.text, token);
        if token == BOUNDARY {
            self.segment = position;
            self.path.clear();
            return;
        }
        let mut path = mem::take(&mut self.spare);
        let reached = self.descend(&self.text[self.segment..], self.depth + 1, &mut path);
        self.count_continuation(position as u32, &path, &reached);
        self.add_context(position as u32, &mut path, &reached);
        self.spare = mem::replace(&mut self.path, path);
    }

    /// How many nodes of the last path, from the root down, keep a continuation. A node deeper than the longest match keeps
    /// that of the longest match, unless the path has a node of exactly its depth.
    fn continued(&self) -> usize {
        let above = self.path.iter().rev().nth(1);
        let twice = above.is_some_and(|node| node.depth() == self.depth);
        self.path.len() - usize::from(twice)
    }

    /// Counts the token at `position` as a continuation of the nodes on the path of the position before.
    fn count_continuation(&mut self, position: u32, path: &[Inner], reached: &Reached) {
        let token = self.text[position as usize];
        if let Some(undo) = &mut self.undo {
            undo.turn(position as usize);
        }
        let below = match reached.below {
            None => 0,
            Some(Child::Leaf(_)) => 1,
            Some(Child::Node(node)) => self.node(node.id).count,
        };
        let mut deeper = path.iter().peekable();
        for number in 0..self.continued() {
            let node = self.path[number];
            let length = self.depth.min(node.depth());
            while deeper.next_if(|node| node.depth() <= length).is_some() {}
            let known = match deeper.peek() {
                Some(node) => self.node(node.id).count,
                None if length < reached.matched => below,
                None => 0,
            };
            self.offer(node.id, position, token, known + 1);
        }
    }

    /// Records that `token` followed node `id` for the `count`th time.
    fn offer(&mut self, id: u32, position: u32, token: u32, count: u32) {
        let node = &mut self.nodes[id as usize];
        if self.text[node.best as usize] == token {
            node.best_count = count;
            if node.second > node.best {
                let before = mem::replace(&mut node.best, position);
                if let Some(undo) = &mut self.undo {
                    undo.push(before | AGAIN);
                }
            }
            return;
        }
        let replaces = count >= node.best_count;
        if let Some(undo) = &mut self.undo {
            let rose = replaces && node.best_count < count;
            undo.push(node.second | if rose { ROSE } else { 0 });
        }
        if replaces {
            node.second = mem::replace(&mut node.best, position);
            node.best_count = count;
        } else {
            node.second = position;
        }
    }

    /// Adds the context that ends at `position`, and its new node to the path.
    fn add_context(&mut self, position: u32, path: &mut Vec<Inner>, reached: &Reached) {
        for node in &*path {
            self.nodes[node.id as usize].count += 1;
        }
        let matched = reached.matched;
        let length = (self.depth + 1).min(position as usize + 1 - self.segment);
        let parent = path.last().copied().unwrap_or(ROOT);
        let branch = self.before(position, parent.depth());
        let Some(below) = reached.below else {
            if matched < length {
                self.set_edge(parent.id, branch, Child::Leaf(position));
            }
            return;
        };
        let known = match below {
            Child::Leaf(leaf) => Node {
                best: leaf + 1,
                best_count: self.continuations(leaf),
                count: 1,
                ..Node::default()
            },
            Child::Node(inner) => Node {
                edges: [Edge::NONE; 2],
                ..*self.node(inner.id)
            },
        };
        let best = known.best;
        let id = self.nodes.len() as u32;
        let depth = matched as u32;
        let node = Node {
            count: known.count + 1,
            ..known
        };
        push(&mut self.nodes, node);
        push(path, Inner { id, depth });
        let child = Child::Node(Inner { id, depth });
        self.set_edge(parent.id, branch, child);
        // A context that occurred in full: the node replaces the leaf.
        if matched < length {
            self.set_edge(id, self.before(best - 1, matched), below);
            let token = self.before(position, matched);
            self.set_edge(id, token, Child::Leaf(position));
        }
    }

    /// Whether the index is rebuilt to go back to `length` tokens: where `undo` does not reach that far, or undoing is more
    /// work.
    fn is_rebuilt(&self, length: usize) -> bool {
        let undo = self.undo.as_ref();
        let known = undo.is_some_and(|undo| length + 1 >= undo.floor());
        !known || self.len() > 2 * length
    }

    /// Number of tokens that are undone or appended again to go back to `length` tokens.
    pub(crate) fn rewind_work(&self, length: usize) -> usize {
        if self.is_rebuilt(length) {
            length
        } else {
            self.len() - length
        }
    }

    /// Removes tokens from the end until `length` are left.
    pub(crate) fn rewind(&mut self, length: usize) {
        if self.is_rebuilt(length) {
            let text = mem::take(&mut self.text);
            #[cfg(test)]
            let work = self.work;
            *self = Self::new(self.depth, self.undo.is_some());
            #[cfg(test)]
            {
                self.work = work;
            }
            return self.extend(&text[1..=length]);
        }
        while self.len() > length {
            self.take_last();
        }
    }

    fn take_last(&mut self) {
        #[cfg(test)]
        {
            self.work += 1;
        }
        let position = self.text.len() - 1;
        let token = self.text[position];
        if token != BOUNDARY {
            self.remove_context(position as u32);
        }
        self.text.pop();
        if token == BOUNDARY {
            let last = self.text.iter().rposition(|&token| token == BOUNDARY);
            self.segment = last.unwrap_or(0);
        }
        self.trace();
        if token != BOUNDARY {
            self.forget_continuation(position as u32, token);
        }
    }

    /// Undoes [`Self::add_context`] for the last position.
    fn remove_context(&mut self, position: u32) {
        for node in &self.path {
            self.nodes[node.id as usize].count -= 1;
        }
        let Some(last) = self.path.pop() else {
            let token = self.before(position, 0);
            return self.remove_edge(ROOT.id, token);
        };
        let (id, depth) = (last.id, last.depth());
        let Node { best, count, .. } = *self.node(id);
        let length = (self.depth + 1).min(position as usize + 1 - self.segment);
        // The node is needed if its contexts are more than those below one other child.
        let below = if depth == length {
            Child::Leaf(best - 1)
        } else {
            self.remove_edge(id, self.before(position, depth));
            let other = self.edge(id, self.before(best - 1, depth));
            other.unwrap_or(Child::Leaf(best - 1))
        };
        let others = match below {
            Child::Leaf(_) => 1,
            Child::Node(node) => self.node(node.id).count,
        };
        if others < count {
            return;
        }
        if depth < length {
            self.remove_edge(id, self.before(best - 1, depth));
        }
        let parent = self.path.last().copied().unwrap_or(ROOT);
        let branch = self.before(position, parent.depth());
        self.set_edge(parent.id, branch, below);
        debug_assert_eq!(id as usize + 1, self.nodes.len());
        self.nodes.truncate(id as usize);
    }

    /// Undoes [`Self::count_continuation`] for the position that was the last one.
    fn forget_continuation(&mut self, position: u32, token: u32) {
        for number in (0..self.continued()).rev() {
            let node = &mut self.nodes[self.path[number].id as usize];
            if node.best == position || node.second == position {
                let word = self.undo.as_mut().and_then(Undo::pop).unwrap_or(0);
                node.restore(position, word);
            } else if self.text[node.best as usize] == token {
                node.best_count -= 1;
            }
        }
    }

    /// Finds the path of the last position, which the trie has.
    fn trace(&mut self) {
        self.path.clear();
        let last = self.text.len() - 1;
        let length = (self.depth + 1).min(last + 1 - self.segment);
        if last == self.segment {
            return;
        }
        let mut node = ROOT;
        while node.depth() < length {
            let token = self.text[last - node.depth()];
            let Some(Child::Node(inner)) = self.edge(node.id, token) else {
                break;
            };
            self.path.push(inner);
            node = inner;
        }
    }
}

#[cfg(test)]
mod tests;
