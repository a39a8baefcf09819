//! What binds the tokens of a sequence, which is the caller's: a grammar, for example.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// Binds the sequences of a request. The request stays in the queue until it is ready, and others go past it.
pub trait Constrain: Debug + Send + Sync {
    /// Begins a sequence of at most `most` tokens. Called again in later steps as long as it is [`Begun::Waiting`]; it must return
    /// at once. Without `jumps` it forces no tokens: each one is drawn, for the log-probabilities that only the driver knows.
    fn begin(&self, most: u32, jumps: bool) -> Begun;

    /// Whether [`begin`](Self::begin) would say [`Begun::Waiting`].
    fn is_waiting(&self) -> bool;
}

/// What came of [`Constrain::begin`].
#[derive(Debug)]
pub enum Begun {
    /// It is not ready.
    Waiting,
    /// It stands at the start of the output.
    Ready(Box<dyn Constraint>),
    /// It cannot be used, with the reason; the sequence ends as [`Finish::Constraint`](crate::Finish::Constraint).
    Failed(Arc<str>),
    /// Nothing is wrong with it, but it cannot be had now, with the reason; the sequence ends as
    /// [`Finish::Busy`](crate::Finish::Busy).
    Busy(Arc<str>),
}

/// Which tokens may be drawn. Shared, because a constraint has it in room that it uses again.
pub type Mask = Arc<Vec<u32>>;

/// Binds one sequence. It may compute what [`next`](Self::next) will be asked for as soon as it has a token.
pub trait Constraint: Debug + Send {
    /// Goes on by a token that was drawn. Returns whether the token ends the sequence; if not, `most` tokens may follow.
    fn take(&mut self, token: u32, most: u32) -> bool;

    /// Whether [`next`](Self::next) would answer at once. May wait for it, or work on it, no longer than `budget`, and takes off what
    /// that took. Where it says no, the sequence is left out of a step that others are in.
    fn prepare(&mut self, budget: &mut Duration) -> bool {
        let _ = budget;
        true
    }

    /// Adds the tokens that come next because they have no alternative to `forced`, and goes on by them. Then returns which tokens may
    /// be drawn: bit `i` of word `w` allows token `32 w + i`, and what is beyond the words is not allowed; `None` allows every
    /// token. Called once after each drawn token. The mask is let go before the next [`take`](Self::take).
    ///
    /// # Errors
    /// Why it cannot go on; the sequence ends as [`Finish::Constraint`](crate::Finish::Constraint).
    fn next(&mut self, forced: &mut Vec<u32>) -> Result<Option<Mask>, Arc<str>>;
}

/// Where a sequence stands with its constraint.
#[derive(Debug, Default)]
pub(crate) enum ConstraintState {
    /// It has none.
    #[default]
    Free,
    /// It has one that has not begun.
    Asked,
    /// `fresh`: the mask is the one of the next token. `None`: every token may come, or none was asked for.
    Bound {
        constraint: Box<dyn Constraint>,
        mask: Option<Mask>,
        fresh: bool,
    },
}

impl ConstraintState {
    pub(crate) fn is_free(&self) -> bool {
        matches!(self, Self::Free)
    }

    pub(crate) fn mask(&self) -> Option<&[u32]> {
        match self {
            Self::Bound { mask, .. } => mask.as_ref().map(|mask| mask.as_slice()),
            Self::Free | Self::Asked => None,
        }
    }

    /// Whether what may come next is known, or will be within the budget.
    pub(crate) fn prepare(&mut self, budget: &mut Duration) -> bool {
        match self {
            Self::Bound {
                constraint, fresh, ..
            } => *fresh || constraint.prepare(budget),
            Self::Free | Self::Asked => true,
        }
    }

    /// Whether what may come next was not asked for since the last token.
    pub(crate) fn is_late(&self) -> bool {
        matches!(self, Self::Bound { fresh: false, .. })
    }

    /// Goes on by a token that was drawn. Whether it ends the sequence.
    pub(crate) fn take(&mut self, token: u32, most: u32) -> bool {
        match self {
            Self::Bound {
                constraint,
                mask,
                fresh,
            } => {
                (*mask, *fresh) = (None, false);
                constraint.take(token, most)
            }
            Self::Free | Self::Asked => false,
        }
    }
}

/// Whether the bits of a mask, in so many words, take less room than the lengths of equal bits.
#[must_use]
pub fn is_shorter_as_bits(mask: &[u32], words: usize) -> bool {
    let mut last = 0;
    let borders = mask.iter().map(|&word| {
        let before = word << 1 | last;
        last = word >> 31;
        (word ^ before).count_ones()
    });
    borders.sum::<u32>() as usize > words
}
