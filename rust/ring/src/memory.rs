//! Memory that several processes write. All raw access to it is here.
//!
//! Rust assumes that a `&[u8]` does not change and that a `&mut [u8]` is exclusive. A shared mapping keeps neither promise: a
//! client that gave up writes its next request, and a faulty peer writes anything at any time. So no byte of it is ever lent. Words are atomics, and payloads are copied in and out by relaxed atomic loads and stores, eight bytes at a
//! time. If a peer writes meanwhile, the copy is a mixture, but it no longer changes: the bytes that were checked are the bytes that
//! are used.
//!
//! Relaxed loads and stores of aligned words are plain moves on every 64-bit machine, so they cost no more than a
//! plain copy. The protocols above this module decide when each side may write, so that copies are whole.

#![expect(unsafe_code, reason = "a file mapping is raw memory")]

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::words::{FragmentWords, HeaderWords, ReaderWords, SlotWords, WriterWords};

const WORD: usize = size_of::<u64>();

/// A cache line of shared words.
///
/// # Safety
/// The type consists of atomics only, in the order of the protocol (`repr(C)`).
pub(crate) unsafe trait CacheLine {}

// SAFETY: all five are `repr(C)` and made of atomic integers.
unsafe impl CacheLine for HeaderWords {}
// SAFETY: as above.
unsafe impl CacheLine for SlotWords {}
// SAFETY: as above.
unsafe impl CacheLine for WriterWords {}
// SAFETY: as above.
unsafe impl CacheLine for ReaderWords {}
// SAFETY: as above.
unsafe impl CacheLine for FragmentWords {}

/// A shared, writable mapping of the beginning of a file.
pub(crate) struct Memory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping lives until drop and has no thread affinity.
unsafe impl Send for Memory {}
// SAFETY: everything in it is reached through atomics.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps the first `len` bytes of a file that has them. With `populate` no later access faults.
    pub(crate) fn map(file: BorrowedFd<'_>, len: usize, populate: bool) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let mut flags = MapFlags::SHARED;
        flags.set(MapFlags::POPULATE, populate);
        // SAFETY: the kernel picks the address, so no existing mapping is replaced.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, access, flags, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { base, len })
    }

    /// The line that starts at `offset`.
    pub(crate) fn cache_line<T: CacheLine>(&self, offset: usize) -> &T {
        // SAFETY: in bounds and aligned (checked by `at`); a `CacheLine` is made of atomics, for which any bytes are a value.
        unsafe { &*self.at(offset, size_of::<T>(), align_of::<T>()).cast() }
    }

    /// Replaces the content of `words` by the `len` bytes from `offset` on, and the bytes that fill up the last word.
    pub(crate) fn copy_words(&self, offset: usize, len: usize, words: &mut Vec<u64>) {
        let shared = self.words(offset, len.div_ceil(WORD));
        words.clear();
        words.extend(shared.iter().map(|word| word.load(Ordering::Relaxed)));
    }

    /// Fills `bytes` with the mapping's bytes from `offset` on.
    pub(crate) fn load(&self, offset: usize, bytes: &mut [u8]) {
        let (head, rest) = bytes.split_at_mut(head_len(offset, bytes.len()));
        let (words, tail) = rest.as_chunks_mut::<WORD>();
        let start = offset + head.len();
        let end = start + WORD * words.len();
        for (shared, byte) in self.bytes(offset, head.len()).iter().zip(head) {
            *byte = shared.load(Ordering::Relaxed);
        }
        for (shared, word) in self.words(start, words.len()).iter().zip(words) {
            *word = shared.load(Ordering::Relaxed).to_ne_bytes();
        }
        for (shared, byte) in self.bytes(end, tail.len()).iter().zip(tail) {
            *byte = shared.load(Ordering::Relaxed);
        }
    }

    /// Writes `bytes` from `offset` on.
    pub(crate) fn store(&self, offset: usize, bytes: &[u8]) {
        let (head, rest) = bytes.split_at(head_len(offset, bytes.len()));
        let (words, tail) = rest.as_chunks::<WORD>();
        let start = offset + head.len();
        let end = start + WORD * words.len();
        for (shared, byte) in self.bytes(offset, head.len()).iter().zip(head) {
            shared.store(*byte, Ordering::Relaxed);
        }
        for (shared, word) in self.words(start, words.len()).iter().zip(words) {
            shared.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        for (shared, byte) in self.bytes(end, tail.len()).iter().zip(tail) {
            shared.store(*byte, Ordering::Relaxed);
        }
    }

    fn bytes(&self, offset: usize, count: usize) -> &[AtomicU8] {
        let start = self.at(offset, count, 1);
        // SAFETY: in bounds (checked by `at`); atomics may change while they are borrowed.
        unsafe { std::slice::from_raw_parts(start.cast(), count) }
    }

    fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
        if count == 0 {
            // The offset need not be aligned then.
            return &[];
        }
        let start = self.at(offset, WORD * count, WORD);
        // SAFETY: in bounds and aligned (checked by `at`); atomics may change while they are borrowed.
        unsafe { std::slice::from_raw_parts(start.cast(), count) }
    }

    /// The address of `len` bytes that start at a multiple of `align`.
    fn at(&self, offset: usize, len: usize, align: usize) -> *const u8 {
        let end = offset.checked_add(len);
        assert!(
            offset.is_multiple_of(align) && end.is_some_and(|end| end <= self.len),
            "{len} bytes from {offset} on are not in a mapping of {} bytes",
            self.len
        );
        self.base.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: base and length are those of `map`; every borrow of the mapping has ended.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// How many of `len` bytes from `offset` on come before the first whole word.
fn head_len(offset: usize, len: usize) -> usize {
    len.min(offset.next_multiple_of(WORD) - offset)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use proptest::prelude::*;
    use rustix::fs::MemfdFlags;

    use super::*;

    const LEN: usize = 100;

    fn memory() -> Memory {
        let file = rustix::fs::memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        Memory::map(file.as_fd(), LEN, true).unwrap()
    }

    proptest! {
        /// As a vector of bytes.
        #[test]
        fn copies_are_exact_at_any_offset_and_length(
            stores in prop::collection::vec((0..LEN, prop::collection::vec(any::<u8>(), 0..LEN)), 1..8),
            offset in 0..LEN,
            len in 0..LEN,
        ) {
            let (memory, mut model) = (memory(), [0; LEN]);
            for (offset, bytes) in &stores {
                let bytes = &bytes[..bytes.len().min(LEN - offset)];
                memory.store(*offset, bytes);
                model[*offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            let len = len.min(LEN - offset);
            let mut bytes = vec![0xAA; len];
            memory.load(offset, &mut bytes);
            prop_assert_eq!(&bytes, &model[offset..offset + len]);

            let (start, mut words) = (offset / WORD * WORD, vec![7; 3]);
            let len = len.min((LEN - start) / WORD * WORD);
            memory.copy_words(start, len, &mut words);
            prop_assert_eq!(words.len(), len.div_ceil(WORD));
            let copied: &[u8] = bytemuck::cast_slice(&words);
            prop_assert_eq!(&copied[..len], &model[start..start + len]);
        }
    }

    #[test]
    fn nothing_outside_is_reached() {
        let memory = memory();
        let reaches = |act: &dyn Fn(&Memory)| {
            let act = std::panic::AssertUnwindSafe(|| act(&memory));
            std::panic::catch_unwind(act).is_ok()
        };
        assert!(reaches(&|memory| memory.store(LEN - 1, &[1])));
        assert!(reaches(&|memory| memory.load(LEN, &mut [])));
        assert!(!reaches(&|memory| memory.store(LEN, &[1])));
        assert!(!reaches(&|memory| memory.store(LEN - 9, &[1; 10])));
        assert!(!reaches(&|memory| memory.load(LEN - 1, &mut [0; 2])));
        assert!(!reaches(&|memory| memory.load(usize::MAX - 7, &mut [0; 9])));
        assert!(!reaches(&|memory| memory.copy_words(4, 8, &mut Vec::new())));
        assert!(!reaches(&|memory| memory.copy_words(
            96,
            8,
            &mut Vec::new()
        )));
        assert!(!reaches(&|memory| {
            memory.cache_line::<SlotWords>(64);
        }));
    }
}
