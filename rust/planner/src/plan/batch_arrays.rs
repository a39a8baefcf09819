//! The batch as a struct of arrays: query tokens, block-table updates, sampling slots, masks, images, drafts.

use pie_wire::{ExtensionRow, ExtensionRows};

use crate::adapter::Adapters;
use crate::drafting::{Drafting, FrameDrafts};
use crate::error::RequestError;
use crate::frame::check::{FrameChecks, Geometry, check_compute, check_mask_mode, is_idle};
use crate::frame::query_tokens::QueryTokens;
use crate::frame::request::PlannedRequest;
use crate::frame::{Frame, range};
use crate::image::Images;
use crate::limits::Limits;
use crate::mask::{MaskMode, MaskRows};
use crate::range32::Range32;
use crate::sampler::logits_processors::RequestKv;
use crate::sampler::params::ParamsStore;
use crate::slot::{SamplingContext, SamplingSlots};
use crate::state::RecurrentState;
use crate::table::BlockTable;
use crate::table::updates::TableUpdates;

/// State of the planner across frames that planning one frame needs.
pub(crate) struct PlannerState<'a> {
    pub(crate) table: &'a mut BlockTable,
    pub(crate) adapters: &'a Adapters,
    pub(crate) drafting: Option<&'a mut Drafting>,
    /// Slots of the engine's pool of recurrent state; 0 when it has none.
    pub(crate) states: u32,
    /// Whether the engine supports custom attention masks.
    pub(crate) masks: bool,
    /// Numbers of a pooled row of an embedding model; 0 for a model that generates.
    pub(crate) embedding_size: u32,
    /// Numbers of a hidden state; 0 where it is not known yet.
    pub(crate) hidden_size: u32,
    /// Key of unseeded samplers.
    pub(crate) random_seed: u64,
    /// Images of all earlier frames.
    pub(crate) images: u64,
    /// Rows of the extension.
    pub(crate) extension: ExtensionRows<'a>,
    /// Parameters registered per context.
    pub(crate) params: &'a ParamsStore,
}

/// The arrays of one batch; each [`PlannedRequest`] has its ranges of them.
#[derive(Debug, Default)]
pub(crate) struct BatchArrays {
    query_tokens: QueryTokens,
    table_updates: TableUpdates,
    slots: SamplingSlots,
    mask_rows: MaskRows,
    images: Images,
    drafts: FrameDrafts,
    /// Prefill tokens: inputs of requests with more than one.
    prompt_tokens: usize,
}

impl BatchArrays {
    pub(crate) fn clear(&mut self) {
        self.query_tokens.clear();
        self.table_updates.clear();
        self.mask_rows.clear();
        self.drafts.clear();
        self.prompt_tokens = 0;
    }

    /// Starts a frame, whose number the block table has.
    pub(crate) fn start(&mut self, limits: &Limits, planner: &PlannerState<'_>) {
        self.images.start(planner.images);
        self.slots.start(SamplingContext {
            vocab_size: limits.vocab_size,
            embedding_size: planner.embedding_size,
            hidden_size: planner.hidden_size,
            random_seed: planner.random_seed,
            frame: planner.table.frame(),
        });
    }

    pub(crate) const fn query_tokens(&self) -> &QueryTokens {
        &self.query_tokens
    }

    pub(crate) const fn table_updates(&self) -> &TableUpdates {
        &self.table_updates
    }

    pub(crate) const fn slots(&self) -> &SamplingSlots {
        &self.slots
    }

    pub(crate) const fn slots_mut(&mut self) -> &mut SamplingSlots {
        &mut self.slots
    }

    pub(crate) const fn mask_rows(&self) -> &MaskRows {
        &self.mask_rows
    }

    pub(crate) const fn images(&self) -> &Images {
        &self.images
    }

    pub(crate) const fn drafts(&self) -> &FrameDrafts {
        &self.drafts
    }

    pub(crate) const fn drafts_mut(&mut self) -> &mut FrameDrafts {
        &mut self.drafts
    }

    /// The drafts of the frame, and the inputs of the drafter.
    pub(crate) const fn drafting(&mut self) -> (&mut FrameDrafts, &QueryTokens, &SamplingSlots) {
        (&mut self.drafts, &self.query_tokens, &self.slots)
    }

    pub(crate) const fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Appends one request of the frame and fills `request`, which is empty. On an error its later fields stay empty.
    pub(crate) fn add(
        &mut self,
        (frame, checks): (&Frame<'_>, &FrameChecks<'_>),
        limits: &Limits,
        planner: &mut PlannerState<'_>,
        (index, request): (usize, &mut PlannedRequest),
    ) -> Result<(), RequestError> {
        let context = frame.context_ids.get(index).copied().unwrap_or(0);
        request.set_context(context);
        let row = planner.extension.of(index);
        if is_idle(frame, index)? {
            return Ok(());
        }
        let geometry = check_compute(frame, checks, limits, index)?;
        let adapter = planner.adapters.binding(frame.adapter(index))?;
        check_mask_mode(geometry, limits, planner.masks)?;
        if planner.states > 0 {
            let state = RecurrentState::of(frame, planner.states, index, geometry.drafts)?;
            request.set_state(state);
        }
        let pages = &frame.pages[range(frame.page_indptr, index)];
        self.table_updates.add(
            planner.table,
            limits,
            (index, context, pages),
            request.table_row_mut(),
        )?;
        request.describe(geometry, adapter);
        if geometry.mask_mode != MaskMode::Causal {
            request.set_mask_rows(self.mask_rows.add(frame, index));
        }
        let tokens = self.query_tokens.add(frame, index);
        request.set_tokens(tokens);
        let inputs = request.inputs().len();
        if inputs > 1 {
            self.prompt_tokens += inputs;
        }
        if let Some(images) = &checks.images {
            let text = (self.query_tokens.token_ids_mut(), limits.vocab_size);
            self.images.add(frame, images, index, tokens.start(), text);
        }
        if let Some(drafting) = &mut planner.drafting {
            let token_ids = &self.query_tokens.token_ids()[tokens.range()];
            drafting.store(pages, geometry.prefix() as usize, token_ids);
            if frame.wants_drafts(index) {
                self.drafts.request(index, context);
            }
        }
        let first_slot = self.slots.len();
        self.add_slots(
            (frame, index),
            geometry,
            (limits, planner.params),
            (pages, &*request),
            row.as_ref(),
        )?;
        request.set_slots(Range32::new(first_slot, self.slots.len()));
        Ok(())
    }

    /// Appends the sampled rows of a request that has its pages and tokens: its samplers, and what its extension asks for.
    #[inline]
    fn add_slots(
        &mut self,
        (frame, index): (&Frame<'_>, usize),
        geometry: Geometry,
        (limits, params): (&Limits, &ParamsStore),
        (pages, request): (&[u32], &PlannedRequest),
        row: Option<&ExtensionRow<'_>>,
    ) -> Result<(), RequestError> {
        let first_row = request.tokens().start();
        let Some(row) = row else {
            let positions = self.query_tokens.positions();
            return self.slots.add(frame, index, first_row, geometry, positions);
        };
        self.add_extended(
            (frame, index),
            geometry,
            (limits, params),
            (pages, request),
            row,
        )
    }

    /// [`add_slots`](Self::add_slots) for a request with an extension row.
    #[inline(never)]
    fn add_extended(
        &mut self,
        (frame, index): (&Frame<'_>, usize),
        geometry: Geometry,
        (limits, params): (&Limits, &ParamsStore),
        (pages, request): (&[u32], &PlannedRequest),
        row: &ExtensionRow<'_>,
    ) -> Result<(), RequestError> {
        let first_row = request.tokens().start();
        let kv = RequestKv {
            table_row: request.table_row().index() + 1,
            pages,
            prefix: geometry.prefix(),
            end: geometry.prefix() + geometry.tokens(),
            first_row,
            samples: !range(frame.sampler_indptr, index).is_empty(),
            context: request.context(),
            tokens: &self.query_tokens.token_ids()[request.tokens().range()],
            drafts: geometry.drafts,
        };
        let own = (&self.query_tokens, geometry);
        let row = (row, params.of(row.params())?);
        self.slots
            .add_extended((frame, index), row, own, limits, kv)
    }
}
