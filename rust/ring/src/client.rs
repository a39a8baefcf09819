//! The runtime's side: the same contract as Pie's own client, for tests, benches and load.
//!
//! A call takes a slot, copies the request, raises `req_seq`, wakes the server and waits until
//! `resp_seq` has caught up. Any number of threads may call; each slot carries one call at a time.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::error::RingError;
use crate::futex;
use crate::layout::{HEADER_BYTES, RegionLayout};
use crate::mapping::{Mapping, epoch_us};
use crate::region::RegionName;
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
    /// Opens an existing region.
    ///
    /// # Errors
    /// [`RingError::NotFound`], [`RingError::Header`] or [`RingError::TooShort`] if there is no
    /// usable region, [`RingError::Name`] or [`RingError::System`] otherwise.
    pub fn open(name: &str, schema_hash: [u8; 8], config: ClientConfig) -> Result<Self, RingError> {
        let name = RegionName::new(name)?;
        let file = name.open().map_err(|error| match error {
            Errno::NOENT => RingError::NotFound {
                name: name.as_str().to_owned(),
            },
            error => name.failed("open", error),
        })?;
        let layout = read_layout(&name, &file, schema_hash)?;
        let mapping =
            Mapping::new(file.as_fd(), layout, false).map_err(|error| name.failed("map", error))?;
        Ok(Self {
            mapping,
            config,
            slots: (0..layout.slots()).map(|_| Mutex::default()).collect(),
            next_slot: AtomicUsize::new(0),
            next_id: AtomicU32::new(1),
            aborted: AtomicBool::new(false),
        })
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
        let (len, capacity) = (request.len(), self.layout().request_capacity());
        if len > capacity {
            return Err(RingError::RequestTooLarge { len, capacity });
        }
        let (slot, _in_use) = self.take_slot();
        if self.is_aborted() {
            return Err(RingError::Aborted);
        }
        let (seq, id) = self.send(slot, request);
        self.receive(slot, seq, id)?;
        self.read_response(slot, read)
    }

    /// Makes every running and later call fail with [`RingError::Aborted`]. The server is not told.
    pub fn abort(&self) {
        // SYNC: pairs with the acquire load in `is_aborted`.
        self.aborted.store(true, Ordering::Release);
        for slot in 0..self.slots.len() {
            let wake = self.mapping.slot(slot).resp_wake();
            // SYNC: pairs with the snapshot in `wait::park`.
            wake.fetch_add(1, Ordering::Release);
            futex::wake_all(wake);
        }
    }

    fn is_aborted(&self) -> bool {
        // SYNC: pairs with the release store in `abort`.
        self.aborted.load(Ordering::Acquire)
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

    fn send(&self, slot: usize, request: &[u8]) -> (u64, u32) {
        let words = self.mapping.slot(slot);
        self.mapping.write_request(slot, request);
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        words.req_id().store(id, Ordering::Relaxed);
        words
            .req_len()
            .store(request.len() as u32, Ordering::Relaxed);
        words.sent_us().store(epoch_us(), Ordering::Relaxed);
        // The slot's mutex makes this thread the only writer of `req_seq`.
        let seq = words.req_seq().load(Ordering::Relaxed).wrapping_add(1);
        // SYNC: pairs with the acquire loads in `Server::scan` and `Lease::is_stale`.
        words.req_seq().store(seq, Ordering::Release);
        // SYNC: pairs with the snapshot in `wait::park`.
        self.mapping.req_wake().fetch_add(1, Ordering::Release);
        futex::wake_all(self.mapping.req_wake());
        (seq, id)
    }

    fn receive(&self, slot: usize, seq: u64, id: u32) -> Result<(), RingError> {
        let words = self.mapping.slot(slot);
        let ready = || {
            // SYNC: pairs with the release store in `Lease::publish`.
            if words.resp_seq().load(Ordering::Acquire) >= seq {
                return Some(Ok(()));
            }
            self.is_aborted().then_some(Err(RingError::Aborted))
        };
        let after = self.config.timeout;
        // A limit beyond the clock's range is none.
        let deadline = Instant::now().checked_add(after);
        wait::until(self.config.wait, words.resp_wake(), deadline, ready)?
            .unwrap_or(Err(RingError::TimedOut { id, after }))
    }

    fn read_response<R>(&self, slot: usize, read: impl FnOnce(&[u8]) -> R) -> Result<R, RingError> {
        let capacity = self.layout().response_capacity();
        let len = self.mapping.slot(slot).resp_len().load(Ordering::Relaxed) as usize;
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

fn read_layout(
    name: &RegionName,
    file: &OwnedFd,
    schema_hash: [u8; 8],
) -> Result<RegionLayout, RingError> {
    let stat = rustix::fs::fstat(file).map_err(|error| name.failed("inspect", error))?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let mut header = [0; HEADER_BYTES];
    let read = rustix::io::pread(file, &mut header, 0);
    if read.map_err(|error| name.failed("read", error))? < HEADER_BYTES {
        let (name, needed) = (name.as_str().to_owned(), HEADER_BYTES as u64);
        return Err(RingError::TooShort { name, size, needed });
    }
    RegionLayout::decode_header(&header, schema_hash, name.as_str(), size)
}
