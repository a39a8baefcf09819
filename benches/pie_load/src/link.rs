//! Frames over the ring, with their times.

use std::sync::Arc;
use std::time::Instant;

use pie_ring::Client;

use crate::answer::{Answer, Probes};
use crate::error::LoadError;
use crate::frame::{FrameBuilder, Turn};
use crate::handshake::Capabilities;

/// Sends one frame at a time, as the runtime's scheduler does.
pub(crate) struct Link {
    client: Arc<Client>,
    builder: FrameBuilder,
    /// When the last answer was seen.
    seen: Option<Instant>,
    /// The last answer.
    pub(crate) answer: Answer,
}

/// One frame and its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange {
    /// From the request made, but not sent, to the answer seen, but not read.
    pub(crate) round_trip_ns: u64,
    /// From the last answer seen to this request made: the load's own work. 0 for the first frame.
    pub(crate) client_ns: u64,
    pub(crate) request_bytes: usize,
    /// `None` for the fast reply.
    pub(crate) probes: Option<Probes>,
}

impl Link {
    pub(crate) fn new(client: Arc<Client>, page_size: u32) -> Self {
        Self {
            client,
            builder: FrameBuilder::new(page_size),
            seen: None,
            answer: Answer::default(),
        }
    }

    /// Forgets the last answer: what follows is another series.
    pub(crate) fn rest(&mut self) {
        self.seen = None;
    }

    /// Sends a frame of `turns`; those that sample come first.
    pub(crate) fn forward<'a>(
        &mut self,
        turns: impl Iterator<Item = Turn<'a>> + Clone,
    ) -> Result<Exchange, LoadError> {
        let Self {
            client,
            builder,
            answer,
            ..
        } = self;
        let sent_turns = turns.clone();
        let (mut request_bytes, mut sent) = (0, Instant::now());
        let (seen, probes) = client.call_in_place(
            |buffer| {
                request_bytes = builder.encode(turns, buffer)?;
                sent = Instant::now();
                Ok::<_, LoadError>(request_bytes)
            },
            |bytes| {
                let seen = Instant::now();
                (seen, answer.read(bytes, sent_turns))
            },
        )?;
        let exchange = Exchange {
            round_trip_ns: (seen - sent).as_nanos() as u64,
            client_ns: self.seen.map_or(0, |last| (sent - last).as_nanos() as u64),
            request_bytes,
            probes: probes?,
        };
        self.seen = Some(seen);
        Ok(exchange)
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
