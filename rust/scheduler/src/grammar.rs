//! Grammars (structured output): the interface to the caller's compiler and matchers, and the state of each sequence.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// The grammar of a request, compiling or compiled. The request stays in the queue until it is compiled; others overtake it.
pub trait GrammarHandle: Debug + Send + Sync {
    /// Creates the matcher of a sequence of at most `most` tokens. Called again in later steps while it returns
    /// [`GrammarStatus::Compiling`]; must not block. Without `jumps` the matcher has no jump-forward tokens: every token is
    /// sampled, so that the driver returns its log-probabilities.
    fn create_matcher(&self, most: u32, jumps: bool) -> GrammarStatus;

    /// Whether [`create_matcher`](Self::create_matcher) would return [`GrammarStatus::Compiling`].
    fn is_compiling(&self) -> bool;
}

/// The result of [`GrammarHandle::create_matcher`].
#[derive(Debug)]
pub enum GrammarStatus {
    /// It is still compiling.
    Compiling,
    /// The matcher, at the start of the output.
    Ready(Box<dyn GrammarMatcher>),
    /// It does not compile; the sequence ends as [`Finish::Grammar`](crate::Finish::Grammar) with this reason.
    Invalid(Arc<str>),
    /// The compiler is overloaded; the sequence ends as [`Finish::Busy`](crate::Finish::Busy) with this reason.
    Busy(Arc<str>),
}

/// A token bitmask: bit `i` of word `w` allows token `32 w + i`; tokens beyond the words are not allowed. Shared, so that
/// matchers reuse the buffer.
pub type Mask = Arc<Vec<u32>>;

/// The grammar matcher of one sequence. It may compute the next mask in the background after each token.
pub trait GrammarMatcher: Debug + Send {
    /// Accepts a sampled token. Returns whether it ends the sequence; if not, `most` tokens may follow.
    fn accept_token(&mut self, token: u32, most: u32) -> bool;

    /// Whether [`next_mask`](Self::next_mask) would return at once. May wait or compute for up to `budget`, which is reduced by
    /// the time spent. A sequence that is not ready is left out of a step that others are in.
    fn prepare_mask(&mut self, budget: &mut Duration) -> bool {
        let _ = budget;
        true
    }

    /// Appends the jump-forward tokens (those without alternative) to `forced` and accepts them, then returns the mask of the
    /// next token; `None` allows all. Called once after each sampled token. The mask is dropped before the next
    /// [`accept_token`](Self::accept_token).
    ///
    /// # Errors
    /// Why it cannot continue; the sequence ends as [`Finish::Grammar`](crate::Finish::Grammar).
    fn next_mask(&mut self, forced: &mut Vec<u32>) -> Result<Option<Mask>, Arc<str>>;
}

/// The grammar of a sequence.
#[derive(Debug, Default)]
pub(crate) enum GrammarState {
    /// Not constrained.
    #[default]
    None,
    /// No matcher yet.
    Compiling,
    /// `is_current`: the mask is that of the next token. `None`: all tokens are allowed, or there is no mask yet.
    Active {
        matcher: Box<dyn GrammarMatcher>,
        mask: Option<Mask>,
        is_current: bool,
    },
}

impl GrammarState {
    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    pub(crate) fn mask(&self) -> Option<&[u32]> {
        match self {
            Self::Active { mask, .. } => mask.as_ref().map(|mask| mask.as_slice()),
            Self::None | Self::Compiling => None,
        }
    }

    /// Whether the next mask is ready, or will be within the budget.
    pub(crate) fn prepare_mask(&mut self, budget: &mut Duration) -> bool {
        match self {
            Self::Active {
                matcher,
                is_current,
                ..
            } => *is_current || matcher.prepare_mask(budget),
            Self::None | Self::Compiling => true,
        }
    }

    /// Whether there is no mask since the last token.
    pub(crate) fn is_late(&self) -> bool {
        matches!(
            self,
            Self::Active {
                is_current: false,
                ..
            }
        )
    }

    /// Accepts a sampled token. Returns whether it ends the sequence.
    pub(crate) fn accept_token(&mut self, token: u32, most: u32) -> bool {
        match self {
            Self::Active {
                matcher,
                mask,
                is_current,
            } => {
                (*mask, *is_current) = (None, false);
                matcher.accept_token(token, most)
            }
            Self::None | Self::Compiling => false,
        }
    }
}

/// Whether a mask of `words` words is smaller as a bitmask than as run lengths.
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
