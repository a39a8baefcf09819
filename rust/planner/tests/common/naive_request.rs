//! The naive planner: validation of a request.

use std::collections::BTreeSet;

use pie_planner::{Limits, SlotClass};
use pie_wire::{ForwardRequest, LogprobOptions};

use crate::common::naive::{Adapters, Request, Row, Slot, part, spans, storage};
use crate::common::naive_sampling::{outputs, sampled};

pub(crate) fn request(
    limits: &Limits,
    adapters: &Adapters,
    frame: &ForwardRequest,
    r: usize,
    asked: Option<&LogprobOptions>,
) -> Request {
    let tokens = part(&frame.token_ids, &frame.qo_indptr, r);
    let samplers = part(&frame.samplers, &frame.sampler_indptr, r);
    let drafts = part(&frame.spec_token_ids, &frame.spec_indptr, r);
    let mut request = Request::default();
    if tokens.is_empty() {
        if !samplers.is_empty() || !drafts.is_empty() {
            request.refused.insert("no-tokens");
        }
        return request;
    }
    request.pages = part(&frame.kv_page_indices, &frame.kv_page_indptr, r).to_vec();
    request.drafts = drafts.to_vec();
    let positions = positions(frame, r, drafts.len());
    refuse(
        &mut request.refused,
        spans(&frame.image_indptr, r) + spans(&frame.audio_indptr, r) > 0,
        "media",
    );
    let adapter = frame.adapter_bindings[r].adapter_id;
    request.adapter = (adapter != -1).then_some(adapter);
    let known = adapters.slots > 0 && adapters.loaded.contains(&adapter);
    refuse(&mut request.refused, adapter != -1 && !known, "adapter");
    let all = || tokens.iter().chain(drafts);
    refuse(
        &mut request.refused,
        all().any(|&id| id >= limits.vocab_size),
        "token-id",
    );
    refuse(
        &mut request.refused,
        positions
            .iter()
            .any(|&at| at >= u64::from(limits.max_positions)),
        "position",
    );
    let kv_end = kv_end(limits, frame, r, &mut request.refused);
    request.sees = masks(frame, r, kv_end, &mut request.refused);
    let rows = tokens.len() + drafts.len();
    let split = request.sees_ahead() && rows > limits.chunk_tokens as usize;
    refuse(&mut request.refused, split, "mask-ahead");
    let Some(kv_end) = kv_end.filter(|_| request.refused.is_empty()) else {
        return request;
    };
    let first = kv_end - tokens.len() as u64;
    request.rows = all()
        .zip(&positions)
        .zip(first..)
        .map(|((&token, &position), index)| Row {
            token,
            position: position as u32,
            index,
            storage: storage(limits, &request.pages, index),
        })
        .collect();
    outputs(limits, frame, r, &mut request);
    if let Some(asked) = asked.filter(|_| request.rejected.is_empty()) {
        ask(limits, asked, r, tokens, &mut request);
    }
    request
}

/// Adds a position for each token of the prompt whose log-probabilities are asked for, on the row before it.
pub(crate) fn ask(
    limits: &Limits,
    asked: &LogprobOptions,
    r: usize,
    tokens: &[u32],
    request: &mut Request,
) {
    request.asked = Some(asked.clone());
    let Some(prompt) = asked.prompt else { return };
    for row in 0..tokens.len() {
        let index = request.rows[row].index + 1;
        if !(u64::from(prompt.from)..u64::from(prompt.end)).contains(&index) {
            continue;
        }
        let token = tokens.get(row + 1).copied().unwrap_or(prompt.next);
        let number = |slot: &&Slot| slot.class == SlotClass::Prompt;
        let slot = Slot {
            request: r,
            number: request.slots.iter().filter(number).count(),
            row,
            class: SlotClass::Prompt,
            labels: vec![token],
            ..sampled(limits, None)
        };
        request.slots.push(slot);
    }
}

pub(crate) fn refuse(errors: &mut BTreeSet<&'static str>, broken: bool, kind: &'static str) {
    if broken {
        errors.insert(kind);
    }
}

/// Positions of the inputs and of the drafts; the latter consecutive unless the frame has one for each draft.
fn positions(frame: &ForwardRequest, r: usize, drafts: usize) -> Vec<u64> {
    let inputs = part(&frame.position_ids, &frame.qo_indptr, r);
    let mut all: Vec<_> = inputs.iter().map(|&at| u64::from(at)).collect();
    if frame.spec_position_ids.len() == frame.spec_token_ids.len() {
        let given = part(&frame.spec_position_ids, &frame.spec_indptr, r);
        all.extend(given.iter().map(|&at| u64::from(at)));
    } else {
        let last = all[all.len() - 1];
        all.extend((0..drafts as u64).map(|draft| last + 1 + draft));
    }
    all
}

/// KV length after the inputs; `None` when the page list and its last length give none that fits.
fn kv_end(
    limits: &Limits,
    frame: &ForwardRequest,
    r: usize,
    errors: &mut BTreeSet<&'static str>,
) -> Option<u64> {
    let pages = part(&frame.kv_page_indices, &frame.kv_page_indptr, r);
    let inputs = i128::from(frame.qo_indptr[r + 1] - frame.qo_indptr[r]);
    let drafts = part(&frame.spec_token_ids, &frame.spec_indptr, r).len() as i128;
    let length = i128::from(frame.kv_last_page_lens[r]);
    let page_size = i128::from(limits.page_size);
    let valid = (1..=page_size).contains(&length);
    refuse(errors, pages.is_empty(), "no-pages");
    refuse(
        errors,
        pages.iter().any(|&page| page >= limits.total_pages),
        "page-id",
    );
    refuse(errors, !valid, "last-page-length");
    if pages.is_empty() || !valid {
        return None;
    }
    let end = (pages.len() as i128 - 1) * page_size + (length + drafts - 1) % page_size + 1;
    let (short, long) = (
        end - drafts < inputs,
        end > i128::from(limits.row_pages) * page_size,
    );
    refuse(errors, short, "geometry");
    refuse(errors, long, "kv-length");
    (!short && !long).then_some((end - drafts) as u64)
}

pub(crate) fn masks(
    frame: &ForwardRequest,
    r: usize,
    kv_end: Option<u64>,
    errors: &mut BTreeSet<&'static str>,
) -> Option<Vec<Vec<bool>>> {
    let rows = part(&frame.masks, &frame.mask_indptr, r);
    let positions = part(&frame.position_ids, &frame.qo_indptr, r);
    if !frame.has_user_mask || rows.is_empty() {
        return None;
    }
    if rows.len() != positions.len() {
        errors.insert("mask-rows");
        return None;
    }
    // Without a geometry there is no causality to compare with.
    let kv_end = kv_end?;
    let drafts = part(&frame.spec_token_ids, &frame.spec_indptr, r).len() as u64;
    let up_to = |own: u64| (0..kv_end + drafts).map(|index| index <= own).collect();
    let mut all_causal = true;
    let mut sees: Vec<Vec<bool>> = Vec::new();
    for (row, (mask, &position)) in rows.iter().zip(positions).enumerate() {
        let runs = &mask.buffer;
        let synthesized =
            runs.len() == 2 && runs[0] == 0 && u64::from(runs[1]) == u64::from(position) + 1;
        let own = kv_end - positions.len() as u64 + row as u64;
        let bits = expand(runs, kv_end);
        let causal = (0..kv_end).all(|index| bits[index as usize] == (index <= own));
        all_causal &= runs.is_empty() || synthesized || causal;
        sees.push(if runs.is_empty() {
            up_to(own)
        } else {
            expand(runs, kv_end + drafts)
        });
    }
    sees.extend((kv_end..kv_end + drafts).map(up_to));
    (!all_causal).then_some(sees)
}

/// The first `limit` bits of a bit string.
pub(crate) fn expand(runs: &[u32], limit: u64) -> Vec<bool> {
    let mut bits = Vec::new();
    for (number, &run) in runs.iter().enumerate() {
        for _ in 0..u64::from(run).min(limit) {
            bits.push(number % 2 == 1);
        }
    }
    bits.resize((limit as usize).max(bits.len()), false);
    bits.truncate(limit as usize);
    bits
}
