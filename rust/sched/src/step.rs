//! What one forward step computes.

use pie_radix::Move;

use crate::pace::Load;

/// Pages to copy before a step, in the order of the fields, each list as one copy frame or several.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Copies {
    /// From the device to the host.
    pub to_host: Vec<Move>,
    /// From the host to the device.
    pub to_device: Vec<Move>,
}

impl Copies {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.to_host.is_empty() && self.to_device.is_empty()
    }

    /// How many pages.
    pub fn len(&self) -> usize {
        self.to_host.len() + self.to_device.len()
    }

    pub(crate) fn clear(&mut self) {
        self.to_host.clear();
        self.to_device.clear();
    }

    /// Puts what came before in front.
    pub(crate) fn prepend(&mut self, former: &Self) {
        self.to_host.splice(..0, former.to_host.iter().copied());
        self.to_device.splice(..0, former.to_device.iter().copied());
    }
}

/// What one sequence has computed in a step: one request of a forward frame.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a, S> {
    /// The request.
    pub id: u64,
    /// Which of its sequences.
    pub sample: u32,
    /// Names the sequence to the driver, from 1; the same for all requests of a session that follow each other.
    pub context: u64,
    /// The input, at least one token. Their KV is stored from `start` on.
    pub tokens: &'a [u32],
    /// The row of the step before whose token is the only one here; `tokens` keeps its place. Where that row gets no token,
    /// any will do: what this one computes is ignored.
    pub awaits: Option<u32>,
    /// Position, and KV index, of the first token.
    pub start: u32,
    /// The pages of the whole sequence, up to the last token or draft.
    pub pages: &'a [u32],
    /// To be verified after the tokens.
    pub drafts: &'a [u32],
    /// Whether the driver may answer with drafts for the next step.
    pub wants_drafts: bool,
    /// What to draw a token with after the last one; `None`: only KV is wanted. Rows that draw come first in a step.
    pub sampling: Option<&'a S>,
    /// Tokens that must not be drawn.
    pub forbidden: &'a [u32],
}

/// A row as it was laid out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planned {
    pub(crate) slot: usize,
    /// The sequence's place in the order of arrival: another one may have the slot later.
    pub(crate) order: u64,
    pub(crate) epoch: u32,
    pub(crate) start: u32,
    pub(crate) end: u32,
    pub(crate) drafts: u32,
    pub(crate) pages: u32,
    pub(crate) awaits: Option<u32>,
    pub(crate) draws: bool,
    pub(crate) wants_drafts: bool,
}

/// A step that is out.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    pub(crate) rows: Vec<Planned>,
    pub(crate) load: Load,
    pub(crate) laid_at: u64,
    /// Whether it is not known before the answer how many tokens it gives, or whether drafts come with them.
    pub(crate) drafting: bool,
}

/// One forward step, as long as it is not encoded.
#[derive(Debug)]
pub struct Step<'a, S> {
    /// Counts from 1.
    pub number: u64,
    /// What comes before it.
    pub copies: &'a Copies,
    pub(crate) scheduler: &'a crate::Scheduler<S>,
}

impl<'a, S> Step<'a, S> {
    /// The rows, at least one. Those that draw a token come first.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = Row<'a, S>> + Clone + use<'a, S> {
        self.scheduler.rows()
    }
}
