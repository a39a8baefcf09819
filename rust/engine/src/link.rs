//! Frames over the ring, with their times.

use std::time::{Duration, Instant};

use pie_ring::{CallError, Client, InFlightRequest, RequestSlot};
use pie_wire::{
    AdapterOp, AdapterRequest, ArchivedResponsePayload, CopyDirection, CopyRequest, CopyResource,
    Frame, Payload, Reply,
};

use crate::answer::{Answer, Asked, Probes};
use crate::error::{AnswerError, RuntimeError};
use crate::frame::{FrameBuilder, FrameMeta, FrameRow, fill_gaps};
use crate::handshake::Capabilities;

/// Pairs of pages in one frame of copies, which takes 8 bytes for each.
const MAX_COPIES: usize = 4096;

/// Sends one frame at a time, and lays the next one out meanwhile.
pub struct Link<'c> {
    client: &'c Client,
    builder: FrameBuilder,
    /// Where frames are encoded, as large as a slot's request.
    frame: Vec<u8>,
    /// Outlines to be used again.
    spare: Vec<FrameMeta>,
    /// Requests of the last frame with a sampler.
    last: usize,
    /// When the last answer was seen.
    seen: Option<Instant>,
    answer: Answer,
}

/// One frame and its answer.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    /// When the request was made, but not sent.
    pub sent: Instant,
    /// From then to the answer seen, but not read.
    pub round_trip_ns: u64,
    /// From the last answer seen to this request made: the load's own work that the driver waits for. 0 for the first frame.
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

/// A frame that is whole, except for the tokens that it awaits.
#[must_use]
pub struct Prepared<'c> {
    outline: FrameMeta,
    /// Where it lies, and its length. When no slot was free it still is the builder's.
    made: Option<(RequestSlot<'c>, usize)>,
}

/// A frame that the driver has.
#[must_use]
pub struct Flight<'c> {
    sent: InFlightRequest<'c>,
    outline: FrameMeta,
    at: Instant,
    client_ns: u64,
    request_bytes: usize,
}

impl Flight<'_> {
    /// Sleeps until the answer is there, or for `limit`.
    ///
    /// # Errors
    /// [`RuntimeError::Call`] if the client was aborted.
    pub fn sleep(&mut self, limit: Duration) -> Result<(), RuntimeError> {
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
            last: 0,
            seen: None,
            answer: Answer::default(),
        }
    }

    /// The last answer.
    pub const fn answer(&self) -> &Answer {
        &self.answer
    }

    /// A frame may not have been taken; see [`FrameBuilder::forget_params`].
    pub(crate) fn forget_params(&mut self) {
        self.builder.forget_params();
    }

    /// Forgets when the last answer came: what follows is another series.
    pub fn rest(&mut self) {
        self.seen = None;
    }

    /// Sends a frame of `turns` and waits for its answer; those that sample come first.
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare), [`send`](Self::send) and [`receive`](Self::receive).
    pub fn forward<'a>(
        &mut self,
        turns: impl Iterator<Item = FrameRow<'a>> + Clone,
    ) -> Result<Exchange, RuntimeError> {
        let prepared = self.prepare(turns)?;
        let flight = self.send(prepared)?;
        let exchange = self.receive(flight)?;
        self.check_served()?;
        Ok(exchange)
    }

    /// Sends the frames that `next` prepares without drafts until it has no more, and gives their times to `done`. Both are
    /// called while the driver computes, so that between an answer and the next request nothing is done but to take the
    /// tokens from the one to the other.
    ///
    /// # Errors
    /// Those of `next`, [`send`](Self::send) and [`receive`](Self::receive).
    pub fn relay<E: From<RuntimeError>>(
        &mut self,
        mut next: impl FnMut(&mut Self) -> Result<Option<Prepared<'c>>, E>,
        mut done: impl FnMut(&Exchange),
    ) -> Result<(), E> {
        let Some(first) = next(self)? else {
            return Ok(());
        };
        let mut flight = Some(self.send(first)?);
        while let Some(sent) = flight {
            let prepared = next(self)?;
            let exchange = self.receive(sent)?;
            self.check_served().map_err(RuntimeError::from)?;
            flight = prepared.map(|frame| self.send(frame)).transpose()?;
            done(&exchange);
        }
        Ok(())
    }

    /// Makes a frame of `turns`. What they await is the answer to the frame that is sent before this one.
    ///
    /// # Errors
    /// [`RuntimeError::Wire`] if the frame is larger than a slot of the ring.
    pub fn prepare<'a>(
        &mut self,
        turns: impl Iterator<Item = FrameRow<'a>> + Clone,
    ) -> Result<Prepared<'c>, RuntimeError> {
        let mut outline = self.spare.pop().unwrap_or_default();
        self.builder.lay_out_in(&mut outline, turns);
        // The frame in flight may have the only slot.
        let request = self.client.try_acquire_slot();
        Ok(Prepared {
            outline,
            made: request.map(|request| self.make(request)).transpose()?,
        })
    }

    fn make(
        &mut self,
        mut request: RequestSlot<'c>,
    ) -> Result<(RequestSlot<'c>, usize), RuntimeError> {
        let length = self.builder.encode(&mut self.frame)?;
        request.write(0, &self.frame[..length])?;
        Ok((request, length))
    }

    /// Puts the last answer's tokens into a frame and sends it.
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare), and [`RuntimeError::Call`] if the driver has ended.
    pub fn send(&mut self, prepared: Prepared<'c>) -> Result<Flight<'c>, RuntimeError> {
        let Prepared { outline, made } = prepared;
        let made = made.map_or_else(|| self.make(self.client.acquire_slot()), Ok);
        let (mut request, request_bytes) = made?;
        let answered = |request| self.answer.last_of(request);
        fill_gaps(&outline.gaps, answered, |at, token| {
            request.write(at, token)
        })?;
        let at = Instant::now();
        Ok(Flight {
            sent: request.send(request_bytes)?,
            outline,
            at,
            client_ns: self.seen.map_or(0, |last| (at - last).as_nanos() as u64),
            request_bytes,
        })
    }

    /// Waits for the answer of a frame. It may have requests that the driver could not serve, without a token.
    ///
    /// # Errors
    /// [`RuntimeError::Call`] if the driver has ended or does not answer, [`RuntimeError::Wire`] and
    /// [`RuntimeError::Answer`] if the answer is not what was asked for.
    pub fn receive(&mut self, flight: Flight<'c>) -> Result<Exchange, RuntimeError> {
        let Flight {
            sent,
            outline,
            at,
            client_ns,
            request_bytes,
        } = flight;
        let answer = &mut self.answer;
        let (seen, probes) = sent.receive(|bytes| {
            let seen = Instant::now();
            if bytes.is_empty() {
                // What a driver answers that ends.
                return (seen, Err(CallError::Aborted.into()));
            }
            (seen, answer.read(bytes, outline.asked()))
        })?;
        self.seen = Some(seen);
        let exchange = Exchange {
            sent: at,
            round_trip_ns: (seen - at).as_nanos() as u64,
            client_ns,
            request_bytes,
            requests: outline.requests as u32,
            tokens: outline.tokens as u32,
            probes: probes?,
        };
        self.last = outline.sampled;
        self.spare.push(outline);
        Ok(exchange)
    }

    /// Copies pages, each from the first of a pair to the second, and waits until they are there. None are no copy.
    ///
    /// # Errors
    /// [`RuntimeError::Answer`] if the driver has not made all of them; then some may have been made. Else those of
    /// [`receive`](Self::receive).
    pub fn copy(
        &mut self,
        direction: CopyDirection,
        pairs: impl Iterator<Item = (u32, u32)>,
    ) -> Result<(), RuntimeError> {
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

    /// Every request of the last frame with a sampler must have a token.
    fn check_served(&self) -> Result<(), AnswerError> {
        self.answer
            .check_served((0..self.last).map(|_| Asked::plainly(true)))
    }
}

/// Has the driver read an adapter, and waits until requests may bind it. Frames go on meanwhile in other slots.
pub(crate) fn load_adapter(client: &Client, id: u64, path: &str) -> Result<(), RuntimeError> {
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
        Err(RuntimeError::Answer(AnswerError::Status(status))) => Err(RuntimeError::Adapter {
            path: path.to_owned(),
            status,
            reason: pie_wire::reason_of(answer).map(str::to_owned),
        }),
        other => other,
    })?
}

/// Whether an answer says that all went well.
fn read_status(bytes: &[u8]) -> Result<(), RuntimeError> {
    if bytes.is_empty() {
        return Err(CallError::Aborted.into());
    }
    let Reply::Frame(frame) = pie_wire::decode_reply(bytes)? else {
        return Err(AnswerError::Outputs.into());
    };
    match &frame.payload {
        _ if frame.aborted => Err(AnswerError::Aborted.into()),
        ArchivedResponsePayload::Status(status) => match status.status.to_native() {
            0 => Ok(()),
            status => Err(AnswerError::Status(status).into()),
        },
        ArchivedResponsePayload::Forward(_) => Err(AnswerError::Outputs.into()),
    }
}

/// What still fits into a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    requests: u32,
    tokens: u32,
    page_refs: u32,
}

impl Room {
    /// An empty frame's.
    pub const fn of(caps: &Capabilities) -> Self {
        Self {
            requests: caps.max_forward_requests,
            tokens: caps.max_forward_tokens,
            page_refs: caps.max_page_refs,
        }
    }

    /// Takes a request's share; false, with nothing taken, when it does not fit.
    #[must_use]
    pub fn take(&mut self, tokens: u32, page_refs: u32) -> bool {
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
        let room = Room {
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
            let mut room = room;
            let taken: Vec<bool> = requests.iter().map(|&(t, p)| room.take(t, p)).collect();
            assert_eq!(taken, expected, "{requests:?}");
        }
    }
}
