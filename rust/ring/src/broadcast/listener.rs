//! The receiving end of a broadcast.

use super::mapping::Mapping;
use crate::error::BroadcastError;
use crate::sync::atomic::{Ordering, fence};
use crate::wait::{self, Wait};

/// The receiving end of a broadcast, in a worker.
///
/// Dropping it frees nothing: the leader waits for this reader once the ring is full. After an error it
/// is of no further use.
pub struct Listener {
    pub(super) mapping: Mapping,
    reader: usize,
    /// Fragments so far.
    taken: u64,
    /// Messages longer than a slot.
    long: Vec<u8>,
}

/// A received message. Its bytes may be in shared memory, so they are copied, not borrowed.
pub struct Message<'m> {
    source: MessageBytes<'m>,
    len: usize,
}

/// Location of the bytes of a message.
enum MessageBytes<'m> {
    /// In one slot.
    Slot(&'m Mapping, usize),
    /// Assembled from several.
    Assembled(&'m [u8]),
}

impl Message<'_> {
    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Fills `bytes` with the message's bytes from `offset` on.
    ///
    /// # Panics
    /// If the message has fewer bytes.
    pub fn copy(&self, offset: usize, bytes: &mut [u8]) {
        let end = offset.checked_add(bytes.len());
        assert!(
            end.is_some_and(|end| end <= self.len),
            "{} bytes from {offset} on are not in a message of {}",
            bytes.len(),
            self.len
        );
        match self.source {
            MessageBytes::Slot(mapping, slot) => mapping.read(slot, offset, bytes),
            MessageBytes::Assembled(whole) => {
                bytes.copy_from_slice(&whole[offset..offset + bytes.len()]);
            }
        }
    }

    /// All of it.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy(0, &mut bytes);
        bytes
    }
}

/// The content of the next slot.
#[derive(Clone, Copy)]
struct Fragment {
    slot: usize,
    kind: u32,
    len: usize,
    has_more: bool,
}

impl Listener {
    /// Claims the reader's number, which is possible once.
    pub(crate) fn new(mapping: Mapping, reader: usize) -> Result<Self, BroadcastError> {
        let readers = mapping.layout().readers();
        if reader >= readers {
            return Err(BroadcastError::Reader { reader, readers });
        }
        if mapping.reader(reader).claimed.swap(1, Ordering::Relaxed) != 0 {
            return Err(BroadcastError::ReaderTaken { reader });
        }
        Ok(Self {
            mapping,
            reader,
            taken: 0,
            long: Vec::new(),
        })
    }

    /// Waits for the next message, replaces the content of `message` by it and returns its kind.
    ///
    /// # Errors
    /// [`BroadcastError::FragmentLength`] if a fragment is longer than its slot, [`BroadcastError::System`] if the
    /// kernel refuses to wait.
    pub fn receive(&mut self, wait: Wait, message: &mut Vec<u8>) -> Result<u32, BroadcastError> {
        let first = self.await_fragment(wait)?;
        self.assemble(wait, first, message)?;
        Ok(first.kind)
    }

    /// Waits for the next message and passes its kind and the message to `act`. A message in one slot is not copied; its slot is
    /// freed when `act` returns. A longer one is assembled first.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn receive_with<T>(
        &mut self,
        wait: Wait,
        act: impl FnOnce(u32, &Message<'_>) -> T,
    ) -> Result<T, BroadcastError> {
        let first = self.await_fragment(wait)?;
        if !first.has_more {
            let source = MessageBytes::Slot(&self.mapping, first.slot);
            let message = Message {
                source,
                len: first.len,
            };
            let result = act(first.kind, &message);
            self.free_slot();
            return Ok(result);
        }
        let mut long = std::mem::take(&mut self.long);
        self.assemble(wait, first, &mut long)?;
        self.long = long;
        let message = Message {
            source: MessageBytes::Assembled(&self.long),
            len: self.long.len(),
        };
        Ok(act(first.kind, &message))
    }

    /// Assembles a message whose first fragment has been received.
    fn assemble(
        &mut self,
        wait: Wait,
        mut fragment: Fragment,
        message: &mut Vec<u8>,
    ) -> Result<(), BroadcastError> {
        let mut len = 0;
        loop {
            let end = len + fragment.len;
            message.resize(end, 0);
            self.mapping.read(fragment.slot, 0, &mut message[len..]);
            self.free_slot();
            len = end;
            if !fragment.has_more {
                return Ok(());
            }
            fragment = self.await_fragment(wait)?;
        }
    }

    /// Waits for the next fragment.
    fn await_fragment(&self, wait: Wait) -> Result<Fragment, BroadcastError> {
        let words = self.mapping.writer();
        let ready = || {
            // SYNC: pairs with the release store in `Broadcast::publish`.
            (words.published.load(Ordering::Acquire) != self.taken).then_some(())
        };
        let seen = match wait {
            Wait::Spin => wait::until(wait, &words.wake, None, ready, || ())?,
            Wait::SpinThenPark(budget) => {
                wait::until(Wait::Spin, &words.wake, Some(budget), ready, || ())?
            }
            Wait::Park => ready(),
        };
        if seen.is_none() {
            self.sleep(ready)?;
        }
        self.fragment()
    }

    /// Sleeps until `ready`.
    fn sleep(&self, ready: impl FnMut() -> Option<()>) -> Result<(), BroadcastError> {
        let words = self.mapping.writer();
        words.sleepers.fetch_add(1, Ordering::Relaxed);
        // SYNC: pairs with the fence in `Broadcast::publish`.
        fence(Ordering::SeqCst);
        let result = wait::until(Wait::Park, &words.wake, None, ready, || ());
        words.sleepers.fetch_sub(1, Ordering::Relaxed);
        result?;
        Ok(())
    }

    /// The next published fragment.
    fn fragment(&self) -> Result<Fragment, BroadcastError> {
        let layout = self.mapping.layout();
        let slot = (self.taken % u64::from(layout.slots)) as usize;
        let words = self.mapping.fragment(slot);
        let (len, capacity) = (
            words.len.load(Ordering::Relaxed) as usize,
            layout.capacity(),
        );
        if len > capacity {
            return Err(BroadcastError::FragmentLength {
                slot,
                len,
                capacity,
            });
        }
        Ok(Fragment {
            slot,
            kind: words.kind.load(Ordering::Relaxed),
            len,
            has_more: words.has_more.load(Ordering::Relaxed) != 0,
        })
    }

    /// Frees the slot of the fragment that was read.
    fn free_slot(&mut self) {
        self.taken += 1;
        let taken = &self.mapping.reader(self.reader).taken;
        // SYNC: pairs with the acquire load in `Broadcast::count_free`.
        taken.store(self.taken, Ordering::Release);
    }
}
