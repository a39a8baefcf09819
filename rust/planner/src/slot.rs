//! Sampling slots: one logits row and its sampler each; planned from requests, filled by the engine's outputs.

pub(crate) mod group;
pub(crate) mod outputs;
mod plan;

use std::ops::Range;

use pie_wire::LogprobShape;

use crate::mask::logit::LogitMasks;
use crate::range32::Range32;
use crate::sampler::SlotClass;
use crate::sampler::logits_processors::LogitsProcessors;
use crate::slot::outputs::{Outputs, ProbeOutputs};

/// Bytes of one index or number of a response.
pub(crate) const WORD: usize = 4;

/// One logits row with its sampler. Kept small: there are many, and planning runs with cold caches.
#[derive(Debug, Clone)]
pub(crate) struct SamplingSlot {
    /// Logits row: query token index in the plan.
    row: u32,
    class: SlotClass,
    /// Parameters as in [`SamplerParams`].
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    uniform: f32,
    /// Index in [`SamplingSlots::masks`], or [`UNMASKED`].
    mask: u32,
    /// Index in [`SamplingSlots::processors`], or [`NO_PROCESSOR`].
    processor: u32,
    /// Whether the extension requests log-probabilities for it.
    returns_logprobs: bool,
    /// Its range of [`SamplingSlots::labels`]: tokens of a log-probability slot, or the prompt token.
    labels: Range32,
    /// The token, once sampled, or [`INVALID_TOKEN`].
    token: u32,
    /// Start of its output among those of its class, or of its log-probabilities, once computed.
    output: u32,
}

/// Mask index of slots without one.
const UNMASKED: u32 = u32::MAX;
/// Processor index of slots without one.
const NO_PROCESSOR: u32 = u32::MAX;
/// Token of a slot with NaN logits.
const INVALID_TOKEN: u32 = u32::MAX;

impl SamplingSlot {
    /// Logits row: query token index in the plan.
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

    /// Uniform random number in `[0, 1)`; 0 for slots that are not sampled at random.
    pub(crate) const fn uniform(&self) -> f32 {
        self.uniform
    }

    /// The sampled token.
    pub(crate) const fn token(&self) -> u32 {
        self.token
    }

    /// Whether its logits were NaN.
    pub(crate) const fn is_invalid(&self) -> bool {
        self.token == INVALID_TOKEN
    }

    /// Index in [`SamplingSlots::processors`].
    pub(crate) const fn processor(&self) -> u32 {
        self.processor
    }

    /// Its logits processor; none for prompt log-probabilities, which are of the unchanged logits.
    pub(crate) fn adjusting_processor(&self) -> u32 {
        if self.class == SlotClass::Prompt {
            NO_PROCESSOR
        } else {
            self.processor
        }
    }

    /// Whether the extension requests log-probabilities for it.
    pub(crate) const fn returns_logprobs(&self) -> bool {
        self.returns_logprobs
    }

    /// Index of its mask in [`SamplingSlots::masks`].
    pub(crate) fn mask(&self) -> Option<usize> {
        (self.mask != UNMASKED).then_some(self.mask as usize)
    }

    /// Stores the sampled token; `false` when it is outside the vocabulary.
    fn take_token(&mut self, token: i64, vocab_size: u32) -> bool {
        let token = u32::try_from(token).ok();
        let token = token.filter(|&token| token < vocab_size);
        self.token = token.unwrap_or(INVALID_TOKEN);
        token.is_some()
    }

    /// Number of output values of a probe.
    pub(crate) fn len(&self) -> usize {
        match self.class {
            SlotClass::Dist | SlotClass::Logits => self.top_k as usize,
            SlotClass::Logprobs => self.labels.len(),
            SlotClass::Entropy => 1,
            SlotClass::Greedy | SlotClass::Plain | SlotClass::Filtered | SlotClass::Prompt => 0,
        }
    }

    /// Its output range among those of its class.
    pub(crate) fn output(&self) -> Range<usize> {
        self.output as usize..self.output as usize + self.len()
    }

    /// Response bytes of a probe; tokens are counted per request.
    pub(crate) fn probe_bytes(&self) -> usize {
        let values = self.len();
        match self.class {
            SlotClass::Greedy | SlotClass::Plain | SlotClass::Filtered | SlotClass::Prompt => 0,
            SlotClass::Dist => WORD + 2 * WORD * values,
            SlotClass::Logits | SlotClass::Logprobs => WORD + WORD * values,
            SlotClass::Entropy => WORD,
        }
    }
}

/// What all slots of a frame share.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SamplingContext {
    /// Rows of the embedding table.
    pub(crate) vocab_size: u32,
    /// Numbers of a pooled row of an embedding model; 0 for a model that generates.
    pub(crate) embedding_size: u32,
    /// Numbers of a hidden state; 0 where it is not known yet.
    pub(crate) hidden_size: u32,
    /// Key of unseeded samplers.
    pub(crate) random_seed: u64,
    /// Number of the frame.
    pub(crate) frame: u64,
}

/// The sampling slots of a frame, with their masks, processors and outputs.
#[derive(Debug, Default)]
pub(crate) struct SamplingSlots {
    all: Vec<SamplingSlot>,
    counts: [usize; SlotClass::COUNT],
    probe_bytes: usize,
    /// Upper bound of the response bytes of log-probabilities.
    logprob_bytes: usize,
    masks: LogitMasks,
    processors: LogitsProcessors,
    /// Tokens whose log-probabilities are requested.
    labels: Vec<u32>,
    outputs: ProbeOutputs,
    sampling: SamplingContext,
}

impl SamplingSlots {
    /// Starts a frame.
    pub(crate) fn start(&mut self, sampling: SamplingContext) {
        self.sampling = sampling;
        self.all.clear();
        self.counts = [0; SlotClass::COUNT];
        (self.probe_bytes, self.logprob_bytes) = (0, 0);
        self.masks.clear();
        self.processors.clear();
        self.labels.clear();
        self.outputs.clear();
    }

    /// Number of slots.
    pub(crate) const fn len(&self) -> usize {
        self.all.len()
    }

    /// All slots of the frame.
    pub(crate) fn all(&self) -> &[SamplingSlot] {
        &self.all
    }

    /// The slots of a request.
    pub(crate) fn of(&self, slots: Range32) -> &[SamplingSlot] {
        &self.all[slots.range()]
    }

    /// Slots of a class.
    pub(crate) const fn count(&self, class: SlotClass) -> usize {
        self.counts[class as usize]
    }

    /// Whether all slots have one class.
    pub(crate) fn have_one_class(&self) -> bool {
        self.counts.iter().filter(|&&count| count > 0).count() <= 1
    }

    /// Whether some slot is a probe.
    pub(crate) fn has_probes(&self) -> bool {
        self.counts[SlotClass::Dist as usize..SlotClass::Prompt as usize] != [0; 4]
    }

    /// Whether every slot yields a token and nothing else: plain decodes.
    pub(crate) fn yield_only_tokens(&self) -> bool {
        let classes = [SlotClass::Greedy, SlotClass::Plain, SlotClass::Filtered];
        let tokens: usize = classes.iter().map(|&class| self.count(class)).sum();
        tokens == self.all.len() && self.logprob_bytes == 0
    }

    /// Sum of [`SamplingSlot::probe_bytes`].
    pub(crate) const fn probe_bytes(&self) -> usize {
        self.probe_bytes
    }

    /// Upper bound of the response bytes of log-probabilities; 0 without any.
    pub(crate) const fn logprob_bytes(&self) -> usize {
        self.logprob_bytes
    }

    /// Log-probabilities requested for a slot, if any.
    pub(crate) fn shape(&self, slot: &SamplingSlot) -> Option<LogprobShape> {
        let logprobs = self.processors.logprobs(slot.processor);
        logprobs
            .filter(|_| slot.returns_logprobs)
            .map(|logprobs| logprobs.shape)
    }

    /// Words of the log-probabilities of a slot.
    pub(crate) fn logprob_words(&self, slot: &SamplingSlot) -> usize {
        self.shape(slot).map_or(0, LogprobShape::words)
    }

    /// The computed log-probabilities of a slot.
    pub(crate) fn logprobs(&self, slot: &SamplingSlot) -> &[u32] {
        let start = slot.output as usize;
        self.outputs
            .position(start..start + self.logprob_words(slot))
    }

    /// The logit masks.
    pub(crate) const fn masks(&self) -> &LogitMasks {
        &self.masks
    }

    /// Penalties, biases and log-probability requests.
    pub(crate) const fn processors(&self) -> &LogitsProcessors {
        &self.processors
    }

    /// The tokens of a log-probability slot.
    pub(crate) fn labels(&self, slot: &SamplingSlot) -> &[u32] {
        &self.labels[slot.labels.range()]
    }

    /// Outputs of probes so far.
    pub(crate) const fn outputs(&self) -> &ProbeOutputs {
        &self.outputs
    }

    /// Stores the token of a slot; false when it is outside the vocabulary.
    pub(crate) fn put_token(&mut self, slot: usize, token: u32, vocab_size: u32) -> bool {
        let valid = token < vocab_size;
        self.all[slot].token = if valid { token } else { INVALID_TOKEN };
        valid
    }

    /// Stores the log-probabilities of a slot: [`logprob_words`](Self::logprob_words) words.
    pub(crate) fn put_logprobs(&mut self, slot: usize, words: impl Iterator<Item = u32>) {
        self.all[slot].output = self.outputs.logprob_words() as u32;
        self.outputs.push_words(words);
    }

    /// [`put_outputs`](Self::put_outputs) for a group that only yields tokens.
    fn put_tokens(&mut self, group: &[u32], tokens: &[i64], vocab_size: u32) -> bool {
        let all = &mut self.all[..];
        let mut valid = true;
        for (&slot, &token) in group.iter().zip(tokens) {
            valid &= all[slot as usize].take_token(token, vocab_size);
        }
        valid
    }

    /// Stores the outputs of a group; `false` when a token is outside the vocabulary.
    pub(crate) fn put_outputs(
        &mut self,
        group: &[u32],
        outputs: &Outputs<'_>,
        vocab_size: u32,
    ) -> bool {
        if self.yield_only_tokens() {
            return self.put_tokens(group, outputs.tokens, vocab_size);
        }
        let mut tokens = outputs.tokens.iter();
        let mut next = self.outputs.lens();
        let mut logprob_words = outputs
            .logprob_words
            .iter()
            .map(|word| word.cast_unsigned());
        let mut valid = true;
        let (all, processors) = (&mut self.all[..], &self.processors);
        for &index in group {
            let slot = &mut all[index as usize];
            if slot.returns_logprobs
                && let Some(logprobs) = processors.logprobs(slot.processor)
            {
                slot.output = self.outputs.logprob_words() as u32;
                let words = logprob_words.by_ref().take(logprobs.shape.words());
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
            *next += slot.len();
        }
        self.outputs.extend(outputs);
        valid
    }
}
