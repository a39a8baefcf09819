//! The naive planner: sampling slots.

use pie_planner::{Limits, SlotClass};
use pie_wire::{ForwardRequest, Sampler};

use crate::common::naive::{Request, Slot, is_token, part};
use crate::common::naive_request::{expand, refuse};

pub(crate) fn outputs(limits: &Limits, frame: &ForwardRequest, r: usize, request: &mut Request) {
    let inputs = part(&frame.token_ids, &frame.qo_indptr, r).len();
    let rows = part(&frame.sampling_indices, &frame.sampling_indptr, r);
    let samplers = part(&frame.samplers, &frame.sampler_indptr, r);
    let logit_masks = part(&frame.logit_masks, &frame.logit_mask_indptr, r);
    let rejected = &mut request.rejected;
    refuse(
        rejected,
        rows.iter().any(|&row| row as usize >= inputs),
        "sampling-index",
    );
    refuse(
        rejected,
        !samplers.is_empty() && logit_masks.len() > 1,
        "logit-masks",
    );
    if !rejected.is_empty() || samplers.is_empty() {
        return;
    }
    let runs = logit_masks.first().map_or(&[][..], |mask| &mask.buffer);
    let bits = expand(runs, u64::from(limits.vocab_size));
    let forbidden = !runs.is_empty() && !bits.contains(&true);
    request.mask = (!runs.is_empty() && !forbidden).then_some(bits);
    // Per output: row, sampler (`None` = arg-max) and sampler slot. Verification stands for all token samplers.
    let mut wanted: Vec<(usize, Option<&Sampler>, usize)> = Vec::new();
    if !request.drafts.is_empty() {
        let first = Some(&samplers[0]).filter(|sampler| is_token(sampler));
        wanted.extend((inputs - 1..request.rows.len()).map(|row| (row, first, 0)));
    }
    for (number, (&row, sampler)) in rows.iter().zip(samplers).enumerate() {
        let verified = is_token(sampler) && !request.drafts.is_empty();
        if *sampler != Sampler::Embedding && !verified {
            wanted.push((row as usize, Some(sampler), number));
        }
    }
    let (mut tokens, mut probes) = (0.., 0..);
    for (row, sampler, number) in wanted {
        let arg_max = forbidden && sampler.is_some_and(is_token);
        let sampler = sampler.filter(|_| !arg_max);
        let mut slot = sampled(limits, sampler);
        let numbers = if slot.class.is_token() {
            &mut tokens
        } else {
            &mut probes
        };
        slot.number = numbers.next().expect("numbers do not end");
        (slot.request, slot.row) = (r, row);
        slot.key = seed(sampler).map(|seed| (seed, request.rows[row].position, number));
        request.slots.push(slot);
    }
}

fn seed(sampler: Option<&Sampler>) -> Option<u32> {
    match sampler {
        Some(&Sampler::Multinomial { seed, .. }) if seed >= 2 => Some(seed),
        _ => None,
    }
}

/// The slot of a sampler with every parameter in range.
pub(crate) fn sampled(limits: &Limits, sampler: Option<&Sampler>) -> Slot {
    let (temperature, k, p, min_p) = match sampler.cloned() {
        Some(Sampler::Multinomial { temperature, .. }) => (temperature, 0, 1.0, 0.0),
        Some(Sampler::TopK { temperature, k }) => (temperature, k, 1.0, 0.0),
        Some(Sampler::TopP { temperature, p }) => (temperature, 0, p, 0.0),
        Some(Sampler::MinP { temperature, p }) => (temperature, 0, 1.0, p),
        Some(Sampler::TopKTopP { temperature, k, p }) => (temperature, k, p, 0.0),
        Some(Sampler::Dist {
            temperature,
            num_tokens,
        }) => (temperature, num_tokens, 1.0, 0.0),
        _ => (0.0, 0, 1.0, 0.0),
    };
    let all = limits.vocab_size;
    let top_k = if k == 0 { all } else { k.min(all) };
    let top_p = if p.is_nan() { 1.0 } else { p.clamp(0.0, 1.0) };
    let min_p = if min_p.is_nan() {
        0.0
    } else {
        min_p.clamp(0.0, 1.0)
    };
    let filters = top_k != all || top_p < 1.0 || min_p > 0.0;
    let random = temperature > 1e-5;
    let class = match (sampler, random, filters) {
        (Some(Sampler::Dist { .. }), ..) => SlotClass::Dist,
        (Some(Sampler::RawLogits), ..) => SlotClass::Logits,
        (Some(Sampler::Logprob { .. } | Sampler::Logprobs { .. }), ..) => SlotClass::Logprobs,
        (Some(Sampler::Entropy), ..) => SlotClass::Entropy,
        (_, false, _) => SlotClass::Greedy,
        (_, true, false) => SlotClass::Plain,
        (_, true, true) => SlotClass::Filtered,
    };
    Slot {
        request: 0,
        number: 0,
        row: 0,
        class,
        temperature: match (random, class) {
            (true, _) => temperature.min(f32::MAX),
            (false, SlotClass::Greedy) => 1.0,
            (false, _) => 0.0,
        },
        top_k,
        top_p,
        min_p,
        key: None,
        labels: match sampler {
            Some(Sampler::Logprob { token_id }) => vec![*token_id],
            Some(Sampler::Logprobs { token_ids }) => token_ids.clone(),
            _ => Vec::new(),
        },
    }
}
