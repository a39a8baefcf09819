//! The dispatcher of a server: receives requests, oldest first.
//!
//! A slot is pending when its `req_seq` differs from the last one delivered. Among pending slots the
//! lowest request id wins. One scan is not enough for that: request 5 may enter slot 0 after the scan
//! has passed it, and request 6 slot 3 before the scan gets there. A scan that has seen request 6 also
//! sees everything sent before it, so the slots before the choice are scanned again until none of
//! them has an older request.
//!
//! A slot whose lease is still alive is not delivered again, even if its client gave up and sent a
//! new request: the two leases would share one response buffer. When a lease ends and a request waits
//! for its slot, the lease wakes the server.

use std::sync::Arc;

use crate::error::SystemError;
use crate::lease::Lease;
use crate::mapping::Mapping;
use crate::shared::Shared;
use crate::sync::atomic::Ordering;
use crate::wait::{self, Wait};

/// Scans the slots for requests.
pub(crate) struct Dispatcher {
    shared: Arc<Shared>,
    queue: Queue,
    /// Client wakes may be deferred, because the server spins and makes them later.
    deferring: bool,
    /// The last wait ended without a request, so a pending one comes before the next wake.
    yields: bool,
}

impl Dispatcher {
    pub(crate) fn new(mapping: Mapping, abort_reply: Vec<u8>) -> Self {
        let slots = vec![Delivered::default(); mapping.layout().slots()].into_boxed_slice();
        Self {
            shared: Arc::new(Shared::new(mapping, abort_reply)),
            queue: Queue { slots, count: 0 },
            deferring: false,
            yields: false,
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Waits for the next request; `None` once stopped, or after a wake. Wakes and requests alternate while there are both.
    pub(crate) fn wait(&mut self, wait: Wait) -> Result<Option<Lease>, SystemError> {
        self.allow_deferring(wait == Wait::Spin);
        if self.yields
            && !self.shared.is_stopped()
            && let Some(lease) = self.queue.take(&self.shared)
        {
            self.yields = false;
            return Ok(Some(lease));
        }
        let Self { shared, queue, .. } = self;
        let ready = || {
            if shared.has_event() {
                Some(None)
            } else {
                queue.take(shared).map(Some)
            }
        };
        let word = &shared.mapping.header().req_wake;
        let lease = wait::until(wait, word, None, ready, || shared.wake_all_deferred())?.flatten();
        self.yields = lease.is_none();
        if lease.is_none() {
            self.allow_deferring(false);
        }
        Ok(lease)
    }

    /// Takes the oldest pending request, if there is one, without waiting.
    pub(crate) fn poll(&mut self) -> Option<Lease> {
        self.allow_deferring(false);
        self.queue.take(&self.shared)
    }

    fn allow_deferring(&mut self, allowed: bool) {
        if self.deferring != allowed {
            self.deferring = allowed;
            self.shared.allow_deferring(allowed);
        }
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        // In a forked child this may wake the parent's clients without a reason, which does no harm.
        self.allow_deferring(false);
    }
}

/// The last delivery of a slot.
#[derive(Clone, Copy, Default)]
struct Delivered {
    seq: u64,
    /// Number of the delivery among all.
    number: u64,
}

struct Queue {
    slots: Box<[Delivered]>,
    /// Deliveries so far.
    count: u64,
}

/// A pending request.
#[derive(Clone, Copy, Debug)]
struct Pending {
    slot: usize,
    seq: u64,
    id: u32,
}

impl Queue {
    /// Takes the oldest pending request.
    fn take(&mut self, shared: &Arc<Shared>) -> Option<Lease> {
        let mut choice = self.scan(shared, self.slots.len())?;
        while let Some(older) = self.scan(shared, choice.slot)
            && is_older(older.id, choice.id)
        {
            choice = older;
        }
        let Pending { slot, seq, id } = choice;
        shared.begin_lease(slot);
        self.count += 1;
        self.slots[slot] = Delivered {
            seq,
            number: self.count,
        };
        self.wake_overdue(shared);
        Some(Lease::new(Arc::clone(shared), slot, seq, id))
    }

    /// The oldest pending request of the first `end` slots.
    fn scan(&self, shared: &Shared, end: usize) -> Option<Pending> {
        let mut oldest: Option<Pending> = None;
        for (slot, delivered) in self.slots[..end].iter().enumerate() {
            let words = shared.mapping.slot(slot);
            // SYNC: pairs with the release store in `Client::send`: id, length and payload follow.
            let seq = words.req_seq.load(Ordering::Acquire);
            if seq == delivered.seq || !shared.is_free(slot) {
                continue;
            }
            let id = words.req_id.load(Ordering::Relaxed);
            if oldest.is_none_or(|oldest| is_older(id, oldest.id)) {
                oldest = Some(Pending { slot, seq, id });
            }
        }
        oldest
    }

    /// Makes the deferred wakes of slots without a delivery in a whole round. Round-robin clients send again before that.
    fn wake_overdue(&self, shared: &Shared) {
        for (slot, delivered) in self.slots.iter().enumerate() {
            if shared.is_deferred(slot) && self.count - delivered.number >= self.slots.len() as u64
            {
                shared.wake_deferred(slot);
            }
        }
    }
}

/// Whether id `a` was given out before `b`. Ids wrap around, so the shorter way round decides.
fn is_older(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).cast_signed() < 0
}

#[cfg(test)]
#[path = "dispatch_tests.rs"]
mod tests;
