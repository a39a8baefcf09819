//! Archived numbers as native slices.
//!
//! The archive stores numbers little-endian and naturally aligned, which is
//! how the targets of this crate store them too.
#![expect(unsafe_code, reason = "one cast between types of identical layout")]

use std::mem::{align_of, size_of};
use std::slice;

use rkyv::rend::{f32_le, i64_le, u32_le, u64_le};
use rkyv::vec::ArchivedVec;

mod sealed {
    pub trait Sealed {}
}

/// An archived primitive that has the bytes of a native one.
pub trait Plain: sealed::Sealed {
    /// The native primitive.
    type Native: Copy;
}

macro_rules! plain {
    ($($archived:ty => $native:ty),* $(,)?) => {$(
        impl sealed::Sealed for $archived {}
        impl Plain for $archived {
            type Native = $native;
        }
        const _: () = {
            assert!(size_of::<$archived>() == size_of::<$native>());
            assert!(align_of::<$archived>() == align_of::<$native>());
        };
    )*};
}

// Only types whose native counterpart accepts every value of the archived one.
plain! {
    u8 => u8,
    bool => bool,
    u32_le => u32,
    u64_le => u64,
    i64_le => i64,
    f32_le => f32,
}

/// Access to an archived vector as a slice of native numbers.
pub trait NativeSlice {
    /// The native element.
    type Element;

    /// The elements, borrowed in place at no cost.
    fn native(&self) -> &[Self::Element];
}

impl<T: Plain> NativeSlice for ArchivedVec<T> {
    type Element = T::Native;

    fn native(&self) -> &[T::Native] {
        let archived = self.as_slice();
        // SAFETY: `Plain` is sealed and implemented only by `plain!`, for a primitive or its
        // little-endian wrapper: same size and alignment (asserted there), same bytes (the
        // crate compiles for little-endian targets only), every value valid. Pointer and
        // length come from a live slice and the result borrows from the same `self`.
        unsafe { slice::from_raw_parts(archived.as_ptr().cast(), archived.len()) }
    }
}
