//! Sampling groups: the slots of a pass in groups of at most [`Limits::max_slots`], sorted by class.

use std::ops::Range;

use crate::block::PassBlock;
use crate::frame::request::{PlannedRequest, Segment};
use crate::limits::Limits;
use crate::sampler::SlotClass;
use crate::sampler::logits_processors::{CustomSlot, EMPTY_RECORD, LogitsRecord};
use crate::slot::outputs::Outputs;
use crate::slot::{SamplingSlot, SamplingSlots};
use crate::staging::error::StageError;

/// A sampling group: slots that are sampled together, in the order of [`SlotClass`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlotGroup {
    /// Slots of each class.
    pub counts: [usize; SlotClass::COUNT],
    /// Staged logit masks.
    pub masks: usize,
    /// Words of these masks.
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

/// A slot whose log-probabilities are requested: `[slot within the group, token, top-k, 1 = after temperature, numbers of its
/// hidden state]`. The token is the
/// next one of a prompt, or -1 for the sampled one.
pub type LogprobPosition = [i64; LOGPROB_POSITION_WORDS];
/// Words of a [`LogprobPosition`].
pub const LOGPROB_POSITION_WORDS: usize = 5;

/// Entry of a slot without a mask.
const UNMASKED: [i32; 2] = [0; 2];

/// The sampling slots of the staged pass, sorted by class within each group, and the staged group.
#[derive(Debug, Default)]
pub(crate) struct PassSlots {
    slots: Vec<u32>,
    /// The staged group.
    group: Range<usize>,
    /// `[log-probability slot within the group, token]`.
    labels: Vec<[i64; 2]>,
    positions: Vec<LogprobPosition>,
    /// `[logprob position, token]` of further requested tokens.
    given: Vec<[i64; 2]>,
    /// Entry of [`FieldId::SlotMasks`](crate::FieldId::SlotMasks) of each mask in the staged group.
    masks: Vec<[i32; 2]>,
    /// Scratch of the sort.
    unordered: Vec<u32>,
    /// Penalty and bias record of each slot of the staged group; empty without any.
    records: Vec<LogitsRecord>,
    /// Biases of the records.
    bias_words: Vec<i32>,
    /// Slots of the staged group with a processor of the driver's process.
    custom: Vec<CustomSlot>,
    /// Why such processors failed: slot of the plan, and reason.
    failures: Vec<(usize, Box<str>)>,
}

impl PassSlots {
    /// Number of slots.
    pub(crate) const fn len(&self) -> usize {
        self.slots.len()
    }

    /// Labels of the staged group.
    pub(crate) fn labels(&self) -> &[[i64; 2]] {
        &self.labels
    }

    /// See [`StagedGroup::logprob_positions`](crate::StagedGroup::logprob_positions).
    pub(crate) fn logprob_positions(&self) -> (&[LogprobPosition], &[[i64; 2]]) {
        (&self.positions, &self.given)
    }

    /// See [`StagedGroup::records`](crate::StagedGroup::records).
    pub(crate) fn records(&self) -> (&[LogitsRecord], &[i32]) {
        (&self.records, &self.bias_words)
    }

    /// See [`StagedGroup::custom`](crate::StagedGroup::custom).
    pub(crate) fn custom(&self) -> &[CustomSlot] {
        &self.custom
    }

    /// Records why the processor of a slot of the staged group failed.
    pub(crate) fn fail(&mut self, slot: usize, reason: &str) {
        if let Some(&slot) = self.slots[self.group.clone()].get(slot) {
            self.failures.push((slot as usize, reason.into()));
        }
    }

    /// Why the processor of a slot of the plan failed.
    pub(crate) fn failure(&self, slot: usize) -> Option<&str> {
        let mut failures = self.failures.iter();
        let found = failures.find(|(failed, _)| *failed == slot);
        found.map(|(_, reason)| &**reason)
    }

    /// Starts a frame.
    pub(crate) fn clear(&mut self) {
        self.failures.clear();
        self.custom.clear();
    }

    /// Starts a pass with all slots of the frame.
    pub(crate) fn select_all(&mut self, slots: &SamplingSlots, limits: &Limits) {
        self.slots.clear();
        self.slots.extend(0..slots.all().len() as u32);
        self.order(slots, limits);
    }

    /// Starts a pass of these segments.
    pub(crate) fn select(
        &mut self,
        segments: &[Segment],
        requests: &[PlannedRequest],
        slots: &SamplingSlots,
        limits: &Limits,
    ) {
        self.slots.clear();
        for segment in segments {
            let request = &requests[segment.request()];
            let own = request.slots().range().map(|slot| slot as u32);
            if segment.len() == request.tokens().len() {
                self.slots.extend(own);
                continue;
            }
            let rows = segment.tokens();
            let inside = |&slot: &u32| rows.contains(&slots.all()[slot as usize].row());
            self.slots.extend(own.filter(inside));
        }
        self.order(slots, limits);
    }

    /// Sorts each group of the pass by class, and rewinds.
    fn order(&mut self, slots: &SamplingSlots, limits: &Limits) {
        self.group = 0..0;
        self.labels.clear();
        if slots.have_one_class() {
            return;
        }
        for group in self.slots.chunks_mut(limits.max_slots as usize) {
            order_by_class(group, &mut self.unordered, slots.all());
        }
    }

    /// Writes the next group, at most [`Limits::max_slots`], of the pass whose first row is `base`; `None` after the last.
    pub(crate) fn stage(
        &mut self,
        slots: &SamplingSlots,
        limits: &Limits,
        base: usize,
        block: &mut PassBlock<'_>,
    ) -> Option<SlotGroup> {
        let start = self.group.end;
        self.group = start..self.slots.len().min(start + limits.max_slots as usize);
        self.labels.clear();
        self.positions.clear();
        self.given.clear();
        let group = &self.slots[self.group.clone()];
        if group.is_empty() {
            return None;
        }
        self.records.clear();
        self.bias_words.clear();
        self.masks.clear();
        self.masks.resize(slots.masks().len(), UNMASKED);
        let mut staged = SlotGroup::default();
        let width = limits.mask_words();
        let mut arrays = block.slots(group.len());
        let all = slots.all();
        for (entry, &slot) in group.iter().enumerate() {
            let slot = &all[slot as usize];
            arrays.put(entry, slot, base);
            arrays.slot_masks[entry] = match slot.mask() {
                None => UNMASKED,
                Some(mask) if self.masks[mask] == UNMASKED => {
                    let first = staged.mask_words;
                    let out = &mut arrays.mask_words[first..][..width];
                    let (words, edges) = slots.masks().put(mask, out);
                    staged.masks += 1;
                    staged.mask_words += words;
                    self.masks[mask] = [first as i32, edges];
                    self.masks[mask]
                }
                Some(mask) => self.masks[mask],
            };
            if slot.class() == SlotClass::Logprobs {
                let number = staged.count(slot.class()) as i64;
                let labels = slots.labels(slot).iter();
                self.labels
                    .extend(labels.map(|&label| [number, i64::from(label)]));
            }
            staged.counts[slot.class() as usize] += 1;
        }
        self.build_records(slots);
        self.build_logprob_positions(slots);
        self.list_custom(slots);
        Some(staged)
    }

    /// Builds the penalty and bias records of the group.
    fn build_records(&mut self, slots: &SamplingSlots) {
        let (processors, all) = (slots.processors(), slots.all());
        if !processors.adjusts() {
            return;
        }
        let group = &self.slots[self.group.clone()];
        let of = |&slot: &u32| all[slot as usize].adjusting_processor();
        self.bias_words
            .resize(processors.words(group.iter().map(of)), 0);
        let mut used = 0;
        for &slot in group {
            let slot = &all[slot as usize];
            let dest = (&mut self.bias_words[..], used);
            let (record, end) = processors
                .put(slot.adjusting_processor(), slot.row(), dest)
                .unwrap_or((EMPTY_RECORD, used));
            self.records.push(record);
            used = end;
        }
        self.bias_words.truncate(used);
    }

    /// Lists the slots with a processor of the driver's process.
    fn list_custom(&mut self, slots: &SamplingSlots) {
        self.custom.clear();
        if !slots.processors().has_custom() {
            return;
        }
        for (entry, &slot) in self.slots[self.group.clone()].iter().enumerate() {
            let slot = &slots.all()[slot as usize];
            if slot.class().is_token() {
                let processor = slot.adjusting_processor();
                let found = slots.processors().custom(processor, slot.row(), entry);
                self.custom.extend(found);
            }
        }
    }

    /// Lists the logprob positions of the group.
    fn build_logprob_positions(&mut self, slots: &SamplingSlots) {
        if slots.logprob_bytes() == 0 {
            return;
        }
        let group = self.slots[self.group.clone()].iter();
        for (entry, &slot) in group.enumerate() {
            let slot = &slots.all()[slot as usize];
            let logprobs = slots.processors().logprobs(slot.processor());
            let Some(logprobs) = logprobs.filter(|_| slot.returns_logprobs()) else {
                continue;
            };
            let is_prompt = slot.class() == SlotClass::Prompt;
            let token = slots.labels(slot).first().filter(|_| is_prompt);
            let given = logprobs.given.iter();
            let number = self.positions.len() as i64;
            self.given
                .extend(given.map(|&token| [number, i64::from(token)]));
            self.positions.push([
                entry as i64,
                token.map_or(-1, |&token| i64::from(token)),
                i64::from(logprobs.shape.top),
                i64::from(logprobs.scaled && !is_prompt),
                i64::from(logprobs.shape.hidden),
            ]);
        }
    }

    /// Stores the outputs of the staged group; `false` when a token is outside the vocabulary.
    ///
    /// # Errors
    /// [`StageError::OutputCount`] when an array has the wrong length; nothing is stored then.
    pub(crate) fn put_outputs(
        &self,
        slots: &mut SamplingSlots,
        outputs: &Outputs<'_>,
        vocab_size: u32,
    ) -> Result<bool, StageError> {
        let group = &self.slots[self.group.clone()];
        let mut counted = [0; SlotClass::COUNT];
        let mut logprob_words = 0;
        if slots.yield_only_tokens() {
            counted[SlotClass::Plain as usize] = group.len();
        } else {
            (counted, logprob_words) = count_values(group, slots);
        }
        check_outputs(counted, logprob_words, outputs)?;
        Ok(slots.put_outputs(group, outputs, vocab_size))
    }
}

/// Counting sort of a group by class; stable.
fn order_by_class(group: &mut [u32], unordered: &mut Vec<u32>, slots: &[SamplingSlot]) {
    let class = |slot: u32| slots[slot as usize].class() as usize;
    let mut offsets = [0; SlotClass::COUNT + 1];
    for &slot in &*group {
        offsets[class(slot) + 1] += 1;
    }
    for class in 1..offsets.len() {
        offsets[class] += offsets[class - 1];
    }
    unordered.clear();
    unordered.extend_from_slice(group);
    for &slot in &*unordered {
        let offset = &mut offsets[class(slot)];
        group[*offset] = slot;
        *offset += 1;
    }
}

/// The number of output values of each class in a group, and of log-probability words.
fn count_values(group: &[u32], slots: &SamplingSlots) -> ([usize; SlotClass::COUNT], usize) {
    let mut values = [0; SlotClass::COUNT];
    let mut logprob_words = 0;
    let all = slots.all();
    for &slot in group {
        let slot = &all[slot as usize];
        logprob_words += slots.logprob_words(slot);
        values[slot.class() as usize] += if slot.class().is_token() {
            1
        } else {
            slot.len()
        };
    }
    (values, logprob_words)
}

/// Checks the length of each output array.
fn check_outputs(
    values: [usize; SlotClass::COUNT],
    logprob_words: usize,
    outputs: &Outputs<'_>,
) -> Result<(), StageError> {
    let [
        greedy,
        plain,
        filtered,
        dists,
        logits,
        logprobs,
        entropies,
        _,
    ] = values;
    for (array, found, expected) in [
        ("tokens", outputs.tokens.len(), greedy + plain + filtered),
        ("dist_ids", outputs.dist_ids.len(), dists),
        ("dist_probs", outputs.dist_probs.len(), dists),
        ("logits", outputs.logits.len(), logits),
        ("logprobs", outputs.logprobs.len(), logprobs),
        ("entropies", outputs.entropies.len(), entropies),
        ("logprob_words", outputs.logprob_words.len(), logprob_words),
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
