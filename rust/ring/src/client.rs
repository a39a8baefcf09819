//! The client's side. It keeps the same contract as the client of the Pie runtime.
//!
//! A call takes a slot, copies the request, raises `req_seq`, wakes the server, waits until `resp_seq` has caught up, and
//! copies the response. Any number of threads may call; each slot carries one call at a time. [`Request`] and [`Sent`] are
//! the two halves of a call, for a thread that has other work in between.

use std::sync::PoisonError;
use std::time::Duration;

use crate::error::CallError;
use crate::futex;
use crate::layout::RegionLayout;
use crate::mapping::Mapping;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, epoch_us};
use crate::wait::{self, Wait};

/// How a client waits.
#[derive(Clone, Copy, Debug)]
pub struct ClientConfig {
    /// Strategy.
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

/// The client of a region. A region has one, which threads share.
///
/// Clients may follow one another, and several may be open while only one calls. Two that call at the same time, like any
/// two writers of a slot, overwrite each other's requests: a call that detects it fails with
/// [`CallError::OtherClient`], but not every mixture can be detected.
pub struct Client {
    mapping: Mapping,
    config: ClientConfig,
    slots: Mutex<Slots>,
    /// A slot is free again.
    freed: Condvar,
    next_id: AtomicU32,
    aborted: AtomicBool,
}

/// Which slots are free.
struct Slots {
    /// Per slot: where its answers are copied to, while no call uses it.
    idle: Box<[Option<Vec<u64>>]>,
    /// Slots are taken in turn.
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
    /// those of [`Sent::receive`] after.
    pub fn call<R>(&self, request: &[u8], read: impl FnOnce(&[u8]) -> R) -> Result<R, CallError> {
        self.check_len(request.len())?;
        let mut sending = self.request();
        sending.write(0, request)?;
        sending.send(request.len())?.receive(read)
    }

    /// A slot to make a request in; if all are busy, waits for the first that becomes free.
    pub fn request(&self) -> Request<'_> {
        let mut slots = self.slots();
        loop {
            if let Some((slot, answer)) = slots.take() {
                return Request(Held::new(self, slot, answer));
            }
            slots.waiting += 1;
            slots = self
                .freed
                .wait(slots)
                .unwrap_or_else(PoisonError::into_inner);
            slots.waiting -= 1;
        }
    }

    /// A slot to make a request in, if one is free. A thread with a request under way uses this for its next one, since
    /// its own slot may be the only one.
    pub fn try_request(&self) -> Option<Request<'_>> {
        let (slot, answer) = self.slots().take()?;
        Some(Request(Held::new(self, slot, answer)))
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

    /// Makes every running and later call fail with [`CallError::Aborted`]. The server does not learn of it.
    pub fn abort(&self) {
        // A sleeping client learns it by the raised counter, a spinning one by its next look at the flag.
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
        // The server may poll these words, so the slow part comes before the first store.
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

    /// Makes the wake-up of the server if it was `deferred`, and waits for the answer.
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
        let ready = || self.look(slot, seq);
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

    /// Sleeps until the answer is there, or the client was aborted, or `limit` is over.
    fn sleep(&self, slot: usize, seq: u64, limit: Duration) -> Result<bool, CallError> {
        let word = &self.mapping.slot(slot).resp_wake;
        let ready = || self.look(slot, seq);
        let found = wait::until(Wait::Park, word, Some(limit), ready, || ())?;
        Ok(found.transpose()?.is_some())
    }

    /// Whether the answer is there.
    fn look(&self, slot: usize, seq: u64) -> Option<Result<(), CallError>> {
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
    /// The next free slot, and where its answer goes.
    fn take(&mut self) -> Option<(usize, Vec<u64>)> {
        let count = self.idle.len();
        let mut slots = (self.next..count).chain(0..self.next);
        let taken = slots.find_map(|slot| Some((slot, self.idle[slot].take()?)));
        self.next = (self.next + 1) % count;
        taken
    }
}

/// A taken slot. Dropping it frees the slot.
struct Held<'c> {
    client: &'c Client,
    slot: usize,
    answer: Vec<u64>,
}

impl<'c> Held<'c> {
    fn new(client: &'c Client, slot: usize, answer: Vec<u64>) -> Self {
        Self {
            client,
            slot,
            answer,
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut slots = self.client.slots();
        slots.idle[self.slot] = Some(std::mem::take(&mut self.answer));
        // To notify takes a system call, even if no thread waits.
        if slots.waiting > 0 {
            self.client.freed.notify_one();
        }
    }
}

/// A taken slot, and the request that is made in it. Dropping it frees the slot.
#[must_use]
pub struct Request<'c>(Held<'c>);

impl<'c> Request<'c> {
    /// Writes a part of the request, from `offset` on. Bytes of an earlier request between the parts stay.
    ///
    /// # Errors
    /// [`CallError::RequestTooLarge`] if the part ends after the slot's request buffer; nothing is written then.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), CallError> {
        let Held { client, slot, .. } = self.0;
        client.check_len(offset.saturating_add(bytes.len()))?;
        client.mapping.write_request(slot, offset, bytes);
        Ok(())
    }

    /// Sends the first `len` bytes of the buffer. With [`Wait::Spin`] a sleeping server is woken only once the answer is
    /// waited for.
    ///
    /// # Errors
    /// [`CallError::RequestTooLarge`] or [`CallError::Aborted`], with nothing sent.
    pub fn send(self, len: usize) -> Result<Sent<'c>, CallError> {
        let Held { client, slot, .. } = self.0;
        client.check_len(len)?;
        if client.is_aborted() {
            return Err(CallError::Aborted);
        }
        let (seq, id) = client.send(slot, len);
        // A client that spins makes the futex call only after it has waited for a while: a server that
        // spins, too, has answered by then.
        let deferred = client.config.wait == Wait::Spin;
        if !deferred {
            client.wake_server();
        }
        Ok(Sent {
            held: self.0,
            seq,
            id,
            deferred,
        })
    }
}

/// A request under way. Dropping it equals a time-out: the server is woken, the slot is free for the next call, and the
/// late answer is dropped.
#[must_use]
pub struct Sent<'c> {
    held: Held<'c>,
    seq: u64,
    id: u32,
    /// The server, which may sleep, is not woken yet.
    deferred: bool,
}

impl Sent<'_> {
    /// Sleeps until the response is there, or for `limit`. Whether it is there. For a caller that has something to do shortly before
    /// it expects the response, and uses no core until then.
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
        let Held {
            client,
            slot,
            answer,
        } = &mut self.held;
        client.receive(*slot, seq, id, deferred)?;
        client.read_response(*slot, answer, read)
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        if self.deferred {
            self.held.client.wake_server();
        }
    }
}
