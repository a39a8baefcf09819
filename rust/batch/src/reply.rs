//! From the slots' outputs to response bytes.

use std::mem;
use std::time::Instant;

use pie_wire::{ForwardResponse, ResponseFrame, ResponsePayload, ResponseRule, WireError};
use thiserror::Error;

use crate::plan::Plan;
use crate::sampler::SlotClass;
use crate::slot::{Slot, Slots};
use crate::verify::token_count;

/// Driver-side timings of one forward, in µs; 0 = not measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Probes {
    /// Copying and validating the archive.
    pub wire_parse: u32,
    /// Planning and staging.
    pub plan: u32,
    /// Host-to-device copies.
    pub h2d: u32,
    /// Issuing the forward pass and sampling.
    pub kernel_launch: u32,
    /// Waiting for the sampled tokens.
    pub sync: u32,
}

/// A response that must not be sent.
#[derive(Debug, Error)]
pub enum ReplyError {
    /// It does not fit the buffer.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The runtime would index the arrays out of bounds.
    #[error("the response breaks a rule of the protocol: {0}")]
    Rule(#[from] ResponseRule),
}

/// The response under construction; its arrays are reused.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    response: ForwardResponse,
}

impl Reply {
    /// Encodes the answer to a computed frame into `buffer` and returns its length: the fast token reply when every request
    /// has exactly one token, else a response archive, which says how much time went by since `started`.
    pub(crate) fn write(
        &mut self,
        plan: &Plan,
        probes: Probes,
        buffer: &mut [u8],
        started: Instant,
    ) -> Result<usize, ReplyError> {
        if self.gather_fast(plan) {
            let tokens = &self.response.tokens;
            return Ok(pie_wire::encode_fast_tokens(
                plan.driver_id(),
                tokens,
                buffer,
            )?);
        }
        self.gather(plan);
        self.response.check()?;
        let length = self.encode(plan.driver_id(), probes, buffer)?;
        let micros = u32::try_from(started.elapsed().as_micros()).unwrap_or(u32::MAX);
        pie_wire::set_response_build_us(&mut buffer[..length], micros);
        Ok(length)
    }

    /// Lists one token for each request; `false` when some request has more or fewer.
    fn gather_fast(&mut self, plan: &Plan) -> bool {
        if plan.slots().has_probes() || plan.drafts().any() {
            return false;
        }
        let (requests, slots) = (plan.requests(), plan.slots());
        let token_ids = plan.rows().token_ids();
        let tokens = &mut self.response.tokens;
        tokens.clear();
        for request in requests {
            match (request.drafts(), slots.of(request.slots())) {
                (0, [slot]) => tokens.push(slot.token()),
                (1.., slots) if token_count(request, slots, token_ids) == 1 => {
                    tokens.push(slots[0].token());
                }
                _ => return false,
            }
        }
        !requests.is_empty()
    }

    /// Lists the outputs of every request, each kind in the order of its samplers.
    fn gather(&mut self, plan: &Plan) {
        let vocab_size = plan.limits().vocab_size;
        let slots = plan.slots();
        self.start(plan.request_count(), slots);
        for request in plan.requests() {
            let own = slots.of(request.slots());
            let mut tokens = match request.drafts() {
                0 => own.len(),
                _ => token_count(request, own, plan.rows().token_ids()),
            };
            for slot in own {
                if !slot.class().is_token() {
                    self.add_probe(slot, slots, vocab_size);
                } else if tokens > 0 {
                    self.response.tokens.push(slot.token());
                    tokens -= 1;
                }
            }
            self.end_request(slots);
        }
        self.gather_drafts(plan);
    }

    fn gather_drafts(&mut self, plan: &Plan) {
        let response = &mut self.response;
        if plan.drafts().any() {
            response.spec_indptr.push(0);
        }
        for (tokens, first_position) in plan.drafts().drafts() {
            response.spec_tokens.extend_from_slice(tokens);
            response
                .spec_positions
                .extend((first_position..).take(tokens.len()));
            response.spec_indptr.push(response.spec_tokens.len() as u32);
        }
    }

    fn encode(
        &mut self,
        driver_id: u32,
        probes: Probes,
        buffer: &mut [u8],
    ) -> Result<usize, WireError> {
        let response = &mut self.response;
        response.probe_wire_parse_us = probes.wire_parse;
        response.probe_plan_us = probes.plan;
        response.probe_h2d_us = probes.h2d;
        response.probe_kernel_launch_us = probes.kernel_launch;
        response.probe_sync_us = probes.sync;
        // The payload owns the arrays only while it is encoded; they come back for the next frame.
        let frame = ResponseFrame {
            driver_id,
            aborted: false,
            payload: ResponsePayload::Forward(mem::take(response)),
        };
        let written = pie_wire::encode_response(&frame, buffer);
        if let ResponsePayload::Forward(response) = frame.payload {
            self.response = response;
        }
        written
    }

    /// Empties the arrays and gives those of the kinds that are asked for their first offset.
    fn start(&mut self, requests: usize, slots: &Slots) {
        let r = &mut self.response;
        r.num_requests = requests as u32;
        for offsets in [
            &mut r.tokens_indptr,
            &mut r.tokens,
            &mut r.dists_req_indptr,
            &mut r.dists_kv_indptr,
            &mut r.dists_ids,
            &mut r.logits_req_indptr,
            &mut r.logits_byte_indptr,
            &mut r.logprobs_req_indptr,
            &mut r.logprobs_val_indptr,
            &mut r.entropies_indptr,
            &mut r.spec_indptr,
            &mut r.spec_tokens,
            &mut r.spec_positions,
        ] {
            offsets.clear();
        }
        for values in [&mut r.dists_probs, &mut r.logprobs_values, &mut r.entropies] {
            values.clear();
        }
        r.logits_bytes.clear();
        if requests == 0 {
            return;
        }
        r.tokens_indptr.push(0);
        for (class, offsets) in [
            (
                SlotClass::Dist,
                [&mut r.dists_req_indptr, &mut r.dists_kv_indptr].as_mut_slice(),
            ),
            (
                SlotClass::Logits,
                &mut [&mut r.logits_req_indptr, &mut r.logits_byte_indptr],
            ),
            (
                SlotClass::Logprobs,
                &mut [&mut r.logprobs_req_indptr, &mut r.logprobs_val_indptr],
            ),
            (SlotClass::Entropy, &mut [&mut r.entropies_indptr]),
        ] {
            if slots.count(class) > 0 {
                for offsets in offsets {
                    offsets.push(0);
                }
            }
        }
    }

    fn add_probe(&mut self, slot: &Slot, slots: &Slots, vocab_size: u32) {
        let r = &mut self.response;
        let values = slot.output(vocab_size);
        match slot.class() {
            SlotClass::Greedy | SlotClass::Plain | SlotClass::Filtered => {}
            SlotClass::Dist => {
                let (ids, probs) = slots.outputs().dists(values);
                r.dists_ids.extend_from_slice(ids);
                r.dists_probs.extend_from_slice(probs);
                r.dists_kv_indptr.push(r.dists_ids.len() as u32);
            }
            SlotClass::Logits => {
                r.logits_bytes
                    .extend_from_slice(slots.outputs().logits(values));
                r.logits_byte_indptr.push(r.logits_bytes.len() as u32);
            }
            SlotClass::Logprobs => {
                r.logprobs_values
                    .extend_from_slice(slots.outputs().logprobs(values));
                r.logprobs_val_indptr.push(r.logprobs_values.len() as u32);
            }
            SlotClass::Entropy => r
                .entropies
                .extend_from_slice(slots.outputs().entropies(values)),
        }
    }

    /// Notes where the outputs of a request end.
    fn end_request(&mut self, slots: &Slots) {
        let r = &mut self.response;
        r.tokens_indptr.push(r.tokens.len() as u32);
        for (class, offsets, entries) in [
            (
                SlotClass::Dist,
                &mut r.dists_req_indptr,
                r.dists_kv_indptr.len(),
            ),
            (
                SlotClass::Logits,
                &mut r.logits_req_indptr,
                r.logits_byte_indptr.len(),
            ),
            (
                SlotClass::Logprobs,
                &mut r.logprobs_req_indptr,
                r.logprobs_val_indptr.len(),
            ),
            // Its values have no offsets of their own.
            (
                SlotClass::Entropy,
                &mut r.entropies_indptr,
                r.entropies.len() + 1,
            ),
        ] {
            if slots.count(class) > 0 {
                offsets.push(entries as u32 - 1);
            }
        }
    }
}
