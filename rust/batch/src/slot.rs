//! Sampling slots: planned from a request's samplers, staged in groups, answered by the engine's outputs.

use std::ops::Range;

use pie_wire::{NativeSlice, SamplerView, brle};

use crate::frame::{Frame, range};
use crate::mask::set_bits;
use crate::plan::Planner;
use crate::random::uniform;
use crate::request::Geometry;
use crate::stage::{Arrays, StageError};
use crate::{Limits, RequestFault, SamplerParams, SlotClass};

/// One logit row and what to make of it.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    /// Row in [`Planner::token_ids`].
    pub(crate) row: usize,
    pub(crate) class: SlotClass,
    pub(crate) params: SamplerParams,
    /// Uniform number in `[0, 1)`; 0 for slots that draw nothing.
    pub(crate) uniform: f32,
    /// Its request's mask in [`Slots::masks`].
    pub(crate) mask: Option<usize>,
    /// Its tokens in [`Slots::labels`], of a log-probability slot.
    labels: Range<usize>,
    /// Whether its output has come.
    pub(crate) answered: bool,
    /// The token, once sampled.
    pub(crate) token: u32,
    /// Where its output begins among those of its class, once computed.
    output: usize,
}

impl Slot {
    /// Values of its output.
    fn len(&self, vocab_size: u32) -> usize {
        match self.class {
            SlotClass::Dist => self.params.top_k as usize,
            SlotClass::Logits => vocab_size as usize,
            SlotClass::Logprobs => self.labels.len(),
            SlotClass::Entropy => 1,
            SlotClass::Greedy | SlotClass::Plain | SlotClass::Filtered => 0,
        }
    }

    /// Where its output lies among those of its class.
    pub(crate) fn output(&self, vocab_size: u32) -> Range<usize> {
        self.output..self.output + self.len(vocab_size)
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
    /// Runs of each logit mask in `runs`.
    masks: Vec<Range<usize>>,
    runs: Vec<u32>,
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
    /// For each mask where it lies in the staged group.
    staged_masks: Vec<Option<[i32; 2]>>,
}

impl Slots {
    pub(crate) fn clear(&mut self) {
        self.all.clear();
        self.masks.clear();
        self.runs.clear();
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
        staged: &[usize],
        outputs: &Outputs<'_>,
        vocab_size: u32,
    ) -> Result<(), StageError> {
        let slots = || staged.iter().map(|&slot| &self.all[slot]);
        let values = |class: SlotClass| -> usize {
            let own = slots().filter(|slot| slot.class == class);
            own.map(|slot| slot.len(vocab_size)).sum()
        };
        let tokens = slots().filter(|slot| slot.class.is_token()).count();
        let dists = values(SlotClass::Dist);
        let (logits, logprobs) = (values(SlotClass::Logits), values(SlotClass::Logprobs));
        let entropies = values(SlotClass::Entropy);
        for (array, found, expected) in [
            ("tokens", outputs.tokens.len(), tokens),
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
    fn take_outputs(&mut self, staged: &[usize], outputs: &Outputs<'_>, vocab_size: u32) -> bool {
        let mut tokens = outputs.tokens.iter();
        let mut next = [
            self.dist_probs.len(),
            self.logits.len() / size_of::<f32>(),
            self.logprobs.len(),
            self.entropies.len(),
        ];
        let mut valid = true;
        for &index in staged {
            let slot = &mut self.all[index];
            slot.answered = true;
            if slot.class.is_token() {
                let token = tokens.next().and_then(|&token| u32::try_from(token).ok());
                let token = token.filter(|&token| token < vocab_size);
                slot.token = token.unwrap_or(INVALID_TOKEN);
                valid &= token.is_some();
                continue;
            }
            let next = &mut next[slot.class as usize - SlotClass::Dist as usize];
            slot.output = *next;
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

    /// Writes a planned mask; see [`put_mask`].
    pub(crate) fn put_mask(&self, mask: usize, words: &mut [i32], limits: &Limits) -> (usize, i32) {
        put_mask(&self.runs[self.masks[mask].clone()], words, limits)
    }

    /// Plans the first mask of a request.
    fn add_mask(&mut self, runs: &[u32]) -> usize {
        let last = self.masks.last().cloned();
        if last.is_some_and(|last| self.runs[last] == *runs) {
            return self.masks.len() - 1;
        }
        let first = self.runs.len();
        self.runs.extend_from_slice(runs);
        self.masks.push(first..self.runs.len());
        self.masks.len() - 1
    }
}

/// What holds for all slots of a request.
#[derive(Clone, Copy)]
struct Common {
    mask: Option<usize>,
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
        if geometry.drafts > 0 {
            let first = SamplerParams::from_wire(frame.samplers[samplers.start].view(), vocab_size);
            let (class, params) = first
                .filter(|(class, _)| class.is_token())
                .unwrap_or((SlotClass::Greedy, SamplerParams::greedy(vocab_size)));
            let last_input = first_row + geometry.inputs as usize - 1;
            for row in last_input..first_row + geometry.rows() as usize {
                self.add_slot(common, row, 0, class, params);
            }
        }
        for (number, sampler) in samplers.enumerate() {
            let view = frame.samplers[sampler].view();
            let Some((class, params)) = SamplerParams::from_wire(view, vocab_size) else {
                continue;
            };
            // Verification stands for the request's token samplers.
            if class.is_token() && geometry.drafts > 0 {
                continue;
            }
            let first_label = self.slots.labels.len();
            match view {
                SamplerView::Logprob { token_id } => self.slots.labels.push(token_id),
                SamplerView::Logprobs { token_ids } => {
                    self.slots.labels.extend_from_slice(token_ids);
                }
                _ => {}
            }
            let labels = first_label..self.slots.labels.len();
            let row = first_row + frame.sampling_indices[sampler] as usize;
            let slot = self.add_slot(common, row, number as u64, class, params);
            slot.labels = labels;
        }
        Ok(())
    }

    fn common(&mut self, frame: &Frame<'_>, index: usize) -> Result<Common, RequestFault> {
        let mut common = Common {
            mask: None,
            forbidden: false,
        };
        if frame.logit_masks.is_empty() {
            return Ok(common);
        }
        let masks = &frame.logit_masks[range(frame.logit_mask_indptr, index)];
        if masks.len() > 1 {
            return Err(RequestFault::LogitMasks { masks: masks.len() });
        }
        let runs = masks.first().map_or(&[][..], |mask| mask.buffer.native());
        if !runs.is_empty() {
            let allowed = brle::true_ranges(runs, u64::from(self.limits.vocab_size)).next();
            common.forbidden = allowed.is_none();
            common.mask = allowed.map(|_| self.slots.add_mask(runs));
        }
        Ok(common)
    }

    fn add_slot(
        &mut self,
        common: Common,
        row: usize,
        number: u64,
        class: SlotClass,
        params: SamplerParams,
    ) -> &mut Slot {
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
        self.reply.ask(class);
        self.slots.all.push(Slot {
            row,
            class,
            params,
            uniform,
            mask: common.mask,
            labels: 0..0,
            answered: false,
            token: 0,
            output: 0,
        });
        let last = self.slots.all.len() - 1;
        &mut self.slots.all[last]
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
        let mut arrays = Arrays::of(&self.layout, block)?;
        let base = self.segments[self.passes[self.stage.next_pass - 1].start].start;
        let mut staged = SlotGroup::default();
        let slots = &mut self.slots;
        slots.close_group();
        slots.staged_masks.clear();
        slots.staged_masks.resize(slots.masks.len(), None);
        for (entry, &slot) in self.stage.pass_slots[group.clone()].iter().enumerate() {
            let slot = &slots.all[slot];
            arrays.put_slot(entry, slot, base);
            let mask = slot.mask.map(|mask| {
                *slots.staged_masks[mask].get_or_insert_with(|| {
                    let runs = &slots.runs[slots.masks[mask].clone()];
                    let first = staged.mask_words;
                    let width = self.limits.mask_words();
                    let out = &mut arrays.mask_words[first..][..width];
                    let (words, edges) = put_mask(runs, out, &self.limits);
                    staged.masks += 1;
                    staged.mask_words += words;
                    [first as i32, edges]
                })
            });
            arrays.slot_masks[2 * entry..][..2].copy_from_slice(&mask.unwrap_or_default());
            let number = staged.count(slot.class) as i64;
            let labels = slots.labels[slot.labels.clone()].iter();
            slots
                .group_labels
                .extend(labels.map(|&label| [number, i64::from(label)]));
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
            let slots = &self.slots.all[request.slots.clone()];
            if slots.iter().any(|slot| slot.token == INVALID_TOKEN) {
                request.slots.end = request.slots.start;
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
/// In a slot whose logits were no numbers.
pub(crate) const INVALID_TOKEN: u32 = u32::MAX;

impl Arrays<'_> {
    fn put_slot(&mut self, entry: usize, slot: &Slot, base: usize) {
        let params = slot.params;
        // Only what the tempered distribution decides divides by the temperature.
        let tempered = matches!(
            slot.class,
            SlotClass::Plain | SlotClass::Filtered | SlotClass::Dist
        );
        self.slot_rows[entry] = (slot.row - base) as i64;
        self.temperatures[entry] = if tempered { params.temperature } else { 1.0 };
        self.top_ps[entry] = params.top_p;
        self.min_ps[entry] = params.min_p;
        self.uniforms[entry] = slot.uniform;
        self.top_ks[entry] = params.top_k as i32;
    }
}

/// Writes a mask into [`Limits::mask_words`] words: its edges, or its bits where edges could take more room. Returns the
/// words in use and what [`FieldId::SlotMasks`](crate::FieldId::SlotMasks) says of its edges.
fn put_mask(runs: &[u32], words: &mut [i32], limits: &Limits) -> (usize, i32) {
    let ranges = brle::true_ranges(runs, u64::from(limits.vocab_size));
    if runs.len() > words.len() {
        words.fill(0);
        ranges.for_each(|allowed| set_bits(words, allowed));
        return (words.len(), BITS);
    }
    let mut edges = 0;
    for allowed in ranges {
        words[edges..][..2].copy_from_slice(&[allowed.start as i32, allowed.end as i32]);
        edges += 2;
    }
    (edges, edges as i32)
}
