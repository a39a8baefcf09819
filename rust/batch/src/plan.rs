//! The batch plan: an owned description of one frame, cut into passes.

use std::mem;
use std::ops::Range;

use pie_wire::ArchivedForwardRequest;
use rustc_hash::FxHashSet;

use crate::adapter::{Adapters, Binding};
use crate::drafting::Drafting;
use crate::extent::Extent;
use crate::frame::{Frame, range};
use crate::image::{Images, Vision};
use crate::mask::{MaskRows, Sight, attention_words, rows_within};
use crate::prefix::PrefixGroups;
use crate::reply::Reply;
use crate::request::{Geometry, Survey, check_compute, check_pages, draft_positions, is_idle};
use crate::slot::Slots;
use crate::stage::Stage;
use crate::state::State;
use crate::table::BlockTable;
use crate::{FrameError, Layout, Limits, RequestFault};

/// One request of the plan. As with slots, there are many.
#[derive(Debug, Clone, Default)]
pub(crate) struct Request {
    /// Its rows in [`Planner::token_ids`], drafts behind the inputs; empty when nothing is computed.
    pub(crate) rows: Extent,
    /// Its slots in [`Slots::all`]; of a request with drafts those that verify come first.
    pub(crate) slots: Extent,
    /// Its block-table changes in [`Planner::updates`].
    pub(crate) updates: Extent,
    /// Its pages in [`Planner::spilled`]: of a request that takes over a row in the middle of the frame.
    pub(crate) spilled: Extent,
    /// The mask of each input row in [`Planner::mask_rows`]; empty unless the request is masked.
    pub(crate) mask_rows: Extent,
    /// The adapter that it is bound to.
    pub(crate) adapter: Binding,
    /// Its row in [`Planner::table`].
    pub(crate) table_row: u32,
    /// The first of its pages.
    pub(crate) first_page: u32,
    /// Tokens stored before this frame.
    pub(crate) prefix: u32,
    /// Draft tokens: the last `drafts` rows.
    pub(crate) drafts: u32,
    /// Its recurrent state, of an engine that has some.
    pub(crate) state: State,
    /// Its rows are computed in vain: they store no KV.
    pub(crate) dropped: bool,
    pub(crate) sight: Sight,
}

impl Request {
    /// Its rows before the drafts.
    pub(crate) const fn inputs(&self) -> Range<usize> {
        self.rows.start()..self.rows.end() - self.drafts as usize
    }
}

/// Consecutive rows of one request within one pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    request: u32,
    /// Rows in [`Planner::token_ids`].
    rows: Extent,
}

impl Segment {
    pub(crate) const fn request(self) -> usize {
        self.request as usize
    }

    /// First row in [`Planner::token_ids`].
    pub(crate) const fn start(self) -> usize {
        self.rows.start()
    }

    pub(crate) const fn len(self) -> usize {
        self.rows.len()
    }

    /// Rows in [`Planner::token_ids`].
    pub(crate) const fn rows(self) -> Range<usize> {
        self.rows.range()
    }

    /// KV index of its first row.
    pub(crate) const fn kv_start(self, request: &Request) -> usize {
        request.prefix as usize + (self.start() - request.rows.start())
    }
}

/// The rows of a pass: requests without rows leave no gap.
pub(crate) fn pass_rows(segments: &[Segment]) -> Range<usize> {
    segments[0].start()..segments[segments.len() - 1].rows.end()
}

/// Turns frames into plans and tokens into replies. Owns every buffer and reuses it from frame to frame.
#[derive(Debug)]
pub struct Planner {
    pub(crate) limits: Limits,
    pub(crate) layout: Layout,
    pub(crate) driver_id: u32,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    pub(crate) table: BlockTable,
    /// Changed block-table entries: index of the entry and first storage slot of the page that it now names.
    pub(crate) updates: Vec<[i64; 2]>,
    pub(crate) spilled: Vec<u32>,
    pub(crate) requests: Vec<Request>,
    pub(crate) slots: Slots,
    pub(crate) adapters: Adapters,
    /// Slots of the engine's pool of recurrent state; 0 when it has none.
    pub(crate) states: u32,
    /// Slots that requests of the frame keep; of use within one plan.
    pub(crate) state_slots: FxHashSet<u32>,
    /// The engine applies masks that are not causal.
    pub(crate) masks: bool,
    pub(crate) mask_rows: MaskRows,
    pub(crate) vision: Option<Vision>,
    pub(crate) images: Images,
    pub(crate) segments: Vec<Segment>,
    /// Segments of each pass.
    pub(crate) passes: Vec<Range<usize>>,
    pub(crate) stage: Stage,
    pub(crate) prefixes: PrefixGroups,
    pub(crate) reply: Reply,
    pub(crate) drafting: Option<Box<Drafting>>,
    pub(crate) faults: Vec<(usize, RequestFault)>,
    pub(crate) random_seed: u64,
    pub(crate) frames: u64,
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
            table: BlockTable::new(&limits),
            updates: Vec::new(),
            spilled: Vec::new(),
            requests: Vec::new(),
            slots: Slots::default(),
            adapters: Adapters::default(),
            states: 0,
            state_slots: FxHashSet::default(),
            masks: true,
            mask_rows: MaskRows::default(),
            vision: None,
            images: Images::default(),
            segments: Vec::new(),
            passes: Vec::new(),
            stage: Stage::new(&limits),
            prefixes: PrefixGroups::default(),
            reply: Reply::default(),
            drafting: None,
            faults: Vec::new(),
            random_seed,
            frames: 0,
        }
    }

    /// For an engine that cannot apply attention masks: a request whose mask is not causal is emptied.
    #[must_use]
    pub const fn without_masks(mut self) -> Self {
        self.masks = false;
        self
    }

    /// For an engine with recurrent state: the runtime may name slots `0..slots`, fewer than 2^31.
    #[must_use]
    pub const fn with_states(mut self, slots: u32) -> Self {
        self.states = slots;
        self
    }

    /// Slots of the engine's pool of recurrent state; 0 when it has none.
    #[must_use]
    pub const fn states(&self) -> u32 {
        self.states
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
        self.table.start_frame();
        let survey = Survey::of(&frame, &self.limits, self.vision)?;
        for index in 0..frame.requests {
            self.table
                .expect(&frame.pages[range(frame.page_indptr, index)]);
        }
        // Taken out, so that each is made where it stays.
        let mut requests = mem::take(&mut self.requests);
        requests.resize_with(frame.requests, Request::default);
        for (index, request) in requests.iter_mut().enumerate() {
            if let Err(fault) = self.add(&frame, &survey, index, request) {
                self.faults.push((index, fault));
            }
        }
        self.requests = requests;
        self.note_kind();
        self.empty_oversize_requests();
        self.keep_last_states();
        self.cut();
        Ok(())
    }

    fn clear(&mut self) {
        self.prefixes.clear();
        if self.stage.passes_left(self.passes.len()) {
            // Changes that the mirror holds never reached the device.
            self.table.forget();
        }
        self.token_ids.clear();
        self.positions.clear();
        self.updates.clear();
        self.spilled.clear();
        self.requests.clear();
        self.slots.clear();
        if let Some(drafting) = &mut self.drafting {
            drafting.clear();
        }
        self.mask_rows.clear();
        self.images.clear();
        self.segments.clear();
        self.passes.clear();
        self.faults.clear();
        self.stage.restart();
    }

    /// Plans one request, which is empty; what of it cannot be served stays so.
    fn add(
        &mut self,
        frame: &Frame<'_>,
        survey: &Survey<'_>,
        index: usize,
        request: &mut Request,
    ) -> Result<(), RequestFault> {
        if is_idle(frame, index)? {
            return Ok(());
        }
        let geometry = check_compute(frame, survey, &self.limits, index)?;
        request.adapter = self.adapters.binding(frame.adapter(index))?;
        self.check_sight(geometry)?;
        if self.states > 0 {
            request.state = self.check_state(frame, index, geometry)?;
        }
        self.place(frame, index, request)?;
        request.prefix = geometry.prefix();
        request.drafts = geometry.drafts;
        request.sight = geometry.sight;
        if geometry.sight != Sight::Causal {
            request.mask_rows = self.mask_rows.add(frame, index);
        }
        request.rows = self.add_rows(frame, index);
        if let Some(images) = &survey.images {
            let tokens = (&mut self.token_ids[..], self.limits.vocab_size);
            self.images
                .add(frame, images, index, request.rows.start(), tokens);
        }
        if self.drafting.is_some() {
            self.note_text(frame, index, request);
        }
        let first_slot = self.slots.all.len();
        let added = self.add_slots(frame, index, request.rows.start(), geometry);
        request.slots = Extent::new(first_slot, self.slots.all.len());
        added
    }

    /// Checks that a pass can apply the request's mask.
    const fn check_sight(&self, geometry: Geometry) -> Result<(), RequestFault> {
        match geometry.sight {
            Sight::Masked | Sight::MaskedAhead if !self.masks => Err(RequestFault::NonCausalMask),
            Sight::Causal | Sight::Masked => Ok(()),
            Sight::MaskedAhead => self.check_one_pass(geometry),
        }
    }

    /// Checks that a request that cannot be cut fits one pass, with its mask.
    const fn check_one_pass(&self, geometry: Geometry) -> Result<(), RequestFault> {
        let (tokens, limit) = (geometry.rows(), self.limits.chunk_tokens);
        let kv_len = geometry.kv_end as usize + geometry.drafts as usize;
        let words = attention_words(tokens as usize, kv_len);
        let most = self.limits.attention_words();
        if tokens > limit {
            return Err(RequestFault::MaskAhead { tokens, limit });
        }
        if words > most {
            return Err(RequestFault::MaskWords {
                tokens,
                kv_len,
                bytes: 4 * words,
                limit: 4 * most,
                // The mask of so many tokens without a prefix is as large.
                chunk: (32 * words - 1).isqrt() + 1,
            });
        }
        Ok(())
    }

    /// The request's recurrent state, which rejected drafts would spoil.
    fn check_state(
        &self,
        frame: &Frame<'_>,
        index: usize,
        geometry: Geometry,
    ) -> Result<State, RequestFault> {
        match geometry.drafts {
            0 => State::of(frame, self.states, index),
            drafts => Err(RequestFault::StateDrafts { drafts }),
        }
    }

    /// Finds the request's row of the block table, checks its pages and notes which entries change.
    fn place(
        &mut self,
        frame: &Frame<'_>,
        index: usize,
        request: &mut Request,
    ) -> Result<(), RequestFault> {
        let pages = &frame.pages[range(frame.page_indptr, index)];
        let context = frame.context_ids.get(index).copied().unwrap_or(0);
        request.first_page = pages.first().copied().unwrap_or(0);
        let Some(row) = self.table.find(context) else {
            check_pages(pages, &self.limits)?;
            request.table_row = self.table.take_over() as u32;
            let first = self.spilled.len();
            self.spilled.extend_from_slice(pages);
            request.spilled = Extent::new(first, self.spilled.len());
            return Ok(());
        };
        // Entries that the mirror holds were checked when they came.
        let matching = self.table.matching_free(row, index, pages);
        check_pages(&pages[matching..], &self.limits)?;
        self.table.take(row, context);
        let first = self.updates.len();
        let (limits, updates) = (&self.limits, &mut self.updates);
        self.table.update(row, pages, matching, |column, page| {
            updates.push(limits.table_update(row, column, page));
        });
        request.table_row = row as u32;
        request.updates = Extent::new(first, self.updates.len());
        Ok(())
    }

    /// Copies the request's inputs and drafts; returns their rows.
    fn add_rows(&mut self, frame: &Frame<'_>, index: usize) -> Extent {
        let first = self.token_ids.len();
        let inputs = range(frame.qo_indptr, index);
        let drafts = range(frame.draft_indptr, index);
        let positions = &frame.positions[inputs.clone()];
        // One by one, as a decode has no more.
        if let [position] = positions {
            self.token_ids.push(frame.token_ids[inputs.start]);
            self.positions.push(*position);
        } else {
            self.token_ids.extend_from_slice(&frame.token_ids[inputs]);
            self.positions.extend_from_slice(positions);
        }
        if !drafts.is_empty() {
            self.token_ids
                .extend_from_slice(&frame.draft_ids[drafts.clone()]);
            self.positions
                .extend(draft_positions(frame, drafts, positions));
        }
        Extent::new(first, self.token_ids.len())
    }

    /// Tells the drafter what the request stores, and whether it asks for drafts.
    fn note_text(&mut self, frame: &Frame<'_>, index: usize, request: &Request) {
        let Some(drafting) = &mut self.drafting else {
            return;
        };
        let context = frame.context_ids.get(index).copied().unwrap_or(0);
        let pages = &frame.pages[range(frame.page_indptr, index)];
        drafting.add(
            (index, context, frame.wants_drafts(index)),
            (pages, request.prefix as usize),
            &self.token_ids[request.rows.range()],
        );
    }

    /// Notes faults that show only after their requests were planned.
    pub(crate) fn add_faults(&mut self, faults: impl IntoIterator<Item = (usize, RequestFault)>) {
        self.faults.extend(faults);
        self.faults.sort_unstable_by_key(|&(index, _)| index);
    }

    /// Cuts the rows into passes of at most `chunk_tokens` tokens and `max_requests` requests, in the frame's order, so
    /// that a later request's writes always land last. A pass is masked or causal as a whole, its masks have no more than
    /// [`Limits::attention_words`], and it needs no more adapters than it can hold.
    fn cut(&mut self) {
        let (chunk, most) = (
            self.limits.chunk_tokens as usize,
            self.limits.max_requests as usize,
        );
        let most_words = self.limits.attention_words();
        let (mut first, mut tokens, mut masked, mut words) = (0, 0, false, 0);
        self.adapters.start_pass();
        let adapters = self.takes_adapters();
        for (index, request) in self.requests.iter().enumerate() {
            let mut rows = request.rows.range();
            while !rows.is_empty() {
                let wanted = match request.sight {
                    Sight::Causal | Sight::Masked => 1,
                    Sight::MaskedAhead => rows.len(),
                };
                let kv_start = || request.prefix as usize + rows.start - request.rows.start();
                let full = tokens + wanted > chunk
                    || (request.sight != Sight::Causal
                        && words + attention_words(wanted, kv_start() + wanted) > most_words)
                    || self.segments.len() - first == most
                    || (adapters && !self.adapters.admits(request.adapter));
                let mixed = masked != (request.sight != Sight::Causal);
                if tokens > 0 && (full || mixed) {
                    self.passes.push(first..self.segments.len());
                    (first, tokens, words) = (self.segments.len(), 0, 0);
                    self.adapters.start_pass();
                }
                if adapters {
                    self.adapters.add(request.adapter);
                }
                masked = request.sight != Sight::Causal;
                let mut len = rows.len().min(chunk - tokens);
                if masked {
                    len = rows_within(most_words - words, kv_start(), len).max(1);
                    words += attention_words(len, kv_start() + len);
                }
                self.segments.push(Segment {
                    request: index as u32,
                    rows: Extent::new(rows.start, rows.start + len),
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
        self.table.forget();
    }
}
