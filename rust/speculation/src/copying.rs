//! Copies with changes: the continuation after a change when a context repeats a text, as edits do.
//!
//! After a change only a token or two match, and they do in many places. The right one is most often shortly after the
//! place that was copied before.

use std::cmp::Reverse;

/// A copy that goes on counts as a match that is longer by this many tokens.
pub(crate) const RESUMED: usize = 2;
/// Longest match after a change that needs the copy as evidence.
const SHORT: usize = 2;
/// Shortest match that counts as a copy.
const COPIED: usize = 3;
/// Tokens of the source that a change may leave out.
const LEFT_OUT: usize = 8;
/// Tokens that a change may put in their place. After more the copy is given up.
const PUT_IN: usize = 16;

/// The place in its own text that a context copies. Positions are the context's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copying {
    /// Position of the token that should come next.
    pub(crate) source: usize,
    /// The context's end when this was found.
    pub(crate) end: usize,
    /// Number of equal tokens before both.
    pub(crate) matched: usize,
}

impl Copying {
    /// Whether a change has just ended: the match is short, and the place is the evidence.
    pub(crate) fn is_resumed(self) -> bool {
        self.matched <= SHORT
    }

    /// Whether a match of `length` tokens elsewhere is more likely to be the copied place.
    pub(crate) fn yields_to(copying: Option<Self>, end: usize, length: usize) -> bool {
        let known = copying.filter(|copying| copying.end == end);
        let known = known.map_or(0, |copying| copying.matched);
        length >= COPIED && length > known + RESUMED
    }

    /// The position where the copy would go on without a change, for a context that ends at `end`.
    pub(crate) fn expected(self, end: usize) -> usize {
        self.source + (end - self.end)
    }

    /// Finds where the copy goes on: at the place with the longest match, of several such at the nearest to the expected
    /// one, and of two equally near at the first. Returns the copy as it was if nothing matches, and `None` if that has been
    /// so for too long. `matching` gives the number of equal tokens before a position and the context's end.
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
