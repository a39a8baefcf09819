//! An engine without a model: outputs of the right lengths, worked out from the staged arrays alone.

use pie_batch::{FieldId, Outputs, Planner, SlotClass, SlotGroup};

/// Token 1 and zeros for whatever is asked; its memory is reused.
#[derive(Debug, Default)]
pub(crate) struct Engine {
    tokens: Vec<i64>,
    dist_ids: Vec<i64>,
    floats: Vec<f32>,
}

impl Engine {
    /// Stages and answers all that is left of the planned frame.
    pub(crate) fn run(&mut self, planner: &mut Planner, block: &mut [u8]) {
        while planner.stage(block).expect("the block fits").is_some() {
            while let Some(group) = planner.stage_slots(block).expect("the block fits") {
                self.answer(planner, block, &group);
            }
        }
    }

    /// Answers the staged group.
    pub(crate) fn answer(&mut self, planner: &mut Planner, block: &[u8], group: &SlotGroup) {
        let tokens = group.count(SlotClass::Greedy)
            + group.count(SlotClass::Plain)
            + group.count(SlotClass::Filtered);
        let dists = group.count(SlotClass::Dist);
        let top_ks = planner.layout().field(FieldId::TopKs);
        let top_ks: &[i32] = bytemuck::cast_slice(&block[top_ks.offset..][..4 * group.len()]);
        let ids = top_ks[tokens..][..dists].iter().map(|&k| k as usize).sum();
        let logits = group.count(SlotClass::Logits) * planner.limits().vocab_size as usize;
        let logprobs = planner.group_labels().len();
        let entropies = group.count(SlotClass::Entropy);
        self.tokens.resize(tokens, 1);
        self.dist_ids.resize(ids, 0);
        let longest = ids.max(logits).max(logprobs).max(entropies);
        self.floats.resize(longest, 0.0);
        let outputs = Outputs {
            tokens: &self.tokens,
            dist_ids: &self.dist_ids,
            dist_probs: &self.floats[..ids],
            logits: &self.floats[..logits],
            logprobs: &self.floats[..logprobs],
            entropies: &self.floats[..entropies],
        };
        planner
            .put_outputs(&outputs)
            .expect("outputs of the lengths asked for");
    }
}
