//! One forward step, as the caller encodes it.

use crate::copies::Copies;
use crate::in_flight::ScheduledRow;
use crate::scheduler::Scheduler;

/// The input of one sequence in a step: one request of a forward frame.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a, S> {
    /// Id of the request.
    pub id: u64,
    /// Index of the sequence in the request.
    pub sample: u32,
    /// Context id of the sequence at the driver, from 1; the requests of a session have the same.
    pub context: u64,
    /// Input tokens, at least one; their KV is stored from position `start` on.
    pub tokens: &'a [u32],
    /// The row of the previous step that samples the only input token; `tokens` has a placeholder. If that row gets no token,
    /// any will do: the output is ignored.
    pub awaits: Option<u32>,
    /// Position and KV index of the first token.
    pub start: u32,
    /// Pages of the whole sequence, up to the last token or draft.
    pub pages: &'a [u32],
    /// Draft tokens to verify after the input.
    pub drafts: &'a [u32],
    /// Whether the driver may return drafts for the next step.
    pub wants_drafts: bool,
    /// Sampling parameters of the token after the input; `None`: prefill without sampling. Rows that sample come first in a
    /// step.
    pub sampling: Option<&'a S>,
    /// The same, also for rows that sample nothing.
    pub params: &'a S,
    /// Adapter of the request.
    pub adapter: Option<u64>,
    /// Length of the prompt.
    pub prompt: u32,
    /// Output tokens right before `tokens` whose KV comes from the cache: in the first row since the sequence was admitted, or
    /// took over cached pages. All tokens before `tokens`
    /// with [`NewRequest::whole_history`](crate::NewRequest::whole_history).
    pub history: &'a [u32],
    /// Prompt tokens, as `(start, end)`, whose log-probabilities the output must have; those of a token come from the row of
    /// its predecessor.
    pub prompt_logprobs: (u32, u32),
    /// The token after `tokens`, if it is known.
    pub next: Option<u32>,
    /// Suppressed tokens in rising order: stop tokens (EOS) before `min_new_tokens`; the `min_tokens` logits processor of vLLM.
    pub forbidden: &'a [u32],
    /// Token bitmask, see [`Mask`](crate::Mask); `None`: all tokens are allowed.
    pub mask: Option<&'a [u32]>,
}

/// One forward step, borrowed until it is encoded.
#[derive(Debug)]
pub struct Step<'a, S> {
    /// Counts from 1.
    pub number: u64,
    /// Copies to execute before it.
    pub copies: &'a Copies,
    pub(crate) scheduler: &'a Scheduler<S>,
}

impl<'a, S> Step<'a, S> {
    /// The rows, at least one. Those that sample a token come first.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = Row<'a, S>> + Clone + use<'a, S> {
        self.scheduler.rows()
    }
}

impl<S> Scheduler<S> {
    pub(crate) fn rows(&self) -> impl ExactSizeIterator<Item = Row<'_, S>> + Clone {
        let planned = self.in_flight.back().map_or(&[][..], |step| &step.rows);
        planned.iter().map(|row| self.row(row))
    }

    fn row(&self, row: &ScheduledRow) -> Row<'_, S> {
        let sequence = &self.sequences[row.slot];
        let request = &sequence.shared.request;
        Row {
            id: request.id,
            sample: sequence.sample,
            context: sequence.context,
            tokens: &sequence.tokens[row.start as usize..row.end as usize],
            awaits: row.awaits,
            start: row.start,
            pages: &sequence.kv.pages[..row.pages as usize],
            drafts: &sequence.drafts[..row.drafts as usize],
            wants_drafts: row.samples_token && row.wants_drafts,
            sampling: row.samples_token.then_some(&request.sampling),
            adapter: request.adapter,
            params: &request.sampling,
            prompt: sequence.prompt_len,
            history: sequence.skipped(row.start),
            prompt_logprobs: row.prompt_logprobs,
            next: sequence.tokens.get(row.end as usize).copied(),
            forbidden: if row.samples_token && sequence.forbids(row.end) {
                &request.stop.stop_tokens
            } else {
                &[]
            },
            mask: row.samples_token.then(|| sequence.grammar.mask()).flatten(),
        }
    }
}
