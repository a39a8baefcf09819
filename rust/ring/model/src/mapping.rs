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

    pub(crate) fn copy_request(&self, index: usize, len: usize, words: &mut Vec<u64>) {
        // An empty request touches nothing, for models in which the reader does not matter.
        copy(&self.0.slots[index].request, len, words);
    }

    pub(crate) fn write_request(&self, index: usize, offset: usize, bytes: &[u8]) {
        write(&self.0.slots[index].request, offset, bytes);
    }

    pub(crate) fn copy_response(&self, index: usize, len: usize, words: &mut Vec<u64>) {
        copy(&self.0.slots[index].response, len, words);
    }

    pub(crate) fn write_response(&self, index: usize, response: &[u8]) {
        write(&self.0.slots[index].response, 0, response);
    }
}

/// The product copies by atomics, for clients that break the protocol. In a model all keep it, so that a copy which
/// meets a write is a fault.
fn copy(payload: &UnsafeCell<Vec<u8>>, len: usize, words: &mut Vec<u64>) {
    words.clear();
    if len > 0 {
        // SAFETY: loom has just checked that no thread writes.
        payload.with(|bytes| unsafe {
            words.extend((&*bytes)[..len].chunks(8).map(|chunk| {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_le_bytes(word)
            }));
        });
    }
}

fn write(payload: &UnsafeCell<Vec<u8>>, offset: usize, bytes: &[u8]) {
    if !bytes.is_empty() {
        // SAFETY: loom has just checked that no other thread is at it.
        payload.with_mut(|payload| unsafe {
            (&mut *payload)[offset..offset + bytes.len()].copy_from_slice(bytes);
        });
    }
}
