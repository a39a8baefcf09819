//! The engine's outputs, stored group by group until the reply.

use std::ops::Range;

/// The engine's outputs for a sampling group: each array has the values of the slots of its class, in the order of the group.
#[derive(Debug, Clone, Copy, Default)]
pub struct Outputs<'a> {
    /// One token of each token slot; a token outside the vocabulary marks NaN logits.
    pub tokens: &'a [i64],
    /// The ids of each distribution, most probable first.
    pub dist_ids: &'a [i64],
    /// Their probabilities.
    pub dist_probs: &'a [f32],
    /// The logits of each raw slot.
    pub logits: &'a [f32],
    /// The log-probabilities of the requested tokens.
    pub logprobs: &'a [f32],
    /// One entropy of each entropy slot, in nats.
    pub entropies: &'a [f32],
    /// The words of each [position](crate::LogprobPosition), whatever the class of its slot, as
    /// [`LogprobShape::words`](pie_wire::LogprobShape::words) says.
    pub logprob_words: &'a [i32],
}

/// Outputs of probes and log-probabilities of a frame, by class.
#[derive(Debug, Default)]
pub(crate) struct ProbeOutputs {
    dist_ids: Vec<u32>,
    dist_probs: Vec<f32>,
    logits: Vec<u8>,
    logprobs: Vec<f32>,
    entropies: Vec<f32>,
    /// Log-probabilities; see [`LogprobShape::words`](pie_wire::LogprobShape::words).
    positions: Vec<u32>,
}

impl ProbeOutputs {
    pub(crate) fn clear(&mut self) {
        self.dist_ids.clear();
        self.dist_probs.clear();
        self.logits.clear();
        self.logprobs.clear();
        self.entropies.clear();
        self.positions.clear();
    }

    /// Values of each class: distributions, logits, log-probabilities, entropies.
    pub(crate) const fn lens(&self) -> [usize; 4] {
        [
            self.dist_probs.len(),
            self.logits.len() / size_of::<f32>(),
            self.logprobs.len(),
            self.entropies.len(),
        ]
    }

    /// Words of log-probabilities.
    pub(crate) const fn logprob_words(&self) -> usize {
        self.positions.len()
    }

    /// Appends log-probabilities.
    pub(crate) fn push_words(&mut self, words: impl Iterator<Item = u32>) {
        self.positions.extend(words);
    }

    /// Log-probabilities by their words.
    pub(crate) fn position(&self, words: Range<usize>) -> &[u32] {
        &self.positions[words]
    }

    /// Appends the probes of a group.
    pub(crate) fn extend(&mut self, outputs: &Outputs<'_>) {
        // Ids come from arg-sorting a row of the vocabulary's length.
        let ids = outputs.dist_ids.iter().map(|&id| id as u32);
        self.dist_ids.extend(ids);
        self.dist_probs.extend_from_slice(outputs.dist_probs);
        let logits = bytemuck::cast_slice(outputs.logits);
        self.logits.extend_from_slice(logits);
        self.logprobs.extend_from_slice(outputs.logprobs);
        self.entropies.extend_from_slice(outputs.entropies);
    }

    /// Ids and probabilities.
    pub(crate) fn dists(&self, values: Range<usize>) -> (&[u32], &[f32]) {
        (&self.dist_ids[values.clone()], &self.dist_probs[values])
    }

    /// As bytes of float32.
    pub(crate) fn logits(&self, values: Range<usize>) -> &[u8] {
        &self.logits[size_of::<f32>() * values.start..size_of::<f32>() * values.end]
    }

    pub(crate) fn logprobs(&self, values: Range<usize>) -> &[f32] {
        &self.logprobs[values]
    }

    pub(crate) fn entropies(&self, values: Range<usize>) -> &[f32] {
        &self.entropies[values]
    }
}
