//! Sampling slots: planned from a request's samplers, answered by the engine's outputs.

use std::ops::Range;

use pie_wire::{AnswerRows, ExtensionRow, PlaceShape, SamplerView};

use crate::check::Geometry;
use crate::extent::Extent;
use crate::extra::{Extras, KvPlace, combined};
use crate::fault::RequestFault;
use crate::frame::{Frame, range};
use crate::limits::Limits;
use crate::logit_mask::LogitMasks;
use crate::outputs::{Outputs, ProbeOutputs};
use crate::random::uniform;
use crate::sampler::{SamplerParams, SlotClass};

/// Bytes of one index or number of a response.
pub(crate) const WORD: usize = 4;

/// One logit row and what to make of it. There are many, and planning finds the caches cold: a slot is kept small.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    /// Row of the plan.
    row: u32,
    class: SlotClass,
    /// Parameters as those of [`SamplerParams`].
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    uniform: f32,
    /// Its request's mask in [`Slots::masks`], or [`UNMASKED`].
    mask: u32,
    /// What its request's extension asks for in [`Slots::extras`], or [`UNEXTENDED`].
    extra: u32,
    /// Whether it is a place whose log-probabilities its request's extension asks for.
    is_place: bool,
    /// Its tokens in [`Slots::labels`], of a log-probability slot; the token of a prompt's place.
    labels: Extent,
    /// The token, once sampled, or [`INVALID_TOKEN`].
    token: u32,
    /// Where its output begins among those of its class, or its words among those of places, once computed.
    output: u32,
}

/// Of slots without a mask.
const UNMASKED: u32 = u32::MAX;
/// Of slots of requests without an extension.
const UNEXTENDED: u32 = u32::MAX;
/// In a slot whose logits were no numbers.
const INVALID_TOKEN: u32 = u32::MAX;

impl Slot {
    /// Row of the plan.
    pub(crate) const fn row(&self) -> usize {
        self.row as usize
    }

    pub(crate) const fn class(&self) -> SlotClass {
        self.class
    }

    /// The sampler's temperature; 0 = arg-max, or all mass on it.
    pub(crate) const fn temperature(&self) -> f32 {
        self.temperature
    }

    pub(crate) const fn top_k(&self) -> u32 {
        self.top_k
    }

    pub(crate) const fn top_p(&self) -> f32 {
        self.top_p
    }

    pub(crate) const fn min_p(&self) -> f32 {
        self.min_p
    }

    /// Uniform number in `[0, 1)`; 0 for slots that draw nothing.
    pub(crate) const fn uniform(&self) -> f32 {
        self.uniform
    }

    /// The token that was sampled.
    pub(crate) const fn token(&self) -> u32 {
        self.token
    }

    /// Whether its logits were no numbers.
    pub(crate) const fn is_invalid(&self) -> bool {
        self.token == INVALID_TOKEN
    }

    /// What its request's extension asks for in [`Slots::extras`].
    pub(crate) const fn extra(&self) -> u32 {
        self.extra
    }

    /// The same, as far as its logits are to be changed: a prompt's are the model's own.
    pub(crate) fn changes(&self) -> u32 {
        if self.class == SlotClass::Prompt {
            UNEXTENDED
        } else {
            self.extra
        }
    }

    /// Whether its request's extension asks for log-probabilities of its place.
    pub(crate) const fn is_place(&self) -> bool {
        self.is_place
    }

    /// Its request's mask in [`Slots::masks`].
    pub(crate) fn mask(&self) -> Option<usize> {
        (self.mask != UNMASKED).then_some(self.mask as usize)
    }

    /// Values of a probe's output.
    pub(crate) fn len(&self, vocab_size: u32) -> usize {
        match self.class {
            SlotClass::Dist => self.top_k as usize,
            SlotClass::Logits => vocab_size as usize,
            SlotClass::Logprobs => self.labels.len(),
            SlotClass::Entropy => 1,
            SlotClass::Greedy | SlotClass::Plain | SlotClass::Filtered | SlotClass::Prompt => 0,
        }
    }

    /// Where its output lies among those of its class.
    pub(crate) fn output(&self, vocab_size: u32) -> Range<usize> {
        self.output as usize..self.output as usize + self.len(vocab_size)
    }

    /// Bytes that its output takes in a response; a token is counted by its request.
    pub(crate) fn probe_bytes(&self, vocab_size: u32) -> usize {
        let values = self.len(vocab_size);
        match self.class {
            SlotClass::Greedy | SlotClass::Plain | SlotClass::Filtered | SlotClass::Prompt => 0,
            SlotClass::Dist => WORD + 2 * WORD * values,
            SlotClass::Logits | SlotClass::Logprobs => WORD + WORD * values,
            SlotClass::Entropy => WORD,
        }
    }
}

/// What holds for all slots of a frame.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sampling {
    /// Rows of the embedding table.
    pub(crate) vocab_size: u32,
    /// Key of unseeded samplers.
    pub(crate) random_seed: u64,
    /// Number of the frame.
    pub(crate) frame: u64,
}

/// The slots of a frame, and what they share.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    all: Vec<Slot>,
    counts: [usize; SlotClass::COUNT],
    probe_bytes: usize,
    /// Bytes that the places take in an answer, each with its request's row.
    place_bytes: usize,
    masks: LogitMasks,
    extras: Extras,
    /// Tokens whose log-probabilities are asked for.
    labels: Vec<u32>,
    outputs: ProbeOutputs,
    sampling: Sampling,
}

impl Slots {
    /// Begins a frame.
    pub(crate) fn start(&mut self, sampling: Sampling) {
        self.sampling = sampling;
        self.all.clear();
        self.counts = [0; SlotClass::COUNT];
        (self.probe_bytes, self.place_bytes) = (0, 0);
        self.masks.clear();
        self.extras.clear();
        self.labels.clear();
        self.outputs.clear();
    }

    /// Number of slots.
    pub(crate) const fn len(&self) -> usize {
        self.all.len()
    }

    /// All slots of the frame.
    pub(crate) fn all(&self) -> &[Slot] {
        &self.all
    }

    /// The slots of a request.
    pub(crate) fn of(&self, slots: Extent) -> &[Slot] {
        &self.all[slots.range()]
    }

    /// Slots of a class.
    pub(crate) const fn count(&self, class: SlotClass) -> usize {
        self.counts[class as usize]
    }

    /// Whether all slots are of one class.
    pub(crate) fn are_alike(&self) -> bool {
        self.counts.iter().filter(|&&count| count > 0).count() <= 1
    }

    /// Whether some slot is a probe.
    pub(crate) fn has_probes(&self) -> bool {
        self.counts[SlotClass::Dist as usize..SlotClass::Prompt as usize] != [0; 4]
    }

    /// Sum of [`Slot::probe_bytes`].
    pub(crate) const fn probe_bytes(&self) -> usize {
        self.probe_bytes
    }

    /// Most bytes that places take in an answer; 0 when no log-probabilities are asked for.
    pub(crate) const fn place_bytes(&self) -> usize {
        self.place_bytes
    }

    /// What each place of a slot's request has; `None` where it asks for no log-probabilities.
    pub(crate) fn shape(&self, slot: &Slot) -> Option<PlaceShape> {
        let asked = self.extras.asked(slot.extra);
        asked.filter(|_| slot.is_place).map(|asked| asked.shape)
    }

    /// Words of the place of a slot.
    pub(crate) fn place_words(&self, slot: &Slot) -> usize {
        self.shape(slot).map_or(0, PlaceShape::words)
    }

    /// The computed words of the place of a slot.
    pub(crate) fn place(&self, slot: &Slot) -> &[u32] {
        let start = slot.output as usize;
        self.outputs.place(start..start + self.place_words(slot))
    }

    /// The logit masks.
    pub(crate) const fn masks(&self) -> &LogitMasks {
        &self.masks
    }

    /// What the frame's extension asks for.
    pub(crate) const fn extras(&self) -> &Extras {
        &self.extras
    }

    /// The tokens of a log-probability slot.
    pub(crate) fn labels(&self, slot: &Slot) -> &[u32] {
        &self.labels[slot.labels.range()]
    }

    /// What probes yielded so far.
    pub(crate) const fn outputs(&self) -> &ProbeOutputs {
        &self.outputs
    }

    /// Gives a slot its token; false when that is outside the vocabulary.
    pub(crate) fn put_token(&mut self, slot: usize, token: u32, vocab_size: u32) -> bool {
        let valid = token < vocab_size;
        self.all[slot].token = if valid { token } else { INVALID_TOKEN };
        valid
    }

    /// Gives the place of a slot its words, as many as [`place_words`](Self::place_words).
    pub(crate) fn put_place(&mut self, slot: usize, words: impl Iterator<Item = u32>) {
        self.all[slot].output = self.outputs.place_words() as u32;
        self.outputs.push_words(words);
    }

    /// Hands each slot of a group its output; `false` when a token is outside the vocabulary.
    pub(crate) fn put_outputs(
        &mut self,
        group: &[u32],
        outputs: &Outputs<'_>,
        vocab_size: u32,
    ) -> bool {
        let mut tokens = outputs.tokens.iter();
        let mut next = self.outputs.lens();
        let mut place_words = outputs.place_words.iter().map(|word| word.cast_unsigned());
        let mut valid = true;
        let (all, extras) = (&mut self.all[..], &self.extras);
        for &index in group {
            let slot = &mut all[index as usize];
            if slot.is_place
                && let Some(asked) = extras.asked(slot.extra)
            {
                slot.output = self.outputs.place_words() as u32;
                let words = place_words.by_ref().take(asked.shape.words());
                self.outputs.push_words(words);
            }
            if slot.class.is_token() {
                let token = tokens.next().and_then(|&token| u32::try_from(token).ok());
                let token = token.filter(|&token| token < vocab_size);
                slot.token = token.unwrap_or(INVALID_TOKEN);
                valid &= token.is_some();
                continue;
            }
            if slot.class == SlotClass::Prompt {
                continue;
            }
            let next = &mut next[slot.class as usize - SlotClass::Dist as usize];
            slot.output = *next as u32;
            *next += slot.len(vocab_size);
        }
        self.outputs.extend(outputs);
        valid
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
    /// Bytes of each of its places in an answer; 0 when it asks for no log-probabilities.
    place_bytes: usize,
}

impl Common {
    /// Nothing is asked for.
    const PLAIN: Self = Self {
        mask: UNMASKED,
        forbidden: false,
        extra: UNEXTENDED,
        place_bytes: 0,
    };
}

/// A request's row of the extension, and its number in [`Slots::extras`].
pub(crate) struct Extended<'a> {
    row: ExtensionRow<'a>,
    number: u32,
}

impl Slots {
    /// Notes what a request's row of the extension asks for.
    ///
    /// # Errors
    /// [`RequestFault::Extension`].
    pub(crate) fn extend<'a>(
        &mut self,
        row: ExtensionRow<'a>,
        limits: &Limits,
        place: KvPlace<'_>,
    ) -> Result<Extended<'a>, RequestFault> {
        let number = self.extras.add(&row, limits, place)?;
        Ok(Extended { row, number })
    }

    /// Plans a mask of bits.
    fn add_bits(
        &mut self,
        row: &ExtensionRow<'_>,
        common: &mut Common,
    ) -> Result<(), RequestFault> {
        if row.mask.is_empty() {
            return Ok(());
        }
        if common.forbidden || common.mask != UNMASKED {
            return Err(RequestFault::LogitMasks { masks: 2 });
        }
        let mask = self.masks.add_bits(row.mask, self.sampling.vocab_size);
        common.forbidden = mask.is_none();
        common.mask = mask.map_or(UNMASKED, |mask| mask as u32);
        Ok(())
    }

    /// Plans the slots of request `index`, whose rows start at `first_row`; those that verify drafts come first.
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
        extended: Option<&Extended<'_>>,
    ) -> Result<(), RequestFault> {
        let samplers = range(frame.sampler_indptr, index);
        let rows = geometry.inputs;
        let outside = |&&row: &&u32| row >= rows;
        if let Some(&index) = frame.sampling_indices[samplers.clone()]
            .iter()
            .find(outside)
        {
            return Err(RequestFault::SamplingIndex { index, rows });
        }
        if samplers.is_empty() {
            return Ok(());
        }
        let mut common = self.common(frame, index)?;
        let vocab_size = self.sampling.vocab_size;
        let mut own = None;
        if let Some(extended) = extended {
            common.extra = extended.number;
            let asked = self.extras.asked(extended.number);
            common.place_bytes = asked.map_or(0, |asked| WORD * asked.shape.words());
            own = combined(&extended.row, vocab_size);
            self.add_bits(&extended.row, &mut common)?;
        }
        let rows = &frame.sampling_indices[samplers.clone()];
        let samplers = &frame.samplers[samplers];
        if geometry.drafts > 0 {
            let sampler = SamplerParams::from_wire(samplers[0].view(), vocab_size);
            let (class, params) = own
                .or(sampler.filter(|(class, _)| class.is_token()))
                .unwrap_or((SlotClass::Greedy, SamplerParams::greedy(vocab_size)));
            let last_input = first_row + geometry.inputs as usize - 1;
            for row in last_input..first_row + geometry.rows() as usize {
                let place = (row, 0, positions);
                self.add_slot(common, place, class, params, Extent::default());
            }
        }
        for (number, (sampler, &row)) in samplers.iter().zip(rows).enumerate() {
            let view = sampler.view();
            let Some((class, params)) = SamplerParams::from_wire(view, vocab_size) else {
                continue;
            };
            let (class, params) = match own {
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

    /// Plans the places of a prompt, of `tokens` on the rows from `first_row` on, whose log-probabilities its extension asks
    /// for. That of a token comes from the row before it.
    pub(crate) fn add_prompt(
        &mut self,
        extended: &Extended<'_>,
        geometry: Geometry,
        first_row: usize,
        tokens: &[u32],
    ) {
        let (asked, prompt) = (
            self.extras.asked(extended.number),
            extended.row.prompt_logprobs(),
        );
        let (Some(asked), Some(prompt)) = (asked, prompt) else {
            return;
        };
        let common = Common {
            extra: extended.number,
            place_bytes: WORD * asked.shape.words(),
            ..Common::PLAIN
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

    fn common(&mut self, frame: &Frame<'_>, index: usize) -> Result<Common, RequestFault> {
        let mut common = Common::PLAIN;
        if frame.logit_masks.is_empty() {
            return Ok(common);
        }
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
        Ok(common)
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
        self.probe_bytes += slot.probe_bytes(self.sampling.vocab_size);
        self.all.push(slot);
    }
}
