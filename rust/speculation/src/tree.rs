//! Draft trees.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use crate::copy_tracker::RESUMED_BONUS;
use crate::history::History;
use crate::index::{Candidate, Index, Scratch, share};

/// A match in the history counts as this many tokens shorter; one more than in a chain, since a tree has room for such a
/// continuation next to others.
pub(crate) const SHARED_PENALTY: usize = 2;

/// The parent of a tree's first tokens: the context's last token.
pub const ROOT: u32 = u32::MAX;

/// A draft tree. Parents come before their children, and more probable tokens before others.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    tokens: Vec<u32>,
    parents: Vec<u32>,
}

impl Tree {
    /// The draft tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The index of each token's parent, or [`ROOT`].
    #[must_use]
    pub fn parents(&self) -> &[u32] {
        &self.parents
    }

    /// Appends the tree with a fixed number of `nodes`, as tree verifiers take it; the first node is the context's last token,
    /// `root`. `tokens` gets the token of each node; `mask` gets a row of `nodes` bytes for each: 1 for the node and its
    /// ancestors, else 0. A larger tree is cut; missing nodes are children of the root with token 0.
    pub fn append_padded(
        &self,
        root: u32,
        nodes: usize,
        tokens: &mut Vec<i64>,
        mask: &mut Vec<u8>,
    ) {
        let start = mask.len();
        mask.resize(start + nodes * nodes, 0);
        let rows = &mut mask[start..];
        for node in 0..nodes {
            let draft = node
                .checked_sub(1)
                .filter(|&draft| draft < self.tokens.len());
            let (token, parent) = match draft {
                Some(draft) => (
                    self.tokens[draft],
                    self.parents[draft].wrapping_add(1) as usize,
                ),
                None if node == 0 => (root, 0),
                None => (0, 0),
            };
            tokens.push(i64::from(token));
            rows.copy_within(parent * nodes..(parent + 1) * nodes, node * nodes);
            rows[node * nodes + node] = 1;
        }
    }

    /// A tree without branches.
    pub(crate) fn grow_chain(&mut self, tokens: &[u32]) {
        self.clear();
        self.tokens.extend_from_slice(tokens);
        let parents = [ROOT].into_iter().chain(0..).take(tokens.len());
        self.parents.extend(parents);
    }

    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.parents.clear();
    }
}

/// A candidate for the next token of the tree.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// Probability of the whole path to this token.
    probability: f64,
    /// Order of discovery, for ties.
    number: usize,
    token: u32,
    parent: u32,
}

impl Ord for Open {
    fn cmp(&self, other: &Self) -> Ordering {
        let order = self.probability.total_cmp(&other.probability);
        order.then(other.number.cmp(&self.number))
    }
}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Open {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Open {}

/// The sources of a tree.
pub(crate) struct Sources<'a> {
    /// The index of the context's own text.
    pub(crate) own: &'a Index,
    /// The shared history.
    pub(crate) history: Option<&'a History>,
    /// The continuation of the resumed copy, and its match length.
    pub(crate) copied: &'a [u32],
    pub(crate) matched: usize,
    /// Shortest match that is continued.
    pub(crate) shortest: usize,
}

/// Grows trees by the most probable token.
#[derive(Debug, Default)]
pub(crate) struct TreeBuilder {
    open: BinaryHeap<Open>,
    found: Vec<Candidate>,
    scratch: Scratch,
}

impl TreeBuilder {
    /// Grows a tree of at most `count` tokens after `suffix`.
    pub(crate) fn build(
        &mut self,
        sources: &Sources<'_>,
        count: usize,
        suffix: &mut Vec<u32>,
        tree: &mut Tree,
    ) {
        self.open.clear();
        let (start, mut number) = (suffix.len(), 0);
        let (mut parent, mut reached) = (ROOT, 1.0);
        while tree.tokens.len() < count {
            suffix.truncate(start);
            append_path(tree, parent, suffix);
            self.find(sources, suffix, start);
            let mut left: f64 = reached;
            for (at, candidate) in self.found.iter().enumerate() {
                let known = &self.found[..at];
                if known.iter().any(|known| known.token == candidate.token) {
                    continue;
                }
                let probability = left * candidate.share;
                left -= probability;
                number += 1;
                self.open.push(Open {
                    probability,
                    number,
                    token: candidate.token,
                    parent,
                });
            }
            let Some(next) = self.open.pop() else { return };
            parent = tree.tokens.len() as u32;
            reached = next.probability;
            tree.tokens.push(next.token);
            tree.parents.push(next.parent);
        }
    }

    /// Finds candidates after `suffix`, whose draft starts at `start`: those of longer matches first.
    fn find(&mut self, sources: &Sources<'_>, suffix: &[u32], start: usize) {
        let Self { found, scratch, .. } = self;
        found.clear();
        let (shortest, split) = (sources.shortest, (suffix, start));
        (sources.own).candidates(split, true, shortest, found, scratch);
        found.extend(sources.find_copied(&suffix[start..]));
        let own = found.len();
        for index in sources
            .history
            .iter()
            .flat_map(|history| history.generations())
        {
            index.candidates(split, false, shortest, found, scratch);
        }
        for candidate in &mut found[own..] {
            candidate.rank = candidate.rank.saturating_sub(SHARED_PENALTY);
        }
        // Stable: of equal ranks the context's own go first.
        found.sort_by_key(|candidate| Reverse(candidate.rank));
    }
}

impl Sources<'_> {
    /// The next token of the resumed copy after `draft`.
    fn find_copied(&self, draft: &[u32]) -> Option<Candidate> {
        let length = self.matched + draft.len();
        let &token = self.copied.strip_prefix(draft)?.first()?;
        (self.matched >= self.shortest).then(|| Candidate {
            token,
            rank: length + RESUMED_BONUS,
            share: share(1.0, 1.0, length),
        })
    }
}

/// Appends the path from the root to a node.
fn append_path(tree: &Tree, number: u32, suffix: &mut Vec<u32>) {
    let start = suffix.len();
    let mut at = number;
    while at != ROOT {
        suffix.push(tree.tokens[at as usize]);
        at = tree.parents[at as usize];
    }
    suffix[start..].reverse();
}
