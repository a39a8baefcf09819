//! Creates the sampling slots of a request from its samplers and its extension.

use std::sync::Arc;

use pie_wire::{ArchivedSampler, ExtensionRow, LogprobRows, SamplerView, WordSlice};

use super::{NO_PROCESSOR, SamplingSlot, SamplingSlots, UNMASKED, WORD};
use crate::error::RequestError;
use crate::frame::check::Geometry;
use crate::frame::query_tokens::QueryTokens;
use crate::frame::{Frame, range};
use crate::limits::Limits;
use crate::range32::Range32;
use crate::sampler::logits_processors::RequestKv;
use crate::sampler::params::ContextParams;
use crate::sampler::random::uniform;
use crate::sampler::{SamplerParams, SlotClass};

/// Options of a request's slots, from its extension.
#[derive(Clone, Copy)]
struct SlotOptions<'a> {
    /// See [`SamplingSlot::processor`].
    processor: u32,
    /// Response bytes of the log-probabilities of a slot; 0 without.
    logprob_bytes: usize,
    /// Replaces its token samplers.
    own: Option<(SlotClass, SamplerParams)>,
    /// A mask of bits.
    mask: Option<WordSlice<'a>>,
}

impl SlotOptions<'_> {
    const NONE: Self = Self {
        processor: NO_PROCESSOR,
        logprob_bytes: 0,
        own: None,
        mask: None,
    };
}

/// What all slots of a request share.
#[derive(Clone, Copy)]
struct SlotDefaults {
    /// See [`SamplingSlot::mask`].
    mask: u32,
    /// Its mask allows no token: the arg-max of the unmasked logits is returned.
    forbidden: bool,
    /// See [`SamplingSlot::processor`].
    processor: u32,
    /// See [`SlotOptions::logprob_bytes`].
    logprob_bytes: usize,
}

impl SlotDefaults {
    const NONE: Self = Self {
        mask: UNMASKED,
        forbidden: false,
        processor: NO_PROCESSOR,
        logprob_bytes: 0,
    };
}

impl SamplingSlots {
    /// Adds the slots of request `index`, whose query tokens start at `first_row`; `positions` are those of the frame. Slots that
    /// verify drafts come first.
    ///
    /// # Errors
    /// [`RequestError`] when its sampling indices or masks are wrong; nothing is added then.
    pub(crate) fn add(
        &mut self,
        frame: &Frame<'_>,
        index: usize,
        first_row: usize,
        geometry: Geometry,
        positions: &[u32],
    ) -> Result<(), RequestError> {
        let rows = (first_row, geometry, positions);
        self.plan(frame, index, rows, SlotOptions::NONE)
    }

    /// [`add`](Self::add) for a request with an extension row; slots of prompt log-probabilities come last.
    ///
    /// # Errors
    /// As `add`, and [`RequestError::Extension`].
    pub(crate) fn add_extended(
        &mut self,
        (frame, index): (&Frame<'_>, usize),
        (row, params): (&ExtensionRow<'_>, &Arc<ContextParams>),
        (rows, geometry): (&QueryTokens, Geometry),
        limits: &Limits,
        kv: RequestKv<'_>,
    ) -> Result<(), RequestError> {
        if self.sampling.embedding_size > 0 {
            return Err(RequestError::Embeds);
        }
        self.check_hidden_size(params)?;
        let processor = self.processors.add(row, params, limits, kv)?;
        let logprobs = self.processors.logprobs(processor);
        let options = SlotOptions {
            processor,
            logprob_bytes: logprobs.map_or(0, |logprobs| WORD * logprobs.shape.words()),
            own: params.sampler,
            mask: Some(row.mask).filter(|mask| !mask.is_empty()),
        };
        let first_row = kv.first_row;
        let own = (first_row, geometry, rows.positions());
        self.plan(frame, index, own, options)?;
        let tokens = &rows.token_ids()[first_row..first_row + geometry.inputs as usize];
        self.add_prompt(row, &options, geometry, first_row, tokens);
        Ok(())
    }

    /// Rejects a request for hidden states of another size than the model's, for which there would be too few or too many numbers.
    fn check_hidden_size(&self, params: &ContextParams) -> Result<(), RequestError> {
        let found = self.sampling.hidden_size;
        let requested = params
            .logprobs
            .as_ref()
            .map_or(0, |logprobs| logprobs.shape.hidden);
        if requested == 0 || found == 0 || requested == found {
            return Ok(());
        }
        Err(RequestError::HiddenSize { requested, found })
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
        options: SlotOptions<'_>,
    ) -> Result<(), RequestError> {
        let samplers = range(frame.sampler_indptr, index);
        let indices = &frame.sampling_indices[samplers.clone()];
        let rows = geometry.inputs;
        if let Some(&index) = indices.iter().find(|&&row| row >= rows) {
            return Err(RequestError::SamplingIndex { index, rows });
        }
        if samplers.is_empty() {
            return Ok(());
        }
        let samplers = &frame.samplers[samplers];
        if self.sampling.embedding_size > 0 {
            let own = (first_row, geometry, positions);
            return self.plan_embeddings(samplers, indices, own);
        }
        let defaults = self.defaults(frame, index, &options)?;
        let vocab_size = self.sampling.vocab_size;
        if geometry.drafts > 0 {
            let sampler = SamplerParams::from_wire(samplers[0].view(), vocab_size);
            let (class, params) = (options.own)
                .or(sampler.filter(|(class, _)| class.is_token()))
                .unwrap_or((SlotClass::Greedy, SamplerParams::greedy(vocab_size)));
            let last_input = first_row + geometry.inputs as usize - 1;
            for row in last_input..first_row + geometry.tokens() as usize {
                let at = (row, 0, positions);
                self.add_slot(defaults, at, class, params, Range32::default());
            }
        }
        for (number, (sampler, &row)) in samplers.iter().zip(indices).enumerate() {
            let view = sampler.view();
            let Some((class, params)) = SamplerParams::from_wire(view, vocab_size) else {
                continue;
            };
            let (class, params) = match options.own {
                Some(own) if class.is_token() => own,
                _ => (class, params),
            };
            // Draft verification replaces the token samplers.
            if class.is_token() && geometry.drafts > 0 {
                continue;
            }
            let labels = self.add_labels(view);
            let at = (first_row + row as usize, number as u64, positions);
            self.add_slot(defaults, at, class, params, labels);
        }
        Ok(())
    }

    /// The slots of an embedding model, whose pooled rows take the place of rows of logits.
    #[cold]
    fn plan_embeddings(
        &mut self,
        samplers: &[ArchivedSampler],
        indices: &[u32],
        (first_row, geometry, positions): (usize, Geometry, &[u32]),
    ) -> Result<(), RequestError> {
        let is_embedding = |sampler| matches!(sampler, &ArchivedSampler::Embedding);
        if geometry.drafts > 0 || !samplers.iter().all(is_embedding) {
            return Err(RequestError::Embeds);
        }
        let params = SamplerParams::greedy(self.sampling.embedding_size);
        for (number, &row) in (0..).zip(indices) {
            let at = (first_row + row as usize, number, positions);
            self.add_slot(
                SlotDefaults::NONE,
                at,
                SlotClass::Logits,
                params,
                Range32::default(),
            );
        }
        Ok(())
    }

    /// Adds the tokens of a log-probability sampler.
    fn add_labels(&mut self, sampler: SamplerView<'_>) -> Range32 {
        let first = self.labels.len();
        match sampler {
            SamplerView::Logprob { token_id } => self.labels.push(token_id),
            SamplerView::Logprobs { token_ids } => self.labels.extend_from_slice(token_ids),
            _ => return Range32::default(),
        }
        Range32::new(first, self.labels.len())
    }

    /// Adds slots for prompt log-probabilities; `tokens` are the inputs from `first_row` on. The log-probability of a token comes
    /// from the logits row before it.
    fn add_prompt(
        &mut self,
        row: &ExtensionRow<'_>,
        options: &SlotOptions<'_>,
        geometry: Geometry,
        first_row: usize,
        tokens: &[u32],
    ) {
        let Some(prompt) = row.prompt_logprobs().filter(|_| options.logprob_bytes > 0) else {
            return;
        };
        // Masks apply to sampled tokens only.
        let defaults = SlotDefaults {
            processor: options.processor,
            logprob_bytes: options.logprob_bytes,
            ..SlotDefaults::NONE
        };
        let params = SamplerParams::greedy(self.sampling.vocab_size);
        let prefix = geometry.prefix();
        for index in prompt.from.max(prefix + 1)..prompt.end.min(geometry.kv_end + 1) {
            let token = tokens
                .get((index - prefix) as usize)
                .unwrap_or(&prompt.next);
            // Placeholders of images are outside the vocabulary.
            let token = (*token).min(self.sampling.vocab_size - 1);
            let labels = Range32::new(self.labels.len(), self.labels.len() + 1);
            self.labels.push(token);
            let row = first_row + (index - 1 - prefix) as usize;
            self.add_slot(defaults, (row, 0, &[]), SlotClass::Prompt, params, labels);
        }
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as with `plan`")]
    fn defaults(
        &mut self,
        frame: &Frame<'_>,
        index: usize,
        options: &SlotOptions<'_>,
    ) -> Result<SlotDefaults, RequestError> {
        let mut defaults = SlotDefaults {
            processor: options.processor,
            logprob_bytes: options.logprob_bytes,
            ..SlotDefaults::NONE
        };
        if !frame.logit_masks.is_empty() {
            self.add_runs(frame, index, &mut defaults)?;
        }
        if let Some(mask) = options.mask {
            self.add_bits(mask, &mut defaults)?;
        }
        Ok(defaults)
    }

    /// Adds the request's logit mask of the frame, run-length encoded.
    fn add_runs(
        &mut self,
        frame: &Frame<'_>,
        index: usize,
        defaults: &mut SlotDefaults,
    ) -> Result<(), RequestError> {
        let masks = range(frame.logit_mask_indptr, index);
        if masks.len() > 1 {
            return Err(RequestError::LogitMasks { masks: masks.len() });
        }
        let given = masks.start;
        if !masks.is_empty() && !frame.logit_masks[given].buffer.is_empty() {
            let vocab_size = self.sampling.vocab_size;
            let mask = self.masks.add_runs(frame.logit_masks, given, vocab_size);
            defaults.forbidden = mask.is_none();
            defaults.mask = mask.map_or(UNMASKED, |mask| mask as u32);
        }
        Ok(())
    }

    /// Adds a logit mask of bits.
    fn add_bits(
        &mut self,
        bits: WordSlice<'_>,
        defaults: &mut SlotDefaults,
    ) -> Result<(), RequestError> {
        if defaults.forbidden || defaults.mask != UNMASKED {
            return Err(RequestError::LogitMasks { masks: 2 });
        }
        let mask = self.masks.add_bits(bits, self.sampling.vocab_size);
        defaults.forbidden = mask.is_none();
        defaults.mask = mask.map_or(UNMASKED, |mask| mask as u32);
        Ok(())
    }

    /// Adds one slot: a logits row and the `number`-th sampler of its request.
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "as with `SamplerParams::from_wire`, whose result it takes"
    )]
    fn add_slot(
        &mut self,
        defaults: SlotDefaults,
        (row, number, positions): (usize, u64, &[u32]),
        class: SlotClass,
        params: SamplerParams,
        labels: Range32,
    ) {
        let class = if defaults.forbidden && class.is_token() {
            SlotClass::Greedy
        } else {
            class
        };
        let uniform = match (class, params.seed) {
            (SlotClass::Plain | SlotClass::Filtered, Some(seed)) => {
                uniform(seed, u64::from(positions[row]), number)
            }
            // The upper half of the key space, disjoint from seeds of callers.
            (SlotClass::Plain | SlotClass::Filtered, None) => uniform(
                self.sampling.random_seed | (1 << 63),
                self.sampling.frame,
                self.all.len() as u64,
            ),
            _ => 0.0,
        };
        let returns_logprobs =
            defaults.logprob_bytes > 0 && (class.is_token() || class == SlotClass::Prompt);
        if returns_logprobs {
            self.logprob_bytes += defaults.logprob_bytes + LogprobRows::ROW_BYTES;
        }
        let slot = SamplingSlot {
            row: row as u32,
            class,
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            uniform,
            mask: defaults.mask,
            processor: defaults.processor,
            returns_logprobs,
            labels,
            token: 0,
            output: 0,
        };
        self.counts[class as usize] += 1;
        if !class.is_token() {
            self.probe_bytes += slot.probe_bytes();
        }
        self.all.push(slot);
    }
}
