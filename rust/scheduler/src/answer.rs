//! What a step was answered.

use crate::error::SchedError;

/// The answer to a step: for each row, in order, its tokens, and what the driver drafts after them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Answer<'a> {
    /// The tokens of all rows. A row that draws has one, after the drafts that came true; others have none. A row that
    /// should have one and has none failed.
    pub tokens: &'a [u32],
    /// Where each row's tokens begin in `tokens`, and where the last one's end: one more than there are rows.
    pub token_ends: &'a [u32],
    /// Drafts for the next step of rows that want some.
    pub drafts: &'a [u32],
    /// As `token_ends`; empty when no row has drafts.
    pub draft_ends: &'a [u32],
    /// Log-probabilities of all rows that want some: of each those of the prompt's tokens first, then those of its own.
    pub logprobs: &'a [u32],
    /// As `token_ends`; empty when no row wants some.
    pub logprob_ends: &'a [u32],
    /// What the copies before the step took, in µs; 0 when there were none.
    pub copies_us: u64,
}

impl<'a> Answer<'a> {
    /// Whether its lists fit each other and a step of so many rows.
    pub(crate) fn check(&self, rows: usize) -> Result<(), SchedError> {
        let answered = self.token_ends.len().saturating_sub(1);
        if answered != rows {
            return Err(SchedError::Rows { answered, rows });
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
                return Err(SchedError::Answer { name });
            }
        }
        Ok(())
    }

    pub(crate) fn tokens_of(&self, row: usize) -> &'a [u32] {
        slice(self.tokens, self.token_ends, row)
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
