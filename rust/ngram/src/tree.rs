//! Drafts as trees.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use crate::copying::RESUMED;
use crate::index::{Candidate, Index, Scratch, share};

/// A match in the texts of others counts as so many tokens shorter. That is one more than in a draft without branches: what
/// comes behind the context's own continuations is tried, too.
pub(crate) const HANDICAP: usize = 2;

/// The parent of a tree's first tokens: the context's last one.
pub const ROOT: u32 = u32::MAX;

/// Tokens that may follow a context, each behind its parent. Parents come before their children, more probable tokens
/// before others.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    tokens: Vec<u32>,
    parents: Vec<u32>,
}

impl Tree {
    /// The tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The number of each token's parent, or [`ROOT`].
    #[must_use]
    pub fn parents(&self) -> &[u32] {
        &self.parents
    }

    /// The tree's mask: for each token a row of `tokens().len().div_ceil(64)` words, in which the bits of the token itself
    /// and of those that it follows are set, the lowest bit first.
    pub fn mask(&self, rows: &mut Vec<u64>) {
        let words = self.tokens.len().div_ceil(64);
        rows.clear();
        rows.resize(words * self.tokens.len(), 0);
        for (number, &parent) in self.parents.iter().enumerate() {
            if parent != ROOT {
                let start = parent as usize * words;
                rows.copy_within(start..start + words, number * words);
            }
            rows[number * words + number / 64] |= 1 << (number % 64);
        }
    }

    /// Appends the tree as verifiers of trees of one size take it: `nodes` nodes, the first of which is the context's last
    /// token `root`. To `tokens` goes the token of each, to `mask` a row of `nodes` bytes, 1 for the node itself and those
    /// that it follows, else 0. What there is no room for is left out; nodes that are missing are tokens 0 behind the first.
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

/// A token that might be the tree's next.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// That the context goes on with all tokens down to this one.
    probability: f64,
    /// In the order of finding; of equal probability the first goes first.
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

/// What trees grow from.
pub(crate) struct Soil<'a> {
    /// The first is the one that ends as the context does.
    pub(crate) indices: &'a [&'a Index],
    /// How many of them are the context's own.
    pub(crate) own: usize,
    /// How a copy that goes on would, and how many tokens before it match.
    pub(crate) copied: &'a [u32],
    pub(crate) matched: usize,
    /// Shortest match that may draft.
    pub(crate) shortest: usize,
}

/// Grows trees from the most probable token to the next.
#[derive(Debug, Default)]
pub(crate) struct TreeBuilder {
    open: BinaryHeap<Open>,
    found: Vec<Candidate>,
    scratch: Scratch,
}

impl TreeBuilder {
    /// Grows a tree of at most `count` tokens behind `suffix`.
    pub(crate) fn build(
        &mut self,
        soil: &Soil<'_>,
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
            self.find(soil, suffix, start);
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

    /// Finds what may follow `suffix`, behind longer matches first.
    fn find(&mut self, soil: &Soil<'_>, suffix: &[u32], start: usize) {
        self.found.clear();
        for (number, index) in soil.indices.iter().enumerate() {
            if number == soil.own {
                self.find_copied(soil, &suffix[start..]);
            }
            let (own, suffix, first) = (number == 0, (suffix, start), self.found.len());
            let (found, scratch) = (&mut self.found, &mut self.scratch);
            index.candidates(suffix, own, soil.shortest, found, scratch);
            let handicap = if number < soil.own { 0 } else { HANDICAP };
            for candidate in &mut self.found[first..] {
                candidate.rank = candidate.rank.saturating_sub(handicap);
            }
        }
        if soil.indices.len() == soil.own {
            self.find_copied(soil, &suffix[start..]);
        }
        // Stable: of equal rank the context's own come first.
        self.found.sort_by_key(|candidate| Reverse(candidate.rank));
    }

    /// Finds what follows the `draft` if the context goes on with its copy.
    fn find_copied(&mut self, soil: &Soil<'_>, draft: &[u32]) {
        let length = soil.matched + draft.len();
        if soil.matched >= soil.shortest
            && let Some(&token) = soil.copied.strip_prefix(draft).and_then(<[_]>::first)
        {
            self.found.push(Candidate {
                token,
                rank: length + RESUMED,
                share: share(1.0, 1.0, length),
            });
        }
    }
}

/// Appends the tokens from the tree's root down to `number`.
fn append_path(tree: &Tree, number: u32, suffix: &mut Vec<u32>) {
    let start = suffix.len();
    let mut at = number;
    while at != ROOT {
        suffix.push(tree.tokens[at as usize]);
        at = tree.parents[at as usize];
    }
    suffix[start..].reverse();
}
