//! The state that a server shares with its leases and stop handles, all of it inside the server's process.
//!
//! An answer raises the client's wake counter at once. The futex call that follows is wasted on a
//! client that does not sleep, and the protocol does not say whether it sleeps. So a server that spins
//! *defers* the call, the *wake*. A deferred wake is cancelled when the slot's next request is delivered,
//! since a client that sends again has read its answer. It is made when the server finds nothing to do
//! for a while, after at most as many deliveries as there are slots, and when the server stops, is
//! dropped or no longer spins.
//!
//! Lease, server and stop handle may be on three threads. Everything they must agree on about a slot
//! is therefore in one atomic word, whose changes have one order for all of them.

use std::sync::Arc;

use crate::futex;
use crate::mapping::Mapping;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// A lease exists.
const LEASED: u32 = 1;
/// The server has seen another request in the slot and waits for the lease's end.
const AWAITED: u32 = 2;
/// The wake of the last answer is deferred.
const DEFERRED: u32 = 4;
/// Wakes are made at once: the server might sleep, or never come back to make one that is deferred.
const AT_ONCE: u32 = 8;

/// The server was stopped, for good.
const STOPPED: u32 = 1;
/// Another thread has called the server.
const WOKEN: u32 = 2;

/// The state that a server shares with its leases and stop handles.
pub(crate) struct Shared {
    pub(crate) mapping: Mapping,
    pub(crate) abort_reply: Vec<u8>,
    /// Per slot: a set of the bits above.
    states: Box<[AtomicU32]>,
    /// The last wake found a client asleep, so the next one is not deferred. Only a hint.
    clients_sleep: AtomicBool,
    /// Reasons to end the server's waiting: a set of the bits above. One word, so that a spinning server reads one.
    events: AtomicU32,
    /// The process that made the region. A forked child must not answer for it.
    pub(crate) pid: u32,
}

impl Shared {
    pub(crate) fn new(mapping: Mapping, abort_reply: Vec<u8>) -> Self {
        let states = (0..mapping.layout().slots())
            .map(|_| AtomicU32::new(AT_ONCE))
            .collect();
        Self {
            mapping,
            abort_reply,
            states,
            clients_sleep: AtomicBool::new(false),
            events: AtomicU32::new(0),
            pid: std::process::id(),
        }
    }

    /// Whether the slot has no lease. If it has one, its end will wake the server.
    pub(crate) fn is_free(&self, slot: usize) -> bool {
        let state = &self.states[slot];
        let seen = state.load(Ordering::Relaxed);
        if seen & LEASED == 0 {
            return true;
        }
        // Either the lease has just ended or its end will find the bit.
        seen & AWAITED == 0 && state.fetch_or(AWAITED, Ordering::Relaxed) & LEASED == 0
    }

    /// Marks a free slot as leased, and cancels its deferred wake: its client has sent again.
    pub(crate) fn begin_lease(&self, slot: usize) {
        self.update(slot, |state| state & AT_ONCE | LEASED);
    }

    /// Frees the slot for the next delivery. Wakes the server if it waits for that, and the client, or defers it.
    pub(crate) fn end_lease(&self, slot: usize, answered: bool) {
        let state = &self.states[slot];
        let before = if answered {
            // SYNC: pairs with the acquire in `update`.
            state.fetch_xor(LEASED | DEFERRED, Ordering::Release)
        } else {
            // SYNC: as above.
            state.fetch_and(!LEASED, Ordering::Release)
        };
        // A server that spins sees it without.
        if before & (AWAITED | AT_ONCE) == AWAITED | AT_ONCE {
            self.wake_server();
        }
        if before & AT_ONCE != 0 || self.clients_sleep.load(Ordering::Relaxed) {
            self.wake_deferred(slot);
        }
    }

    /// Whether the wake of the slot's last answer is deferred.
    pub(crate) fn is_deferred(&self, slot: usize) -> bool {
        self.states[slot].load(Ordering::Relaxed) & DEFERRED != 0
    }

    /// Makes the slot's wake if it is deferred.
    pub(crate) fn wake_deferred(&self, slot: usize) {
        if self.is_deferred(slot) && self.update(slot, |state| state & !DEFERRED) & DEFERRED != 0 {
            self.wake_client(slot);
        }
    }

    /// Makes every deferred wake.
    pub(crate) fn wake_all_deferred(&self) {
        for slot in 0..self.states.len() {
            self.wake_deferred(slot);
        }
    }

    /// Allows or forbids to defer wakes from now on. Forbidding makes those that are deferred.
    pub(crate) fn allow_deferring(&self, allowed: bool) {
        for slot in 0..self.states.len() {
            if allowed {
                self.update(slot, |state| state & !AT_ONCE);
            } else if self.update(slot, |state| state & !DEFERRED | AT_ONCE) & DEFERRED != 0 {
                self.wake_client(slot);
            }
        }
    }

    /// Answers every open request with zero bytes, which are not a reply, because the process ends. Other threads may hold
    /// leases, so response buffers are not touched: a client that is answered at the same time reads either a whole reply
    /// or none.
    pub(crate) fn refuse_all(&self) {
        for slot in 0..self.states.len() {
            let words = self.mapping.slot(slot);
            // SYNC: pairs with the release store in `Client::send`.
            let seq = words.req_seq.load(Ordering::Acquire);
            if words.resp_seq.load(Ordering::Relaxed) == seq {
                continue;
            }
            words.resp_len.store(0, Ordering::Relaxed);
            // SYNC: pairs with the acquire load in `Client::receive`: the length follows.
            words.resp_seq.store(seq, Ordering::Release);
            // SYNC: pairs with the snapshot in `wait::park`.
            words.resp_wake.fetch_add(1, Ordering::Release);
            self.wake_client(slot);
        }
        // Wakes of earlier answers may be deferred.
        self.allow_deferring(false);
    }

    /// Whether the server was stopped or called, which ends its waiting.
    pub(crate) fn has_event(&self) -> bool {
        self.events.load(Ordering::Relaxed) != 0
    }

    /// Whether the server was stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.events.load(Ordering::Relaxed) & STOPPED != 0
    }

    /// Whether a thread has called since the last time.
    pub(crate) fn take_wake(&self) -> bool {
        // SYNC: pairs with the release in `Waker::wake`: writes before the call are visible after this.
        self.events.load(Ordering::Relaxed) & WOKEN != 0
            && self.events.fetch_and(!WOKEN, Ordering::Acquire) & WOKEN != 0
    }

    /// Changes the state of a slot and returns the former one.
    fn update(&self, slot: usize, change: impl Fn(u32) -> u32) -> u32 {
        let (state, change) = (&self.states[slot], |state| Some(change(state)));
        // SYNC: pairs with the release in `end_lease`. The old lease's use of the buffer is over before the next lease
        // begins. A thread that makes a wake deferred by another one sees that thread's raise of the counter first, so a
        // client that is about to sleep sees it, too.
        let result = state.fetch_update(Ordering::Acquire, Ordering::Relaxed, change);
        let (Ok(before) | Err(before)) = result;
        before
    }

    fn wake_client(&self, slot: usize) {
        let woken = futex::wake_all(&self.mapping.slot(slot).resp_wake);
        self.clients_sleep.store(woken > 0, Ordering::Relaxed);
    }

    fn wake_server(&self) {
        let word = &self.mapping.header().req_wake;
        // SYNC: pairs with the snapshot in `wait::park`.
        word.fetch_add(1, Ordering::Release);
        futex::wake_all(word);
    }
}

/// Ends the waiting of a server from any thread or signal handler. Stopping is final.
#[derive(Clone)]
pub struct Stop(pub(crate) Arc<Shared>);

impl Stop {
    /// Makes the running and every later [`Server::wait`](crate::Server::wait) return `None`. Only
    /// atomics and futex calls, so it may be used in a signal handler.
    pub fn stop(&self) {
        // A sleeping server learns it by the raised counter, a spinning one by its next look at the word.
        self.0.events.fetch_or(STOPPED, Ordering::Relaxed);
        self.0.wake_server();
        self.0.allow_deferring(false);
    }
}

/// Interrupts a server's waiting from any thread, for work besides requests.
#[derive(Clone)]
pub struct Waker(pub(crate) Arc<Shared>);

impl Waker {
    /// Makes the running or the next [`Server::wait`](crate::Server::wait) return `None`; at most one request comes first. A
    /// request that is pending when such a wait has ended comes before the next call ends one.
    /// Several calls before the server [takes](crate::Server::take_wake) one count as one.
    pub fn wake(&self) {
        // SYNC: pairs with the acquire in `Shared::take_wake`.
        self.0.events.fetch_or(WOKEN, Ordering::Release);
        self.0.wake_server();
    }
}
