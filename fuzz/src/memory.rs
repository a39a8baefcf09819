//! How much memory an action takes.
#![expect(unsafe_code, reason = "a global allocator is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that this thread has allocated and not freed.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    /// The most that `LIVE` has been since [`peak`] began.
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, counting.
struct Counting;

fn count(grown: isize) {
    let live = LIVE.get() + grown;
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
}

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that this thread holds on the heap.
pub(crate) fn live() -> isize {
    LIVE.get()
}

/// The result of an action, and the most bytes that it held at once beyond what was held before.
pub(crate) fn peak<T>(action: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = action();
    (result, (PEAK.get() - before) as usize)
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    #[test]
    fn the_peak_counts_what_is_freed_again() {
        let live = super::live();
        let ((), peak) = super::peak(|| {
            drop(black_box(vec![1_u8; 100]));
            drop(black_box(vec![1_u8; 30]));
        });
        assert_eq!((peak, super::live()), (100, live));
    }
}
