//! A region on the heap. Payloads are cells that loom watches: an access that is not ordered after
//! the other side's last one ends the model.

use std::array;
use std::sync::Arc;

use loom::cell::UnsafeCell;

use crate::layout::RegionLayout;
use crate::sync::atomic::{AtomicU32, AtomicU64};
use crate::words::{HeaderWords, SlotWords};

/// One of the two mappings of a region.
#[derive(Clone)]
pub(crate) struct Mapping(Arc<Region>);

struct Region {
    layout: RegionLayout,
    header: HeaderWords,
    slots: Box<[Slot]>,
}

struct Slot {
    words: SlotWords,
    request: UnsafeCell<Vec<u8>>,
    response: UnsafeCell<Vec<u8>>,
}

// SAFETY: loom checks every access.
unsafe impl Sync for Slot {}

/// Start values of the sequence numbers and wake counters.
#[derive(Clone, Copy, Default)]
pub(crate) struct Start {
    pub(crate) seq: u64,
    pub(crate) wake: u32,
}

impl Mapping {
    pub(crate) fn new(layout: RegionLayout, start: Start) -> Self {
        let words = || array::from_fn(|_| AtomicU32::new(0));
        let header = HeaderWords {
            fixed: array::from_fn(|_| AtomicU32::new(0)),
            req_wake: AtomicU32::new(start.wake),
            rest: array::from_fn(|_| AtomicU32::new(0)),
        };
        let slot = || Slot {
            words: SlotWords {
                req_seq: AtomicU64::new(start.seq),
                resp_seq: AtomicU64::new(start.seq),
                req_id: AtomicU32::new(0),
                reserved: AtomicU32::new(0),
                req_len: AtomicU32::new(0),
                resp_len: AtomicU32::new(0),
                sent_us: AtomicU64::new(0),
                responded_us: AtomicU64::new(0),
                resp_wake: AtomicU32::new(start.wake),
                rest: words(),
            },
            request: UnsafeCell::new(vec![0; layout.request_capacity()]),
            response: UnsafeCell::new(vec![0; layout.response_capacity()]),
        };
        let slots = (0..layout.slots()).map(|_| slot()).collect();
        Self(Arc::new(Region {
            layout,
            header,
            slots,
        }))
    }

    pub(crate) fn layout(&self) -> &RegionLayout {
        &self.0.layout
    }

    pub(crate) fn header(&self) -> &HeaderWords {
        &self.0.header
    }

    pub(crate) fn slot(&self, index: usize) -> &SlotWords {
        &self.0.slots[index].words
    }

    pub(crate) fn request(&self, index: usize, len: usize) -> &[u8] {
        self.0.slots[index]
            .request
            // SAFETY: loom has just checked that nobody else is at it.
            .with(|bytes| unsafe { &(&*bytes)[..len] })
    }

    /// For `Lease::copy_request`, which no model calls: a client that gives up may write meanwhile, and this would be
    /// a race.
    pub(crate) fn copy_request(&self, index: usize, len: usize, words: &mut Vec<u64>) {
        words.clear();
        let (whole, rest) = self.request(index, len).as_chunks::<8>();
        words.extend(whole.iter().map(|word| u64::from_le_bytes(*word)));
        if !rest.is_empty() {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            words.push(u64::from_le_bytes(word));
        }
    }

    pub(crate) fn response(&self, index: usize, len: usize) -> &[u8] {
        self.0.slots[index]
            .response
            // SAFETY: as above.
            .with(|bytes| unsafe { &(&*bytes)[..len] })
    }

    pub(crate) fn write_request(&self, index: usize, request: &[u8]) {
        // An empty request touches nothing, for clients that do not care who reads.
        if !request.is_empty() {
            // SAFETY: as above.
            self.0.slots[index].request.with_mut(|bytes| unsafe {
                (&mut *bytes)[..request.len()].copy_from_slice(request);
            });
        }
    }

    /// # Safety
    /// As in the ring.
    #[expect(clippy::mut_from_ref, reason = "as in the ring")]
    pub(crate) unsafe fn request_mut(&self, index: usize) -> &mut [u8] {
        self.0.slots[index]
            .request
            // SAFETY: as above.
            .with_mut(|bytes| unsafe { (&mut *bytes).as_mut_slice() })
    }

    /// # Safety
    /// As in the ring.
    #[expect(clippy::mut_from_ref, reason = "as in the ring")]
    pub(crate) unsafe fn response_mut(&self, index: usize) -> &mut [u8] {
        self.0.slots[index]
            .response
            // SAFETY: as above.
            .with_mut(|bytes| unsafe { (&mut *bytes).as_mut_slice() })
    }
}
