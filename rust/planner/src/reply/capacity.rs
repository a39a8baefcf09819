//! Rejection of requests whose outputs exceed the response buffer.

use std::cmp::Reverse;

use pie_wire::{LogprobRows, RESPONSE_ROOT_LEN};

use crate::frame::request::PlannedRequest;
use crate::limits::Limits;
use crate::sampler::SlotClass;
use crate::slot::{SamplingSlot, SamplingSlots, WORD};

/// `(output bytes, request index)` of the requests to reject so that the response fits [`Limits::reply_bytes`], largest outputs
/// first. All drafts count as accepted. A fast reply that loses a token becomes a longer archive, so this is checked again.
pub(crate) fn oversize_requests(
    requests: &[PlannedRequest],
    slots: &SamplingSlots,
    limits: &Limits,
) -> Vec<(usize, usize)> {
    let limit = limits.reply_bytes as usize;
    let empty = empty_bytes(requests.len(), slots);
    // Fast path: an upper bound fits.
    let logprob_bytes = match slots.logprob_bytes() {
        0 => 0,
        bytes => bytes + LogprobRows::END_BYTES,
    };
    if empty + WORD * slots.all().len() + slots.probe_bytes() + logprob_bytes <= limit {
        return Vec::new();
    }
    let size = |request: &PlannedRequest| output_bytes(request, slots);
    let outputs: usize = requests.iter().map(size).sum();
    let end = if logprob_bytes > 0 {
        LogprobRows::END_BYTES
    } else {
        0
    };
    let excess = (empty + outputs + end).saturating_sub(limit);
    if excess == 0 || is_fast(requests, slots, limit.saturating_sub(logprob_bytes)) {
        return Vec::new();
    }
    let mut largest: Vec<_> = requests.iter().map(size).zip(0..).collect();
    largest.sort_unstable_by_key(|&entry| Reverse(entry));
    let mut saved = 0;
    let needed = largest.iter().take_while(|&&(bytes, _)| {
        let needed = saved < excess && bytes > 0;
        saved += bytes;
        needed
    });
    largest.truncate(needed.count());
    largest
}

/// Whether the fast reply is certain and fits. A request with an adapter may still be rejected.
fn is_fast(requests: &[PlannedRequest], slots: &SamplingSlots, limit: usize) -> bool {
    let one_token = |request: &PlannedRequest| {
        request.drafts() == 0 && request.slots().len() == 1 && request.adapter().is_none()
    };
    !slots.has_probes()
        && slots.count(SlotClass::Prompt) == 0
        && requests.iter().all(one_token)
        && pie_wire::fast_tokens_len(requests.len()) <= limit
}

/// Bytes of the outputs of a request, without its offsets.
fn output_bytes(request: &PlannedRequest, slots: &SamplingSlots) -> usize {
    let own = slots.of(request.slots());
    // Slots of prompt log-probabilities yield no token.
    let tokens = own.iter().filter(|slot| slot.class().is_token()).count();
    let tokens = match request.drafts() {
        0 => WORD * tokens,
        drafts => WORD * tokens.min(drafts + 1),
    };
    let probes = own.iter().map(SamplingSlot::probe_bytes);
    let logprob_bytes = WORD
        * own
            .iter()
            .map(|slot| slots.logprob_words(slot))
            .sum::<usize>();
    let row = if logprob_bytes > 0 {
        LogprobRows::ROW_BYTES
    } else {
        0
    };
    tokens + probes.sum::<usize>() + logprob_bytes + row
}

/// Bytes of the response without any output.
fn empty_bytes(requests: usize, slots: &SamplingSlots) -> usize {
    let offsets = match requests {
        0 => 0,
        requests => WORD * (requests + 1),
    };
    let probes = [
        (SlotClass::Dist, WORD),
        (SlotClass::Logits, WORD),
        (SlotClass::Logprobs, WORD),
        (SlotClass::Entropy, 0),
    ];
    let asked = probes.iter().filter(|(class, _)| slots.count(*class) > 0);
    RESPONSE_ROOT_LEN + offsets + asked.map(|(_, more)| offsets + more).sum::<usize>()
}
