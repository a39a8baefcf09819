//! A worker's end.

use super::mapping::Mapping;
use crate::error::RingError;
use crate::sync::atomic::{Ordering, fence};
use crate::wait::{self, Wait};

/// A worker's end of a broadcast.
///
/// Dropping it frees nothing: the leader waits for this reader once the ring is full. After an error it
/// is of no further use.
pub struct Listener {
    pub(super) mapping: Mapping,
    reader: usize,
    /// Fragments so far.
    taken: u64,
    /// Messages longer than a slot. Words, so that they are aligned.
    long: Vec<u64>,
}

/// What the next slot holds.
#[derive(Clone, Copy)]
struct Fragment {
    slot: usize,
    kind: u32,
    len: usize,
    has_more: bool,
}

impl Listener {
    /// Takes the reader's number, which can be done once.
    pub(crate) fn new(mapping: Mapping, reader: usize) -> Result<Self, RingError> {
        let readers = mapping.shape().readers();
        if reader >= readers {
            return Err(RingError::Reader { reader, readers });
        }
        if mapping.reader(reader).claimed.swap(1, Ordering::Relaxed) != 0 {
            return Err(RingError::ReaderTaken { reader });
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
    /// [`RingError::FragmentLength`] if a fragment is longer than its slot, [`RingError::System`] if the
    /// kernel refuses to wait.
    pub fn receive(&mut self, wait: Wait, message: &mut Vec<u8>) -> Result<u32, RingError> {
        message.clear();
        loop {
            let fragment = self.await_fragment(wait)?;
            self.take(fragment, |bytes| message.extend_from_slice(bytes));
            if !fragment.has_more {
                return Ok(fragment.kind);
            }
        }
    }

    /// Waits for the next message and shows kind and bytes to `act`. A message that fits a slot is shown
    /// where it is, starting at a multiple of 64, and its slot is given back when `act` returns. A longer
    /// one is put together first, starting at a multiple of 8.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn with_next<T>(
        &mut self,
        wait: Wait,
        act: impl FnOnce(u32, &[u8]) -> T,
    ) -> Result<T, RingError> {
        let fragment = self.await_fragment(wait)?;
        let kind = fragment.kind;
        if !fragment.has_more {
            return Ok(self.take(fragment, |bytes| act(kind, bytes)));
        }
        let len = self.assemble(wait, fragment)?;
        Ok(act(kind, &bytemuck::cast_slice(&self.long)[..len]))
    }

    /// Puts a message together whose first fragment is there, and returns its length.
    fn assemble(&mut self, wait: Wait, mut fragment: Fragment) -> Result<usize, RingError> {
        let (mut long, mut len) = (std::mem::take(&mut self.long), 0);
        loop {
            let end = len + fragment.len;
            long.resize(end.div_ceil(size_of::<u64>()), 0);
            let place = &mut bytemuck::cast_slice_mut(&mut long)[len..end];
            self.take(fragment, |bytes| place.copy_from_slice(bytes));
            len = end;
            if !fragment.has_more {
                self.long = long;
                return Ok(len);
            }
            fragment = self.await_fragment(wait)?;
        }
    }

    /// Waits for the next fragment.
    fn await_fragment(&self, wait: Wait) -> Result<Fragment, RingError> {
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
    fn sleep(&self, ready: impl FnMut() -> Option<()>) -> Result<(), RingError> {
        let words = self.mapping.writer();
        words.sleepers.fetch_add(1, Ordering::Relaxed);
        // SYNC: pairs with the fence in `Broadcast::publish`.
        fence(Ordering::SeqCst);
        let result = wait::until(Wait::Park, &words.wake, None, ready, || ());
        words.sleepers.fetch_sub(1, Ordering::Relaxed);
        result.map(|_| ())
    }

    /// The fragment that was published next.
    fn fragment(&self) -> Result<Fragment, RingError> {
        let shape = self.mapping.shape();
        let slot = (self.taken % u64::from(shape.slots)) as usize;
        let words = self.mapping.fragment(slot);
        let (len, capacity) = (words.len.load(Ordering::Relaxed) as usize, shape.capacity());
        if len > capacity {
            return Err(RingError::FragmentLength {
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

    /// Shows a fragment, then gives its slot back.
    fn take<T>(&mut self, fragment: Fragment, act: impl FnOnce(&[u8]) -> T) -> T {
        let result = self.mapping.read(fragment.slot, fragment.len, act);
        self.taken += 1;
        let taken = &self.mapping.reader(self.reader).taken;
        // SYNC: pairs with the acquire load in `Broadcast::count_free`.
        taken.store(self.taken, Ordering::Release);
        result
    }
}
