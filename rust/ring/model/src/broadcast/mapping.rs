//! A broadcast on the heap, with payloads that loom watches.

use std::array;
use std::sync::Arc;

use loom::cell::UnsafeCell;

use super::layout::BroadcastLayout;
use crate::sync::atomic::{AtomicU32, AtomicU64};
use crate::words::{FragmentWords, ReaderWords, WriterWords};

/// One of the mappings of a broadcast.
#[derive(Clone)]
pub(crate) struct Mapping(Arc<Memory>);

struct Memory {
    layout: BroadcastLayout,
    writer: WriterWords,
    readers: Box<[ReaderWords]>,
    slots: Box<[Slot]>,
}

struct Slot {
    words: FragmentWords,
    payload: UnsafeCell<Vec<u8>>,
}

// SAFETY: loom checks every access.
unsafe impl Sync for Slot {}

fn zeros<const COUNT: usize>() -> [AtomicU32; COUNT] {
    array::from_fn(|_| AtomicU32::new(0))
}

impl Mapping {
    pub(crate) fn new(layout: BroadcastLayout) -> Self {
        let writer = WriterWords {
            published: AtomicU64::new(0),
            wake: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            rest: zeros(),
        };
        let reader = |_| ReaderWords {
            taken: AtomicU64::new(0),
            claimed: AtomicU32::new(0),
            rest: zeros(),
        };
        let slot = |_| Slot {
            words: FragmentWords {
                kind: AtomicU32::new(0),
                len: AtomicU32::new(0),
                has_more: AtomicU32::new(0),
                rest: zeros(),
            },
            payload: UnsafeCell::new(vec![0; layout.capacity()]),
        };
        Self(Arc::new(Memory {
            layout,
            writer,
            readers: (0..layout.readers()).map(reader).collect(),
            slots: (0..layout.slots()).map(slot).collect(),
        }))
    }

    pub(crate) fn layout(&self) -> &BroadcastLayout {
        &self.0.layout
    }

    pub(crate) fn writer(&self) -> &WriterWords {
        &self.0.writer
    }

    pub(crate) fn reader(&self, reader: usize) -> &ReaderWords {
        &self.0.readers[reader]
    }

    pub(crate) fn fragment(&self, slot: usize) -> &FragmentWords {
        &self.0.slots[slot].words
    }

    pub(crate) fn read(&self, slot: usize, offset: usize, bytes: &mut [u8]) {
        let end = offset + bytes.len();
        // SAFETY: loom has just checked that no thread writes.
        let read = |payload: *const Vec<u8>| unsafe {
            bytes.copy_from_slice(&(&*payload)[offset..end]);
        };
        self.0.slots[slot].payload.with(read);
    }

    pub(crate) fn write(&self, slot: usize, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        // SAFETY: loom has just checked that no other thread is at it.
        let write = |payload: *mut Vec<u8>| unsafe {
            (&mut *payload)[offset..end].copy_from_slice(bytes);
        };
        self.0.slots[slot].payload.with_mut(write);
    }
}
