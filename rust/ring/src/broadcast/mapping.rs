//! The mapped broadcast: its words, and payloads that are copied in and out.

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::layout::BroadcastLayout;
use crate::memory::Memory;
use crate::words::{FragmentWords, ReaderWords, WriterWords};

// A line each, and words where futexes may be.
const _: () = {
    assert!(size_of::<WriterWords>() == 64 && offset_of!(WriterWords, wake) == 8);
    assert!(size_of::<ReaderWords>() == 64);
    assert!(size_of::<FragmentWords>() == 64);
};

/// A mapping of a whole broadcast, and its file.
pub(crate) struct Mapping {
    memory: Memory,
    layout: BroadcastLayout,
    file: OwnedFd,
}

impl Mapping {
    /// Maps a file of at least `layout.total_bytes()` bytes. No later access faults.
    pub(crate) fn new(file: OwnedFd, layout: BroadcastLayout) -> io::Result<Self> {
        let memory = Memory::map(file.as_fd(), layout.total_bytes(), true)?;
        Ok(Self {
            memory,
            layout,
            file,
        })
    }

    pub(crate) fn layout(&self) -> &BroadcastLayout {
        &self.layout
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The writer's line.
    pub(crate) fn writer(&self) -> &WriterWords {
        self.memory.cache_line(BroadcastLayout::writer_offset())
    }

    /// A reader's line.
    pub(crate) fn reader(&self, reader: usize) -> &ReaderWords {
        assert!(
            reader < self.layout.readers(),
            "reader {reader} is out of range"
        );
        self.memory
            .cache_line(BroadcastLayout::reader_offset(reader))
    }

    /// The words of a slot.
    pub(crate) fn fragment(&self, slot: usize) -> &FragmentWords {
        assert!(slot < self.layout.slots(), "slot {slot} is out of range");
        self.memory.cache_line(self.layout.slot_offset(slot))
    }

    /// Copies from a slot, from `offset` on. For a reader that has not taken it.
    pub(crate) fn read(&self, slot: usize, offset: usize, bytes: &mut [u8]) {
        self.memory
            .load(self.payload(slot, offset, bytes.len()), bytes);
    }

    /// Copies into a slot, from `offset` on. For the writer, when every reader has taken the slot.
    pub(crate) fn write(&self, slot: usize, offset: usize, bytes: &[u8]) {
        self.memory
            .store(self.payload(slot, offset, bytes.len()), bytes);
    }

    /// Where a part of a payload starts.
    fn payload(&self, slot: usize, offset: usize, len: usize) -> usize {
        assert!(slot < self.layout.slots() && offset <= self.layout.capacity());
        assert!(len <= self.layout.capacity() - offset);
        self.layout.payload_offset(slot) + offset
    }
}
