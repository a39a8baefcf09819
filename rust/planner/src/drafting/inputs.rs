//! Inputs of drafting: the plan of the frame.

use pie_speculation::DecodeStep;

use crate::drafting::verify::token_count;
use crate::frame::query_tokens::QueryTokens;
use crate::frame::request::PlannedRequest;
use crate::limits::Limits;
use crate::slot::SamplingSlots;
use crate::table::BlockTable;

/// What drafting reads of a plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftInputs<'a> {
    pub(crate) limits: &'a Limits,
    /// Number of the frame.
    pub(crate) number: u64,
    pub(crate) requests: &'a [PlannedRequest],
    pub(crate) query_tokens: &'a QueryTokens,
    pub(crate) slots: &'a SamplingSlots,
}

impl DraftInputs<'_> {
    /// The pages of the cached prefix, from the block table; `None` if the row was reused.
    pub(super) fn known_pages<'t>(
        &self,
        table: &'t BlockTable,
        request: &PlannedRequest,
    ) -> Option<&'t [u32]> {
        let count = request.prefix().div_ceil(self.limits.page_size as usize);
        // Shared rows, and rows after a later frame, have pages of other requests.
        let shared = self.requests.len() > self.limits.max_requests as usize;
        let others = shared || table.frame() != self.number;
        let pages = table.pages(request.table_row().index());
        pages.get(..count).filter(|_| !others)
    }

    /// Tokens of the reply.
    fn answered_tokens(&self) -> usize {
        let count = |request: &PlannedRequest| {
            let slots = self.slots.of(request.slots());
            token_count(request, slots, self.query_tokens.token_ids())
        };
        self.requests.iter().map(count).sum()
    }

    /// Whether it is a decode step, with or without drafts to verify.
    pub(super) fn is_decode(&self) -> bool {
        let mut computed = (self.requests.iter()).filter(|request| !request.tokens().is_empty());
        computed.all(|request| request.tokens().len() == request.drafts() + 1)
    }

    /// The frame as a decode step, which it is if it has one pass and no prompts.
    pub(super) fn decode_step(&self, passes: usize, ran_model: bool) -> Option<DecodeStep> {
        let rows = self.query_tokens.len();
        let verified = self.requests.iter().map(PlannedRequest::drafts);
        (passes == 1 && self.is_decode()).then(|| DecodeStep {
            requests: rows.saturating_sub(verified.sum()),
            rows,
            tokens: self.answered_tokens(),
            ran_model,
        })
    }
}
