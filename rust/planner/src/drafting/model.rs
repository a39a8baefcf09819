//! Drafts of a draft model, which the captured graph of a step computes beside the sampled tokens.

use pie_speculation::DraftProposal;

use crate::slot::SamplingSlot;

/// Match length by which the policy groups these drafts: with it every draft of a chain has counts of its own.
const MATCH_LENGTH: usize = 1;

/// The draft tokens of each sampling slot of a frame; empty if the frame did not run as a graph that drafts.
#[derive(Debug, Default)]
pub(crate) struct ModelDrafts {
    /// `[slots, num_drafts]`; tokens outside the vocabulary stand for none.
    tokens: Vec<u32>,
    num_drafts: usize,
}

impl ModelDrafts {
    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.num_drafts = 0;
    }

    /// Starts a frame with `num_drafts` drafts for each slot.
    pub(crate) fn start(&mut self, num_drafts: usize) {
        self.clear();
        self.num_drafts = num_drafts;
    }

    /// Appends the drafts of the next slot.
    pub(crate) fn push(&mut self, tokens: impl Iterator<Item = u32>) {
        self.tokens.extend(tokens);
    }

    /// The drafts that continue token number `token` of a request, whose slots start at index `first` of the frame.
    pub(crate) fn after(&self, first: usize, slots: &[SamplingSlot], token: usize) -> &[u32] {
        let mut tokens = slots.iter().enumerate();
        let nth = tokens
            .by_ref()
            .filter(|(_, slot)| slot.class().is_token())
            .nth(token);
        let own = nth.map(|(offset, _)| (first + offset) * self.num_drafts);
        own.and_then(|start| self.tokens.get(start..start + self.num_drafts))
            .unwrap_or(&[])
    }
}

/// The proposal of a draft model for a context: `drafts` tokens.
pub(crate) fn model_proposal(context: u64, drafts: usize) -> DraftProposal {
    DraftProposal {
        context,
        match_length: MATCH_LENGTH,
        drafts,
        ..DraftProposal::default()
    }
}
