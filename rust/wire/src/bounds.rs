//! Validation by bounds and alignment (§5.2).
//!
//! rkyv's own validator also demands that the arrays of an object lie in the order of its fields,
//! empty ones included, which a client that writes frames by hand need not know. Order and overlap
//! are harmless here: every archived type is plain data that is only ever read. What all arrays
//! claim together is bounded by the payload, so that shared bytes cannot multiply the work of a
//! reader.
#![expect(
    unsafe_code,
    reason = "the trait promises that accepted pointers may be read"
)]

use std::alloc::Layout;
use std::fmt;
use std::ops::Range;

use rkyv::rancor::{OptionExt, Source, fail};
use rkyv::validation::ArchiveContext;

/// The addresses that an archive may refer to.
#[derive(Debug)]
pub(crate) struct Bounds {
    range: Range<usize>,
    /// Bytes that may still be claimed.
    remaining: usize,
}

impl Bounds {
    /// The addresses of `bytes`.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let range = bytes.as_ptr_range();
        Self {
            range: range.start.addr()..range.end.addr(),
            remaining: bytes.len(),
        }
    }
}

#[derive(Debug)]
struct OutOfBounds {
    /// Start relative to the archive's first byte.
    offset: i128,
    size: usize,
    len: usize,
}

impl fmt::Display for OutOfBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, size, len } = self;
        write!(
            f,
            "{size} bytes at offset {offset} are outside the {len} of the payload"
        )
    }
}

impl std::error::Error for OutOfBounds {}

#[derive(Debug)]
struct Overlap;

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the arrays claim more bytes than the payload has")
    }
}

impl std::error::Error for Overlap {}

#[derive(Debug)]
struct Unaligned {
    address: usize,
    align: usize,
}

impl fmt::Display for Unaligned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, align } = self;
        write!(f, "address {address:#x} is not a multiple of {align}")
    }
}

impl std::error::Error for Unaligned {}

// SAFETY: a pointer is accepted only if all its bytes lie in the range of the archive and it is
// aligned. Ranges need not be exclusive: the archived types hold no interior mutability and are
// reached through shared references only, so two of them may overlap.
unsafe impl<E: Source> ArchiveContext<E> for Bounds {
    fn check_subtree_ptr(&mut self, ptr: *const u8, layout: &Layout) -> Result<(), E> {
        let (start, size) = (ptr.addr(), layout.size());
        let inside = self.range.start <= start && start <= self.range.end;
        if !inside || size > self.range.end - start {
            fail!(OutOfBounds {
                offset: start as i128 - self.range.start as i128,
                size,
                len: self.range.len(),
            });
        }
        if !start.is_multiple_of(layout.align()) {
            fail!(Unaligned {
                address: start,
                align: layout.align(),
            });
        }
        self.remaining = self.remaining.checked_sub(size).into_trace(Overlap)?;
        Ok(())
    }

    // SAFETY: the range stays that of the whole payload, which `check_subtree_ptr` enforces alone.
    unsafe fn push_subtree_range(&mut self, _: *const u8, _: *const u8) -> Result<Range<usize>, E> {
        Ok(0..0)
    }

    // SAFETY: as above: nothing was pushed.
    unsafe fn pop_subtree_range(&mut self, _: Range<usize>) -> Result<(), E> {
        Ok(())
    }
}
