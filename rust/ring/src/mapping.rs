//! The mapped region: its words, and payloads that are copied in and out.

use std::io;
use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use crate::layout::{HEADER_BYTES, RegionLayout, SLOT_HEADER_BYTES};
use crate::memory::Memory;
use crate::words::{HeaderWords, SlotWords};

// The offsets of the protocol.
const _: () = {
    assert!(size_of::<HeaderWords>() == HEADER_BYTES);
    assert!(offset_of!(HeaderWords, req_wake) == 32);
    assert!(size_of::<SlotWords>() == SLOT_HEADER_BYTES);
    assert!(offset_of!(SlotWords, req_seq) == 0);
    assert!(offset_of!(SlotWords, resp_seq) == 8);
    assert!(offset_of!(SlotWords, req_id) == 16);
    assert!(offset_of!(SlotWords, req_len) == 24);
    assert!(offset_of!(SlotWords, resp_len) == 28);
    assert!(offset_of!(SlotWords, sent_us) == 32);
    assert!(offset_of!(SlotWords, responded_us) == 40);
    assert!(offset_of!(SlotWords, resp_wake) == 48);
};

/// A mapping of a whole region.
pub(crate) struct Mapping {
    memory: Memory,
    layout: RegionLayout,
}

impl Mapping {
    /// Maps a file of at least `layout.total_bytes()` bytes. With `populate` no later access faults.
    pub(crate) fn new(
        file: BorrowedFd<'_>,
        layout: RegionLayout,
        populate: bool,
    ) -> io::Result<Self> {
        let memory = Memory::map(file, layout.total_bytes(), populate)?;
        Ok(Self { memory, layout })
    }

    pub(crate) fn layout(&self) -> &RegionLayout {
        &self.layout
    }

    /// Writes the header; the magic goes last, so that a reader that comes too early finds it missing.
    pub(crate) fn write_header(&self, bytes: &[u8; HEADER_BYTES]) {
        // The words after the fixed ones are zero, and so is a fresh file.
        let values = bytes.as_chunks::<4>().0;
        for (word, value) in self.header().fixed.iter().zip(values).rev() {
            // SYNC: orders the words for a client that reads them from the file.
            word.store(u32::from_le_bytes(*value), Ordering::Release);
        }
    }

    /// The region's header.
    pub(crate) fn header(&self) -> &HeaderWords {
        self.memory.cache_line(0)
    }

    /// The words of a slot.
    pub(crate) fn slot(&self, index: usize) -> &SlotWords {
        self.memory.cache_line(self.start(index, 0))
    }

    /// Copies the first `len` bytes of a request into whole words. For the server.
    pub(crate) fn copy_request(&self, index: usize, len: usize, words: &mut Vec<u64>) {
        assert!(len <= self.layout.request_capacity());
        let start = self.start(index, SLOT_HEADER_BYTES);
        self.memory.copy_words(start, len, words);
    }

    /// Writes a part of a request. For the client.
    pub(crate) fn write_request(&self, index: usize, offset: usize, bytes: &[u8]) {
        let end = offset.checked_add(bytes.len());
        assert!(end.is_some_and(|end| end <= self.layout.request_capacity()));
        let start = self.start(index, SLOT_HEADER_BYTES);
        self.memory.store(start + offset, bytes);
    }

    /// Copies the first `len` bytes of a response into whole words. For the client.
    pub(crate) fn copy_response(&self, index: usize, len: usize, words: &mut Vec<u64>) {
        assert!(len <= self.layout.response_capacity());
        // A stride is a multiple of 64, so the last word is the slot's own.
        let start = self.start(index, self.layout.response_offset());
        self.memory.copy_words(start, len, words);
    }

    /// Writes a response. For the server.
    pub(crate) fn write_response(&self, index: usize, response: &[u8]) {
        assert!(response.len() <= self.layout.response_capacity());
        let start = self.start(index, self.layout.response_offset());
        self.memory.store(start, response);
    }

    /// Where a part of a slot starts.
    fn start(&self, index: usize, offset: usize) -> usize {
        assert!(index < self.layout.slots(), "slot {index} is out of range");
        self.layout.slot_offset(index) + offset
    }
}
