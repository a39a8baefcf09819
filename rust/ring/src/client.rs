//! The runtime's side: the same contract as Pie's own client, for tests, benches and load.
//!
//! A call takes a slot, copies the request, raises `req_seq`, wakes the server and waits until
//! `resp_seq` has caught up. Any number of threads may call; each slot carries one call at a time.
//! [`Request`] and [`Sent`] are the two halves of a call, for a thread that has other work in between.

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
    /// Time limit for an answer, counted from when it is waited for.
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
    /// [`RingError::RequestTooLarge`] or [`RingError::Aborted`] before anything is sent;
    /// [`RingError::TimedOut`], [`RingError::Aborted`] or [`RingError::ResponseLength`] after.
    pub fn call<R>(&self, request: &[u8], read: impl FnOnce(&[u8]) -> R) -> Result<R, RingError> {
        self.check_len(request.len())?;
        let sending = self.request();
        self.mapping.write_request(sending.slot, request);
        sending.send(request.len())?.receive(read)
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
        let mut request = self.request();
        let len = write(request.buffer())?;
        Ok(request.send(len)?.receive(read)?)
    }

    /// A slot to make a request in; if all are busy, waits for the first.
    pub fn request(&self) -> Request<'_> {
        let start = self.rotate();
        self.free_slot(start).unwrap_or_else(|| Request {
            client: self,
            slot: start,
            in_use: self.slots[start]
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        })
    }

    /// A slot to make a request in, if one is free. A thread that has a request on its way makes the
    /// next one so, as its own slot may be the only one.
    pub fn try_request(&self) -> Option<Request<'_>> {
        self.free_slot(self.rotate())
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

    /// Slots are taken in turn.
    fn rotate(&self) -> usize {
        self.next_slot.fetch_add(1, Ordering::Relaxed) % self.slots.len()
    }

    /// The first free slot from `start` on.
    fn free_slot(&self, start: usize) -> Option<Request<'_>> {
        let mut slots = (start..self.slots.len()).chain(0..start);
        slots.find_map(|slot| {
            let in_use = match self.slots[slot].try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            };
            Some(Request {
                client: self,
                slot,
                in_use,
            })
        })
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

    /// Wakes the server if `owed`, and waits for the answer.
    fn receive(&self, slot: usize, seq: u64, id: u32, owed: bool) -> Result<(), RingError> {
        let Self {
            mapping, config, ..
        } = self;
        let words = mapping.slot(slot);
        let mut owed = owed;
        let mut wake_server = || {
            if std::mem::take(&mut owed) {
                self.wake_server();
            }
        };
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

    fn wake_server(&self) {
        futex::wake_all(&self.mapping.header().req_wake);
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

/// A slot that is taken, and the request that is made in it. Dropped, it frees the slot.
#[must_use]
pub struct Request<'c> {
    client: &'c Client,
    slot: usize,
    in_use: MutexGuard<'c, ()>,
}

impl<'c> Request<'c> {
    /// The whole request buffer, with whatever an earlier request has left in it.
    pub fn buffer(&mut self) -> &mut [u8] {
        #[expect(unsafe_code, reason = "the buffer is exclusive by the slot's mutex")]
        // SAFETY: `in_use` holds the slot's mutex, no other code of a client borrows the request buffer,
        // and `self` is borrowed exclusively.
        unsafe {
            self.client.mapping.request_mut(self.slot)
        }
    }

    /// Sends the first `len` bytes of the buffer. A client that spins leaves a server that sleeps
    /// asleep until the answer is waited for.
    ///
    /// # Errors
    /// [`RingError::RequestTooLarge`] or [`RingError::Aborted`], with nothing sent.
    pub fn send(self, len: usize) -> Result<Sent<'c>, RingError> {
        let Self {
            client,
            slot,
            in_use,
        } = self;
        client.check_len(len)?;
        if client.is_aborted() {
            return Err(RingError::Aborted);
        }
        let (seq, id) = client.send(slot, len);
        // A client that spins makes the futex call only when it has waited for a while: a server that
        // spins too has answered by then.
        let owed = client.config.wait == Wait::Spin;
        if !owed {
            client.wake_server();
        }
        Ok(Sent {
            client,
            slot,
            seq,
            id,
            owed,
            _in_use: in_use,
        })
    }
}

/// A request on its way. Dropped, it is as one that has timed out: the server is woken, the slot serves
/// the next call, and the late answer is dropped.
#[must_use]
pub struct Sent<'c> {
    client: &'c Client,
    slot: usize,
    seq: u64,
    id: u32,
    /// Whether the server, which may sleep, has yet to be woken.
    owed: bool,
    _in_use: MutexGuard<'c, ()>,
}

impl Sent<'_> {
    /// Waits for the response and gives it to `read`.
    ///
    /// # Errors
    /// [`RingError::TimedOut`], [`RingError::Aborted`] or [`RingError::ResponseLength`].
    pub fn receive<R>(mut self, read: impl FnOnce(&[u8]) -> R) -> Result<R, RingError> {
        let owed = std::mem::take(&mut self.owed);
        self.client.receive(self.slot, self.seq, self.id, owed)?;
        self.client.read_response(self.slot, read)
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        if self.owed {
            self.client.wake_server();
        }
    }
}
