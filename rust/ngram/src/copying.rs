//! Copies with changes: what follows a change when a context says a text again, as edits do.
//!
//! Behind a change only a token or two match, and they do in many places. The one that is meant lies most often just
//! behind the place that was copied before.

use std::cmp::Reverse;

/// A copy that goes on counts as a match so many tokens longer than it is.
pub(crate) const RESUMED: usize = 2;
/// So far a match behind a change is short; a longer one speaks for itself.
const SHORT: usize = 2;
/// Shortest match that is taken for a copy.
const COPIED: usize = 3;
/// Tokens of the source that a change may leave out.
const LEFT_OUT: usize = 8;
/// Tokens that a change may put in their place. Behind more the copy is given up.
const PUT_IN: usize = 16;

/// What a context copies of its own text. Positions are the context's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copying {
    /// What should follow.
    pub(crate) source: usize,
    /// The context's end when that was found.
    pub(crate) end: usize,
    /// Tokens before both that were the same then.
    pub(crate) matched: usize,
}

impl Copying {
    /// Whether a change has just ended, by little evidence but the place.
    pub(crate) fn is_resumed(self) -> bool {
        self.matched <= SHORT
    }

    /// Whether a match of so many tokens elsewhere is more likely what is copied.
    pub(crate) fn yields_to(copying: Option<Self>, end: usize, length: usize) -> bool {
        let known = copying.filter(|copying| copying.end == end);
        let known = known.map_or(0, |copying| copying.matched);
        length >= COPIED && length > known + RESUMED
    }

    /// Where the copy would go on without a change, now that the context ends at `end`.
    pub(crate) fn expected(self, end: usize) -> usize {
        self.source + (end - self.end)
    }

    /// Finds where the copy goes on: where most tokens before match, and of several such places at the nearest to the one
    /// that is expected, the first of two. As it was if nothing matches; nothing if that has been so for too long.
    /// `matching` compares what lies before a position with the context's end.
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
