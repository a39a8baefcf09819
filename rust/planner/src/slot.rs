//! Sampling slots: planned from a request's samplers, answered by the engine's outputs.

pub(crate) mod group;
pub(crate) mod outputs;
mod plan;

use std::ops::Range;

use pie_wire::PlaceShape;

use crate::extent::Extent;
use crate::mask::logit::LogitMasks;
use crate::sampler::SlotClass;
use crate::sampler::extra::Extras;
use crate::slot::outputs::{Outputs, ProbeOutputs};

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

    /// Takes its token as an engine gives it; `false` when that is outside the vocabulary.
    fn take_token(&mut self, token: i64, vocab_size: u32) -> bool {
        let token = u32::try_from(token).ok();
        let token = token.filter(|&token| token < vocab_size);
        self.token = token.unwrap_or(INVALID_TOKEN);
        token.is_some()
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

    /// Whether each slot yields a token and nothing else, as those of decodes do.
    pub(crate) fn are_tokens(&self) -> bool {
        let classes = [SlotClass::Greedy, SlotClass::Plain, SlotClass::Filtered];
        let tokens: usize = classes.iter().map(|&class| self.count(class)).sum();
        tokens == self.all.len() && self.place_bytes == 0
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

    /// Hands each slot of a group its token; as [`put_outputs`](Self::put_outputs) does, where there is nothing else.
    fn put_tokens(&mut self, group: &[u32], tokens: &[i64], vocab_size: u32) -> bool {
        let all = &mut self.all[..];
        let mut valid = true;
        for (&slot, &token) in group.iter().zip(tokens) {
            valid &= all[slot as usize].take_token(token, vocab_size);
        }
        valid
    }

    /// Hands each slot of a group its output; `false` when a token is outside the vocabulary.
    pub(crate) fn put_outputs(
        &mut self,
        group: &[u32],
        outputs: &Outputs<'_>,
        vocab_size: u32,
    ) -> bool {
        if self.are_tokens() {
            return self.put_tokens(group, outputs.tokens, vocab_size);
        }
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
                let token = tokens.next().copied().unwrap_or(-1);
                valid &= slot.take_token(token, vocab_size);
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
}
