//! Copy tracking: finds the continuation after an edit while a context repeats its own text.
//!
//! After an edit only a token or two match, in many places. The right one is most often shortly after the position that was
//! copied before.

use std::cmp::Reverse;

/// A resumed copy counts as a match that is longer by this many tokens.
pub(crate) const RESUMED_BONUS: usize = 2;
/// Longest match after an edit that needs the copy as evidence.
const SHORT: usize = 2;
/// Shortest match that counts as a copy.
const COPIED: usize = 3;
/// Most source tokens that an edit may delete.
const LEFT_OUT: usize = 8;
/// Most tokens that an edit may insert; after more the copy is dropped.
const PUT_IN: usize = 16;

/// The position in its own text that a context copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyTracker {
    /// Position of the next source token.
    pub(crate) source: usize,
    /// Length of the context when it was found.
    pub(crate) end: usize,
    /// Matching tokens before both.
    pub(crate) matched: usize,
}

impl CopyTracker {
    /// Whether an edit has just ended: the match is short, and the position is the evidence.
    pub(crate) fn is_resumed(self) -> bool {
        self.matched <= SHORT
    }

    /// Whether a match of `length` tokens elsewhere is the more likely source.
    pub(crate) fn yields_to(copying: Option<Self>, end: usize, length: usize) -> bool {
        let known = copying.filter(|copying| copying.end == end);
        let known = known.map_or(0, |copying| copying.matched);
        length >= COPIED && length > known + RESUMED_BONUS
    }

    /// The source position without an edit, for a context of length `end`.
    pub(crate) fn expected(self, end: usize) -> usize {
        self.source + (end - self.end)
    }

    /// Resumes the copy at the position with the longest match, of several the nearest to the expected one, of two equally near
    /// the first. Returns the copy unchanged if nothing matches, and `None` if that has been so for too long. `matching`
    /// returns the number of matching tokens before a position.
    pub(crate) fn at(self, end: usize, matching: impl Fn(usize) -> usize) -> Option<Self> {
        let new = end - self.end;
        if new == 0 {
            return Some(self);
        }
        let expected = self.expected(end);
        let mut likeliest = None;
        for source in expected - new.min(PUT_IN)..(expected + LEFT_OUT + 1).min(end) {
            let matched = matching(source);
            if matched > 0 {
                let rank = (matched, Reverse(source.abs_diff(expected)));
                likeliest = likeliest
                    .filter(|&(other, _)| other >= rank)
                    .or(Some((rank, source)));
            }
        }
        match likeliest {
            Some(((matched, _), source)) => Some(Self {
                source,
                end,
                matched,
            }),
            None => (new <= PUT_IN).then_some(self),
        }
    }
}
