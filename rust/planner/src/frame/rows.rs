//! The rows of a frame: tokens and their positions.

use std::ops::Range;

use crate::extent::Extent;
use crate::frame::check::draft_positions;
use crate::frame::{Frame, range};

/// The inputs and drafts of all requests that are computed, request by request.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
}

impl Rows {
    pub(crate) fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
    }

    /// Copies the inputs and drafts of request `index`; returns their rows.
    pub(crate) fn add(&mut self, frame: &Frame<'_>, index: usize) -> Extent {
        let first = self.token_ids.len();
        let inputs = range(frame.qo_indptr, index);
        let drafts = range(frame.draft_indptr, index);
        // One by one, as a decode has no more.
        if inputs.len() == 1 && drafts.is_empty() {
            self.token_ids.push(frame.token_ids[inputs.start]);
            self.positions.push(frame.positions[inputs.start]);
        } else {
            self.add_several(frame, inputs, drafts);
        }
        Extent::new(first, self.token_ids.len())
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

    /// Number of rows.
    pub(crate) const fn len(&self) -> usize {
        self.token_ids.len()
    }

    pub(crate) fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// For placeholders of images.
    pub(crate) fn token_ids_mut(&mut self) -> &mut [u32] {
        &mut self.token_ids
    }

    pub(crate) fn positions(&self) -> &[u32] {
        &self.positions
    }
}
