//! Which requests' outputs a response has room for.

use std::cmp::Reverse;

use pie_wire::{AnswerRows, RESPONSE_ROOT_LEN};

use crate::frame::request::Request;
use crate::limits::Limits;
use crate::sampler::SlotClass;
use crate::slot::{Slots, WORD};

/// The requests to empty, those with the largest outputs first, until the response fits into the limits' `reply_bytes`:
/// the bytes of their outputs, and their numbers. How many drafts will be accepted is not known yet, so all of them count.
/// A fast reply that loses a token becomes an archive, which is longer: what is left is looked at again then.
pub(crate) fn oversize_requests(
    requests: &[Request],
    slots: &Slots,
    limits: &Limits,
) -> Vec<(usize, usize)> {
    let limit = limits.reply_bytes as usize;
    let empty = empty_bytes(requests.len(), slots);
    // The usual batch: no output is so large that they need be counted one by one.
    let places = match slots.place_bytes() {
        0 => 0,
        bytes => bytes + AnswerRows::END_BYTES,
    };
    if empty + WORD * slots.all().len() + slots.probe_bytes() + places <= limit {
        return Vec::new();
    }
    let size = |request: &Request| output_bytes(request, slots, limits.vocab_size);
    let outputs: usize = requests.iter().map(size).sum();
    let end = if places > 0 { AnswerRows::END_BYTES } else { 0 };
    let excess = (empty + outputs + end).saturating_sub(limit);
    if excess == 0 || is_fast(requests, slots, limit.saturating_sub(places)) {
        return Vec::new();
    }
    let mut largest: Vec<_> = requests.iter().map(size).zip(0..).collect();
    largest.sort_unstable_by_key(|&place| Reverse(place));
    let mut saved = 0;
    let needed = largest.iter().take_while(|&&(bytes, _)| {
        let needed = saved < excess && bytes > 0;
        saved += bytes;
        needed
    });
    largest.truncate(needed.count());
    largest
}

/// Whether the fast reply will do whatever comes, and fits. A request may yet lose its adapter, and its token with it.
fn is_fast(requests: &[Request], slots: &Slots, limit: usize) -> bool {
    let one_token = |request: &Request| {
        request.drafts() == 0 && request.slots().len() == 1 && request.adapter().is_none()
    };
    !slots.has_probes()
        && slots.count(SlotClass::Prompt) == 0
        && requests.iter().all(one_token)
        && pie_wire::fast_tokens_len(requests.len()) <= limit
}

/// Bytes that the outputs of a request take, besides the offsets that every request has.
fn output_bytes(request: &Request, slots: &Slots, vocab_size: u32) -> usize {
    let own = slots.of(request.slots());
    // Log-probabilities of a prompt have slots as well, which bring no token.
    let tokens = own.iter().filter(|slot| slot.class().is_token()).count();
    let tokens = match request.drafts() {
        0 => WORD * tokens,
        drafts => WORD * tokens.min(drafts + 1),
    };
    let probes = own.iter().map(|slot| slot.probe_bytes(vocab_size));
    let places = WORD
        * own
            .iter()
            .map(|slot| slots.place_words(slot))
            .sum::<usize>();
    let row = if places > 0 { AnswerRows::ROW_BYTES } else { 0 };
    tokens + probes.sum::<usize>() + places + row
}

/// Bytes of the response without any output.
fn empty_bytes(requests: usize, slots: &Slots) -> usize {
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
