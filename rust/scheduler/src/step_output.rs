//! The output of a step.

use std::sync::Arc;

use crate::error::SchedulerError;

/// The output of a step: sampled tokens and new drafts of each row, in order.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepOutput<'a> {
    /// Tokens of all rows: accepted drafts and one sampled token of each row that samples, none of others. A row that should
    /// have a token and has none failed.
    pub tokens: &'a [u32],
    /// Offsets of each row's tokens in `tokens`: one more than rows, from 0 on.
    pub token_ends: &'a [u32],
    /// Drafts for the next step, of rows that want some.
    pub drafts: &'a [u32],
    /// As `token_ends`; empty without drafts.
    pub draft_ends: &'a [u32],
    /// Log-probabilities of all rows that want some: of each first those of prompt tokens, then those of output tokens.
    pub logprobs: &'a [u32],
    /// As `token_ends`; empty without log-probabilities.
    pub logprob_ends: &'a [u32],
    /// Why rows have no token: row, and a reason for the client.
    pub failures: &'a [(u32, Arc<str>)],
    /// Time of the copies before the step, in µs; 0 without copies.
    pub copies_us: u64,
}

impl<'a> StepOutput<'a> {
    /// Checks the offsets against each other and the number of rows.
    pub(crate) fn check(&self, rows: usize) -> Result<(), SchedulerError> {
        let answered = self.token_ends.len().saturating_sub(1);
        if answered != rows {
            return Err(SchedulerError::Rows { answered, rows });
        }
        let lists = [
            ("tokens", self.tokens, self.token_ends),
            ("drafts", self.drafts, self.draft_ends),
            ("logprobs", self.logprobs, self.logprob_ends),
        ];
        for (name, values, ends) in lists {
            let whole = ends.first().is_none_or(|&first| first == 0)
                && ends.last().map_or(0, |&last| last as usize) == values.len();
            let fits = ends.is_empty() || ends.len() == rows + 1;
            if !(whole && fits && ends.is_sorted()) {
                return Err(SchedulerError::StepOutput { name });
            }
        }
        Ok(())
    }

    pub(crate) fn tokens_of(&self, row: usize) -> &'a [u32] {
        slice(self.tokens, self.token_ends, row)
    }

    /// Why a row has no token.
    pub(crate) fn failure_of(&self, row: usize) -> Option<&'a Arc<str>> {
        let mut failures = self.failures.iter();
        let found = failures.find(|(failed, _)| *failed as usize == row);
        found.map(|(_, reason)| reason)
    }

    pub(crate) fn logprobs_of(&self, row: usize) -> &'a [u32] {
        slice(self.logprobs, self.logprob_ends, row)
    }

    pub(crate) fn drafts_of(&self, row: usize) -> &'a [u32] {
        slice(self.drafts, self.draft_ends, row)
    }
}

fn slice<'a>(values: &'a [u32], ends: &[u32], row: usize) -> &'a [u32] {
    match ends.get(row..row + 2) {
        Some(&[start, end]) => &values[start as usize..end as usize],
        _ => &[],
    }
}
