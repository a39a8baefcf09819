//! Query tokens of a frame: ids and positions.

use std::ops::Range;

use crate::frame::check::draft_positions;
use crate::frame::{Frame, range};
use crate::range32::Range32;

/// The inputs, then the drafts, of each computed request.
#[derive(Debug, Default)]
pub(crate) struct QueryTokens {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
}

impl QueryTokens {
    pub(crate) fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
    }

    /// Appends the inputs and drafts of request `index`; returns their range.
    pub(crate) fn add(&mut self, frame: &Frame<'_>, index: usize) -> Range32 {
        let first = self.token_ids.len();
        let inputs = range(frame.qo_indptr, index);
        let drafts = range(frame.draft_indptr, index);
        // Fast path of a decode.
        if inputs.len() == 1 && drafts.is_empty() {
            self.token_ids.push(frame.token_ids[inputs.start]);
            self.positions.push(frame.positions[inputs.start]);
        } else {
            self.add_several(frame, inputs, drafts);
        }
        Range32::new(first, self.token_ids.len())
    }

    #[inline(never)]
    fn add_several(&mut self, frame: &Frame<'_>, inputs: Range<usize>, drafts: Range<usize>) {
        let positions = &frame.positions[inputs.clone()];
        self.token_ids.extend_from_slice(&frame.token_ids[inputs]);
        self.positions.extend_from_slice(positions);
        self.token_ids
            .extend_from_slice(&frame.draft_ids[drafts.clone()]);
        self.positions
            .extend(draft_positions(frame, drafts, positions));
    }

    /// Number of query tokens.
    pub(crate) const fn len(&self) -> usize {
        self.token_ids.len()
    }

    pub(crate) fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// For image placeholders.
    pub(crate) fn token_ids_mut(&mut self) -> &mut [u32] {
        &mut self.token_ids
    }

    pub(crate) fn positions(&self) -> &[u32] {
        &self.positions
    }
}
