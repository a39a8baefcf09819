//! The mapped region. All raw memory access of the crate is here: words are atomics, so a peer that
//! writes at the wrong time is a wrong value and never a data race; payloads are byte slices.
//!
//! A payload slice is stable only as long as both sides keep the protocol. The bytes of a request
//! may change once its client has timed out and used the slot again, so a request is also copied
//! word by word, by atomic loads.

#![expect(unsafe_code, reason = "a file mapping is raw memory")]

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::layout::{HEADER_BYTES, RegionLayout, header, slot};

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
        let (words, _) = bytes.as_chunks::<4>();
        for (index, word) in words.iter().enumerate().rev() {
            // SYNC: orders the words for a client that reads them from the file.
            self.word32(index * 4)
                .store(u32::from_le_bytes(*word), Ordering::Release);
        }
    }

    /// Counter of sends; the server sleeps on it.
    pub(crate) fn req_wake(&self) -> &AtomicU32 {
        self.word32(header::REQ_WAKE)
    }

    /// The words of a slot.
    pub(crate) fn slot(&self, index: usize) -> SlotWords<'_> {
        assert!(index < self.layout.slots(), "slot {index} is out of range");
        SlotWords {
            mapping: self,
            offset: self.layout.slot_offset(index),
        }
    }

    /// The first `len` bytes of a request. For the server, which never writes them.
    pub(crate) fn request(&self, index: usize, len: usize) -> &[u8] {
        assert!(len <= self.layout.request_capacity());
        self.bytes(self.slot(index).offset + slot::REQUEST, len)
    }

    /// Copies the first `len` bytes of a request into whole words. For the server.
    pub(crate) fn copy_request(&self, index: usize, len: usize, words: &mut Vec<u64>) {
        assert!(len <= self.layout.request_capacity());
        let start = self.slot(index).offset + slot::REQUEST;
        let count = len.div_ceil(size_of::<u64>());
        assert!(start.is_multiple_of(size_of::<u64>()));
        assert!(start + count * size_of::<u64>() <= self.layout.total_bytes());
        // SAFETY: aligned and inside the mapping by the assertions; atomics may change while they
        // are borrowed.
        let shared: &[AtomicU64] =
            unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(start).cast(), count) };
        words.clear();
        words.extend(shared.iter().map(|word| word.load(Ordering::Relaxed)));
    }

    /// The first `len` bytes of a response. For the client, which never writes them.
    pub(crate) fn response(&self, index: usize, len: usize) -> &[u8] {
        assert!(index < self.layout.slots() && len <= self.layout.response_capacity());
        self.bytes(self.layout.response_offset(index), len)
    }

    /// Copies a request into its slot. For the client, which never reads it back.
    pub(crate) fn write_request(&self, index: usize, request: &[u8]) {
        assert!(request.len() <= self.layout.request_capacity());
        let offset = self.slot(index).offset + slot::REQUEST;
        // SAFETY: in bounds by the assertion; the source is a borrowed slice outside the buffer,
        // because nothing in this process borrows the request buffer of a client's mapping.
        unsafe {
            ptr::copy_nonoverlapping(
                request.as_ptr(),
                self.base.as_ptr().add(offset),
                request.len(),
            );
        }
    }

    /// The response buffer of a slot. For the server.
    ///
    /// # Safety
    /// No other reference to this buffer may exist in this process while the result lives.
    #[expect(clippy::mut_from_ref, reason = "exclusive by contract, not by borrow")]
    pub(crate) unsafe fn response_mut(&self, index: usize) -> &mut [u8] {
        assert!(index < self.layout.slots());
        let start = self
            .base
            .as_ptr()
            .wrapping_add(self.layout.response_offset(index));
        // SAFETY: in bounds for every slot of the layout; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(start, self.layout.response_capacity()) }
    }

    fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        debug_assert!(offset + len <= self.layout.total_bytes());
        // SAFETY: the callers checked slot and length, so the range is inside the mapping.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), len) }
    }

    fn word32(&self, offset: usize) -> &AtomicU32 {
        self.check_word(offset, 4);
        // SAFETY: inside the mapping and aligned (checked); only accessed atomically.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    fn word64(&self, offset: usize) -> &AtomicU64 {
        self.check_word(offset, 8);
        // SAFETY: inside the mapping and aligned (checked); only accessed atomically.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    fn check_word(&self, offset: usize, size: usize) {
        assert!(offset.is_multiple_of(size) && offset + size <= self.layout.total_bytes());
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of `new`; every borrow of the mapping has ended.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.layout.total_bytes()) };
    }
}

/// The words of one slot. `req_seq`, `resp_seq` and `resp_wake` carry the protocol; the others are
/// plain values published by them.
#[derive(Clone, Copy)]
pub(crate) struct SlotWords<'a> {
    mapping: &'a Mapping,
    offset: usize,
}

impl<'a> SlotWords<'a> {
    /// Number of requests sent through this slot. Written by the client.
    pub(crate) fn req_seq(self) -> &'a AtomicU64 {
        self.mapping.word64(self.offset + slot::REQ_SEQ)
    }

    /// The last answered `req_seq`. Written by the server.
    pub(crate) fn resp_seq(self) -> &'a AtomicU64 {
        self.mapping.word64(self.offset + slot::RESP_SEQ)
    }

    /// Counter of answers and aborts; the client sleeps on it.
    pub(crate) fn resp_wake(self) -> &'a AtomicU32 {
        self.mapping.word32(self.offset + slot::RESP_WAKE)
    }

    /// Number of the request among all of its client. Written before `req_seq`.
    pub(crate) fn req_id(self) -> &'a AtomicU32 {
        self.mapping.word32(self.offset + slot::REQ_ID)
    }

    /// Length of the request. Written before `req_seq`.
    pub(crate) fn req_len(self) -> &'a AtomicU32 {
        self.mapping.word32(self.offset + slot::REQ_LEN)
    }

    /// Length of the response. Written before `resp_seq`.
    pub(crate) fn resp_len(self) -> &'a AtomicU32 {
        self.mapping.word32(self.offset + slot::RESP_LEN)
    }

    /// Time of the send in microseconds since the epoch. Written before `req_seq`.
    pub(crate) fn sent_us(self) -> &'a AtomicU64 {
        self.mapping.word64(self.offset + slot::SENT_US)
    }

    /// Time of the answer in microseconds since the epoch. Written before `resp_seq`.
    pub(crate) fn responded_us(self) -> &'a AtomicU64 {
        self.mapping.word64(self.offset + slot::RESPONDED_US)
    }
}

/// Microseconds since the epoch.
pub(crate) fn epoch_us() -> u64 {
    let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
