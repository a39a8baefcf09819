//! The n-gram index of a text: the longest earlier match of a context's end, and its most frequent continuation.
//!
//! A PATRICIA trie over reversed contexts. The path from the root along `text[i]`, `text[i-1]`, … names the context that ends
//! at position `i`, so the longest earlier match of a suffix is as long as its path. Each position adds at most one leaf, which
//! is a position in an edge, and one inner node with its number of occurrences and their most frequent continuation.
//!
//! **Continuations are counted while appending.** Token `a` followed context `x` as often as `xa` occurred: that is the count
//! on the path of the new context, one token deeper. So one descent gives all counts that an append changes, and the nodes of
//! the previous path compare them with their best; ties go to the newer. `second` is the last continuation that was not the
//! best. When the best recurs after the second, its position moves there, so the larger of both positions was last.
//!
//! **Paths are one token longer than matches,** because the continuations of the longest match are counted by contexts that are
//! one token longer.
//!
//! **Appending is bound by cache misses** once an index outgrows the caches. A node holds its first two edges, half a cache
//! line in all; further ones are in a hash table. New nodes are adjacent.
//!
//! **Rewinding undoes appends in reverse.** Nodes are numbered in the order of their creation, so the last token's is the last
//! one; replaced positions are in the undo log.

mod rewind;
pub(crate) mod search;
pub(crate) mod suffix;

use std::mem;

use crate::edge_table::{Child, Edge, EdgeTable, Inner, LARGEST};
use crate::growth::push;
use crate::undo_log::UndoLog;

pub(crate) use search::{Candidate, Draft, Match, Scratch, share};

/// The token before and between texts. It matches itself, and no match extends beyond it.
pub(crate) const BOUNDARY: u32 = LARGEST;

/// The root; the only node without an occurrence.
const ROOT: Inner = Inner { id: 0, depth: 0 };

/// A context of `depth` tokens. Aligned, so that it does not span two cache lines.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
struct Node {
    /// Position of the most frequent continuation: its last occurrence after a different one. The position before it is an
    /// occurrence of the node.
    best: u32,
    /// Its count; 0 for none.
    best_count: u32,
    /// Occurrences, including one without a continuation.
    count: u32,
    /// Position of the last continuation that was not the best, or was replaced as the best; a boundary for none. Larger than
    /// `best` if it came last.
    second: u32,
    /// The first two edges; most nodes have no more. Edges are removed in reverse order, so the table has none of a node with a
    /// free slot here.
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
    /// Undoes an update by `position`, by its word of the undo log.
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

/// The result of a descent.
struct Reached {
    matched: usize,
    /// The child of the edge on which the match ends, if it ends on one.
    below: Option<Child>,
}

/// An n-gram index over one text, or several with boundaries between.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    /// Longest match.
    depth: usize,
    text: Vec<u32>,
    /// Position of the last boundary.
    segment: usize,
    nodes: Vec<Node>,
    /// Edges beyond the two in a node.
    more_edges: EdgeTable,
    /// Undo log: replaced positions, with [`ROSE`] or [`AGAIN`]. `None` for an index without rewinds.
    undo: Option<UndoLog>,
    /// Nodes of the last position's path, from the root down.
    path: Vec<Inner>,
    spare: Vec<Inner>,
    /// Number of tokens that were appended or removed.
    #[cfg(test)]
    pub(crate) work: usize,
}

/// Undo flag: the former best had one occurrence less.
const ROSE: u32 = 1 << 31;
/// Undo flag: the best recurred; the word is its earlier position.
const AGAIN: u32 = 1 << 30;

impl Index {
    /// An empty index for matches of at most `depth` tokens.
    pub(crate) fn new(depth: usize, rewinds: bool) -> Self {
        Self {
            depth,
            text: vec![BOUNDARY],
            segment: 0,
            nodes: vec![Node::default()],
            more_edges: EdgeTable::default(),
            undo: rewinds.then(UndoLog::default),
            path: Vec::new(),
            spare: Vec::new(),
            #[cfg(test)]
            work: 0,
        }
    }

    /// Most tokens of a match.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// The text, which starts with a boundary.
    pub(crate) fn text(&self) -> &[u32] {
        &self.text
    }

    /// The end of the text, as much as a search reads.
    pub(crate) fn tail(&self) -> &[u32] {
        let start = self.text.len().saturating_sub(self.depth);
        &self.text[start.max(self.segment)..]
    }

    /// Tokens without the first boundary.
    pub(crate) fn len(&self) -> usize {
        self.text.len() - 1
    }

    /// Heap memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let undo = self.undo.as_ref().map_or(0, UndoLog::bytes);
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

    /// Continuations of a leaf: 0 or 1.
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
        // Only the first token of each edge is compared; one comparison at the end finds the first difference.
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

    /// Ends the text.
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

    /// Nodes of the last path, from the root down, that count a continuation. A node deeper than the longest match counts for
    /// that match, unless the path has a node of exactly its depth.
    fn continued(&self) -> usize {
        let above = self.path.iter().rev().nth(1);
        let twice = above.is_some_and(|node| node.depth() == self.depth);
        self.path.len() - usize::from(twice)
    }

    /// Counts the token at `position` as a continuation of the previous path.
    fn count_continuation(&mut self, position: u32, path: &[Inner], reached: &Reached) {
        let token = self.text[position as usize];
        if let Some(undo) = &mut self.undo {
            undo.start_generation(position as usize);
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
        // The context occurred in full: the node replaces the leaf.
        if matched < length {
            self.set_edge(id, self.before(best - 1, matched), below);
            let token = self.before(position, matched);
            self.set_edge(id, token, Child::Leaf(position));
        }
    }
}

#[cfg(test)]
mod tests;
