//! From sampled tokens to response bytes.

use std::time::Instant;

use pie_wire::{ResponseFrame, ResponsePayload, WireError};

use crate::plan::{Planner, Request, Slot};

/// Driver-side timings of one forward, in µs; 0 = not measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Probes {
    /// Validating the archive.
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

impl Planner {
    /// Encodes the answer to the current frame into `buffer` and returns its length in bytes: the fast token reply when
    /// every request has exactly one token, else a response archive. When the archive does not fit, the requests with
    /// most tokens are emptied until it does; their indices are pushed to `dropped`.
    ///
    /// # Errors
    /// [`WireError`] when even the empty answer does not fit.
    pub fn reply(
        &mut self,
        probes: Probes,
        buffer: &mut [u8],
        dropped: &mut Vec<usize>,
    ) -> Result<usize, WireError> {
        let started = Instant::now();
        self.gather();
        if self.wants_fast_reply(buffer.len()) {
            return pie_wire::encode_fast_tokens(self.driver_id, &self.reply.tokens, buffer);
        }
        while pie_wire::response_len(&self.reply) > buffer.len() {
            match self.drop_largest() {
                Some(request) => dropped.push(request),
                None => break,
            }
        }
        self.reply.probe_wire_parse_us = probes.wire_parse;
        self.reply.probe_plan_us = probes.plan;
        self.reply.probe_h2d_us = probes.h2d;
        self.reply.probe_kernel_launch_us = probes.kernel_launch;
        self.reply.probe_sync_us = probes.sync;
        // The payload owns the arrays only while it is encoded; they come back for the next frame.
        let frame = ResponseFrame {
            driver_id: self.driver_id,
            aborted: false,
            payload: ResponsePayload::Forward(std::mem::take(&mut self.reply)),
        };
        let written = pie_wire::encode_response(&frame, buffer);
        if let ResponsePayload::Forward(reply) = frame.payload {
            self.reply = reply;
        }
        let length = written?;
        let micros = u32::try_from(started.elapsed().as_micros()).unwrap_or(u32::MAX);
        pie_wire::set_response_build_us(&mut buffer[..length], micros);
        Ok(length)
    }

    /// Lists each request's tokens in the order of its samplers.
    fn gather(&mut self) {
        let reply = &mut self.reply;
        reply.num_requests = self.requests.len() as u32;
        reply.tokens.clear();
        reply.tokens_indptr.clear();
        if self.requests.is_empty() {
            return;
        }
        reply.tokens_indptr.push(0);
        for request in &self.requests {
            let slots = &self.slots[request.slots.clone()];
            let count = if request.drafts > 0 {
                self::accepted(request, slots, &self.token_ids)
            } else {
                slots.len()
            };
            reply
                .tokens
                .extend(slots[..count].iter().map(|slot| slot.token));
            reply.tokens_indptr.push(reply.tokens.len() as u32);
        }
    }

    fn wants_fast_reply(&self, capacity: usize) -> bool {
        let tokens = self.reply.tokens.len();
        let one_each = self
            .reply
            .tokens_indptr
            .windows(2)
            .all(|pair| pair[1] - pair[0] == 1);
        tokens > 0 && one_each && pie_wire::fast_tokens_len(tokens) <= capacity
    }

    /// Empties the request with most tokens and returns its index; `None` when all are empty.
    fn drop_largest(&mut self) -> Option<usize> {
        let indptr = &mut self.reply.tokens_indptr;
        let (largest, count) = indptr
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .enumerate()
            .max_by_key(|&(_, n)| n)?;
        if count == 0 {
            return None;
        }
        self.reply
            .tokens
            .drain(indptr[largest] as usize..indptr[largest + 1] as usize);
        indptr[largest + 1..]
            .iter_mut()
            .for_each(|end| *end -= count);
        Some(largest)
    }
}

/// Tokens that verification yields: the accepted drafts (equal to what was sampled in their place) and one more.
fn accepted(request: &Request, slots: &[Slot], token_ids: &[u32]) -> usize {
    let drafts = &token_ids[request.rows.end - request.drafts as usize..request.rows.end];
    let matching = slots
        .iter()
        .zip(drafts)
        .take_while(|(slot, draft)| slot.token == **draft)
        .count();
    slots.len().min(matching + 1)
}
