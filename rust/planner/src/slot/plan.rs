//! Planning slots: what a request's samplers ask of its rows, and what its extension adds.

use std::sync::Arc;

use pie_wire::{AnswerRows, ExtensionRow, SamplerView, Words};

use super::{Slot, Slots, UNEXTENDED, UNMASKED, WORD};
use crate::extent::Extent;
use crate::fault::RequestFault;
use crate::frame::check::Geometry;
use crate::frame::rows::Rows;
use crate::frame::{Frame, range};
use crate::limits::Limits;
use crate::sampler::extra::KvPlace;
use crate::sampler::params::Params;
use crate::sampler::random::uniform;
use crate::sampler::{SamplerParams, SlotClass};

/// What a request's extension asks of its slots.
#[derive(Clone, Copy)]
struct Wishes<'a> {
    /// See [`Slot::extra`].
    extra: u32,
    /// Bytes of each of its places in an answer; 0 when it asks for no log-probabilities.
    place_bytes: usize,
    /// What stands for its token samplers.
    own: Option<(SlotClass, SamplerParams)>,
    /// A mask of bits.
    mask: Option<Words<'a>>,
}

impl Wishes<'_> {
    const NONE: Self = Self {
        extra: UNEXTENDED,
        place_bytes: 0,
        own: None,
        mask: None,
    };
}

/// What holds for all slots of a request.
#[derive(Clone, Copy)]
struct Common {
    /// See [`Slot::mask`].
    mask: u32,
    /// Its mask forbids everything: the arg-max of the unmasked logits is returned.
    forbidden: bool,
    /// See [`Slot::extra`].
    extra: u32,
    /// See [`Wishes::place_bytes`].
    place_bytes: usize,
}

impl Slots {
    /// Plans the slots of request `index`, whose rows start at `first_row` and have these `positions` of the frame's; those
    /// that verify drafts come first.
    ///
    /// # Errors
    /// [`RequestFault`] when its sampling indices or masks are wrong; nothing is added then.
    pub(crate) fn add(
        &mut self,
        frame: &Frame<'_>,
        index: usize,
        first_row: usize,
        geometry: Geometry,
        positions: &[u32],
    ) -> Result<(), RequestFault> {
        let rows = (first_row, geometry, positions);
        self.plan(frame, index, rows, Wishes::NONE)
    }

    /// The same for a request with a row of the extension and its parameters, whose inputs are in `rows`: with what that asks for, and the places
    /// of its prompt after its slots.
    ///
    /// # Errors
    /// As [`add`](Self::add), and [`RequestFault::Extension`].
    pub(crate) fn add_extended(
        &mut self,
        (frame, index): (&Frame<'_>, usize),
        (row, params): (&ExtensionRow<'_>, &Arc<Params>),
        (rows, geometry): (&Rows, Geometry),
        limits: &Limits,
        place: KvPlace<'_>,
    ) -> Result<(), RequestFault> {
        let extra = self.extras.add(row, params, limits, place)?;
        let asked = self.extras.asked(extra);
        let wishes = Wishes {
            extra,
            place_bytes: asked.map_or(0, |asked| WORD * asked.shape.words()),
            own: params.sampler,
            mask: Some(row.mask).filter(|mask| !mask.is_empty()),
        };
        let first_row = place.first_row;
        let own = (first_row, geometry, rows.positions());
        self.plan(frame, index, own, wishes)?;
        let tokens = &rows.token_ids()[first_row..first_row + geometry.inputs as usize];
        self.add_prompt(row, &wishes, geometry, first_row, tokens);
        Ok(())
    }

    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "nothing of the extension is left where a request has none"
    )]
    fn plan(
        &mut self,
        frame: &Frame<'_>,
        index: usize,
        (first_row, geometry, positions): (usize, Geometry, &[u32]),
        wishes: Wishes<'_>,
    ) -> Result<(), RequestFault> {
        let samplers = range(frame.sampler_indptr, index);
        let indices = &frame.sampling_indices[samplers.clone()];
        let rows = geometry.inputs;
        if let Some(&index) = indices.iter().find(|&&row| row >= rows) {
            return Err(RequestFault::SamplingIndex { index, rows });
        }
        if samplers.is_empty() {
            return Ok(());
        }
        let common = self.common(frame, index, &wishes)?;
        let vocab_size = self.sampling.vocab_size;
        let samplers = &frame.samplers[samplers];
        if geometry.drafts > 0 {
            let sampler = SamplerParams::from_wire(samplers[0].view(), vocab_size);
            let (class, params) = (wishes.own)
                .or(sampler.filter(|(class, _)| class.is_token()))
                .unwrap_or((SlotClass::Greedy, SamplerParams::greedy(vocab_size)));
            let last_input = first_row + geometry.inputs as usize - 1;
            for row in last_input..first_row + geometry.rows() as usize {
                let place = (row, 0, positions);
                self.add_slot(common, place, class, params, Extent::default());
            }
        }
        for (number, (sampler, &row)) in samplers.iter().zip(indices).enumerate() {
            let view = sampler.view();
            let Some((class, params)) = SamplerParams::from_wire(view, vocab_size) else {
                continue;
            };
            let (class, params) = match wishes.own {
                Some(own) if class.is_token() => own,
                _ => (class, params),
            };
            // Verification stands for the request's token samplers.
            if class.is_token() && geometry.drafts > 0 {
                continue;
            }
            let labels = self.add_labels(view);
            let place = (first_row + row as usize, number as u64, positions);
            self.add_slot(common, place, class, params, labels);
        }
        Ok(())
    }

    /// Plans the tokens of a log-probability sampler.
    fn add_labels(&mut self, sampler: SamplerView<'_>) -> Extent {
        let first = self.labels.len();
        match sampler {
            SamplerView::Logprob { token_id } => self.labels.push(token_id),
            SamplerView::Logprobs { token_ids } => self.labels.extend_from_slice(token_ids),
            _ => return Extent::default(),
        }
        Extent::new(first, self.labels.len())
    }

    /// Plans the places of a prompt, of `tokens` on the rows from `first_row` on, whose log-probabilities its extension asks
    /// for. That of a token comes from the row before it.
    fn add_prompt(
        &mut self,
        row: &ExtensionRow<'_>,
        wishes: &Wishes<'_>,
        geometry: Geometry,
        first_row: usize,
        tokens: &[u32],
    ) {
        let Some(prompt) = row.prompt_logprobs().filter(|_| wishes.place_bytes > 0) else {
            return;
        };
        // A mask is of what is sampled.
        let common = Common {
            mask: UNMASKED,
            forbidden: false,
            extra: wishes.extra,
            place_bytes: wishes.place_bytes,
        };
        let params = SamplerParams::greedy(self.sampling.vocab_size);
        let prefix = geometry.prefix();
        for index in prompt.from.max(prefix + 1)..prompt.end.min(geometry.kv_end + 1) {
            let token = tokens
                .get((index - prefix) as usize)
                .unwrap_or(&prompt.next);
            // Of an image's row there is no such token.
            let token = (*token).min(self.sampling.vocab_size - 1);
            let labels = Extent::new(self.labels.len(), self.labels.len() + 1);
            self.labels.push(token);
            let row = first_row + (index - 1 - prefix) as usize;
            self.add_slot(common, (row, 0, &[]), SlotClass::Prompt, params, labels);
        }
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as with `plan`")]
    fn common(
        &mut self,
        frame: &Frame<'_>,
        index: usize,
        wishes: &Wishes<'_>,
    ) -> Result<Common, RequestFault> {
        let mut common = Common {
            mask: UNMASKED,
            forbidden: false,
            extra: wishes.extra,
            place_bytes: wishes.place_bytes,
        };
        if !frame.logit_masks.is_empty() {
            self.add_runs(frame, index, &mut common)?;
        }
        if let Some(mask) = wishes.mask {
            self.add_bits(mask, &mut common)?;
        }
        Ok(common)
    }

    /// Plans the mask of runs that the frame brings for a request.
    fn add_runs(
        &mut self,
        frame: &Frame<'_>,
        index: usize,
        common: &mut Common,
    ) -> Result<(), RequestFault> {
        let masks = range(frame.logit_mask_indptr, index);
        if masks.len() > 1 {
            return Err(RequestFault::LogitMasks { masks: masks.len() });
        }
        let given = masks.start;
        if !masks.is_empty() && !frame.logit_masks[given].buffer.is_empty() {
            let vocab_size = self.sampling.vocab_size;
            let mask = self.masks.add_runs(frame.logit_masks, given, vocab_size);
            common.forbidden = mask.is_none();
            common.mask = mask.map_or(UNMASKED, |mask| mask as u32);
        }
        Ok(())
    }

    /// Plans a mask of bits.
    fn add_bits(&mut self, bits: Words<'_>, common: &mut Common) -> Result<(), RequestFault> {
        if common.forbidden || common.mask != UNMASKED {
            return Err(RequestFault::LogitMasks { masks: 2 });
        }
        let mask = self.masks.add_bits(bits, self.sampling.vocab_size);
        common.forbidden = mask.is_none();
        common.mask = mask.map_or(UNMASKED, |mask| mask as u32);
        Ok(())
    }

    /// Plans a slot of a row: the sampler with this number among those of its request.
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "as with `SamplerParams::from_wire`, whose result it takes"
    )]
    fn add_slot(
        &mut self,
        common: Common,
        (row, number, positions): (usize, u64, &[u32]),
        class: SlotClass,
        params: SamplerParams,
        labels: Extent,
    ) {
        let class = if common.forbidden && class.is_token() {
            SlotClass::Greedy
        } else {
            class
        };
        let uniform = match (class, params.seed) {
            (SlotClass::Plain | SlotClass::Filtered, Some(seed)) => {
                uniform(seed, u64::from(positions[row]), number)
            }
            // The upper half of the key space: no caller's 32-bit seed meets it.
            (SlotClass::Plain | SlotClass::Filtered, None) => uniform(
                self.sampling.random_seed | (1 << 63),
                self.sampling.frame,
                self.all.len() as u64,
            ),
            _ => 0.0,
        };
        let is_place = common.place_bytes > 0 && (class.is_token() || class == SlotClass::Prompt);
        if is_place {
            self.place_bytes += common.place_bytes + AnswerRows::ROW_BYTES;
        }
        let slot = Slot {
            row: row as u32,
            class,
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            uniform,
            mask: common.mask,
            extra: common.extra,
            is_place,
            labels,
            token: 0,
            output: 0,
        };
        self.counts[class as usize] += 1;
        if !class.is_token() {
            self.probe_bytes += slot.probe_bytes(self.sampling.vocab_size);
        }
        self.all.push(slot);
    }
}
