//! Sampling slots: planned from a request's samplers, answered by the engine's outputs.

use std::ops::Range;

use pie_wire::{ArchivedBrle, ExtensionRow, NativeSlice, SamplerView};

use crate::check::Geometry;
use crate::extent::Extent;
use crate::extra::{Extras, KvPlace, combined};
use crate::fault::RequestFault;
use crate::frame::{Frame, range};
use crate::limits::Limits;
use crate::mask::{push_edges, set_bits};
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
    /// Its tokens in [`Slots::labels`], of a log-probability slot.
    labels: Extent,
    /// The token, once sampled, or [`INVALID_TOKEN`].
    token: u32,
    /// Where its output begins among those of its class, once computed.
    output: u32,
}

/// Of slots without a mask.
const UNMASKED: u32 = u32::MAX;
/// Of slots of requests without an extension.
const UNEXTENDED: u32 = u32::MAX;
/// In a slot whose logits were no numbers.
const INVALID_TOKEN: u32 = u32::MAX;
/// Edges of a mask whose bits are staged.
const BITS: i32 = -1;

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
            SlotClass::Greedy | SlotClass::Plain | SlotClass::Filtered => 0,
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
            SlotClass::Greedy | SlotClass::Plain | SlotClass::Filtered => 0,
            SlotClass::Dist => WORD + 2 * WORD * values,
            SlotClass::Logits | SlotClass::Logprobs => WORD + WORD * values,
            SlotClass::Entropy => WORD,
        }
    }
}

/// Where a logit mask lies.
#[derive(Debug, Clone, Copy)]
enum Mask {
    /// Its edges in [`Slots::edges`].
    Edges(Extent),
    /// Its words in [`Slots::bits`].
    Bits(Extent),
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
    masks: Vec<Mask>,
    /// Where a mask begins to allow tokens, and where it ends to, in turn.
    edges: Vec<i32>,
    /// Masks that came as bits.
    bits: Vec<i32>,
    extras: Extras,
    /// Which of the frame's masks the last one of `masks` is.
    last_mask: usize,
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
        self.probe_bytes = 0;
        self.masks.clear();
        self.edges.clear();
        self.bits.clear();
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
        self.counts[SlotClass::Dist as usize..] != [0; 4]
    }

    /// Sum of [`Slot::probe_bytes`].
    pub(crate) const fn probe_bytes(&self) -> usize {
        self.probe_bytes
    }

    /// Number of logit masks.
    pub(crate) const fn mask_count(&self) -> usize {
        self.masks.len()
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

    /// Hands each slot of a group its output; `false` when a token is outside the vocabulary.
    pub(crate) fn put_outputs(
        &mut self,
        group: &[u32],
        outputs: &Outputs<'_>,
        vocab_size: u32,
    ) -> bool {
        let mut tokens = outputs.tokens.iter();
        let mut next = self.outputs.lens();
        let mut valid = true;
        let all = &mut self.all[..];
        for &index in group {
            let slot = &mut all[index as usize];
            if slot.class.is_token() {
                let token = tokens.next().and_then(|&token| u32::try_from(token).ok());
                let token = token.filter(|&token| token < vocab_size);
                slot.token = token.unwrap_or(INVALID_TOKEN);
                valid &= token.is_some();
                continue;
            }
            let next = &mut next[slot.class as usize - SlotClass::Dist as usize];
            slot.output = *next as u32;
            *next += slot.len(vocab_size);
        }
        self.outputs.extend(outputs);
        valid
    }

    /// Writes a planned mask into [`mask_words`](crate::Limits::mask_words) words: its edges, or its bits where they take
    /// less room. Returns the words in use and what [`FieldId::SlotMasks`](crate::FieldId::SlotMasks) says of its edges.
    pub(crate) fn put_mask(&self, mask: usize, words: &mut [i32]) -> (usize, i32) {
        let edges = match self.masks[mask] {
            Mask::Edges(edges) => &self.edges[edges.range()],
            Mask::Bits(bits) => {
                words.copy_from_slice(&self.bits[bits.range()]);
                return (words.len(), BITS);
            }
        };
        if let Some(words) = words.get_mut(..edges.len()) {
            words.copy_from_slice(edges);
            return (edges.len(), edges.len() as i32);
        }
        words.fill(0);
        for allowed in edges.chunks_exact(2) {
            set_bits(words, allowed[0] as u64..allowed[1] as u64);
        }
        (words.len(), BITS)
    }

    /// Plans the mask of a request, number `index` of the frame's; `None` when it forbids everything.
    fn add_mask(&mut self, masks: &[ArchivedBrle], index: usize, vocab_size: u32) -> Option<usize> {
        let runs = masks[index].buffer.native();
        let last = self.masks.len().checked_sub(1);
        let listed = |&last: &usize| matches!(self.masks[last], Mask::Edges(_));
        let same = |last: &usize| listed(last) && *masks[self.last_mask].buffer.native() == *runs;
        if let Some(last) = last.filter(same) {
            return Some(last);
        }
        let first = self.edges.len();
        push_edges(runs, vocab_size, &mut self.edges);
        let edges = Extent::new(first, self.edges.len());
        if edges.is_empty() {
            return None;
        }
        self.masks.push(Mask::Edges(edges));
        self.last_mask = index;
        Some(self.masks.len() - 1)
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
        let last = self.sampling.vocab_size as usize % 32;
        let tail = u32::MAX >> ((32 - last) % 32);
        let first = self.bits.len();
        let words = row.mask.iter().map(u32::cast_signed);
        self.bits.extend(words);
        if let Some(word) = self.bits.last_mut() {
            // Bits after the vocabulary allow nothing.
            *word &= tail.cast_signed();
        }
        common.forbidden = self.bits[first..].iter().all(|&word| word == 0);
        if common.forbidden {
            self.bits.truncate(first);
        } else {
            common.mask = self.masks.len() as u32;
            let bits = Extent::new(first, self.bits.len());
            self.masks.push(Mask::Bits(bits));
        }
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

    fn common(&mut self, frame: &Frame<'_>, index: usize) -> Result<Common, RequestFault> {
        let mut common = Common {
            mask: UNMASKED,
            forbidden: false,
            extra: UNEXTENDED,
        };
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
            let mask = self.add_mask(frame.logit_masks, given, vocab_size);
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
            labels,
            token: 0,
            output: 0,
        };
        self.counts[class as usize] += 1;
        self.probe_bytes += slot.probe_bytes(self.sampling.vocab_size);
        self.all.push(slot);
    }
}
