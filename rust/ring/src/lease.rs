//! A lease: one received request and the right to respond exactly once, by a reply, or by the abort reply when it is dropped.
//!
//! A client that gave up may have put a new request into the slot. Then `req_seq` has moved on, the
//! lease is *stale*, and nothing may be published under the old number. A client that gave up without
//! a new request never reads the answer.
//!
//! Neither buffer of the slot is lent, since a client that breaks the protocol may write both at any time. The request is
//! copied out before it is read, and an answer is built elsewhere and copied in.

use std::fmt;
use std::sync::Arc;

use crate::error::LeaseError;
use crate::shared::Shared;
use crate::sync::atomic::{Ordering, fence};
use crate::sync::epoch_us;
use crate::words::SlotWords;

/// The outcome of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Publish {
    /// The client can read it.
    Delivered,
    /// The client gave up and reused the slot: nothing was published.
    Stale,
}

/// A received request. Dropped without a reply, it sends the abort reply.
pub struct Lease {
    shared: Arc<Shared>,
    slot: usize,
    seq: u64,
    /// The client's running number of the request.
    pub(crate) id: u32,
    request_len: usize,
    open: bool,
}

impl Lease {
    pub(crate) fn new(shared: Arc<Shared>, slot: usize, seq: u64, id: u32) -> Self {
        let words = shared.mapping.slot(slot);
        let request_len = words.req_len.load(Ordering::Relaxed) as usize;
        Self {
            shared,
            slot,
            seq,
            id,
            request_len,
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

    /// Replaces the content of `words` by a copy of the request, and returns its bytes.
    ///
    /// A client that gave up may have sent its next request in this slot by now. The copy would be that request, or a mixture of
    /// both, and running it would run the next request twice. So the sequence number is read again after the copy, as in a
    /// seqlock. A client that is only about to raise it is not noticed: the protocol has no mark for that. Then the copy may be
    /// a mixture, but it no longer changes.
    ///
    /// # Errors
    /// [`LeaseError::RequestLength`] if the client announced more than the slot holds; [`LeaseError::Stale`] if the slot holds
    /// another request.
    pub fn copy_request<'w>(&self, words: &'w mut Vec<u64>) -> Result<&'w [u8], LeaseError> {
        let (slot, len) = (self.slot, self.request_len);
        let capacity = self.shared.mapping.layout().request_capacity();
        if len > capacity {
            return Err(LeaseError::RequestLength {
                slot,
                len,
                capacity,
            });
        }
        self.shared.mapping.copy_request(slot, len, words);
        // SYNC: pairs with the release store in `Client::send`. If the copy has read a byte of a later request that was sent, the
        // load below finds its number.
        fence(Ordering::Acquire);
        if self.is_stale() {
            return Err(LeaseError::Stale { slot });
        }
        Ok(&bytemuck::cast_slice(words)[..len])
    }

    /// Whether the client has given up and sent something else in this slot.
    pub(crate) fn is_stale(&self) -> bool {
        self.words().req_seq.load(Ordering::Relaxed) != self.seq
    }

    /// Copies `response` into the slot and publishes it. Nothing is copied for a stale lease.
    ///
    /// # Errors
    /// [`LeaseError::ResponseTooLarge`]; the client gets the abort reply.
    pub fn reply(mut self, response: &[u8]) -> Result<Publish, LeaseError> {
        let (len, capacity) = (
            response.len(),
            self.shared.mapping.layout().response_capacity(),
        );
        if len > capacity {
            return Err(LeaseError::ResponseTooLarge { len, capacity });
        }
        Ok(self.fill_and_publish(response))
    }

    fn words(&self) -> &SlotWords {
        self.shared.mapping.slot(self.slot)
    }

    fn fill_and_publish(&mut self, response: &[u8]) -> Publish {
        if !self.is_stale() {
            // One lease per slot (`Shared::is_free`): no other answer is being written here.
            self.shared.mapping.write_response(self.slot, response);
        }
        self.publish(response.len())
    }

    /// Publishes the response, unless stale, and releases the slot. The length has been checked.
    fn publish(&mut self, len: usize) -> Publish {
        self.open = false;
        let stale = self.is_stale();
        if !stale {
            // The client may poll these words, so the clock is read before the first store.
            let (words, now) = (self.words(), epoch_us());
            // SYNC: pairs with the acquire load in `Client::read_response`: the payload follows, also where `refuse_all` has
            // published the number meanwhile.
            words.resp_len.store(len as u32, Ordering::Release);
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
        // In a forked child the lease is a copy, which must not respond.
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
