//! Searches in the index: matches and their continuations.

use super::{BOUNDARY, Index, Node};
use crate::edge_table::{Child, Inner};

/// A match with a continuation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    /// Matching tokens.
    pub(crate) length: usize,
    child: Child,
}

/// Buffers of a search.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scratch {
    path: Vec<Inner>,
}

/// Assumed share of the second continuation among those other than the best.
pub(crate) const SECOND: f64 = 0.75;
/// Occurrences that count as evidence.
pub(crate) const EVIDENCE: f64 = 1.5;
/// Pseudo-count of unseen continuations, divided by match length plus one.
const NOVEL: f64 = 2.5;

/// The most frequent continuation precedes a newer one if it is this many times as frequent as all others.
pub(crate) const OFTEN: u32 = 4;

impl Index {
    /// The longest earlier match of the text's end.
    pub(crate) fn own_match(&self) -> Option<Match> {
        let mut path = self.path[..self.continued()].iter().rev();
        path.find_map(|&node| self.node_match(node, self.depth))
    }

    /// Position of a match's most frequent continuation.
    pub(crate) fn next(&self, found: Match) -> usize {
        match found.child {
            Child::Leaf(leaf) => leaf as usize + 1,
            Child::Node(node) => self.node(node.id).best as usize,
        }
    }

    fn node_match(&self, node: Inner, limit: usize) -> Option<Match> {
        let length = limit.min(node.depth());
        let child = Child::Node(node);
        (self.node(node.id).best_count > 0).then_some(Match { length, child })
    }

    /// The longest match of at most `limit` tokens of the end of `suffix` that has a continuation.
    pub(crate) fn find(
        &self,
        suffix: &[u32],
        limit: usize,
        scratch: &mut Scratch,
    ) -> Option<Match> {
        let limit = limit.min(self.depth);
        let reached = self.descend(suffix, limit, &mut scratch.path);
        let below = reached.below.and_then(|child| match child {
            Child::Node(node) => self.node_match(node, reached.matched),
            Child::Leaf(leaf) => {
                let length = reached.matched;
                (self.continuations(leaf) > 0).then_some(Match { length, child })
            }
        });
        let above = || {
            let mut path = scratch.path.iter().rev();
            path.find_map(|&node| self.node_match(node, limit))
        };
        below.or_else(above)
    }

    /// Position of the likeliest continuation of node `id` with `all` occurrences: the most frequent, or with `newest` the
    /// last, unless the former is [`OFTEN`] times as frequent as all others.
    pub(super) fn likeliest(&self, id: u32, all: u32, newest: bool) -> u32 {
        let node = self.node(id);
        let others = all - node.best_count;
        if newest && node.second > node.best && OFTEN.saturating_mul(others) > node.best_count {
            return node.second;
        }
        node.best
    }

    /// Appends at most `count` tokens to `suffix`: the likeliest continuation of `first`, then of what that matches, while at
    /// least `shortest` tokens match. Text that occurred once is copied.
    pub(crate) fn draft(
        &self,
        first: Match,
        draft: Draft,
        suffix: &mut Vec<u32>,
        scratch: &mut Scratch,
    ) {
        let start = suffix.len();
        let end = start + draft.count;
        let mut found = first;
        while suffix.len() < end {
            match found.child {
                Child::Leaf(leaf) => {
                    return self.copy(leaf as usize + 1, (start, end), draft.own, suffix);
                }
                Child::Node(node) => {
                    // The text's end has no continuation yet.
                    let ends = draft.own && suffix.len() == start;
                    let all = self.node(node.id).count - u32::from(ends);
                    let next = self.likeliest(node.id, all, draft.own);
                    suffix.push(self.text[next as usize]);
                }
            }
            if suffix.len() == end {
                return;
            }
            match self.find(suffix, found.length + 1, scratch) {
                Some(next) if next.length >= draft.shortest => found = next,
                _ => return,
            }
        }
    }

    /// Adds the two likeliest continuations of each match of at least `shortest` tokens of `suffix`. In the index of the
    /// context's `own` text, the draft starts at `start`.
    pub(crate) fn candidates(
        &self,
        (suffix, start): (&[u32], usize),
        own: bool,
        shortest: usize,
        found: &mut Vec<Candidate>,
        scratch: &mut Scratch,
    ) {
        let mut below = None;
        let ends = own && suffix.len() == start;
        let path = if ends {
            &self.path[..self.continued()]
        } else {
            let reached = self.descend(suffix, self.depth, &mut scratch.path);
            below = reached.below.map(|child| (child, reached.matched));
            &scratch.path[..]
        };
        let above = path.iter().rev().map(|&node| {
            let length = self.depth.min(node.depth());
            (Child::Node(node), length)
        });
        let drafted = if own { suffix.get(start) } else { None };
        for (child, length) in below.into_iter().chain(above) {
            if length < shortest {
                break;
            }
            let known = match child {
                Child::Leaf(leaf) => Node {
                    best: leaf + 1,
                    best_count: 1,
                    count: 1,
                    ..Node::default()
                },
                Child::Node(node) => *self.node(node.id),
            };
            // The text's end has no continuation yet.
            let all = known.count - u32::from(ends);
            let mut add = |token: Option<&u32>, count: f64| {
                if let Some(&token) = token.filter(|&&token| count > 0.0 && token != BOUNDARY) {
                    found.push(Candidate {
                        token,
                        rank: length,
                        share: share(count, f64::from(all), length),
                    });
                }
            };
            let best = self.text.get(known.best as usize).or(drafted);
            add(best, f64::from(known.best_count));
            let others = all.saturating_sub(known.best_count);
            let second = &self.text[known.second as usize];
            add(Some(second), SECOND * f64::from(others));
        }
    }

    /// Copies the text from `at` until `suffix` is `end` long; past the end of its `own` text the draft itself, which starts at
    /// `start`.
    fn copy(&self, at: usize, (start, end): (usize, usize), own: bool, suffix: &mut Vec<u32>) {
        for at in at..at + (end - suffix.len()) {
            let token = match self.text.get(at) {
                Some(&token) => token,
                None if own => suffix[start + at - self.text.len()],
                None => BOUNDARY,
            };
            if token == BOUNDARY {
                return;
            }
            suffix.push(token);
        }
    }
}

/// A candidate for the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) token: u32,
    /// Match length; longer ones go first.
    pub(crate) rank: usize,
    /// Its share of the match's continuations.
    pub(crate) share: f64,
}

/// The share of `count` in `all` continuations of a match, discounted for unseen ones: less the longer the match. Occurrences
/// beyond [`EVIDENCE`] do not count: a repetitive text has many, and they say little about other text.
pub(crate) fn share(count: f64, all: f64, length: usize) -> f64 {
    let seen = all.min(EVIDENCE);
    count / all * seen / (seen + NOVEL / (length as f64 + 1.0))
}

/// Parameters of a chain of drafts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draft {
    pub(crate) count: usize,
    /// Shortest match that is continued.
    pub(crate) shortest: usize,
    /// Whether the index is of the drafted text. Then newer continuations precede more frequent ones, and the draft may copy
    /// itself past the text's end.
    pub(crate) own: bool,
}
