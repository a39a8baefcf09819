//! Which drafts came true.

use crate::frame::request::Request;
use crate::slot::Slot;

/// Tokens that a request returns: one of each token slot, or what verification yields. `slots` are its own, `token_ids`
/// those of all rows of the plan.
pub(crate) fn token_count(request: &Request, slots: &[Slot], token_ids: &[u32]) -> usize {
    match request.drafts() {
        0 => slots.iter().filter(|slot| slot.class().is_token()).count(),
        _ => verified(request, slots, token_ids),
    }
}

/// Tokens that verification yields for a request with drafts: those accepted (equal to what was sampled in their place)
/// and one more.
fn verified(request: &Request, slots: &[Slot], token_ids: &[u32]) -> usize {
    let drafts = &token_ids[request.inputs().end..request.rows().end()];
    // What verifies comes first; without samplers there is nothing of it.
    let tokens = slots.iter().take_while(|slot| slot.class().is_token());
    let slots = &slots[..tokens.count().min(drafts.len() + 1)];
    let matching = slots
        .iter()
        .zip(drafts)
        .take_while(|(slot, draft)| slot.token() == **draft)
        .count();
    slots.len().min(matching + 1)
}
