//! Suffix decoding in the index: every match length is a candidate, and a draft is as long as its probability says.
//!
//! The trie over reversed contexts is a suffix tree of the reversed text, with the counts of every context `x` and of `x`
//! continued by `a`. The path of a context's end has a node for each match length at which the occurrences change. So
//! following the continuations of each node, with their relative frequencies, tries all match lengths.
//!
//! A frequency says less the shorter the match and the fewer its occurrences: [`share`] discounts it. In a context's own text
//! the newest continuation precedes more frequent ones, as in n-gram drafts.

use super::search::{EVIDENCE, SECOND, share};
use super::{BOUNDARY, Index, ROOT};
use crate::edge_table::{Child, Inner};

/// Least share of the newest continuation of a match among all.
pub(crate) const NEWEST: f64 = 0.5;

/// Limits of a draft.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SuffixLimits {
    /// Most tokens.
    pub(crate) count: usize,
    /// Shortest match that is continued.
    pub(crate) shortest: usize,
    /// Most tokens for each token of the match.
    pub(crate) factor: f32,
    /// Least probability that a token and all before it are right.
    pub(crate) min_probability: f32,
    /// Whether the index is of the drafted text.
    pub(crate) own: bool,
}

impl SuffixLimits {
    /// Most tokens after a match of `length` tokens.
    pub(crate) fn most(&self, length: usize) -> usize {
        // Such that 75 * 0.84 is 63.
        let longest = length as f32 * self.factor + 1e-4;
        self.count.min(longest as usize)
    }
}

/// A continuation of a match.
#[derive(Clone, Copy, Debug)]
struct Continuation {
    token: u32,
    /// How often it followed, and how often the match was continued.
    count: f64,
    all: f64,
}

/// The best draft of a step, and buffers of the search.
#[derive(Clone, Debug, Default)]
pub(crate) struct Speculation {
    tokens: Vec<u32>,
    /// The probability of each token that it and all before it are right.
    probabilities: Vec<f32>,
    /// Their sum: as many tokens are expected to be accepted.
    score: f32,
    match_length: usize,
    /// Probabilities of the draft that is tried.
    tried: Vec<f32>,
    starts: Vec<(Child, usize)>,
    path: Vec<Inner>,
    /// Matches whose continuations were followed.
    #[cfg(test)]
    pub(crate) followed: usize,
}

impl Speculation {
    /// Starts a step.
    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.probabilities.clear();
        (self.score, self.match_length) = (0.0, 0);
    }

    /// The draft tokens.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Of each token the probability that it and all before it are right.
    pub(crate) fn probabilities(&self) -> &[f32] {
        &self.probabilities
    }

    /// Length of the match before the draft; 0 without one.
    pub(crate) fn match_length(&self) -> usize {
        self.match_length
    }

    /// Adds a token to the draft that is tried, unless it is too unlikely.
    fn try_token(&mut self, share: f64, limits: SuffixLimits) -> bool {
        let before = self.tried.last().copied().unwrap_or(1.0);
        let probability = before * share as f32;
        let likely = probability >= limits.min_probability;
        if likely {
            self.tried.push(probability);
        }
        likely
    }

    /// Keeps a draft that was tried, if more of its tokens are expected to be accepted.
    fn offer(&mut self, draft: &[u32], match_length: usize) {
        let score = self.tried.iter().sum();
        if score > self.score {
            self.tokens.clear();
            self.tokens.extend_from_slice(draft);
            std::mem::swap(&mut self.probabilities, &mut self.tried);
            (self.score, self.match_length) = (score, match_length);
        }
        self.tried.clear();
    }

    /// Offers a text that followed a match of `length` tokens once.
    pub(crate) fn offer_copy(&mut self, copied: &[u32], length: usize, limits: SuffixLimits) {
        for more in 0..copied.len().min(limits.most(length)) {
            if !self.try_token(share(1.0, 1.0, length + more), limits) {
                break;
            }
        }
        self.offer(&copied[..self.tried.len()], length);
    }
}

impl Index {
    /// Offers the continuations of all matches of the end of `suffix`, the longest first.
    pub(crate) fn speculate(
        &self,
        limits: SuffixLimits,
        suffix: &mut Vec<u32>,
        best: &mut Speculation,
    ) {
        let start = suffix.len();
        self.find_starts(suffix, limits.own, best);
        while let Some((child, length)) = best.starts.pop() {
            if length < limits.shortest || !self.may_exceed(best.score, length, limits) {
                return;
            }
            #[cfg(test)]
            {
                best.followed += 1;
            }
            self.follow((child, length), limits, suffix, best);
            best.offer(&suffix[start..], length);
            suffix.truncate(start);
        }
    }

    /// Whether more than `score` tokens of a draft after a match of `length` tokens may be expected to be accepted: as if all
    /// its occurrences were continued alike. If not, no shorter match is better, whose shares are discounted more.
    fn may_exceed(&self, score: f32, length: usize, limits: SuffixLimits) -> bool {
        let (mut expected, mut probability) = (0.0, 1.0);
        for length in length..length + limits.most(length) {
            let frequent = share(EVIDENCE, EVIDENCE, length.min(self.depth));
            probability *= frequent.max(share(1.0, 1.0, length)) as f32;
            if probability < limits.min_probability {
                break;
            }
            expected += probability;
            if expected > score {
                return true;
            }
        }
        false
    }

    /// Finds the nodes of all matches of the end of `suffix`, and the longest match of each; the longest last.
    fn find_starts(&self, suffix: &[u32], own: bool, best: &mut Speculation) {
        let Speculation { starts, path, .. } = best;
        starts.clear();
        let mut below = None;
        let nodes = if own {
            &self.path[..self.continued()]
        } else {
            let reached = self.descend(suffix, self.depth, path);
            below = reached.below.map(|child| (child, reached.matched));
            &path[..]
        };
        let above = nodes.iter().map(|&node| {
            let length = self.depth.min(node.depth());
            (Child::Node(node), length)
        });
        starts.extend(above.chain(below));
    }

    /// Appends the likeliest continuation of a match to `suffix`, then that of the match and it, and so on.
    fn follow(
        &self,
        (mut child, mut length): (Child, usize),
        limits: SuffixLimits,
        suffix: &mut Vec<u32>,
        best: &mut Speculation,
    ) {
        let (start, most) = (suffix.len(), limits.most(length));
        while best.tried.len() < most {
            let next = match child {
                Child::Leaf(leaf) => self.after_leaf(leaf, limits.own, &suffix[start..]),
                Child::Node(node) => self.after_node(node, limits.own),
            };
            let Some(next) = next.filter(|next| next.token != BOUNDARY) else {
                return;
            };
            if !best.try_token(share(next.count, next.all, length), limits) {
                return;
            }
            suffix.push(next.token);
            match child {
                // Text that occurred once is copied.
                Child::Leaf(leaf) => {
                    child = Child::Leaf(leaf + 1);
                    length += 1;
                }
                Child::Node(_) => {
                    length = self.depth.min(length + 1);
                    let reached = self.descend(suffix, length, &mut best.path);
                    // The continuation occurred after the match.
                    debug_assert_eq!(reached.matched, length);
                    let node = best.path.last().copied().unwrap_or(ROOT);
                    child = reached.below.unwrap_or(Child::Node(node));
                }
            }
        }
    }

    /// The only continuation of a leaf: past the end of the drafted text the draft itself.
    fn after_leaf(&self, leaf: u32, own: bool, draft: &[u32]) -> Option<Continuation> {
        let at = leaf as usize + 1;
        let drafted = || draft.get(at - self.text.len()).filter(|_| own);
        let &token = self.text.get(at).or_else(drafted)?;
        Some(Continuation {
            token,
            count: 1.0,
            all: 1.0,
        })
    }

    /// The likeliest continuation of a node.
    fn after_node(&self, node: Inner, own: bool) -> Option<Continuation> {
        let known = self.node(node.id);
        if known.best_count == 0 {
            return None;
        }
        // The text's end has no continuation yet.
        let ends = own && self.path.contains(&node);
        let all = known.count - u32::from(ends);
        let at = self.likeliest(node.id, all, own);
        let count = if at == known.best {
            f64::from(known.best_count)
        } else {
            let others = f64::from(all - known.best_count);
            (SECOND * others).max(NEWEST * f64::from(all))
        };
        Some(Continuation {
            token: self.text[at as usize],
            count,
            all: f64::from(all),
        })
    }
}
