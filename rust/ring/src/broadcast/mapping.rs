//! The mapped broadcast. All raw memory access of the module is here: words are atomics, payloads are
//! byte slices.
//!
//! A payload is stable as long as both ends keep the protocol: the writer leaves a slot alone until
//! every reader has taken it.

#![expect(unsafe_code, reason = "a file mapping is raw memory")]

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags};

use super::shape::Shape;
use crate::words::{FragmentWords, ReaderWords, WriterWords};

// A line each, and words where futexes may be.
const _: () = {
    assert!(size_of::<WriterWords>() == 64 && offset_of!(WriterWords, wake) == 8);
    assert!(size_of::<ReaderWords>() == 64);
    assert!(size_of::<FragmentWords>() == 64);
};

/// A shared, writable mapping of a whole broadcast, and its file.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    shape: Shape,
    file: OwnedFd,
}

// SAFETY: the mapping lives until drop and has no thread affinity.
unsafe impl Send for Mapping {}
// SAFETY: words are reached as atomics only; payloads follow the contract above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a file of at least `shape.total_bytes()` bytes. No later access faults.
    pub(crate) fn new(file: OwnedFd, shape: Shape) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let len = shape.total_bytes();
        // SAFETY: the kernel picks the address, so no existing mapping is replaced.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, access, flags, &file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { base, shape, file })
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The writer's line.
    pub(crate) fn writer(&self) -> &WriterWords {
        // SAFETY: in bounds and aligned in every shape; the words are atomics.
        unsafe { &*self.at(Shape::writer_offset()).cast() }
    }

    /// A reader's line.
    pub(crate) fn reader(&self, reader: usize) -> &ReaderWords {
        assert!(
            reader < self.shape.readers(),
            "reader {reader} is out of range"
        );
        // SAFETY: in bounds by the assertion and aligned; the words are atomics.
        unsafe { &*self.at(Shape::reader_offset(reader)).cast() }
    }

    /// The words of a slot.
    pub(crate) fn fragment(&self, slot: usize) -> &FragmentWords {
        assert!(slot < self.shape.slots(), "slot {slot} is out of range");
        // SAFETY: in bounds by the assertion and aligned; the words are atomics.
        unsafe { &*self.at(self.shape.slot_offset(slot)).cast() }
    }

    /// Shows the first `len` bytes of a slot. For a reader that has not taken it.
    pub(crate) fn read<T>(&self, slot: usize, len: usize, act: impl FnOnce(&[u8]) -> T) -> T {
        assert!(slot < self.shape.slots() && len <= self.shape.capacity());
        let start = self.at(self.shape.payload_offset(slot));
        // SAFETY: in bounds by the assertion; nobody writes until the slot is taken.
        act(unsafe { std::slice::from_raw_parts(start, len) })
    }

    /// Copies into a slot, from `offset` on. For the writer, when every reader has taken the slot.
    pub(crate) fn write(&self, slot: usize, offset: usize, bytes: &[u8]) {
        assert!(slot < self.shape.slots() && offset <= self.shape.capacity());
        assert!(bytes.len() <= self.shape.capacity() - offset);
        let start = self.at(self.shape.payload_offset(slot) + offset);
        // SAFETY: in bounds by the assertions; the source is a borrowed slice outside the payload,
        // because nothing in this process borrows a payload of a writer's mapping.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) }
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let len = self.shape.total_bytes();
        // SAFETY: base and length are those of `new`; every borrow of the mapping has ended.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), len) };
    }
}
