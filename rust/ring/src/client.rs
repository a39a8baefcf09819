//! The client of a region; compatible with the client of the Pie runtime.
//!
//! A call acquires a slot, copies the request, increments `req_seq`, wakes the server, waits until `resp_seq` equals it, and copies
//! the response. Any number of threads may call; each slot has one call at a time. [`RequestSlot`] and [`InFlightRequest`] are the
//! two halves of a call, for asynchronous use.

use std::sync::PoisonError;
use std::time::Duration;

use crate::error::CallError;
use crate::futex;
use crate::layout::RegionLayout;
use crate::mapping::Mapping;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, epoch_us};
use crate::wait::{self, Wait};

/// Wait strategy and timeout of a client.
#[derive(Clone, Copy, Debug)]
pub struct ClientConfig {
    /// Strategy.
    pub wait: Wait,
    /// Timeout of a response, from the start of the wait.
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

/// The client of a region. A region has one, which threads share.
///
/// Clients may follow one another, and several may be open while only one calls. Two that call at the same time, like any
/// two writers of a slot, overwrite each other's requests: a call that detects it fails with
/// [`CallError::OtherClient`], but not every mixture can be detected.
pub struct Client {
    mapping: Mapping,
    config: ClientConfig,
    slots: Mutex<Slots>,
    /// Signals a free slot.
    freed: Condvar,
    next_id: AtomicU32,
    aborted: AtomicBool,
}

/// The free slots.
struct Slots {
    /// The response buffer of each free slot.
    idle: Box<[Option<Vec<u64>>]>,
    /// Round-robin position.
    next: usize,
    /// Threads that wait for a slot.
    waiting: usize,
}

impl Client {
    pub(crate) fn new(mapping: Mapping, config: ClientConfig) -> Self {
        let slots = Slots {
            idle: vec![Some(Vec::new()); mapping.layout().slots()].into(),
            next: 0,
            waiting: 0,
        };
        Self {
            mapping,
            config,
            slots: Mutex::new(slots),
            freed: Condvar::new(),
            next_id: AtomicU32::new(1),
            aborted: AtomicBool::new(false),
        }
    }

    /// The layout that the server chose.
    pub fn layout(&self) -> &RegionLayout {
        self.mapping.layout()
    }

    /// Sends `request`, waits for the response and passes a copy of it to `read`. After a time-out the slot
    /// is free for the next call, and the late answer is dropped.
    ///
    /// # Errors
    /// [`CallError::RequestTooLarge`] or [`CallError::Aborted`] before anything is sent;
    /// those of [`InFlightRequest::receive`] after.
    pub fn call<R>(&self, request: &[u8], read: impl FnOnce(&[u8]) -> R) -> Result<R, CallError> {
        self.check_len(request.len())?;
        let mut sending = self.acquire_slot();
        sending.write(0, request)?;
        sending.send(request.len())?.receive(read)
    }

    /// Acquires a slot for a request; blocks while all are in use.
    pub fn acquire_slot(&self) -> RequestSlot<'_> {
        let mut slots = self.slots();
        loop {
            if let Some((slot, answer)) = slots.take() {
                return RequestSlot(AcquiredSlot::new(self, slot, answer));
            }
            slots.waiting += 1;
            slots = self
                .freed
                .wait(slots)
                .unwrap_or_else(PoisonError::into_inner);
            slots.waiting -= 1;
        }
    }

    /// Acquires a slot if one is free. A thread with a request in flight must use this, since its own slot may be the only one.
    pub fn try_acquire_slot(&self) -> Option<RequestSlot<'_>> {
        let (slot, answer) = self.slots().take()?;
        Some(RequestSlot(AcquiredSlot::new(self, slot, answer)))
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_len(&self, len: usize) -> Result<(), CallError> {
        let capacity = self.layout().request_capacity();
        if len > capacity {
            return Err(CallError::RequestTooLarge { len, capacity });
        }
        Ok(())
    }

    /// Makes every running and later call fail with [`CallError::Aborted`]. The server is not notified.
    pub fn abort(&self) {
        // A parked client is woken by the counter, a spinning one reads the flag.
        self.aborted.store(true, Ordering::Relaxed);
        for slot in 0..self.layout().slots() {
            let wake = &self.mapping.slot(slot).resp_wake;
            // SYNC: pairs with the snapshot in `wait::park`.
            wake.fetch_add(1, Ordering::Release);
            futex::wake_all(wake);
        }
    }

    fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Relaxed)
    }

    /// Sends the `len` bytes that the slot holds.
    fn send(&self, slot: usize, len: usize) -> (u64, u32) {
        let words = self.mapping.slot(slot);
        // The server may be polling these words, so slow calls come before the first store.
        let (id, now) = (self.next_id.fetch_add(1, Ordering::Relaxed), epoch_us());
        // The holder of the slot is the only writer of `req_seq`.
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

    /// Wakes the server if that was `deferred`, and waits for the response.
    fn receive(&self, slot: usize, seq: u64, id: u32, deferred: bool) -> Result<(), CallError> {
        let Self {
            mapping, config, ..
        } = self;
        let words = mapping.slot(slot);
        let mut deferred = deferred;
        let mut wake_server = || {
            if std::mem::take(&mut deferred) {
                self.wake_server();
            }
        };
        let ready = || self.poll_response(slot, seq);
        let after = config.timeout;
        let result = wait::until(
            config.wait,
            &words.resp_wake,
            Some(after),
            ready,
            &mut wake_server,
        )?
        .unwrap_or(Err(CallError::TimedOut { id, after }));
        if result.is_err() {
            wake_server();
        }
        // A slot that is taken has no other writer, unless there is another client.
        if result.is_ok() && words.req_seq.load(Ordering::Relaxed) != seq {
            return Err(CallError::OtherClient { slot });
        }
        result
    }

    /// Parks until the response is there, the client is aborted, or `limit` has passed.
    fn sleep(&self, slot: usize, seq: u64, limit: Duration) -> Result<bool, CallError> {
        let word = &self.mapping.slot(slot).resp_wake;
        let ready = || self.poll_response(slot, seq);
        let found = wait::until(Wait::Park, word, Some(limit), ready, || ())?;
        Ok(found.transpose()?.is_some())
    }

    /// Whether the response is there.
    fn poll_response(&self, slot: usize, seq: u64) -> Option<Result<(), CallError>> {
        let words = self.mapping.slot(slot);
        // SYNC: pairs with the release store in `Lease::publish`. The distance decides, because
        // numbers wrap around; apart from that it is the protocol's `resp_seq >= seq`.
        let ahead = words.resp_seq.load(Ordering::Acquire).wrapping_sub(seq);
        if ahead.cast_signed() >= 0 {
            return Some(Ok(()));
        }
        self.is_aborted().then_some(Err(CallError::Aborted))
    }

    fn wake_server(&self) {
        futex::wake_all(&self.mapping.header().req_wake);
    }

    /// Copies the response into `answer`, and passes it to `read`.
    fn read_response<R>(
        &self,
        slot: usize,
        answer: &mut Vec<u64>,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, CallError> {
        let capacity = self.layout().response_capacity();
        // SYNC: pairs with the release store of the length in `Lease::publish`.
        let len = self.mapping.slot(slot).resp_len.load(Ordering::Acquire) as usize;
        if len > capacity {
            return Err(CallError::ResponseLength {
                slot,
                len,
                capacity,
            });
        }
        self.mapping.copy_response(slot, len, answer);
        Ok(read(&bytemuck::cast_slice(answer)[..len]))
    }
}

impl Slots {
    /// The next free slot, with its response buffer.
    fn take(&mut self) -> Option<(usize, Vec<u64>)> {
        let count = self.idle.len();
        let mut slots = (self.next..count).chain(0..self.next);
        let taken = slots.find_map(|slot| Some((slot, self.idle[slot].take()?)));
        self.next = (self.next + 1) % count;
        taken
    }
}

/// An acquired slot. Dropping it frees the slot.
struct AcquiredSlot<'c> {
    client: &'c Client,
    slot: usize,
    answer: Vec<u64>,
}

impl<'c> AcquiredSlot<'c> {
    fn new(client: &'c Client, slot: usize, answer: Vec<u64>) -> Self {
        Self {
            client,
            slot,
            answer,
        }
    }
}

impl Drop for AcquiredSlot<'_> {
    fn drop(&mut self) {
        let mut slots = self.client.slots();
        slots.idle[self.slot] = Some(std::mem::take(&mut self.answer));
        // Notifying is a system call even without waiters.
        if slots.waiting > 0 {
            self.client.freed.notify_one();
        }
    }
}

/// An acquired slot, in which a request is written. Dropping it frees the slot.
#[must_use]
pub struct RequestSlot<'c>(AcquiredSlot<'c>);

impl<'c> RequestSlot<'c> {
    /// Writes a part of the request at `offset`.
    ///
    /// # Errors
    /// [`CallError::RequestTooLarge`] if the part ends after the slot's request buffer; nothing is written then.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), CallError> {
        let AcquiredSlot { client, slot, .. } = self.0;
        client.check_len(offset.saturating_add(bytes.len()))?;
        client.mapping.write_request(slot, offset, bytes);
        Ok(())
    }

    /// Sends the first `len` bytes of the buffer. With [`Wait::Spin`] a sleeping server is woken only once the answer is
    /// waited for.
    ///
    /// # Errors
    /// [`CallError::RequestTooLarge`] or [`CallError::Aborted`], with nothing sent.
    pub fn send(self, len: usize) -> Result<InFlightRequest<'c>, CallError> {
        let AcquiredSlot { client, slot, .. } = self.0;
        client.check_len(len)?;
        if client.is_aborted() {
            return Err(CallError::Aborted);
        }
        let (seq, id) = client.send(slot, len);
        // A spinning client defers the futex call: a spinning server responds before it is made.
        let deferred = client.config.wait == Wait::Spin;
        if !deferred {
            client.wake_server();
        }
        Ok(InFlightRequest {
            held: self.0,
            seq,
            id,
            deferred,
        })
    }
}

/// A request in flight. Dropping it equals a timeout: the slot is free for the next call, and a late response is dropped.
#[must_use]
pub struct InFlightRequest<'c> {
    held: AcquiredSlot<'c>,
    seq: u64,
    id: u32,
    /// The server is not woken yet.
    deferred: bool,
}

impl InFlightRequest<'_> {
    /// Parks until the response is there, or for `limit`; returns whether it is there. For a caller that has work shortly before it
    /// expects the response.
    ///
    /// # Errors
    /// [`CallError::Aborted`].
    pub fn sleep(&mut self, limit: Duration) -> Result<bool, CallError> {
        if std::mem::take(&mut self.deferred) {
            self.held.client.wake_server();
        }
        self.held.client.sleep(self.held.slot, self.seq, limit)
    }

    /// Waits for the response and passes a copy of it to `read`.
    ///
    /// # Errors
    /// [`CallError::TimedOut`], [`CallError::Aborted`], [`CallError::ResponseLength`], or [`CallError::OtherClient`] if
    /// the answer may be to the request of another client.
    pub fn receive<R>(mut self, read: impl FnOnce(&[u8]) -> R) -> Result<R, CallError> {
        let deferred = std::mem::take(&mut self.deferred);
        let (seq, id) = (self.seq, self.id);
        let AcquiredSlot {
            client,
            slot,
            answer,
        } = &mut self.held;
        client.receive(*slot, seq, id, deferred)?;
        client.read_response(*slot, answer, read)
    }
}

impl Drop for InFlightRequest<'_> {
    fn drop(&mut self) {
        if self.deferred {
            self.held.client.wake_server();
        }
    }
}
