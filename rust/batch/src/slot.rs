//! Sampling slots: planned from a request's samplers, staged in groups, answered by the engine's outputs.

use std::ops::Range;

use pie_wire::{ArchivedBrle, NativeSlice, SamplerView};

use crate::extent::Extent;
use crate::frame::{Frame, range};
use crate::mask::{push_edges, set_bits};
use crate::plan::Planner;
use crate::random::uniform;
use crate::reply::WORD;
use crate::request::Geometry;
use crate::stage::{Arrays, StageError};
use crate::{RequestFault, SamplerParams, SlotClass};

/// One logit row and what to make of it. There are many, and planning finds the caches cold: a slot is kept small.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    /// Row in [`Planner::token_ids`].
    row: u32,
    pub(crate) class: SlotClass,
    /// Whether its output has come.
    pub(crate) answered: bool,
    /// Parameters as those of [`SamplerParams`].
    pub(crate) temperature: f32,
    pub(crate) top_k: u32,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    /// Uniform number in `[0, 1)`; 0 for slots that draw nothing.
    pub(crate) uniform: f32,
    /// Its request's mask in [`Slots::masks`], or [`UNMASKED`].
    mask: u32,
    /// Its tokens in [`Slots::labels`], of a log-probability slot.
    labels: Extent,
    /// The token, once sampled.
    pub(crate) token: u32,
    /// Where its output begins among those of its class, once computed.
    output: u32,
}

/// Of slots without a mask.
const UNMASKED: u32 = u32::MAX;

impl Slot {
    /// Row in [`Planner::token_ids`].
    pub(crate) const fn row(&self) -> usize {
        self.row as usize
    }

    /// Its request's mask in [`Slots::masks`].
    pub(crate) fn mask(&self) -> Option<usize> {
        (self.mask != UNMASKED).then_some(self.mask as usize)
    }

    /// Values of its output.
    fn len(&self, vocab_size: u32) -> usize {
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

/// Slots that are computed together, in the order of [`SlotClass`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlotGroup {
    /// Slots of each class.
    pub counts: [usize; SlotClass::COUNT],
    /// Staged logit masks.
    pub masks: usize,
    /// The words that they take.
    pub mask_words: usize,
}

impl SlotGroup {
    /// Slots of the group.
    #[must_use]
    pub fn len(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Whether the group has no slot.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Slots of one class.
    #[must_use]
    pub const fn count(&self, class: SlotClass) -> usize {
        self.counts[class as usize]
    }
}

/// What the engine computed for a slot group: each array in the order of the group's slots of that class, a slot's values
/// one behind the other.
#[derive(Debug, Clone, Copy, Default)]
pub struct Outputs<'a> {
    /// One token of each token slot. One outside the vocabulary says that the slot's logits are no numbers.
    pub tokens: &'a [i64],
    /// The ids of each distribution, most probable first.
    pub dist_ids: &'a [i64],
    /// Their probabilities.
    pub dist_probs: &'a [f32],
    /// The logits of each raw slot.
    pub logits: &'a [f32],
    /// The log-probabilities of the tokens asked for.
    pub logprobs: &'a [f32],
    /// One entropy of each entropy slot, in nats.
    pub entropies: &'a [f32],
}

/// The slots of a frame, and what they share.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    pub(crate) all: Vec<Slot>,
    /// Slots of each class.
    pub(crate) counts: [usize; SlotClass::COUNT],
    /// Sum of [`Slot::probe_bytes`].
    pub(crate) probe_bytes: usize,
    /// Edges of each logit mask in `edges`.
    masks: Vec<Extent>,
    /// Where a mask begins to allow tokens, and where it ends to, in turn.
    edges: Vec<i32>,
    /// Which of the frame's masks the last one of `masks` is.
    last_mask: usize,
    /// Tokens whose log-probabilities are asked for.
    labels: Vec<u32>,
    /// Outputs by class.
    pub(crate) dist_ids: Vec<u32>,
    pub(crate) dist_probs: Vec<f32>,
    pub(crate) logits: Vec<u8>,
    pub(crate) logprobs: Vec<f32>,
    pub(crate) entropies: Vec<f32>,
    /// The staged group: its slots, and for log-probability slots `[number among them, token]` of each label.
    group: Range<usize>,
    group_labels: Vec<[i64; 2]>,
    /// For each mask where it lies in the staged group, as [`FieldId::SlotMasks`](crate::FieldId::SlotMasks) says it.
    staged_masks: Vec<[i32; 2]>,
}

impl Slots {
    pub(crate) fn clear(&mut self) {
        self.all.clear();
        self.counts = [0; SlotClass::COUNT];
        self.probe_bytes = 0;
        self.masks.clear();
        self.edges.clear();
        self.labels.clear();
        self.dist_ids.clear();
        self.dist_probs.clear();
        self.logits.clear();
        self.logprobs.clear();
        self.entropies.clear();
        self.group = 0..0;
        self.group_labels.clear();
    }

    /// Forgets the staged group.
    pub(crate) fn close_group(&mut self) {
        self.group = 0..0;
        self.group_labels.clear();
    }

    /// Checks that each array has the values that the slots ask for.
    fn check_outputs(
        &self,
        staged: &[u32],
        outputs: &Outputs<'_>,
        vocab_size: u32,
    ) -> Result<(), StageError> {
        let mut values = [0; SlotClass::COUNT];
        for &slot in staged {
            let slot = &self.all[slot as usize];
            values[slot.class as usize] += if slot.class.is_token() {
                1
            } else {
                slot.len(vocab_size)
            };
        }
        let [greedy, plain, filtered, dists, logits, logprobs, entropies] = values;
        for (array, found, expected) in [
            ("tokens", outputs.tokens.len(), greedy + plain + filtered),
            ("dist_ids", outputs.dist_ids.len(), dists),
            ("dist_probs", outputs.dist_probs.len(), dists),
            ("logits", outputs.logits.len(), logits),
            ("logprobs", outputs.logprobs.len(), logprobs),
            ("entropies", outputs.entropies.len(), entropies),
        ] {
            if found != expected {
                return Err(StageError::OutputCount {
                    array,
                    found,
                    expected,
                });
            }
        }
        Ok(())
    }

    /// Hands each slot its output; `false` when a token is outside the vocabulary.
    fn take_outputs(&mut self, staged: &[u32], outputs: &Outputs<'_>, vocab_size: u32) -> bool {
        let mut tokens = outputs.tokens.iter();
        let mut next = [
            self.dist_probs.len(),
            self.logits.len() / size_of::<f32>(),
            self.logprobs.len(),
            self.entropies.len(),
        ];
        let mut valid = true;
        for &index in staged {
            let slot = &mut self.all[index as usize];
            slot.answered = true;
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
        // Ids come from arg-sorting a row of the vocabulary's length.
        let ids = outputs.dist_ids.iter().map(|&id| id as u32);
        self.dist_ids.extend(ids);
        self.dist_probs.extend_from_slice(outputs.dist_probs);
        let logits = bytemuck::cast_slice(outputs.logits);
        self.logits.extend_from_slice(logits);
        self.logprobs.extend_from_slice(outputs.logprobs);
        self.entropies.extend_from_slice(outputs.entropies);
        valid
    }

    /// Writes a planned mask into [`mask_words`](crate::Limits::mask_words) words: its edges, or its bits where they take
    /// less room. Returns the words in use and what [`FieldId::SlotMasks`](crate::FieldId::SlotMasks) says of its edges.
    pub(crate) fn put_mask(&self, mask: usize, words: &mut [i32]) -> (usize, i32) {
        let edges = &self.edges[self.masks[mask].range()];
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
        let same = |_: &usize| *masks[self.last_mask].buffer.native() == *runs;
        if let Some(last) = last.filter(same) {
            return Some(last);
        }
        let first = self.edges.len();
        push_edges(runs, vocab_size, &mut self.edges);
        let edges = Extent::new(first, self.edges.len());
        if edges.is_empty() {
            return None;
        }
        self.masks.push(edges);
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
}

impl Planner {
    /// Plans the slots of a request whose rows start at `first_row`; those that verify drafts come first.
    ///
    /// # Errors
    /// [`RequestFault`] when its sampling indices or masks are wrong; nothing is added then.
    pub(crate) fn add_slots(
        &mut self,
        frame: &Frame<'_>,
        index: usize,
        first_row: usize,
        geometry: Geometry,
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
        let common = self.common(frame, index)?;
        let vocab_size = self.limits.vocab_size;
        let rows = &frame.sampling_indices[samplers.clone()];
        let samplers = &frame.samplers[samplers];
        if geometry.drafts > 0 {
            let first = SamplerParams::from_wire(samplers[0].view(), vocab_size);
            let (class, params) = first
                .filter(|(class, _)| class.is_token())
                .unwrap_or((SlotClass::Greedy, SamplerParams::greedy(vocab_size)));
            let last_input = first_row + geometry.inputs as usize - 1;
            for row in last_input..first_row + geometry.rows() as usize {
                self.add_slot(common, (row, 0), class, params, Extent::default());
            }
        }
        for (number, (sampler, &row)) in samplers.iter().zip(rows).enumerate() {
            let view = sampler.view();
            let Some((class, params)) = SamplerParams::from_wire(view, vocab_size) else {
                continue;
            };
            // Verification stands for the request's token samplers.
            if class.is_token() && geometry.drafts > 0 {
                continue;
            }
            let labels = self.slots.add_labels(view);
            let place = (first_row + row as usize, number as u64);
            self.add_slot(common, place, class, params, labels);
        }
        Ok(())
    }

    fn common(&mut self, frame: &Frame<'_>, index: usize) -> Result<Common, RequestFault> {
        let mut common = Common {
            mask: UNMASKED,
            forbidden: false,
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
            let vocab_size = self.limits.vocab_size;
            let mask = self.slots.add_mask(frame.logit_masks, given, vocab_size);
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
        (row, number): (usize, u64),
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
                uniform(u64::from(seed), u64::from(self.positions[row]), number)
            }
            // The upper half of the key space: no caller's 32-bit seed meets it.
            (SlotClass::Plain | SlotClass::Filtered, None) => uniform(
                self.random_seed | (1 << 63),
                self.frames,
                self.slots.all.len() as u64,
            ),
            _ => 0.0,
        };
        let slot = Slot {
            row: row as u32,
            class,
            answered: false,
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            uniform,
            mask: common.mask,
            labels,
            token: 0,
            output: 0,
        };
        self.slots.counts[class as usize] += 1;
        self.slots.probe_bytes += slot.probe_bytes(self.limits.vocab_size);
        self.slots.all.push(slot);
    }

    /// Writes the next group of slots of the current pass into `block`; `None` when all are done.
    ///
    /// # Errors
    /// [`StageError`] when the block does not fit the layout.
    pub fn stage_slots(&mut self, block: &mut [u8]) -> Result<Option<SlotGroup>, StageError> {
        let group = self.stage.next_group(self.limits.max_slots as usize);
        if group.is_empty() {
            return Ok(None);
        }
        let mut arrays = Arrays::of(&self.layout, block)?.with_slots(group.len());
        let base = self.segments[self.passes[self.stage.next_pass - 1].start].start();
        let mut staged = SlotGroup::default();
        let slots = &mut self.slots;
        slots.close_group();
        slots.staged_masks.clear();
        slots.staged_masks.resize(slots.masks.len(), UNSTAGED);
        let width = self.limits.mask_words();
        for (entry, &slot) in self.stage.pass_slots[group.clone()].iter().enumerate() {
            let slot = &slots.all[slot as usize];
            arrays.put_slot(entry, slot, base);
            arrays.slot_masks[entry] = match slot.mask() {
                None => UNSTAGED,
                Some(mask) if slots.staged_masks[mask] == UNSTAGED => {
                    let first = staged.mask_words;
                    let (words, edges) =
                        slots.put_mask(mask, &mut arrays.mask_words[first..][..width]);
                    staged.masks += 1;
                    staged.mask_words += words;
                    slots.staged_masks[mask] = [first as i32, edges];
                    slots.staged_masks[mask]
                }
                Some(mask) => slots.staged_masks[mask],
            };
            if slot.class == SlotClass::Logprobs {
                let number = staged.count(slot.class) as i64;
                let labels = slots.labels[slot.labels.range()].iter();
                slots
                    .group_labels
                    .extend(labels.map(|&label| [number, i64::from(label)]));
            }
            staged.counts[slot.class as usize] += 1;
        }
        self.stage.next_slot = group.end;
        slots.group = group;
        Ok(Some(staged))
    }

    /// The tokens whose log-probabilities the staged group asks for: `[number of the slot among the group's
    /// log-probability slots, token]`. A token may be outside the vocabulary: its log-probability is -inf.
    #[must_use]
    pub fn group_labels(&self) -> &[[i64; 2]] {
        &self.slots.group_labels
    }

    /// Takes what the engine computed for the last staged slot group, once.
    ///
    /// # Errors
    /// [`StageError`] when an array does not have the length that the group's slots ask for; nothing is taken then.
    pub fn put_outputs(&mut self, outputs: &Outputs<'_>) -> Result<(), StageError> {
        let slots = &mut self.slots;
        let staged = &self.stage.pass_slots[slots.group.clone()];
        slots.check_outputs(staged, outputs, self.limits.vocab_size)?;
        slots.group = 0..0;
        let valid = slots.take_outputs(staged, outputs, self.limits.vocab_size);
        if !valid {
            self.empty_spoilt_requests();
        }
        Ok(())
    }

    /// Empties the requests with a slot whose logits were no numbers, and others where the archive that replaces a fast
    /// reply does not fit.
    pub(crate) fn empty_spoilt_requests(&mut self) {
        let mut spoilt = Vec::new();
        for (index, request) in self.requests.iter_mut().enumerate() {
            let slots = &self.slots.all[request.slots.range()];
            if slots.iter().any(|slot| slot.token == INVALID_TOKEN) {
                request.slots.clear();
                spoilt.push(index);
            }
        }
        self.add_faults(
            spoilt
                .into_iter()
                .map(|index| (index, RequestFault::Logits)),
        );
        self.empty_oversize_requests();
    }
}

/// Edges of a mask whose bits are staged.
const BITS: i32 = -1;
/// What the staged array says of a slot without a mask.
const UNSTAGED: [i32; 2] = [0; 2];
/// In a slot whose logits were no numbers.
pub(crate) const INVALID_TOKEN: u32 = u32::MAX;

impl Arrays<'_> {
    fn put_slot(&mut self, entry: usize, slot: &Slot, base: usize) {
        // Only what the tempered distribution decides divides by the temperature.
        let tempered = matches!(
            slot.class,
            SlotClass::Plain | SlotClass::Filtered | SlotClass::Dist
        );
        self.slot_rows[entry] = (slot.row() - base) as i64;
        self.temperatures[entry] = if tempered { slot.temperature } else { 1.0 };
        self.top_ps[entry] = slot.top_p;
        self.min_ps[entry] = slot.min_p;
        self.uniforms[entry] = slot.uniform;
        self.top_ks[entry] = slot.top_k as i32;
    }
}
