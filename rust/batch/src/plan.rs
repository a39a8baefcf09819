//! The batch plan: an owned description of one frame, cut into passes.

use std::ops::Range;

use pie_wire::ArchivedForwardRequest;

use crate::frame::{Frame, range};
use crate::random::uniform;
use crate::request::{Checked, Geometry, draft_positions};
use crate::stage::Stage;
use crate::{FrameError, Layout, Limits, RequestFault, TokenSampler};

/// One request of the plan.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// Its rows in [`Planner::token_ids`], drafts behind the inputs; empty when nothing is computed.
    pub(crate) rows: Range<usize>,
    /// Its pages in [`Planner::pages`].
    pub(crate) pages: Range<usize>,
    /// Its slots in [`Planner::slots`].
    pub(crate) slots: Range<usize>,
    /// Tokens stored before this frame.
    pub(crate) prefix: u32,
    /// Draft tokens: the last `drafts` rows.
    pub(crate) drafts: u32,
}

/// One logit row to sample from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    /// Row in [`Planner::token_ids`].
    pub(crate) row: usize,
    pub(crate) sampler: TokenSampler,
    /// Uniform number in `[0, 1)`.
    pub(crate) uniform: f32,
    /// The sampled token, once known.
    pub(crate) token: u32,
}

/// Consecutive rows of one request within one pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    pub(crate) request: usize,
    /// First row in [`Planner::token_ids`].
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// Turns frames into plans and tokens into replies. Owns every buffer and reuses it from frame to frame.
#[derive(Debug)]
pub struct Planner {
    pub(crate) limits: Limits,
    pub(crate) layout: Layout,
    pub(crate) driver_id: u32,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    pub(crate) pages: Vec<u32>,
    pub(crate) requests: Vec<Request>,
    pub(crate) slots: Vec<Slot>,
    pub(crate) segments: Vec<Segment>,
    /// Segments of each pass.
    pub(crate) passes: Vec<Range<usize>>,
    pub(crate) stage: Stage,
    pub(crate) reply: pie_wire::ForwardResponse,
    faults: Vec<(usize, RequestFault)>,
    random_seed: u64,
    frames: u64,
}

impl Planner {
    /// A planner for one engine. `random_seed` keys the randomness of unseeded samplers. The limits must pass
    /// [`Limits::check`].
    #[must_use]
    pub fn new(limits: Limits, random_seed: u64) -> Self {
        Self {
            limits,
            layout: Layout::new(&limits),
            driver_id: 0,
            token_ids: Vec::new(),
            positions: Vec::new(),
            pages: Vec::new(),
            requests: Vec::new(),
            slots: Vec::new(),
            segments: Vec::new(),
            passes: Vec::new(),
            stage: Stage::new(&limits),
            reply: pie_wire::ForwardResponse::default(),
            faults: Vec::new(),
            random_seed,
            frames: 0,
        }
    }

    /// The layout of the staging block that [`Planner::stage`] fills.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Plans one frame, replacing the last one.
    ///
    /// # Errors
    /// [`FrameError`] when the frame's arrays contradict each other. A request that alone cannot be served is no error:
    /// it is listed in [`Planner::faults`].
    pub fn plan(
        &mut self,
        driver_id: u32,
        request: &ArchivedForwardRequest,
    ) -> Result<(), FrameError> {
        self.clear();
        self.driver_id = driver_id;
        let frame = Frame::check(request)?;
        self.frames += 1;
        for index in 0..frame.requests {
            let checked = Checked::request(&frame, &self.limits, index);
            self.add(&frame, index, checked);
        }
        self.cut();
        Ok(())
    }

    fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
        self.pages.clear();
        self.requests.clear();
        self.slots.clear();
        self.segments.clear();
        self.passes.clear();
        self.faults.clear();
        self.stage.restart();
    }

    fn add(&mut self, frame: &Frame<'_>, index: usize, checked: Checked) {
        let geometry = checked.geometry.unwrap_or(Geometry {
            inputs: 0,
            drafts: 0,
            kv_end: 0,
        });
        let (first_row, first_page) = (self.token_ids.len(), self.pages.len());
        if checked.geometry.is_some() {
            let inputs = range(frame.qo_indptr, index);
            let drafts = range(frame.draft_indptr, index);
            let positions = &frame.positions[inputs.clone()];
            self.token_ids.extend_from_slice(&frame.token_ids[inputs]);
            self.token_ids
                .extend_from_slice(&frame.draft_ids[drafts.clone()]);
            self.positions.extend_from_slice(positions);
            self.positions
                .extend(draft_positions(frame, drafts, positions));
            self.pages
                .extend_from_slice(&frame.pages[range(frame.page_indptr, index)]);
        }
        let first_slot = self.slots.len();
        if checked.geometry.is_some() && checked.fault.is_none() {
            self.add_slots(frame, index, first_row, geometry);
        }
        self.requests.push(Request {
            rows: first_row..first_row + geometry.rows() as usize,
            pages: first_page..self.pages.len(),
            slots: first_slot..self.slots.len(),
            prefix: geometry.prefix(),
            drafts: geometry.drafts,
        });
        self.faults
            .extend(checked.fault.map(|fault| (index, fault)));
    }

    fn add_slots(&mut self, frame: &Frame<'_>, index: usize, first_row: usize, geometry: Geometry) {
        let samplers = range(frame.sampler_indptr, index);
        let vocab_size = self.limits.vocab_size;
        if geometry.drafts > 0 {
            // Verification: the last input row and every draft row, each with the first sampler. Without any sampler
            // nothing is returned, as for every request.
            let Some(first) = frame.samplers[samplers].first() else {
                return;
            };
            let sampler = TokenSampler::from_wire(first.view(), vocab_size)
                .unwrap_or(TokenSampler::greedy(vocab_size));
            let last_input = first_row + geometry.inputs as usize - 1;
            for row in last_input..first_row + geometry.rows() as usize {
                self.add_slot(row, 0, sampler);
            }
            return;
        }
        for (slot, sampler) in samplers.enumerate() {
            if let Ok(token_sampler) =
                TokenSampler::from_wire(frame.samplers[sampler].view(), vocab_size)
            {
                let row = first_row + frame.sampling_indices[sampler] as usize;
                self.add_slot(row, slot as u64, token_sampler);
            }
        }
    }

    fn add_slot(&mut self, row: usize, slot: u64, sampler: TokenSampler) {
        let uniform = match sampler.seed {
            Some(seed) => uniform(u64::from(seed), u64::from(self.positions[row]), slot),
            // The upper half of the key space: no caller's 32-bit seed meets it.
            None => uniform(
                self.random_seed | (1 << 63),
                self.frames,
                self.slots.len() as u64,
            ),
        };
        self.slots.push(Slot {
            row,
            sampler,
            uniform,
            token: 0,
        });
    }

    /// Cuts the rows into passes of at most `chunk_tokens` tokens and `max_requests` requests, in the frame's order, so
    /// that a later request's writes always land last.
    fn cut(&mut self) {
        let (chunk, most) = (
            self.limits.chunk_tokens as usize,
            self.limits.max_requests as usize,
        );
        let (mut first, mut tokens) = (0, 0);
        for request in 0..self.requests.len() {
            let mut rows = self.requests[request].rows.clone();
            while !rows.is_empty() {
                if tokens == chunk || self.segments.len() - first == most {
                    self.passes.push(first..self.segments.len());
                    (first, tokens) = (self.segments.len(), 0);
                }
                let len = rows.len().min(chunk - tokens);
                self.segments.push(Segment {
                    request,
                    start: rows.start,
                    len,
                });
                tokens += len;
                rows.start += len;
            }
        }
        if first < self.segments.len() {
            self.passes.push(first..self.segments.len());
        }
    }

    /// The bounds that plans keep to.
    #[must_use]
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Requests of the current frame.
    #[must_use]
    pub fn request_count(&self) -> usize {
        self.requests.len()
    }

    /// Rows that the current frame computes, drafts included.
    #[must_use]
    pub fn token_count(&self) -> usize {
        self.token_ids.len()
    }

    /// Passes of the current frame; 0 when nothing needs the model.
    #[must_use]
    pub fn pass_count(&self) -> usize {
        self.passes.len()
    }

    /// Requests of the current frame that are answered with empty ranges, and why.
    #[must_use]
    pub fn faults(&self) -> &[(usize, RequestFault)] {
        &self.faults
    }

    /// Forgets what the device's block table holds; call it after a pass failed half-way.
    pub fn forget_table(&mut self) {
        self.stage.forget_table();
    }
}
