//! Encodes the response of a computed plan.

pub(crate) mod capacity;

use std::mem;
use std::time::Instant;

use pie_wire::{
    ForwardResponse, LogprobRows, LogprobShape, ResponseFrame, ResponsePayload, ResponseRule,
    WireError,
};
use thiserror::Error;

use crate::drafting::verify::token_count;
use crate::frame::request::PlannedRequest;
use crate::plan::Plan;
use crate::sampler::SlotClass;
use crate::slot::{SamplingSlot, SamplingSlots};

/// Driver-side timings of one forward, in µs; 0 = not measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ForwardTimings {
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

/// Token counts of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TokenCounts {
    /// Tokens, accepted drafts included.
    pub tokens: usize,
    /// Verified drafts.
    pub drafts: usize,
    /// Accepted drafts.
    pub accepted: usize,
}

impl TokenCounts {
    /// Counts a request with drafts that returns `tokens` tokens: the accepted drafts and one more; 0 without verification.
    const fn verified(&mut self, drafts: usize, tokens: usize) {
        if tokens > 0 {
            self.drafts += drafts;
            self.accepted += tokens - 1;
        }
    }
}

/// Builds responses; its arrays are reused.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    response: ForwardResponse,
    logprobs: LogprobRows,
    token_counts: TokenCounts,
}

impl Reply {
    /// Token counts of the last response.
    pub(crate) const fn token_counts(&self) -> TokenCounts {
        self.token_counts
    }

    /// Encodes the response into `buffer` and returns its length: the fast token reply when every request has exactly one token,
    /// else an archive, which includes the time since `started`.
    pub(crate) fn write(
        &mut self,
        plan: &Plan,
        timings: ForwardTimings,
        buffer: &mut [u8],
        started: Instant,
    ) -> Result<usize, ReplyError> {
        if self.gather_fast(plan) {
            let tokens = &self.response.tokens;
            let length = pie_wire::encode_fast_tokens(plan.driver_id(), tokens, buffer)?;
            return self.append_logprobs(plan, buffer, length);
        }
        self.gather(plan);
        self.response.check()?;
        let length = self.encode(plan.driver_id(), timings, buffer)?;
        let micros = u32::try_from(started.elapsed().as_micros()).unwrap_or(u32::MAX);
        pie_wire::set_response_build_us(&mut buffer[..length], micros);
        let length = self.append_logprobs(plan, buffer, length)?;
        let failures = plan.request_errors().iter();
        let failures = failures.filter(|(_, error)| error.is_for_client());
        let failures: Vec<_> = failures
            .map(|(request, error)| (*request as u32, error.to_string()))
            .collect();
        let failures = failures.iter().map(|(request, text)| (*request, &**text));
        Ok(pie_wire::append_failures(failures, buffer, length)?)
    }

    /// Appends the log-probabilities to a response of `length` bytes; returns the length of both.
    fn append_logprobs(
        &mut self,
        plan: &Plan,
        buffer: &mut [u8],
        length: usize,
    ) -> Result<usize, ReplyError> {
        let slots = plan.slots();
        if slots.logprob_bytes() == 0 {
            return Ok(length);
        }
        self.logprobs.clear();
        for (index, request) in plan.requests().iter().enumerate() {
            let own = slots.of(request.slots());
            let Some(shape) = own.iter().find_map(|slot| slots.shape(slot)) else {
                continue;
            };
            self.add_logprobs(plan, (index, request), shape);
        }
        Ok(self.logprobs.append(buffer, length)?)
    }

    fn add_logprobs(
        &mut self,
        plan: &Plan,
        (index, request): (usize, &PlannedRequest),
        shape: LogprobShape,
    ) {
        let slots = plan.slots();
        let own = slots.of(request.slots());
        let prompt = || own.iter().filter(|slot| slot.class() == SlotClass::Prompt);
        let tokens = token_count(request, own, plan.query_tokens().token_ids());
        let sampled = own.iter().filter(|slot| slot.class().is_token());
        let positions = prompt().chain(sampled.take(tokens));
        let words = positions.flat_map(|slot| slots.logprobs(slot).iter().copied());
        let counts = (prompt().count() as u32, tokens as u32);
        self.logprobs.push(index as u32, shape, counts, words);
    }

    /// Collects one token per request; `false` when some request has more or fewer.
    fn gather_fast(&mut self, plan: &Plan) -> bool {
        if plan.slots().has_probes() || plan.drafts().any() {
            return false;
        }
        let (requests, slots) = (plan.requests(), plan.slots());
        let token_ids = plan.query_tokens().token_ids();
        let tokens = &mut self.response.tokens;
        tokens.clear();
        let mut token_counts = TokenCounts::default();
        for request in requests {
            match (request.drafts(), slots.of(request.slots())) {
                (0, [slot]) if slot.class().is_token() => tokens.push(slot.token()),
                (0, [slot, next, ..])
                    if slot.class().is_token() && next.class() == SlotClass::Prompt =>
                {
                    tokens.push(slot.token());
                }
                (drafts @ 1.., slots) if token_count(request, slots, token_ids) == 1 => {
                    token_counts.verified(drafts, 1);
                    tokens.push(slots[0].token());
                }
                _ => return false,
            }
        }
        token_counts.tokens = tokens.len();
        self.token_counts = token_counts;
        !requests.is_empty()
    }

    /// Collects the outputs of every request, each kind in the order of its samplers.
    fn gather(&mut self, plan: &Plan) {
        let slots = plan.slots();
        self.start(plan.request_count(), slots);
        let mut token_counts = TokenCounts::default();
        for request in plan.requests() {
            let own = slots.of(request.slots());
            let mut tokens = match request.drafts() {
                0 => own.len(),
                drafts => {
                    let tokens = token_count(request, own, plan.query_tokens().token_ids());
                    token_counts.verified(drafts, tokens);
                    tokens
                }
            };
            for slot in own {
                if !slot.class().is_token() {
                    self.add_probe(slot, slots);
                } else if tokens > 0 {
                    self.response.tokens.push(slot.token());
                    tokens -= 1;
                }
            }
            self.end_request(slots);
        }
        token_counts.tokens = self.response.tokens.len();
        self.token_counts = token_counts;
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
        timings: ForwardTimings,
        buffer: &mut [u8],
    ) -> Result<usize, WireError> {
        let response = &mut self.response;
        response.probe_wire_parse_us = timings.wire_parse;
        response.probe_plan_us = timings.plan;
        response.probe_h2d_us = timings.h2d;
        response.probe_kernel_launch_us = timings.kernel_launch;
        response.probe_sync_us = timings.sync;
        // The payload borrows the arrays by value while it is encoded.
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

    /// Clears the arrays, and starts the offset arrays of the requested kinds with 0.
    fn start(&mut self, requests: usize, slots: &SamplingSlots) {
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

    fn add_probe(&mut self, slot: &SamplingSlot, slots: &SamplingSlots) {
        let r = &mut self.response;
        let values = slot.output();
        match slot.class() {
            SlotClass::Greedy | SlotClass::Plain | SlotClass::Filtered | SlotClass::Prompt => {}
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

    /// Appends the end offsets of a request.
    fn end_request(&mut self, slots: &SamplingSlots) {
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
