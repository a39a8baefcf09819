//! From sampled tokens to response bytes.

use std::cmp::Reverse;
use std::time::Instant;

use pie_wire::{ResponseFrame, ResponsePayload, WireError};

use crate::plan::{Planner, Request, Slot};

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

impl Planner {
    /// Encodes the answer to the current frame into `buffer` and returns its length in bytes: the fast token reply when
    /// every request has exactly one token, else a response archive. When the archive does not fit, the requests with
    /// most tokens are emptied until it does; `dropped` then lists them in ascending order.
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
        self.fit(buffer.len(), dropped);
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

    /// Empties requests, those with most tokens first, until the archive takes at most `capacity` bytes; lists them in
    /// `dropped` in ascending order.
    fn fit(&mut self, capacity: usize, dropped: &mut Vec<usize>) {
        let excess = pie_wire::response_len(&self.reply).saturating_sub(capacity);
        if excess == 0 {
            return;
        }
        let indptr = &mut self.reply.tokens_indptr;
        let size =
            |request: usize| (indptr[request + 1] - indptr[request]) as usize * size_of::<u32>();
        dropped.clear();
        dropped.extend((0..self.requests.len()).filter(|&request| size(request) > 0));
        dropped.sort_unstable_by_key(|&request| Reverse((size(request), request)));
        let mut saved = 0;
        let enough = dropped.iter().position(|&request| {
            saved += size(request);
            saved >= excess
        });
        dropped.truncate(enough.map_or(dropped.len(), |last| last + 1));
        dropped.sort_unstable();
        close_gaps(&mut self.reply.tokens, indptr, dropped);
    }
}

/// Takes the ranges of `dropped` (ascending) out of `values` and moves the others up.
fn close_gaps(values: &mut Vec<u32>, indptr: &mut [u32], dropped: &[usize]) {
    let mut dropped = dropped.iter().copied().peekable();
    let (mut start, mut end) = (0, 0);
    for request in 0..indptr.len().saturating_sub(1) {
        let range = start..indptr[request + 1] as usize;
        start = range.end;
        if dropped.next_if_eq(&request).is_none() {
            values.copy_within(range.clone(), end);
            end += range.len();
        }
        indptr[request + 1] = end as u32;
    }
    values.truncate(end);
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
