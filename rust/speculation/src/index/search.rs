//! Searches in the index of a text: the longest match of the end of another text, or of its own, and its continuations.

use super::{BOUNDARY, Index, Node};
use crate::table::{Child, Inner};

/// A place in the trie with a continuation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    /// Tokens that match.
    pub(crate) length: usize,
    place: Child,
}

/// Buffers of a search, kept to be reused.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scratch {
    path: Vec<Inner>,
}

/// The share of the continuations other than the best that the second one is taken to have.
pub(crate) const SECOND: f64 = 0.75;
/// More occurrences than this add no evidence.
const EVIDENCE: f64 = 1.5;
/// Occurrences that a continuation never seen counts as, divided by the match's length and one.
const NOVEL: f64 = 2.5;

/// A continuation goes before a newer one if it followed this many times as often as all others.
pub(crate) const OFTEN: u32 = 4;

impl Index {
    /// The longest earlier match of the text's own end.
    pub(crate) fn own_match(&self) -> Option<Match> {
        let mut path = self.path[..self.continued()].iter().rev();
        path.find_map(|&node| self.node_match(node, self.depth))
    }

    /// The position of a match's most frequent continuation.
    pub(crate) fn next(&self, found: Match) -> usize {
        match found.place {
            Child::Leaf(leaf) => leaf as usize + 1,
            Child::Node(node) => self.node(node.id).best as usize,
        }
    }

    fn node_match(&self, node: Inner, limit: usize) -> Option<Match> {
        let length = limit.min(node.depth());
        let place = Child::Node(node);
        (self.node(node.id).best_count > 0).then_some(Match { length, place })
    }

    /// The longest match of the end of `suffix` that was continued, of at most `limit` tokens.
    pub(crate) fn find(
        &self,
        suffix: &[u32],
        limit: usize,
        scratch: &mut Scratch,
    ) -> Option<Match> {
        let limit = limit.min(self.depth);
        let reached = self.descend(suffix, limit, &mut scratch.path);
        let below = reached.below.and_then(|place| match place {
            Child::Node(node) => self.node_match(node, reached.matched),
            Child::Leaf(leaf) => {
                let length = reached.matched;
                (self.continuations(leaf) > 0).then_some(Match { length, place })
            }
        });
        let above = || {
            let mut path = scratch.path.iter().rev();
            path.find_map(|&node| self.node_match(node, limit))
        };
        below.or_else(above)
    }

    /// The position of the likeliest continuation of node `id`, which occurs `all` times: the most frequent one,
    /// or with `newest` the last one, unless the former came [`OFTEN`] times as often as all others.
    fn likeliest(&self, id: u32, all: u32, newest: bool) -> u32 {
        let node = self.node(id);
        let others = all - node.best_count;
        if newest && node.second > node.best && OFTEN.saturating_mul(others) > node.best_count {
            return node.second;
        }
        node.best
    }

    /// Appends at most `count` tokens to `suffix`: the likeliest continuation of `first`, then of what that matches, as long
    /// as at least `shortest` tokens match. A text that occurred once is copied.
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
            match found.place {
                Child::Leaf(leaf) => {
                    return self.copy(leaf as usize + 1, (start, end), draft.own, suffix);
                }
                Child::Node(node) => {
                    // The text's own end has no continuation yet.
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

    /// Adds the most frequent continuation of the end of `suffix`, and the second one, for each of its matches of at least
    /// `shortest` tokens. In the index of the context's `own` text, the draft starts at `start`.
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
            below = reached.below.map(|place| (place, reached.matched));
            &scratch.path[..]
        };
        let above = path.iter().rev().map(|&node| {
            let length = self.depth.min(node.depth());
            (Child::Node(node), length)
        });
        let drafted = if own { suffix.get(start) } else { None };
        for (place, length) in below.into_iter().chain(above) {
            if length < shortest {
                break;
            }
            let known = match place {
                Child::Leaf(leaf) => Node {
                    best: leaf + 1,
                    best_count: 1,
                    count: 1,
                    ..Node::default()
                },
                Child::Node(node) => *self.node(node.id),
            };
            // The text's own end has no continuation yet.
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

    /// Copies the text from `at` until `suffix` is `end` long; past the end of its `own` text the draft itself, which starts
    /// at `start`.
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

/// A token that may come next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) token: u32,
    /// The length of the match that it continues; longer ones go first.
    pub(crate) rank: usize,
    /// Its share of that match's continuations, less than 1 for those never seen.
    pub(crate) share: f64,
}

/// The share of `count` in `all` continuations of a match, less than 1 for those never seen: the longer the match, the less
/// likely they are. More occurrences than [`EVIDENCE`] do not change that: a text that repeats itself has many, and they
/// say little of another text, or of the same one after its next change.
pub(crate) fn share(count: f64, all: f64, length: usize) -> f64 {
    let seen = all.min(EVIDENCE);
    count / all * seen / (seen + NOVEL / (length as f64 + 1.0))
}

/// A draft without branches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draft {
    pub(crate) count: usize,
    /// Shortest match that may draft.
    pub(crate) shortest: usize,
    /// Whether the index is of the text that the draft continues. Then newer continuations go before more frequent ones,
    /// and the draft may go on past the text's end, as a copy of itself.
    pub(crate) own: bool,
}
