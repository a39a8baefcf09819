//! What the requests of a frame bring: their rows, pages, slots, masks, images and drafts, each kind in an array of its own.

use pie_wire::ExtensionRows;

use crate::adapter::Adapters;
use crate::drafting::{Drafting, FrameDrafts};
use crate::extent::Extent;
use crate::fault::RequestFault;
use crate::frame::check::{FrameFacts, check_compute, check_visibility, is_idle};
use crate::frame::request::Request;
use crate::frame::rows::Rows;
use crate::frame::{Frame, range};
use crate::image::Images;
use crate::limits::Limits;
use crate::mask::{MaskRows, Visibility};
use crate::sampler::extra::KvPlace;
use crate::sampler::params::ParamsStore;
use crate::slot::{Sampling, Slots};
use crate::state::State;
use crate::table::BlockTable;
use crate::table::changes::TableChanges;

/// What outlasts a frame, as far as planning one needs it.
pub(crate) struct Lasting<'a> {
    pub(crate) table: &'a mut BlockTable,
    pub(crate) adapters: &'a Adapters,
    pub(crate) drafting: Option<&'a mut Drafting>,
    /// Slots of the engine's pool of recurrent state; 0 when it has none.
    pub(crate) states: u32,
    /// The engine applies masks that are not causal.
    pub(crate) masks: bool,
    /// Key of unseeded samplers.
    pub(crate) random_seed: u64,
    /// Images of all frames before.
    pub(crate) images: u64,
    /// What requests ask for beyond the Pie protocol.
    pub(crate) extension: ExtensionRows<'a>,
    /// The parameters of contexts.
    pub(crate) params: &'a ParamsStore,
}

/// What the requests of one frame bring; a [`Request`] says which part is its own.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    rows: Rows,
    changes: TableChanges,
    slots: Slots,
    mask_rows: MaskRows,
    images: Images,
    drafts: FrameDrafts,
    /// Input tokens of requests with more than one.
    prompt_tokens: usize,
}

impl Contents {
    pub(crate) fn clear(&mut self) {
        self.rows.clear();
        self.changes.clear();
        self.mask_rows.clear();
        self.drafts.clear();
        self.prompt_tokens = 0;
    }

    /// Begins a frame, of which the block table knows the number.
    pub(crate) fn start(&mut self, limits: &Limits, lasting: &Lasting<'_>) {
        self.images.start(lasting.images);
        self.slots.start(Sampling {
            vocab_size: limits.vocab_size,
            random_seed: lasting.random_seed,
            frame: lasting.table.frame(),
        });
    }

    pub(crate) const fn rows(&self) -> &Rows {
        &self.rows
    }

    pub(crate) const fn changes(&self) -> &TableChanges {
        &self.changes
    }

    pub(crate) const fn slots(&self) -> &Slots {
        &self.slots
    }

    pub(crate) const fn slots_mut(&mut self) -> &mut Slots {
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

    /// What the drafter changes, and what it reads.
    pub(crate) const fn drafting(&mut self) -> (&mut FrameDrafts, &Rows, &Slots) {
        (&mut self.drafts, &self.rows, &self.slots)
    }

    pub(crate) const fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Takes one request of the frame, and describes it in `request`, which is empty: what of it cannot be served stays so.
    pub(crate) fn add(
        &mut self,
        (frame, facts): (&Frame<'_>, &FrameFacts<'_>),
        limits: &Limits,
        lasting: &mut Lasting<'_>,
        (index, request): (usize, &mut Request),
    ) -> Result<(), RequestFault> {
        let context = frame.context_ids.get(index).copied().unwrap_or(0);
        request.set_context(context);
        let row = lasting.extension.of(index);
        if is_idle(frame, index)? {
            return Ok(());
        }
        let geometry = check_compute(frame, facts, limits, index)?;
        let adapter = lasting.adapters.binding(frame.adapter(index))?;
        check_visibility(geometry, limits, lasting.masks)?;
        if lasting.states > 0 {
            let state = State::of(frame, lasting.states, index, geometry.drafts)?;
            request.set_state(state);
        }
        let pages = &frame.pages[range(frame.page_indptr, index)];
        self.changes.add(
            lasting.table,
            limits,
            (index, context, pages),
            request.place_mut(),
        )?;
        request.describe(geometry, adapter);
        if geometry.visibility != Visibility::Causal {
            request.set_mask_rows(self.mask_rows.add(frame, index));
        }
        let rows = self.rows.add(frame, index);
        request.set_rows(rows);
        let inputs = request.inputs().len();
        if inputs > 1 {
            self.prompt_tokens += inputs;
        }
        if let Some(images) = &facts.images {
            let tokens = (self.rows.token_ids_mut(), limits.vocab_size);
            self.images.add(frame, images, index, rows.start(), tokens);
        }
        if let Some(drafting) = &mut lasting.drafting {
            let tokens = &self.rows.token_ids()[rows.range()];
            drafting.store(pages, geometry.prefix() as usize, tokens);
            if frame.wants_drafts(index) {
                self.drafts.ask(index, context);
            }
        }
        let first_slot = self.slots.len();
        match row {
            None => {
                let positions = self.rows.positions();
                self.slots
                    .add(frame, index, rows.start(), geometry, positions)?;
            }
            Some(row) => {
                let place = KvPlace {
                    table_row: request.place().row() + 1,
                    pages,
                    prefix: geometry.prefix(),
                    end: geometry.prefix() + geometry.rows(),
                    first_row: rows.start(),
                    samples: !range(frame.sampler_indptr, index).is_empty(),
                };
                let own = (&self.rows, geometry);
                let row = (&row, lasting.params.of(row.params())?);
                self.slots
                    .add_extended((frame, index), row, own, limits, place)?;
            }
        }
        request.set_slots(Extent::new(first_slot, self.slots.len()));
        Ok(())
    }
}
