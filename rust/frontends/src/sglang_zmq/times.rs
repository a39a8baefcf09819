//! Times of a request (queue time, TTFT): `SGLang`'s `SchedulerReqTimeStats`, which its front end shows and makes metrics of.
//!
//! In a message these objects are pickled. Python pickles one at the start, and this crate puts the times of each request into
//! copies of it.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::sglang_zmq::open_request::OpenRequest;

/// A pickled object, without the opcodes around it, and where its numbers lie: 8 bytes each, the highest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimesTemplate {
    /// The opcodes that build the object; they keep nothing in the pickle's memo.
    pub pickle: Vec<u8>,
    /// Where the time stands at which the request began to wait.
    pub queued: usize,
    /// Where the time stands at which it was admitted.
    pub admitted: usize,
    /// Where the time stands at which its prompt was computed.
    pub computed: usize,
    /// Where it stands by how much the time of day is ahead of the clock of the other three.
    pub ahead: usize,
}

impl TimesTemplate {
    /// Whether all offsets are inside of it.
    pub fn is_whole(&self) -> bool {
        let offsets = [self.queued, self.admitted, self.computed, self.ahead];
        let end = self.pickle.len().saturating_sub(size_of::<f64>());
        self.pickle.len() >= size_of::<f64>() && offsets.iter().all(|&index| index <= end)
    }
}

/// Writes times.
#[derive(Debug, Clone)]
pub struct TimeStats {
    /// The moment from which the backend counts.
    pub began: Instant,
    /// The same moment on the clock of the front end, in seconds.
    pub began_s: f64,
    /// The object.
    pub template: TimesTemplate,
}

/// What has not happened: `SGLang` takes times above 0 for some, and moves them by how far two processes' clocks are apart.
const NEVER: f64 = -1e9;

/// Opcodes of pickle: protocol 2, an empty list, a mark; and what ends a list and the pickle.
const HEAD: &[u8] = b"\x80\x02](";
const TAIL: &[u8] = b"e.";

impl TimeStats {
    /// A pickled list with the times of each request.
    pub(crate) fn encode<'o>(&self, requests: impl Iterator<Item = &'o OpenRequest>) -> Vec<u8> {
        let mut bytes = HEAD.to_vec();
        let ahead = self.ahead();
        for open in requests {
            let start = bytes.len();
            bytes.extend_from_slice(&self.template.pickle);
            let queued = self.at(open.received);
            // What never ran has waited for nothing.
            let admitted = open.admitted.map_or(queued, |us| self.after(us));
            let computed = open.computed.map_or(NEVER, |at| self.at(at));
            for (index, time) in [
                (self.template.queued, queued),
                (self.template.admitted, admitted),
                (self.template.computed, computed),
                (self.template.ahead, ahead),
            ] {
                let index = start + index;
                bytes[index..index + size_of::<f64>()].copy_from_slice(&time.to_be_bytes());
            }
        }
        bytes.extend_from_slice(TAIL);
        bytes
    }

    /// Seconds from the queue to the admission, and from there to the first token.
    pub(crate) fn waited(&self, open: &OpenRequest) -> Option<(f64, f64)> {
        let admitted = self.after(open.admitted?);
        let computed = self.at(open.computed?);
        let queued = self.at(open.received);
        Some(((admitted - queued).max(0.0), (computed - admitted).max(0.0)))
    }

    /// On the front end's clock.
    fn at(&self, moment: Instant) -> f64 {
        let since = moment.saturating_duration_since(self.began);
        self.began_s + since.as_secs_f64()
    }

    /// How far the time of day is ahead of the front end's clock: as of now, for it may be set at any time.
    fn ahead(&self) -> f64 {
        let day = SystemTime::now().duration_since(UNIX_EPOCH);
        day.unwrap_or_default().as_secs_f64() - self.at(Instant::now())
    }

    fn after(&self, us: u64) -> f64 {
        self.began_s + us as f64 / 1e6
    }
}
