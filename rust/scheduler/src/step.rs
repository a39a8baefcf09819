//! What one forward step computes.

use crate::copies::Copies;

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
    /// The same, also of rows that draw nothing.
    pub asked: &'a S,
    /// The adapter that the request was handed in with.
    pub adapter: Option<u64>,
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens produced that lie right before `tokens` and whose KV comes from the cache: of the first row since the sequence
    /// was admitted, or since it went on with pages of the cache in the place of its own.
    pub history: &'a [u32],
    /// Tokens of the prompt, by their indices, whose log-probabilities the answer must have; those of a token come from the row
    /// of the one before. Empty for none.
    pub prompt_logprobs: (u32, u32),
    /// The token after `tokens`, where it is known.
    pub next: Option<u32>,
    /// Tokens that must not be drawn, in rising order.
    pub forbidden: &'a [u32],
    /// Which tokens may be drawn, a bit for each, as [`Constraint::next`](crate::Constraint::next) has them; `None`: all.
    pub mask: Option<&'a [u32]>,
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
