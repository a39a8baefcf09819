//! The client of one driver: sends frames over the ring, and receives their replies.

use std::time::{Duration, Instant};

use pie_ring::{CallError, Client, InFlightRequest, RequestSlot};
use pie_wire::{
    AdapterOp, AdapterRequest, ArchivedResponsePayload, CopyDirection, CopyRequest, CopyResource,
    Frame, Payload, Reply,
};

use crate::error::{EngineError, ReplyError};
use crate::frame::{FrameBuilder, FrameMeta, FrameRow, write_patches};
use crate::handshake::Capabilities;
use crate::reply::{ExpectedReply, Probes, StepReply};

/// Pairs of pages in one copy frame; each takes 8 bytes.
const MAX_COPIES: usize = 4096;

/// Sends one frame at a time, and builds the next one meanwhile.
pub struct Link<'c> {
    client: &'c Client,
    builder: FrameBuilder,
    /// Buffer for encoding, as large as a slot of the ring.
    frame: Vec<u8>,
    /// Metadata to reuse.
    spare: Vec<FrameMeta>,
    /// Sampled requests of the last frame.
    sampled: usize,
    /// When the last reply arrived.
    seen: Option<Instant>,
    reply: StepReply,
}

/// Times and sizes of one step.
#[derive(Clone, Copy, Debug)]
pub struct StepTiming {
    /// When the frame was complete, right before it was sent.
    pub sent: Instant,
    /// From then to the arrival of the reply, before it is read.
    pub round_trip_ns: u64,
    /// Host gap: from the previous reply to this frame, while the driver waits for this side. 0 for the first frame.
    pub client_ns: u64,
    /// Size of the frame.
    pub request_bytes: usize,
    /// Requests of the frame.
    pub requests: u32,
    /// Input tokens.
    pub tokens: u32,
    /// `None` for the fast reply.
    pub probes: Option<Probes>,
}

/// A frame that is complete except for the tokens of the step before it.
#[must_use]
pub struct PreparedFrame<'c> {
    meta: FrameMeta,
    /// Its slot and length; `None` when no slot was free: it still is in the builder.
    encoded: Option<(RequestSlot<'c>, usize)>,
}

/// A frame that was sent to the driver.
#[must_use]
pub struct InFlightFrame<'c> {
    sent: InFlightRequest<'c>,
    meta: FrameMeta,
    at: Instant,
    client_ns: u64,
    request_bytes: usize,
}

impl InFlightFrame<'_> {
    /// Sleeps until the reply arrives, or for `limit`.
    ///
    /// # Errors
    /// [`EngineError::Call`] if the client was aborted.
    pub fn sleep(&mut self, limit: Duration) -> Result<(), EngineError> {
        self.sent.sleep(limit)?;
        Ok(())
    }
}

impl<'c> Link<'c> {
    /// Frames of `builder` for the driver of `client`.
    pub fn new(client: &'c Client, builder: FrameBuilder) -> Self {
        Self {
            client,
            builder,
            frame: vec![0; client.layout().request_capacity()],
            spare: Vec::new(),
            sampled: 0,
            seen: None,
            reply: StepReply::default(),
        }
    }

    /// The last reply.
    pub const fn reply(&self) -> &StepReply {
        &self.reply
    }

    /// See [`FrameBuilder::resend_params`].
    pub(crate) fn resend_params(&mut self) {
        self.builder.resend_params();
    }

    /// Ends a series of steps: the time until the next one is no host gap.
    pub fn end_series(&mut self) {
        self.seen = None;
    }

    /// Sends a frame of `rows`, of which those that sample come first, and waits for its reply.
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare), [`send`](Self::send) and [`receive`](Self::receive).
    pub fn forward<'a>(
        &mut self,
        rows: impl Iterator<Item = FrameRow<'a>> + Clone,
    ) -> Result<StepTiming, EngineError> {
        let prepared = self.prepare(rows)?;
        let flight = self.send(prepared)?;
        let exchange = self.receive(flight)?;
        self.check_none_rejected()?;
        Ok(exchange)
    }

    /// Sends the frames that `next` prepares, without drafts, until it returns `None`, and passes their times to `done`. Both are called
    /// while the driver computes: between a reply and the next frame only tokens are patched.
    ///
    /// # Errors
    /// Those of `next`, [`send`](Self::send) and [`receive`](Self::receive).
    pub fn pipeline<E: From<EngineError>>(
        &mut self,
        mut next: impl FnMut(&mut Self) -> Result<Option<PreparedFrame<'c>>, E>,
        mut done: impl FnMut(&StepTiming),
    ) -> Result<(), E> {
        let Some(first) = next(self)? else {
            return Ok(());
        };
        let mut flight = Some(self.send(first)?);
        while let Some(sent) = flight {
            let prepared = next(self)?;
            let exchange = self.receive(sent)?;
            self.check_none_rejected().map_err(EngineError::from)?;
            flight = prepared.map(|frame| self.send(frame)).transpose()?;
            done(&exchange);
        }
        Ok(())
    }

    /// Builds a frame of `rows`, to be sent after the frame whose tokens they await.
    ///
    /// # Errors
    /// [`EngineError::Wire`] if the frame is larger than a slot of the ring.
    pub fn prepare<'a>(
        &mut self,
        rows: impl Iterator<Item = FrameRow<'a>> + Clone,
    ) -> Result<PreparedFrame<'c>, EngineError> {
        let mut meta = self.spare.pop().unwrap_or_default();
        self.builder.build_into(&mut meta, rows);
        // The frame in flight may occupy the only slot.
        let request = self.client.try_acquire_slot();
        Ok(PreparedFrame {
            meta,
            encoded: request.map(|request| self.encode(request)).transpose()?,
        })
    }

    fn encode(
        &mut self,
        mut request: RequestSlot<'c>,
    ) -> Result<(RequestSlot<'c>, usize), EngineError> {
        let length = self.builder.encode(&mut self.frame)?;
        request.write(0, &self.frame[..length])?;
        Ok((request, length))
    }

    /// Patches the last reply's tokens into a frame and sends it.
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare), and [`EngineError::Call`] if the driver has ended.
    pub fn send(&mut self, prepared: PreparedFrame<'c>) -> Result<InFlightFrame<'c>, EngineError> {
        let PreparedFrame { meta, encoded } = prepared;
        let encoded = encoded.map_or_else(|| self.encode(self.client.acquire_slot()), Ok);
        let (mut request, request_bytes) = encoded?;
        let sampled = |row| self.reply.last_of(row);
        write_patches(&meta.patches, sampled, |at, token| request.write(at, token))?;
        let at = Instant::now();
        Ok(InFlightFrame {
            sent: request.send(request_bytes)?,
            meta,
            at,
            client_ns: self.seen.map_or(0, |last| (at - last).as_nanos() as u64),
            request_bytes,
        })
    }

    /// Waits for the reply to a frame. Requests that the driver rejected have no token.
    ///
    /// # Errors
    /// [`EngineError::Call`] if the driver has ended or does not reply, [`EngineError::Wire`] and
    /// [`EngineError::Reply`] if the reply is not the expected one.
    pub fn receive(&mut self, flight: InFlightFrame<'c>) -> Result<StepTiming, EngineError> {
        let InFlightFrame {
            sent,
            meta,
            at,
            client_ns,
            request_bytes,
        } = flight;
        let reply = &mut self.reply;
        let (seen, probes) = sent.receive(|bytes| {
            let seen = Instant::now();
            if bytes.is_empty() {
                // The reply of a driver that shuts down.
                return (seen, Err(CallError::Aborted.into()));
            }
            (seen, reply.read(bytes, meta.expected()))
        })?;
        self.seen = Some(seen);
        let exchange = StepTiming {
            sent: at,
            round_trip_ns: (seen - at).as_nanos() as u64,
            client_ns,
            request_bytes,
            requests: meta.requests as u32,
            tokens: meta.tokens as u32,
            probes: probes?,
        };
        self.sampled = meta.sampled;
        self.spare.push(meta);
        Ok(exchange)
    }

    /// Copies pages, each from the first of a pair to the second, and waits for the copies.
    ///
    /// # Errors
    /// [`EngineError::Reply`] if not all copies were made; some may have been. Else those of
    /// [`receive`](Self::receive).
    pub fn copy(
        &mut self,
        direction: CopyDirection,
        pairs: impl Iterator<Item = (u32, u32)>,
    ) -> Result<(), EngineError> {
        let mut pairs = pairs.peekable();
        while pairs.peek().is_some() {
            let (srcs, dsts) = pairs.by_ref().take(MAX_COPIES).unzip();
            let request = CopyRequest {
                dir: direction,
                srcs,
                dsts,
                resource: CopyResource::Kv,
            };
            let frame = Frame {
                driver_id: 0,
                payload: Payload::Copy(request),
            };
            let length = pie_wire::encode_request(&frame, &mut self.frame)?;
            self.client.call(&self.frame[..length], read_status)??;
        }
        Ok(())
    }

    fn check_none_rejected(&self) -> Result<(), ReplyError> {
        self.reply
            .check_none_rejected((0..self.sampled).map(|_| ExpectedReply::without_drafts(true)))
    }
}

/// Loads a `LoRA` adapter in the driver, and waits for it. Steps continue meanwhile in other slots of the ring.
pub(crate) fn load_adapter(client: &Client, id: u64, path: &str) -> Result<(), EngineError> {
    let request = AdapterRequest {
        op: AdapterOp::Load,
        adapter_id: id,
        path: path.to_owned(),
    };
    let frame = Frame {
        driver_id: 0,
        payload: Payload::Adapter(request),
    };
    let mut bytes = vec![0; client.layout().request_capacity()];
    let length = pie_wire::encode_request(&frame, &mut bytes)?;
    client.call(&bytes[..length], |answer| match read_status(answer) {
        Err(EngineError::Reply(ReplyError::Status(status))) => Err(EngineError::Adapter {
            path: path.to_owned(),
            status,
            reason: pie_wire::reason_of(answer).map(str::to_owned),
        }),
        other => other,
    })?
}

/// Reads a status reply.
fn read_status(bytes: &[u8]) -> Result<(), EngineError> {
    if bytes.is_empty() {
        return Err(CallError::Aborted.into());
    }
    let Reply::Frame(frame) = pie_wire::decode_reply(bytes)? else {
        return Err(ReplyError::Outputs.into());
    };
    match &frame.payload {
        _ if frame.aborted => Err(ReplyError::Aborted.into()),
        ArchivedResponsePayload::Status(status) => match status.status.to_native() {
            0 => Ok(()),
            status => Err(ReplyError::Status(status).into()),
        },
        ArchivedResponsePayload::Forward(_) => Err(ReplyError::Outputs.into()),
    }
}

/// What still fits into a frame: requests, tokens, page references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameBudget {
    requests: u32,
    tokens: u32,
    page_refs: u32,
}

impl FrameBudget {
    /// Of an empty frame.
    pub const fn new(caps: &Capabilities) -> Self {
        Self {
            requests: caps.max_forward_requests,
            tokens: caps.max_forward_tokens,
            page_refs: caps.max_page_refs,
        }
    }

    /// Reserves room for a request. Returns false, with nothing reserved, when it does not fit.
    #[must_use]
    pub fn reserve(&mut self, tokens: u32, page_refs: u32) -> bool {
        let fits = self.requests > 0 && tokens <= self.tokens && page_refs <= self.page_refs;
        if fits {
            self.requests -= 1;
            self.tokens -= tokens;
            self.page_refs -= page_refs;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_full_by_any_limit() {
        let budget = FrameBudget {
            requests: 3,
            tokens: 10,
            page_refs: 5,
        };
        for (requests, expected) in [
            (
                &[(1, 1), (1, 1), (1, 1), (1, 1)][..],
                &[true, true, true, false][..],
            ),
            (&[(8, 1), (3, 1), (2, 1)], &[true, false, true]),
            (&[(1, 4), (1, 2), (1, 1)], &[true, false, true]),
        ] {
            let mut budget = budget;
            let fits: Vec<bool> = requests
                .iter()
                .map(|&(t, p)| budget.reserve(t, p))
                .collect();
            assert_eq!(fits, expected, "{requests:?}");
        }
    }
}
