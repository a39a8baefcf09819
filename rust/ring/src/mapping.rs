//! The mapped region. All raw memory access of the crate is here: words are atomics, payloads are
//! byte slices.
//!
//! A payload slice is stable only as long as both sides keep the protocol. The bytes of a request
//! may change once its client has timed out and used the slot again, so a request is also copied
//! word by word, by atomic loads.

#![expect(unsafe_code, reason = "a file mapping is raw memory")]

use std::io;
use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::layout::{HEADER_BYTES, RegionLayout, SLOT_HEADER_BYTES};
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

/// A shared, writable mapping of a whole region.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    layout: RegionLayout,
}

// SAFETY: the mapping lives until drop and has no thread affinity.
unsafe impl Send for Mapping {}
// SAFETY: words are reached as atomics only; the slices follow the contracts stated at their methods.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a file of at least `layout.total_bytes()` bytes. With `populate` no later access faults.
    pub(crate) fn new(
        file: BorrowedFd<'_>,
        layout: RegionLayout,
        populate: bool,
    ) -> io::Result<Self> {
        let flags = MapFlags::SHARED;
        let flags = if populate {
            flags | MapFlags::POPULATE
        } else {
            flags
        };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel picks the address, so no existing mapping is replaced.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                layout.total_bytes(),
                access,
                flags,
                file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { base, layout })
    }

    pub(crate) fn layout(&self) -> &RegionLayout {
        &self.layout
    }

    /// Writes the header; the magic goes last, so that a reader who comes too early is told so.
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
        // SAFETY: a mapping starts on a page and is longer than a header, whose words are atomics.
        unsafe { self.base.cast().as_ref() }
    }

    /// The words of a slot.
    pub(crate) fn slot(&self, index: usize) -> &SlotWords {
        let start = self.start(index, 0);
        // SAFETY: in bounds (checked by `start`) and aligned, because slots start at multiples of
        // 64; the words are atomics.
        unsafe { &*start.cast() }
    }

    /// The first `len` bytes of a request. For the server, which never writes them.
    pub(crate) fn request(&self, index: usize, len: usize) -> &[u8] {
        assert!(len <= self.layout.request_capacity());
        // SAFETY: in bounds for every slot of the layout.
        unsafe { std::slice::from_raw_parts(self.start(index, SLOT_HEADER_BYTES), len) }
    }

    /// Copies the first `len` bytes of a request into whole words. For the server.
    pub(crate) fn copy_request(&self, index: usize, len: usize, words: &mut Vec<u64>) {
        let count = len.div_ceil(size_of::<u64>());
        assert!(count * size_of::<u64>() <= self.layout.request_capacity());
        let start = self.start(index, SLOT_HEADER_BYTES);
        // SAFETY: in bounds by the assertion; aligned, because slots start at multiples of 64;
        // atomics may change while they are borrowed.
        let shared: &[AtomicU64] = unsafe { std::slice::from_raw_parts(start.cast(), count) };
        words.clear();
        words.extend(shared.iter().map(|word| word.load(Ordering::Relaxed)));
    }

    /// The first `len` bytes of a response. For the client, which never writes them.
    pub(crate) fn response(&self, index: usize, len: usize) -> &[u8] {
        assert!(len <= self.layout.response_capacity());
        // SAFETY: in bounds for every slot of the layout.
        unsafe { std::slice::from_raw_parts(self.start(index, self.layout.response_offset()), len) }
    }

    /// Copies a request into its slot. For the client, which never reads it back.
    pub(crate) fn write_request(&self, index: usize, request: &[u8]) {
        assert!(request.len() <= self.layout.request_capacity());
        let start = self.start(index, SLOT_HEADER_BYTES);
        // SAFETY: in bounds by the assertion; the source is a borrowed slice outside the buffer,
        // because in this process only who has taken a slot borrows its request buffer.
        unsafe { ptr::copy_nonoverlapping(request.as_ptr(), start, request.len()) }
    }

    /// The request buffer of a slot. For the client.
    ///
    /// # Safety
    /// No other reference to this buffer may exist in this process while the result lives.
    #[expect(clippy::mut_from_ref, reason = "exclusive by contract, not by borrow")]
    pub(crate) unsafe fn request_mut(&self, index: usize) -> &mut [u8] {
        let start = self.start(index, SLOT_HEADER_BYTES);
        // SAFETY: in bounds for every slot of the layout; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(start, self.layout.request_capacity()) }
    }

    /// The response buffer of a slot. For the server.
    ///
    /// # Safety
    /// No other reference to this buffer may exist in this process while the result lives.
    #[expect(clippy::mut_from_ref, reason = "exclusive by contract, not by borrow")]
    pub(crate) unsafe fn response_mut(&self, index: usize) -> &mut [u8] {
        let start = self.start(index, self.layout.response_offset());
        // SAFETY: in bounds for every slot of the layout; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(start, self.layout.response_capacity()) }
    }

    /// The address of a part of a slot.
    fn start(&self, index: usize, offset: usize) -> *mut u8 {
        assert!(index < self.layout.slots(), "slot {index} is out of range");
        let offset = self.layout.slot_offset(index) + offset;
        self.base.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of `new`; every borrow of the mapping has ended.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.layout.total_bytes()) };
    }
}
