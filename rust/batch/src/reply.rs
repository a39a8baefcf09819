//! From the slots' outputs to response bytes.

use std::cmp::Reverse;
use std::mem;
use std::time::Instant;

use pie_wire::{
    ForwardResponse, RESPONSE_ROOT_LEN, ResponseFrame, ResponsePayload, ResponseRule, WireError,
};
use thiserror::Error;

use crate::plan::{Planner, Request};
use crate::slot::{Slot, Slots};
use crate::{RequestFault, SlotClass};

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
    /// Slots that the engine was never asked for, or has not answered.
    #[error(
        "{slots} slots have no output: stage every pass and put the outputs of every slot group"
    )]
    Unanswered {
        /// Slots without an output.
        slots: usize,
    },
    /// The runtime would index the arrays out of bounds.
    #[error("the response breaks a rule of the protocol: {0}")]
    Rule(#[from] ResponseRule),
}

/// The response under construction; its arrays are reused.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    response: ForwardResponse,
}

/// Bytes of one index or number.
pub(crate) const WORD: usize = 4;

impl Planner {
    /// Encodes the answer to the current frame into `buffer`, which has the [`reply_bytes`](crate::Limits::reply_bytes)
    /// that the frame was planned for, and returns its length in bytes: the fast token reply when every request has exactly
    /// one token, else a response archive.
    ///
    /// # Errors
    /// [`ReplyError`] when the buffer is smaller, a slot has no output, or the arrays contradict each other.
    pub fn reply(&mut self, probes: Probes, buffer: &mut [u8]) -> Result<usize, ReplyError> {
        let started = Instant::now();
        self.propose_drafts();
        match self.write(probes, buffer, started) {
            // The frame was planned for a reply without drafts, which may be left out at any time.
            Err(ReplyError::Wire(_)) if self.has_drafts() => {
                self.drop_drafts();
                self.write(probes, buffer, started)
            }
            written => written,
        }
    }

    fn write(
        &mut self,
        probes: Probes,
        buffer: &mut [u8],
        started: Instant,
    ) -> Result<usize, ReplyError> {
        if self.gather_fast() {
            let tokens = &self.reply.response.tokens;
            return Ok(pie_wire::encode_fast_tokens(
                self.driver_id,
                tokens,
                buffer,
            )?);
        }
        self.gather()?;
        self.reply.response.check()?;
        let length = self.encode(probes, buffer)?;
        let micros = u32::try_from(started.elapsed().as_micros()).unwrap_or(u32::MAX);
        pie_wire::set_response_build_us(&mut buffer[..length], micros);
        Ok(length)
    }

    /// Empties requests, those with the largest outputs first, until the response fits into the limits' `reply_bytes`.
    /// How many drafts will be accepted is not known yet, so all of them count. A fast reply that loses a token becomes an
    /// archive, which is longer: what is left is looked at again then.
    pub(crate) fn empty_oversize_requests(&mut self) {
        let limit = self.limits.reply_bytes as usize;
        // The usual batch: no output is so large that they need be counted one by one.
        let most = WORD * self.slots.all.len() + self.slots.probe_bytes;
        if self.empty_bytes() + most <= limit {
            return;
        }
        let size = |request: &Request| self.output_bytes(request);
        let outputs: usize = self.requests.iter().map(size).sum();
        let excess = (self.empty_bytes() + outputs).saturating_sub(limit);
        if excess == 0 || self.is_fast(limit) {
            return;
        }
        let mut largest: Vec<_> = self.requests.iter().map(size).zip(0..).collect();
        largest.sort_unstable_by_key(|&place| Reverse(place));
        let mut saved = 0;
        let needed = largest.iter().take_while(|&&(bytes, _)| {
            let needed = saved < excess && bytes > 0;
            saved += bytes;
            needed
        });
        largest.truncate(needed.count());
        for &(_, index) in &largest {
            self.requests[index].slots.clear();
        }
        let fault = |(bytes, index)| (index, RequestFault::Oversize { bytes, limit });
        self.add_faults(largest.into_iter().map(fault));
    }

    /// Whether the fast reply will do whatever comes, and fits. A request may yet lose its adapter, and its token with it.
    fn is_fast(&self, limit: usize) -> bool {
        let one_token = |request: &Request| {
            request.drafts == 0 && request.slots.len() == 1 && request.adapter.is_none()
        };
        !self.asks_probes()
            && self.requests.iter().all(one_token)
            && pie_wire::fast_tokens_len(self.requests.len()) <= limit
    }

    fn asks_probes(&self) -> bool {
        self.slots.counts[SlotClass::Dist as usize..] != [0; 4]
    }

    /// Lists one token for each request; `false` when some request has more or fewer.
    fn gather_fast(&mut self) -> bool {
        if self.asks_probes() || self.has_drafts() {
            return false;
        }
        let (requests, slots) = (&self.requests, &self.slots.all);
        let tokens = &mut self.reply.response.tokens;
        tokens.clear();
        for request in requests {
            match &slots[request.slots.range()] {
                [slot] if slot.answered && request.drafts == 0 => tokens.push(slot.token),
                slots if verified(request, slots, &self.token_ids) == Some(1) => {
                    tokens.push(slots[0].token);
                }
                _ => return false,
            }
        }
        !requests.is_empty()
    }

    /// Bytes that the outputs of a request take, beside the offsets that every request has.
    fn output_bytes(&self, request: &Request) -> usize {
        let slots = &self.slots.all[request.slots.range()];
        let tokens = match request.drafts as usize {
            0 => WORD * slots.iter().filter(|slot| slot.class.is_token()).count(),
            drafts => WORD * slots.len().min(drafts + 1),
        };
        let probes = slots
            .iter()
            .map(|slot| slot.probe_bytes(self.limits.vocab_size));
        tokens + probes.sum::<usize>()
    }

    /// Bytes of the response without any output.
    fn empty_bytes(&self) -> usize {
        let offsets = match self.requests.len() {
            0 => 0,
            requests => WORD * (requests + 1),
        };
        let probes = [
            (SlotClass::Dist, WORD),
            (SlotClass::Logits, WORD),
            (SlotClass::Logprobs, WORD),
            (SlotClass::Entropy, 0),
        ];
        let asked = probes
            .iter()
            .filter(|(class, _)| self.slots.counts[*class as usize] > 0);
        RESPONSE_ROOT_LEN + offsets + asked.map(|(_, more)| offsets + more).sum::<usize>()
    }

    /// Lists the outputs of every request, each kind in the order of its samplers.
    fn gather(&mut self) -> Result<(), ReplyError> {
        let vocab_size = self.limits.vocab_size;
        self.reply.start(self.requests.len(), &self.slots);
        let mut unanswered = 0;
        for request in &self.requests {
            let slots = &self.slots.all[request.slots.range()];
            let mut tokens = match request.drafts {
                0 => slots.len(),
                _ => token_count(request, slots, &self.token_ids),
            };
            for slot in slots {
                unanswered += usize::from(!slot.answered);
                if !slot.class.is_token() {
                    self.reply.add_probe(slot, &self.slots, vocab_size);
                } else if tokens > 0 {
                    self.reply.response.tokens.push(slot.token);
                    tokens -= 1;
                }
            }
            self.reply.end_request(&self.slots);
        }
        if unanswered > 0 {
            return Err(ReplyError::Unanswered { slots: unanswered });
        }
        self.gather_drafts();
        Ok(())
    }

    fn gather_drafts(&mut self) {
        let mut response = mem::take(&mut self.reply.response);
        if self.has_drafts() {
            response.spec_indptr.push(0);
        }
        for (tokens, first_position) in self.drafts() {
            response.spec_tokens.extend_from_slice(tokens);
            response
                .spec_positions
                .extend((first_position..).take(tokens.len()));
            response.spec_indptr.push(response.spec_tokens.len() as u32);
        }
        self.reply.response = response;
    }

    fn encode(&mut self, probes: Probes, buffer: &mut [u8]) -> Result<usize, WireError> {
        let response = &mut self.reply.response;
        response.probe_wire_parse_us = probes.wire_parse;
        response.probe_plan_us = probes.plan;
        response.probe_h2d_us = probes.h2d;
        response.probe_kernel_launch_us = probes.kernel_launch;
        response.probe_sync_us = probes.sync;
        // The payload owns the arrays only while it is encoded; they come back for the next frame.
        let frame = ResponseFrame {
            driver_id: self.driver_id,
            aborted: false,
            payload: ResponsePayload::Forward(mem::take(response)),
        };
        let written = pie_wire::encode_response(&frame, buffer);
        if let ResponsePayload::Forward(response) = frame.payload {
            self.reply.response = response;
        }
        written
    }
}

impl Reply {
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
            if slots.counts[class as usize] > 0 {
                for offsets in offsets {
                    offsets.push(0);
                }
            }
        }
    }

    fn add_probe(&mut self, slot: &Slot, slots: &Slots, vocab_size: u32) {
        if !slot.answered {
            return;
        }
        let r = &mut self.response;
        let values = slot.output(vocab_size);
        match slot.class {
            SlotClass::Greedy | SlotClass::Plain | SlotClass::Filtered => {}
            SlotClass::Dist => {
                r.dists_ids
                    .extend_from_slice(&slots.dist_ids[values.clone()]);
                r.dists_probs.extend_from_slice(&slots.dist_probs[values]);
                r.dists_kv_indptr.push(r.dists_ids.len() as u32);
            }
            SlotClass::Logits => {
                let bytes = WORD * values.start..WORD * values.end;
                r.logits_bytes.extend_from_slice(&slots.logits[bytes]);
                r.logits_byte_indptr.push(r.logits_bytes.len() as u32);
            }
            SlotClass::Logprobs => {
                r.logprobs_values.extend_from_slice(&slots.logprobs[values]);
                r.logprobs_val_indptr.push(r.logprobs_values.len() as u32);
            }
            SlotClass::Entropy => r.entropies.extend_from_slice(&slots.entropies[values]),
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
            if slots.counts[class as usize] > 0 {
                offsets.push(entries as u32 - 1);
            }
        }
    }
}

/// Tokens that a request returns: one of each token slot, or what verification yields.
pub(crate) fn token_count(request: &Request, slots: &[Slot], token_ids: &[u32]) -> usize {
    verified(request, slots, token_ids)
        .unwrap_or_else(|| slots.iter().filter(|slot| slot.class.is_token()).count())
}

/// Tokens that verification yields: the accepted drafts (equal to what was sampled in their place) and one more; `None`
/// for a request without drafts, or with a slot that has no output.
fn verified(request: &Request, slots: &[Slot], token_ids: &[u32]) -> Option<usize> {
    if request.drafts == 0 || !slots.iter().all(|slot| slot.answered) {
        return None;
    }
    let drafts = &token_ids[request.inputs().end..request.rows.end()];
    let slots = &slots[..slots.len().min(drafts.len() + 1)];
    let matching = slots
        .iter()
        .zip(drafts)
        .take_while(|(slot, draft)| slot.token == **draft)
        .count();
    Some(slots.len().min(matching + 1))
}
