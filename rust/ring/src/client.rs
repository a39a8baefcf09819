//! The runtime's side: the same contract as Pie's own client, for tests, benches and load.
//!
//! A call takes a slot, copies the request, raises `req_seq`, wakes the server and waits until
//! `resp_seq` has caught up. Any number of threads may call; each slot carries one call at a time.

use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

use crate::error::RingError;
use crate::futex;
use crate::layout::RegionLayout;
use crate::mapping::Mapping;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use crate::sync::{Mutex, MutexGuard, epoch_us};
use crate::wait::{self, Wait};

/// How a client waits.
#[derive(Clone, Copy, Debug)]
pub struct ClientConfig {
    /// Strategy; the runtime uses the driver's spin budget.
    pub wait: Wait,
    /// Time limit for an answer, counted from the send.
    pub timeout: Duration,
}

impl Default for ClientConfig {
    /// Spins for 1 ms, then parks; gives up after 60 s.
    fn default() -> Self {
        Self {
            wait: Wait::SpinThenPark(Duration::from_millis(1)),
            timeout: Duration::from_mins(1),
        }
    }
}

/// The one client of a region.
pub struct Client {
    mapping: Mapping,
    config: ClientConfig,
    /// Per slot: held for the length of a call.
    slots: Box<[Mutex<()>]>,
    next_slot: AtomicUsize,
    next_id: AtomicU32,
    aborted: AtomicBool,
}

impl Client {
    pub(crate) fn new(mapping: Mapping, config: ClientConfig) -> Self {
        let slots = mapping.layout().slots();
        Self {
            mapping,
            config,
            slots: (0..slots).map(|_| Mutex::new(())).collect(),
            next_slot: AtomicUsize::new(0),
            next_id: AtomicU32::new(1),
            aborted: AtomicBool::new(false),
        }
    }

    /// The layout that the server chose.
    pub fn layout(&self) -> &RegionLayout {
        self.mapping.layout()
    }

    /// Sends `request`, waits for the response and gives it to `read`. After a time-out the slot
    /// serves the next call; the late answer is dropped.
    ///
    /// # Errors
    /// [`RingError::RequestTooLarge`] before anything is sent; [`RingError::TimedOut`],
    /// [`RingError::Aborted`] or [`RingError::ResponseLength`] after.
    pub fn call<R>(&self, request: &[u8], read: impl FnOnce(&[u8]) -> R) -> Result<R, RingError> {
        self.check_len(request.len())?;
        let write = |slot| {
            self.mapping.write_request(slot, request);
            Ok(request.len())
        };
        self.exchange(write, read)
    }

    /// As [`call`](Self::call), but `write` makes the request in the slot itself and returns its length.
    ///
    /// # Errors
    /// What `write` returns, with nothing sent; otherwise those of [`call`](Self::call).
    pub fn call_in_place<R, E: From<RingError>>(
        &self,
        write: impl FnOnce(&mut [u8]) -> Result<usize, E>,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, E> {
        let write = |slot| {
            #[expect(unsafe_code, reason = "the buffer is exclusive by the slot's mutex")]
            // SAFETY: `exchange` holds the slot's mutex, and no other code of a client borrows the
            // request buffer.
            let len = write(unsafe { self.mapping.request_mut(slot) })?;
            self.check_len(len)?;
            Ok(len)
        };
        self.exchange(write, read)
    }

    fn exchange<R, E: From<RingError>>(
        &self,
        write: impl FnOnce(usize) -> Result<usize, E>,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, E> {
        let (slot, _in_use) = self.take_slot();
        if self.is_aborted() {
            return Err(RingError::Aborted.into());
        }
        let len = write(slot)?;
        let (seq, id) = self.send(slot, len);
        self.receive(slot, seq, id)?;
        Ok(self.read_response(slot, read)?)
    }

    fn check_len(&self, len: usize) -> Result<(), RingError> {
        let capacity = self.layout().request_capacity();
        if len > capacity {
            return Err(RingError::RequestTooLarge { len, capacity });
        }
        Ok(())
    }

    /// Makes every running and later call fail with [`RingError::Aborted`]. The server is not told.
    pub fn abort(&self) {
        // A client that sleeps learns it by the raised counter, one that spins by and by.
        self.aborted.store(true, Ordering::Relaxed);
        for slot in 0..self.slots.len() {
            let wake = &self.mapping.slot(slot).resp_wake;
            // SYNC: pairs with the snapshot in `wait::park`.
            wake.fetch_add(1, Ordering::Release);
            futex::wake_all(wake);
        }
    }

    fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Relaxed)
    }

    /// The first free slot from a rotating start; if all are busy, waits for the first.
    fn take_slot(&self) -> (usize, MutexGuard<'_, ()>) {
        let start = self.next_slot.fetch_add(1, Ordering::Relaxed) % self.slots.len();
        for offset in 0..self.slots.len() {
            let slot = (start + offset) % self.slots.len();
            match self.slots[slot].try_lock() {
                Ok(guard) => return (slot, guard),
                Err(TryLockError::Poisoned(poisoned)) => return (slot, poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        (
            start,
            self.slots[start]
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }

    /// Sends the `len` bytes that the slot holds.
    fn send(&self, slot: usize, len: usize) -> (u64, u32) {
        let words = self.mapping.slot(slot);
        // The server looks at the words all the time: what takes time comes before the first store.
        let (id, now) = (self.next_id.fetch_add(1, Ordering::Relaxed), epoch_us());
        // The slot's mutex makes this thread the only writer of `req_seq`.
        let seq = words.req_seq.load(Ordering::Relaxed).wrapping_add(1);
        words.req_id.store(id, Ordering::Relaxed);
        words.req_len.store(len as u32, Ordering::Relaxed);
        words.sent_us.store(now, Ordering::Relaxed);
        // SYNC: pairs with the acquire load in `Queue::scan`.
        words.req_seq.store(seq, Ordering::Release);
        let req_wake = &self.mapping.header().req_wake;
        // SYNC: pairs with the snapshot in `wait::park`.
        req_wake.fetch_add(1, Ordering::Release);
        (seq, id)
    }

    /// Wakes the server and waits for the answer. A client that spins makes the futex call only when
    /// it has waited for a while: a server that spins too has answered by then.
    fn receive(&self, slot: usize, seq: u64, id: u32) -> Result<(), RingError> {
        let Self {
            mapping, config, ..
        } = self;
        let words = mapping.slot(slot);
        let mut owed = true;
        let mut wake_server = || {
            if std::mem::take(&mut owed) {
                futex::wake_all(&mapping.header().req_wake);
            }
        };
        if config.wait != Wait::Spin {
            wake_server();
        }
        let ready = || {
            // SYNC: pairs with the release store in `Lease::publish`. The distance decides, because
            // numbers wrap around; short of that it is what the protocol demands, `resp_seq >= seq`.
            let ahead = words.resp_seq.load(Ordering::Acquire).wrapping_sub(seq);
            if ahead.cast_signed() >= 0 {
                return Some(Ok(()));
            }
            self.is_aborted().then_some(Err(RingError::Aborted))
        };
        let after = config.timeout;
        let result = wait::until(
            config.wait,
            &words.resp_wake,
            Some(after),
            ready,
            &mut wake_server,
        )?
        .unwrap_or(Err(RingError::TimedOut { id, after }));
        if result.is_err() {
            wake_server();
        }
        result
    }

    fn read_response<R>(&self, slot: usize, read: impl FnOnce(&[u8]) -> R) -> Result<R, RingError> {
        let capacity = self.layout().response_capacity();
        let len = self.mapping.slot(slot).resp_len.load(Ordering::Relaxed) as usize;
        if len > capacity {
            return Err(RingError::ResponseLength {
                slot,
                len,
                capacity,
            });
        }
        Ok(read(self.mapping.response(slot, len)))
    }
}
