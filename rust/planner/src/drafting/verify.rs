//! Draft verification: the longest prefix of drafts that equals the sampled tokens is accepted.
//!
//! There is no rejection sampling: each position is sampled from the model's own distribution, and a draft is accepted if it is
//! the sampled token. So drafts never change the distribution of outputs.

use crate::frame::request::PlannedRequest;
use crate::slot::SamplingSlot;

/// Tokens that a request returns: one per token slot, or with drafts the accepted ones and one more. `token_ids` are those of
/// the whole plan.
pub(crate) fn token_count(
    request: &PlannedRequest,
    slots: &[SamplingSlot],
    token_ids: &[u32],
) -> usize {
    match request.drafts() {
        0 => slots.iter().filter(|slot| slot.class().is_token()).count(),
        _ => verified(request, slots, token_ids),
    }
}

/// Accepted drafts and one more.
fn verified(request: &PlannedRequest, slots: &[SamplingSlot], token_ids: &[u32]) -> usize {
    let drafts = &token_ids[request.inputs().end..request.tokens().end()];
    // Verifying slots come first; there are none without samplers.
    let tokens = slots.iter().take_while(|slot| slot.class().is_token());
    let slots = &slots[..tokens.count().min(drafts.len() + 1)];
    let matching = slots
        .iter()
        .zip(drafts)
        .take_while(|(slot, draft)| slot.token() == **draft)
        .count();
    slots.len().min(matching + 1)
}
