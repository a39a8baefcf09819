//! Frames over the ring, with their times.

use std::time::Instant;

use pie_ring::{Client, Request, Sent};

use crate::answer::{Answer, Asked, Probes};
use crate::error::LoadError;
use crate::frame::{FrameBuilder, Outline, Turn, fill_gaps};
use crate::handshake::Capabilities;

/// Sends one frame at a time, as the runtime's scheduler does.
pub(crate) struct Link<'c> {
    client: &'c Client,
    builder: FrameBuilder,
    /// Where frames are encoded, as large as a slot's request.
    frame: Vec<u8>,
    /// When the last answer was seen.
    seen: Option<Instant>,
    /// The last answer.
    pub(crate) answer: Answer,
}

/// One frame and its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange {
    /// When the request was made, but not sent.
    pub(crate) sent: Instant,
    /// From then to the answer seen, but not read.
    pub(crate) round_trip_ns: u64,
    /// From the last answer seen to this request made: the load's own work that the driver waits for. 0 for the first frame.
    pub(crate) client_ns: u64,
    pub(crate) request_bytes: usize,
    pub(crate) requests: u32,
    /// Input tokens.
    pub(crate) tokens: u32,
    /// `None` for the fast reply.
    pub(crate) probes: Option<Probes>,
}

/// A frame that is whole, but for the tokens that it awaits.
pub(crate) struct Prepared<'c> {
    outline: Outline,
    /// Where it lies, and its length. When no slot was free it still is the builder's.
    made: Option<(Request<'c>, usize)>,
}

/// A frame that the driver has, and what will be known of it.
struct Flight<'c> {
    sent: Sent<'c>,
    outline: Outline,
    at: Instant,
    client_ns: u64,
    request_bytes: usize,
}

impl<'c> Link<'c> {
    pub(crate) fn new(client: &'c Client, page_size: u32) -> Self {
        Self {
            client,
            builder: FrameBuilder::new(page_size),
            frame: vec![0; client.layout().request_capacity()],
            seen: None,
            answer: Answer::default(),
        }
    }

    /// Forgets the last answer: what follows is another series.
    pub(crate) fn rest(&mut self) {
        self.seen = None;
    }

    /// Sends a frame of `turns` and waits for its answer; those that sample come first.
    pub(crate) fn forward<'a>(
        &mut self,
        turns: impl Iterator<Item = Turn<'a>> + Clone,
    ) -> Result<Exchange, LoadError> {
        let prepared = self.prepare(turns.clone())?;
        let flight = self.send(prepared)?;
        self.receive(flight, turns.map(Turn::asked))
    }

    /// Sends the frames that `next` prepares without drafts until it has no more, and gives their times to `done`. Both are
    /// called while the driver computes, so that between an answer and the next request nothing is done but to take the
    /// tokens from the one to the other.
    pub(crate) fn relay(
        &mut self,
        mut next: impl FnMut(&mut Self) -> Result<Option<Prepared<'c>>, LoadError>,
        mut done: impl FnMut(&Exchange),
    ) -> Result<(), LoadError> {
        let Some(first) = next(self)? else {
            return Ok(());
        };
        let mut flight = Some(self.send(first)?);
        while let Some(sent) = flight {
            let prepared = next(self)?;
            let Outline {
                requests, sampled, ..
            } = sent.outline;
            let asked = (0..requests).map(|request| Asked::plainly(request < sampled));
            let exchange = self.receive(sent, asked)?;
            flight = prepared.map(|frame| self.send(frame)).transpose()?;
            done(&exchange);
        }
        Ok(())
    }

    /// Makes a frame of `turns`. What they await is the answer to the frame that is sent before this one.
    pub(crate) fn prepare<'a>(
        &mut self,
        turns: impl Iterator<Item = Turn<'a>> + Clone,
    ) -> Result<Prepared<'c>, LoadError> {
        let outline = self.builder.lay_out(turns);
        // The frame in flight may have the only slot.
        let request = self.client.try_request();
        Ok(Prepared {
            outline,
            made: request.map(|request| self.make(request)).transpose()?,
        })
    }

    fn make(&mut self, mut request: Request<'c>) -> Result<(Request<'c>, usize), LoadError> {
        let length = self.builder.encode(&mut self.frame)?;
        request.write(0, &self.frame[..length])?;
        Ok((request, length))
    }

    /// Puts the last answer's tokens into a frame and sends it.
    fn send(&mut self, prepared: Prepared<'c>) -> Result<Flight<'c>, LoadError> {
        let Prepared { outline, made } = prepared;
        let made = made.map_or_else(|| self.make(self.client.request()), Ok);
        let (mut request, request_bytes) = made?;
        let tokens = &self.answer.tokens;
        fill_gaps(&outline.gaps, tokens, |at, token| request.write(at, token))?;
        let at = Instant::now();
        Ok(Flight {
            sent: request.send(request_bytes)?,
            outline,
            at,
            client_ns: self.seen.map_or(0, |last| (at - last).as_nanos() as u64),
            request_bytes,
        })
    }

    /// Waits for the answer of a frame that `asked` so.
    fn receive<'a>(
        &mut self,
        flight: Flight<'c>,
        asked: impl Iterator<Item = Asked<'a>> + Clone,
    ) -> Result<Exchange, LoadError> {
        let (seen, probes) = flight
            .sent
            .receive(|bytes| (Instant::now(), self.answer.read(bytes, asked)))?;
        self.seen = Some(seen);
        Ok(Exchange {
            sent: flight.at,
            round_trip_ns: (seen - flight.at).as_nanos() as u64,
            client_ns: flight.client_ns,
            request_bytes: flight.request_bytes,
            requests: flight.outline.requests as u32,
            tokens: flight.outline.tokens as u32,
            probes: probes?,
        })
    }
}

/// What still fits into a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    requests: u32,
    tokens: u32,
    page_refs: u32,
}

impl Room {
    pub(crate) const fn of(caps: &Capabilities) -> Self {
        Self {
            requests: caps.max_forward_requests,
            tokens: caps.max_forward_tokens,
            page_refs: caps.max_page_refs,
        }
    }

    /// Takes a request's share; false, with nothing taken, when it does not fit.
    #[must_use]
    pub(crate) fn take(&mut self, tokens: u32, page_refs: u32) -> bool {
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
