//! The sending end of a broadcast.

use std::time::Duration;

use super::mapping::Mapping;
use crate::error::BroadcastError;
use crate::futex;
use crate::sync::atomic::{Ordering, fence};
use crate::sync::sleep;
use crate::wait::{self, Wait};

/// Rounds of spinning, of some microseconds each, before the writer sleeps.
const SPINS: u32 = 64;
const MAX_SLEEP: Duration = Duration::from_millis(1);

/// Leader's end of a broadcast. One writer, a fixed number of readers; every reader gets every
/// message, in order.
///
/// Readers that have not been opened yet, or whose process has ended, count like slow ones. The writer goes
/// on until the ring is full of fragments that they have not taken, and then waits for them, without a
/// limit. Ending a leader whose worker has died is left to the caller, and so is ending workers whose leader
/// has died: they wait for its next message.
///
/// ```
/// use pie_ring::{Broadcast, Listener, Wait};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut broadcast = Broadcast::create(1)?;
/// broadcast.send(7, &[b"a message ", b"in two parts"])?;
///
/// // In a worker, which inherits the descriptor:
/// let inherited = broadcast.fd().try_clone_to_owned()?;
/// let mut listener = Listener::open(inherited, 0)?;
/// let (kind, len) = listener.receive_with(Wait::Park, |kind, message| (kind, message.len()))?;
/// assert_eq!((kind, len), (7, 22));
/// # Ok(())
/// # }
/// ```
pub struct Broadcast {
    pub(super) mapping: Mapping,
    /// Fragments so far.
    published: u64,
    /// Slots that are known to be free. Others may be by now.
    free: usize,
    /// A message was begun, and its rest is missing.
    is_torn: bool,
}

impl Broadcast {
    pub(crate) fn new(mapping: Mapping) -> Self {
        Self {
            mapping,
            published: 0,
            free: 0,
            is_torn: false,
        }
    }

    /// Sends one message, the concatenation of all parts. `kind` is any number of the caller's, which is received with
    /// it. Waits while a slow reader leaves no space.
    ///
    /// # Errors
    /// [`BroadcastError::ReaderCount`] if a reader's count makes no sense. When the message was longer than a
    /// slot and partly sent by then, every later one fails with [`BroadcastError::Torn`].
    pub fn send(&mut self, kind: u32, parts: &[&[u8]]) -> Result<(), BroadcastError> {
        if self.is_torn {
            return Err(BroadcastError::Torn);
        }
        let capacity = self.mapping.layout().capacity();
        let mut left = parts.iter().map(|part| part.len()).sum();
        let mut source = Source { part: &[], parts };
        loop {
            self.wait_for_space()?;
            let len = capacity.min(left);
            left -= len;
            self.fill(kind, &mut source, len, left > 0);
            self.publish();
            self.is_torn = left > 0;
            if left == 0 {
                return Ok(());
            }
        }
    }

    fn slot(&self) -> usize {
        (self.published % u64::from(self.mapping.layout().slots)) as usize
    }

    /// Writes the next slot.
    fn fill(&self, kind: u32, source: &mut Source, len: usize, has_more: bool) {
        let (slot, mut end) = (self.slot(), 0);
        while end < len {
            let bytes = source.take(len - end);
            self.mapping.write(slot, end, bytes);
            end += bytes.len();
        }
        let words = self.mapping.fragment(slot);
        words.kind.store(kind, Ordering::Relaxed);
        words.len.store(len as u32, Ordering::Relaxed);
        words.has_more.store(u32::from(has_more), Ordering::Relaxed);
    }

    /// Publishes the slot, and wakes readers that sleep.
    fn publish(&mut self) {
        self.published += 1;
        self.free -= 1;
        let words = self.mapping.writer();
        // SYNC: pairs with the acquire load in `Listener::await_fragment`: words and payload follow.
        words.published.store(self.published, Ordering::Release);
        // SYNC: pairs with the snapshot in `wait::park`.
        words.wake.store(self.published as u32, Ordering::Release);
        // SYNC: pairs with the fence in `Listener::sleep`. Either that reader is counted below, or it
        // sees the new count before it sleeps.
        fence(Ordering::SeqCst);
        if words.sleepers.load(Ordering::Relaxed) > 0 {
            futex::wake_all(&words.wake);
        }
    }

    /// Waits until the next slot is free: spins, then sleeps with backoff.
    fn wait_for_space(&mut self) -> Result<(), BroadcastError> {
        let mut turns: u32 = 0;
        while self.free == 0 {
            let ready = || match self.count_free() {
                Ok(0) => None,
                found => Some(found),
            };
            let idle = || {
                turns = turns.saturating_add(1);
                if let Some(naps) = turns.checked_sub(SPINS) {
                    sleep((Duration::from_micros(20).saturating_mul(naps)).min(MAX_SLEEP));
                }
            };
            let word = &self.mapping.writer().wake;
            let found = wait::until(Wait::Spin, word, None, ready, idle)?;
            self.free = found.unwrap_or(Ok(0))?;
        }
        Ok(())
    }

    /// Number of slots that every reader has read.
    fn count_free(&self) -> Result<usize, BroadcastError> {
        let (published, slots) = (self.published, u64::from(self.mapping.layout().slots));
        let mut free = slots;
        for reader in 0..self.mapping.layout().readers() {
            // SYNC: pairs with the release store in `Listener::take`: the reading is over.
            let taken = self.mapping.reader(reader).taken.load(Ordering::Acquire);
            let pending = published.wrapping_sub(taken);
            if pending > slots {
                return Err(BroadcastError::ReaderCount {
                    reader,
                    taken,
                    published,
                    slots,
                });
            }
            free = free.min(slots - pending);
        }
        Ok(free as usize)
    }
}

/// The part of a message that is not sent yet.
struct Source<'a> {
    part: &'a [u8],
    parts: &'a [&'a [u8]],
}

impl<'a> Source<'a> {
    /// The next contiguous bytes, at most `limit`; none at the end.
    fn take(&mut self, limit: usize) -> &'a [u8] {
        while self.part.is_empty()
            && let Some((first, rest)) = self.parts.split_first()
        {
            (self.part, self.parts) = (first, rest);
        }
        let (now, later) = self.part.split_at(self.part.len().min(limit));
        self.part = later;
        now
    }
}
