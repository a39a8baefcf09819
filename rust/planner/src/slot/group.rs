//! The slots of a pass, computed group by group.

use std::ops::Range;

use crate::block::PassBlock;
use crate::frame::request::{Request, Segment};
use crate::limits::Limits;
use crate::sampler::SlotClass;
use crate::sampler::extra::{EMPTY, Record};
use crate::slot::outputs::Outputs;
use crate::slot::{Slot, Slots};
use crate::stages::error::StageError;

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

/// A slot of a group whose extension asks for log-probabilities, as words: number of the slot in the group; its token;
/// most probable tokens; 1 for after the temperature. The token is the next one of a prompt, or -1 for the one that is drawn.
pub type Place = [i64; PLACE_WORDS];
/// Words of a [`Place`].
pub const PLACE_WORDS: usize = 4;

/// What the staged array says of a slot without a mask.
const UNMASKED: [i32; 2] = [0; 2];

/// The slots of the staged pass, ordered by class within each group, and the group that is staged.
#[derive(Debug, Default)]
pub(crate) struct PassSlots {
    slots: Vec<u32>,
    /// The staged group.
    group: Range<usize>,
    /// Of its log-probability slots: `[number among them, token]` of each label.
    labels: Vec<[i64; 2]>,
    places: Vec<Place>,
    /// `[number of the place, token]` of each token that is given for one.
    given: Vec<[i64; 2]>,
    /// For each mask where it lies in the staged group, as [`FieldId::SlotMasks`](crate::FieldId::SlotMasks) says it.
    masks: Vec<[i32; 2]>,
    /// A group as it was before it was ordered.
    unordered: Vec<u32>,
    /// Of each slot of the staged group what is asked of its logits; empty when nothing is.
    records: Vec<Record>,
    /// Biases of the records.
    bias_words: Vec<i32>,
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

    /// The places of the staged group, and the tokens that are given for them: number of the place and token.
    pub(crate) fn places(&self) -> (&[Place], &[[i64; 2]]) {
        (&self.places, &self.given)
    }

    /// What the staged group asks of its slots' logits, and the words that the records refer to.
    pub(crate) fn records(&self) -> (&[Record], &[i32]) {
        (&self.records, &self.bias_words)
    }

    /// Begins a pass that has all slots of the frame.
    pub(crate) fn take_all(&mut self, slots: &Slots, limits: &Limits) {
        self.slots.clear();
        self.slots.extend(0..slots.all().len() as u32);
        self.order(slots, limits);
    }

    /// Begins a pass of certain segments.
    pub(crate) fn take(
        &mut self,
        segments: &[Segment],
        requests: &[Request],
        slots: &Slots,
        limits: &Limits,
    ) {
        self.slots.clear();
        for segment in segments {
            let request = &requests[segment.request()];
            let own = request.slots().range().map(|slot| slot as u32);
            if segment.len() == request.rows().len() {
                self.slots.extend(own);
                continue;
            }
            let rows = segment.rows();
            let inside = |&slot: &u32| rows.contains(&slots.all()[slot as usize].row());
            self.slots.extend(own.filter(inside));
        }
        self.order(slots, limits);
    }

    /// Orders each group of the pass, and goes before the first.
    fn order(&mut self, slots: &Slots, limits: &Limits) {
        self.group = 0..0;
        self.labels.clear();
        if slots.are_alike() {
            return;
        }
        for group in self.slots.chunks_mut(limits.max_slots as usize) {
            order_by_class(group, &mut self.unordered, slots.all());
        }
    }

    /// Writes the next group, at most [`Limits::max_slots`], of the pass whose first row is `base`; `None` after the last.
    pub(crate) fn stage(
        &mut self,
        slots: &Slots,
        limits: &Limits,
        base: usize,
        block: &mut PassBlock<'_>,
    ) -> Option<SlotGroup> {
        let start = self.group.end;
        self.group = start..self.slots.len().min(start + limits.max_slots as usize);
        self.labels.clear();
        self.places.clear();
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
                    let room = &mut arrays.mask_words[first..][..width];
                    let (words, edges) = slots.masks().put(mask, room);
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
        self.note_records(slots);
        self.note_places(slots);
        Some(staged)
    }

    /// Notes what the extension asks of the group's logits.
    fn note_records(&mut self, slots: &Slots) {
        let (extras, all) = (slots.extras(), slots.all());
        if !extras.adjusts() {
            return;
        }
        let group = &self.slots[self.group.clone()];
        let of = |&slot: &u32| all[slot as usize].changes();
        self.bias_words
            .resize(extras.words(group.iter().map(of)), 0);
        let mut used = 0;
        for &slot in group {
            let slot = &all[slot as usize];
            let place = (&mut self.bias_words[..], used);
            let (record, end) = extras
                .put(slot.changes(), slot.row(), place)
                .unwrap_or((EMPTY, used));
            self.records.push(record);
            used = end;
        }
        self.bias_words.truncate(used);
    }

    /// Notes the group's places.
    fn note_places(&mut self, slots: &Slots) {
        if slots.place_bytes() == 0 {
            return;
        }
        let group = self.slots[self.group.clone()].iter();
        for (entry, &slot) in group.enumerate() {
            let slot = &slots.all()[slot as usize];
            let asked = slots.extras().asked(slot.extra());
            let Some(asked) = asked.filter(|_| slot.is_place()) else {
                continue;
            };
            let is_prompt = slot.class() == SlotClass::Prompt;
            let token = slots.labels(slot).first().filter(|_| is_prompt);
            let given = asked.given.iter();
            let number = self.places.len() as i64;
            self.given
                .extend(given.map(|&token| [number, i64::from(token)]));
            self.places.push([
                entry as i64,
                token.map_or(-1, |&token| i64::from(token)),
                i64::from(asked.shape.top),
                i64::from(asked.scaled && !is_prompt),
            ]);
        }
    }

    /// Gives the slots of the staged group their outputs; `false` when a token is outside the vocabulary.
    ///
    /// # Errors
    /// [`StageError::OutputCount`] when an array has another length than the slots ask for; nothing is taken then.
    pub(crate) fn put_outputs(
        &self,
        slots: &mut Slots,
        outputs: &Outputs<'_>,
        vocab_size: u32,
    ) -> Result<bool, StageError> {
        let group = &self.slots[self.group.clone()];
        let mut counted = [0; SlotClass::COUNT];
        let mut place_words = 0;
        if slots.are_tokens() {
            counted[SlotClass::Plain as usize] = group.len();
        } else {
            (counted, place_words) = count_values(group, slots, vocab_size);
        }
        check_outputs(counted, place_words, outputs)?;
        Ok(slots.put_outputs(group, outputs, vocab_size))
    }
}

/// Orders a group by class; slots of one class keep their order. There are few classes, so that places are counted.
fn order_by_class(group: &mut [u32], unordered: &mut Vec<u32>, slots: &[Slot]) {
    let class = |slot: u32| slots[slot as usize].class() as usize;
    let mut places = [0; SlotClass::COUNT + 1];
    for &slot in &*group {
        places[class(slot) + 1] += 1;
    }
    for class in 1..places.len() {
        places[class] += places[class - 1];
    }
    unordered.clear();
    unordered.extend_from_slice(group);
    for &slot in &*unordered {
        let place = &mut places[class(slot)];
        group[*place] = slot;
        *place += 1;
    }
}

/// The values that the slots of a group ask for, those of each class, and the words of their places.
fn count_values(
    group: &[u32],
    slots: &Slots,
    vocab_size: u32,
) -> ([usize; SlotClass::COUNT], usize) {
    let mut values = [0; SlotClass::COUNT];
    let mut place_words = 0;
    let all = slots.all();
    for &slot in group {
        let slot = &all[slot as usize];
        place_words += slots.place_words(slot);
        values[slot.class() as usize] += if slot.class().is_token() {
            1
        } else {
            slot.len(vocab_size)
        };
    }
    (values, place_words)
}

/// Checks that each array has as many values as the slots ask for.
fn check_outputs(
    values: [usize; SlotClass::COUNT],
    place_words: usize,
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
        ("place_words", outputs.place_words.len(), place_words),
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
