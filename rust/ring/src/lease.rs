//! One request in the hands of the driver, answered exactly once: by a commit, or by the abort reply
//! when the lease is dropped.
//!
//! A client that gave up may have put a new request into the slot. Then `req_seq` has moved on, the
//! lease is *stale*, and nothing may be published under the old number. A client that gave up without
//! a new request simply never looks at the answer.

#![expect(
    unsafe_code,
    reason = "the response buffer is exclusive by the slot's state"
)]

use std::fmt;
use std::sync::Arc;

use crate::error::RingError;
use crate::shared::Shared;
use crate::sync::atomic::Ordering;
use crate::sync::epoch_us;
use crate::words::SlotWords;

/// What became of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Publish {
    /// The client can read it.
    Delivered,
    /// The client gave up and reused the slot: nothing was published.
    Stale,
}

/// A request and the right to answer it. Dropped without a commit, it sends the abort reply.
pub struct Lease {
    shared: Arc<Shared>,
    slot: usize,
    seq: u64,
    id: u32,
    request_len: usize,
    sent_us: u64,
    open: bool,
}

impl Lease {
    pub(crate) fn new(shared: Arc<Shared>, slot: usize, seq: u64, id: u32) -> Self {
        let words = shared.mapping.slot(slot);
        let request_len = words.req_len.load(Ordering::Relaxed) as usize;
        let sent_us = words.sent_us.load(Ordering::Relaxed);
        Self {
            shared,
            slot,
            seq,
            id,
            request_len,
            sent_us,
            open: true,
        }
    }

    /// Index of the slot.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// Sequence number within the slot.
    pub fn sequence(&self) -> u64 {
        self.seq
    }

    /// The client's running number of the request.
    pub fn request_id(&self) -> u32 {
        self.id
    }

    /// When the client sent the request, in microseconds since the epoch.
    pub fn sent_us(&self) -> u64 {
        self.sent_us
    }

    /// The request in place. Its bytes may change at any time, if the client gives up and reuses
    /// the slot: what was checked may be different when it is read again. Whoever reads anything
    /// twice takes a [copy](Self::copy_request).
    ///
    /// # Errors
    /// [`RingError::RequestLength`] if the client announced more than the slot holds.
    pub fn request(&self) -> Result<&[u8], RingError> {
        self.check_request()?;
        Ok(self.shared.mapping.request(self.slot, self.request_len))
    }

    /// Copies the request to the start of `words`, which it replaces, and returns its length in
    /// bytes. If the client rewrites its slot meanwhile the copy may be a mixture, but it stays as
    /// it is.
    ///
    /// # Errors
    /// As [`Lease::request`].
    pub fn copy_request(&self, words: &mut Vec<u64>) -> Result<usize, RingError> {
        self.check_request()?;
        let mapping = &self.shared.mapping;
        mapping.copy_request(self.slot, self.request_len, words);
        Ok(self.request_len)
    }

    /// The whole response buffer. Ask [`Lease::is_stale`] before a long fill.
    pub fn response(&mut self) -> &mut [u8] {
        // SAFETY: one lease per slot (`Shared::is_free`), and `self` is borrowed exclusively.
        unsafe { self.shared.mapping.response_mut(self.slot) }
    }

    /// Request and response buffer at once, to answer while reading.
    ///
    /// # Errors
    /// As [`Lease::request`].
    pub fn buffers(&mut self) -> Result<(&[u8], &mut [u8]), RingError> {
        let request = self.request()?;
        // SAFETY: as in `response`; the request buffer is a different part of the slot.
        let response = unsafe { self.shared.mapping.response_mut(self.slot) };
        Ok((request, response))
    }

    /// Whether the client has given up and sent something else in this slot.
    pub fn is_stale(&self) -> bool {
        self.words().req_seq.load(Ordering::Relaxed) != self.seq
    }

    /// Publishes the first `len` bytes of the response buffer.
    ///
    /// # Errors
    /// [`RingError::ResponseTooLarge`]; the client gets the abort reply.
    pub fn commit(mut self, len: usize) -> Result<Publish, RingError> {
        self.check_response(len)?;
        Ok(self.publish(len))
    }

    /// Copies `response` into the slot and publishes it. Nothing is copied for a stale lease.
    ///
    /// # Errors
    /// [`RingError::ResponseTooLarge`]; the client gets the abort reply.
    pub fn reply(mut self, response: &[u8]) -> Result<Publish, RingError> {
        self.check_response(response.len())?;
        Ok(self.fill_and_publish(response))
    }

    fn words(&self) -> &SlotWords {
        self.shared.mapping.slot(self.slot)
    }

    fn check_request(&self) -> Result<(), RingError> {
        let capacity = self.shared.mapping.layout().request_capacity();
        if self.request_len > capacity {
            let (slot, len) = (self.slot, self.request_len);
            return Err(RingError::RequestLength {
                slot,
                len,
                capacity,
            });
        }
        Ok(())
    }

    fn check_response(&self, len: usize) -> Result<(), RingError> {
        let capacity = self.shared.mapping.layout().response_capacity();
        if len > capacity {
            return Err(RingError::ResponseTooLarge { len, capacity });
        }
        Ok(())
    }

    fn fill_and_publish(&mut self, response: &[u8]) -> Publish {
        if !self.is_stale() {
            self.response()[..response.len()].copy_from_slice(response);
        }
        self.publish(response.len())
    }

    /// Answers, unless stale, and gives the slot back. The length has been checked.
    fn publish(&mut self, len: usize) -> Publish {
        self.open = false;
        let stale = self.is_stale();
        if !stale {
            // The client looks at the words all the time: the clock comes before the first store.
            let (words, now) = (self.words(), epoch_us());
            words.resp_len.store(len as u32, Ordering::Relaxed);
            words.responded_us.store(now, Ordering::Relaxed);
            // SYNC: pairs with the acquire load in `Client::receive`: payload, length, time follow.
            words.resp_seq.store(self.seq, Ordering::Release);
            // SYNC: pairs with the snapshot in `wait::park`.
            words.resp_wake.fetch_add(1, Ordering::Release);
        }
        self.shared.end_lease(self.slot, !stale);
        if stale {
            Publish::Stale
        } else {
            Publish::Delivered
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // The copy that a forked child has is not the one to answer.
        if self.open && std::process::id() == self.shared.pid {
            let shared = Arc::clone(&self.shared);
            let _ = self.fill_and_publish(&shared.abort_reply);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("slot", &self.slot)
            .field("seq", &self.seq)
            .field("id", &self.id)
            .field("request_len", &self.request_len)
            .finish_non_exhaustive()
    }
}
