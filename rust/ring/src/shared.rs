//! What the server shares with its leases and stop handles, all of it inside the server's process.
//!
//! An answer raises the client's wake counter at once. The futex call that follows is wasted on a
//! client that does not sleep, and clients do not tell. So a server that spins may *owe* the call. It
//! is cancelled when the slot's next request is delivered: a client that sends again has read its
//! answer. It is made when the server finds nothing to do for a while, after at most as many
//! deliveries as there are slots, and when the server stops, is dropped or no longer spins.
//!
//! Lease, server and stop handle may be on three threads. Everything they must agree on about a slot
//! is therefore in one atomic word, whose changes have one order for all of them.

use std::sync::Arc;

use crate::futex;
use crate::mapping::Mapping;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// A lease exists.
const LEASED: u32 = 1;
/// The server has seen a request behind the lease and waits for the lease's end.
const AWAITED: u32 = 2;
/// The futex call of the last answer has not been made.
const OWED: u32 = 4;
/// Calls are made at once: the server might sleep, or never come back to make one that is owed.
const AT_ONCE: u32 = 8;

/// The server was stopped, for good.
const STOPPED: u32 = 1;
/// Another thread has called the server.
const CALLED: u32 = 2;

/// What the server shares with its leases and stop handles.
pub(crate) struct Shared {
    pub(crate) mapping: Mapping,
    pub(crate) abort_reply: Vec<u8>,
    /// Per slot: a set of the bits above.
    states: Box<[AtomicU32]>,
    /// The last call found a client asleep, so the next one will not be owed. Only a hint.
    clients_sleep: AtomicBool,
    /// What ends the server's waiting: a set of the bits below. One word, so that a spinning server looks at one.
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

    /// Marks a free slot as leased. Its client has sent again and is owed nothing.
    pub(crate) fn begin_lease(&self, slot: usize) {
        self.update(slot, |state| state & AT_ONCE | LEASED);
    }

    /// Frees the slot for the next delivery, and wakes whom the lease's end concerns.
    pub(crate) fn end_lease(&self, slot: usize, answered: bool) {
        let state = &self.states[slot];
        let before = if answered {
            // SYNC: pairs with the acquire in `update`.
            state.fetch_xor(LEASED | OWED, Ordering::Release)
        } else {
            // SYNC: as above.
            state.fetch_and(!LEASED, Ordering::Release)
        };
        // A server that spins will see for itself.
        if before & (AWAITED | AT_ONCE) == AWAITED | AT_ONCE {
            self.wake_server();
        }
        if before & AT_ONCE != 0 || self.clients_sleep.load(Ordering::Relaxed) {
            self.pay(slot);
        }
    }

    /// Whether the futex call of the slot's last answer is owed.
    pub(crate) fn owes(&self, slot: usize) -> bool {
        self.states[slot].load(Ordering::Relaxed) & OWED != 0
    }

    /// Wakes the client of the slot if that is owed.
    pub(crate) fn pay(&self, slot: usize) {
        if self.owes(slot) && self.update(slot, |state| state & !OWED) & OWED != 0 {
            self.wake_client(slot);
        }
    }

    /// Makes every call that is owed.
    pub(crate) fn pay_all(&self) {
        for slot in 0..self.states.len() {
            self.pay(slot);
        }
    }

    /// Whether answers may owe their call from now on. If not, nothing is owed afterwards.
    pub(crate) fn allow_owing(&self, allowed: bool) {
        for slot in 0..self.states.len() {
            if allowed {
                self.update(slot, |state| state & !AT_ONCE);
            } else if self.update(slot, |state| state & !OWED | AT_ONCE) & OWED != 0 {
                self.wake_client(slot);
            }
        }
    }

    /// Answers every open request with nothing, because the process ends: zero bytes, which are no reply. Leases may be in
    /// other threads' hands, so response buffers are not touched: a client that is answered at the same time reads either
    /// a whole reply or none.
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
        // Answers that were given before may owe their call.
        self.allow_owing(false);
    }

    /// Whether there is anything but requests that ends the server's waiting.
    pub(crate) fn has_event(&self) -> bool {
        self.events.load(Ordering::Relaxed) != 0
    }

    /// Whether a thread has called since the last time.
    pub(crate) fn take_call(&self) -> bool {
        // SYNC: pairs with the release in `Waker::wake`: what was done before a call is seen behind it.
        self.events.load(Ordering::Relaxed) & CALLED != 0
            && self.events.fetch_and(!CALLED, Ordering::Acquire) & CALLED != 0
    }

    /// Changes the state of a slot and returns the former one.
    fn update(&self, slot: usize, change: impl Fn(u32) -> u32) -> u32 {
        let (state, change) = (&self.states[slot], |state| Some(change(state)));
        // SYNC: pairs with the release in `end_lease`. The next lease finds the old one's use of the
        // buffer over, and whoever makes a call that another thread owed has its raise of the
        // counter, so that a client which is only falling asleep sees it.
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
        // A server that sleeps learns it by the raised counter, one that spins by and by.
        self.0.events.fetch_or(STOPPED, Ordering::Relaxed);
        self.0.wake_server();
        self.0.allow_owing(false);
    }
}

/// Calls a server from any thread: it has something to do besides requests.
#[derive(Clone)]
pub struct Waker(pub(crate) Arc<Shared>);

impl Waker {
    /// Makes the running or the next [`Server::wait`](crate::Server::wait) return `None`; at most one request comes first.
    /// Calls that come before the server has [taken](crate::Server::take_call) one are one.
    pub fn wake(&self) {
        // SYNC: pairs with the acquire in `Shared::take_call`.
        self.0.events.fetch_or(CALLED, Ordering::Release);
        self.0.wake_server();
    }
}
