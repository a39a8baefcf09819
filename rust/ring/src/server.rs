//! The driver's side: owns the region and hands out requests, oldest first.
//!
//! A slot is pending when its `req_seq` differs from the last one delivered. Among pending slots the
//! lowest request id wins. One scan is not enough for that: request 5 may enter slot 0 after the scan
//! has passed it, and request 6 slot 3 before the scan gets there. Whoever has seen request 6 also
//! sees everything sent before it, so the scan is repeated until it confirms its own choice.
//!
//! A slot whose lease is still alive is not delivered again, even if its client gave up and sent a
//! new request: the two leases would share one response buffer. The lease wakes the server when it
//! ends with a request behind it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use crate::error::RingError;
use crate::futex;
use crate::guard::ExitGuard;
use crate::layout::RegionLayout;
use crate::lease::Lease;
use crate::mapping::Mapping;
use crate::region::{RegionFile, RegionName};
use crate::wait::{self, Wait};

/// How long [`Server::create`] waits for a live owner by default: a driver on its way out needs less.
pub const DEFAULT_TAKEOVER: Duration = Duration::from_secs(5);

/// What a region is made of.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// POSIX name, such as `/pie_shmem_g0`.
    pub name: String,
    /// Slots and capacities.
    pub layout: RegionLayout,
    /// Identity of the payload schema; the client demands the same.
    pub schema_hash: [u8; 8],
    /// The complete response sent for a request that was dropped without an answer.
    pub abort_reply: Vec<u8>,
    /// How long to wait for a live owner of the name.
    pub takeover: Duration,
}

impl ServerConfig {
    /// A configuration with the default layout and take-over time.
    pub fn new(name: impl Into<String>, schema_hash: [u8; 8], abort_reply: Vec<u8>) -> Self {
        Self {
            name: name.into(),
            layout: RegionLayout::default(),
            schema_hash,
            abort_reply,
            takeover: DEFAULT_TAKEOVER,
        }
    }
}

/// What the server shares with its leases and stop handles.
pub(crate) struct Shared {
    pub(crate) mapping: Mapping,
    pub(crate) abort_reply: Vec<u8>,
    /// Per slot: a lease exists.
    leased: Box<[AtomicBool]>,
    stopped: AtomicBool,
    /// The process that made the region. A forked child must not answer for it.
    pub(crate) pid: u32,
}

impl Shared {
    fn new(mapping: Mapping, abort_reply: Vec<u8>) -> Self {
        let leased = (0..mapping.layout().slots())
            .map(|_| AtomicBool::new(false))
            .collect();
        let (stopped, pid) = (AtomicBool::new(false), std::process::id());
        Self {
            mapping,
            abort_reply,
            leased,
            stopped,
            pid,
        }
    }

    /// Whether a slot that was just seen pending must wait for its lease to end.
    fn is_leased(&self, slot: usize) -> bool {
        // SYNC: pairs with the fence in `end_lease`. The server reads `req_seq`, then the flag; the
        // lease clears the flag, then reads `req_seq`. One of them sees the other's step, so a new
        // request is found here or announced there.
        fence(Ordering::SeqCst);
        // SYNC: pairs with the release store in `end_lease`: the old buffer borrow is over.
        self.leased[slot].load(Ordering::Acquire)
    }

    /// Frees the slot for the next delivery.
    pub(crate) fn end_lease(&self, slot: usize, seq: u64) {
        // SYNC: pairs with the acquire load in `is_leased`.
        self.leased[slot].store(false, Ordering::Release);
        // SYNC: pairs with the fence in `is_leased`.
        fence(Ordering::SeqCst);
        if self.mapping.slot(slot).req_seq().load(Ordering::Relaxed) != seq {
            self.wake_server();
        }
    }

    fn wake_server(&self) {
        // SYNC: pairs with the snapshot in `wait::park`.
        self.mapping.req_wake().fetch_add(1, Ordering::Release);
        futex::wake_all(self.mapping.req_wake());
    }
}

/// Ends the waiting of a server from any thread or signal handler. Stopping is final.
#[derive(Clone)]
pub struct Stop(Arc<Shared>);

impl Stop {
    /// Makes the running and every later [`Server::wait`] return `None`. Only atomics and one futex
    /// call, so it may be used in a signal handler.
    pub fn stop(&self) {
        // SYNC: pairs with the acquire load in `is_stopped`.
        self.0.stopped.store(true, Ordering::Release);
        self.0.wake_server();
    }

    /// Whether `stop` was called.
    pub fn is_stopped(&self) -> bool {
        // SYNC: pairs with the release store in `stop`.
        self.0.stopped.load(Ordering::Acquire)
    }
}

/// The owner of a region. Dropping it removes the region's name; leases stay usable.
pub struct Server {
    region: RegionFile,
    shared: Arc<Shared>,
    /// Per slot: the last `req_seq` delivered.
    last_seen: Box<[u64]>,
}

/// A pending request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pending {
    slot: usize,
    seq: u64,
    id: u32,
}

impl Server {
    /// Makes the region: name, lock, memory, header. Waits for a live owner, replaces a dead one.
    ///
    /// # Errors
    /// [`RingError::Owned`] if another driver lives on, [`RingError::NoSpace`] if `/dev/shm` is too
    /// small, [`RingError::Name`] and [`RingError::AbortReplyTooLarge`] for a bad configuration,
    /// [`RingError::System`] otherwise. Nothing is left behind.
    pub fn create(config: &ServerConfig, guard: &ExitGuard) -> Result<Self, RingError> {
        let name = RegionName::new(&config.name)?;
        let (len, capacity) = (config.abort_reply.len(), config.layout.response_capacity());
        if len > capacity {
            return Err(RingError::AbortReplyTooLarge { len, capacity });
        }
        let bytes = config.layout.total_bytes() as u64;
        let region = RegionFile::create(&name, bytes, config.takeover, guard.tracker())?;
        let mapping = Mapping::new(region.file(), config.layout, true)
            .map_err(|error| name.failed("map", error))?;
        mapping.write_header(&config.layout.encode_header(config.schema_hash));
        let last_seen = vec![0; config.layout.slots()].into_boxed_slice();
        let shared = Arc::new(Shared::new(mapping, config.abort_reply.clone()));
        Ok(Self {
            region,
            shared,
            last_seen,
        })
    }

    /// The layout of the region.
    pub fn layout(&self) -> &RegionLayout {
        self.shared.mapping.layout()
    }

    /// A handle that ends the waiting.
    pub fn stop_handle(&self) -> Stop {
        Stop(Arc::clone(&self.shared))
    }

    /// Waits for the next request; `None` once stopped.
    ///
    /// # Errors
    /// [`RingError::System`] if the kernel refuses to wait.
    pub fn wait(&mut self, wait: Wait) -> Result<Option<Lease>, RingError> {
        let stop = self.stop_handle();
        let ready = || {
            if stop.is_stopped() {
                Some(None)
            } else {
                self.poll().map(Some)
            }
        };
        Ok(wait::until(wait, stop.0.mapping.req_wake(), None, ready)?.flatten())
    }

    /// Takes the oldest pending request, if there is one, without waiting.
    pub fn poll(&mut self) -> Option<Lease> {
        let mut choice = self.scan()?;
        // Each repetition either confirms the choice or finds an older one.
        for _ in 0..self.last_seen.len() {
            let again = self.scan()?;
            if again == choice {
                break;
            }
            choice = again;
        }
        self.last_seen[choice.slot] = choice.seq;
        self.shared.leased[choice.slot].store(true, Ordering::Relaxed);
        Some(Lease::new(
            Arc::clone(&self.shared),
            choice.slot,
            choice.seq,
        ))
    }

    /// Removes the region's name, if it still leads to this region. Open mappings keep working.
    pub fn unlink(&self) {
        self.region.unlink();
    }

    fn scan(&self) -> Option<Pending> {
        let mut oldest: Option<Pending> = None;
        for (slot, &last_seen) in self.last_seen.iter().enumerate() {
            let words = self.shared.mapping.slot(slot);
            // SYNC: pairs with the release store in `Client::send`: id, length and payload follow.
            let seq = words.req_seq().load(Ordering::Acquire);
            if seq == last_seen || self.shared.is_leased(slot) {
                continue;
            }
            let id = words.req_id().load(Ordering::Relaxed);
            if oldest.is_none_or(|oldest| is_older(id, oldest.id)) {
                oldest = Some(Pending { slot, seq, id });
            }
        }
        oldest
    }
}

/// Whether id `a` was given out before `b`. Ids wrap around, so the shorter way round decides.
fn is_older(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).cast_signed() < 0
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
