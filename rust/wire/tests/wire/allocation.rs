//! The hot paths never touch the heap.
#![expect(unsafe_code, reason = "a global allocator is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use pie_wire::{ResponseFrame, ResponsePayload, encode_fast_tokens, encode_response};

use crate::{samples, walk};

thread_local! {
    /// Allocations of this thread; tests run in parallel.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting.
struct Counting;

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations made by a closure.
fn allocations(action: impl FnOnce()) -> u64 {
    let before = COUNT.get();
    action();
    COUNT.get() - before
}

#[test]
fn the_counter_counts() {
    let count = allocations(|| drop(std::hint::black_box(vec![1_u8; 9])));
    assert_eq!(count, 1);
}

#[test]
fn reading_allocates_nothing() {
    for (name, message) in samples::all() {
        let bytes = message.encode();
        let count = allocations(|| {
            let sum = walk::payload(message.kind(), &bytes);
            std::hint::black_box(sum.is_ok());
        });
        assert_eq!(count, 0, "{name}");
        walk::payload(message.kind(), &bytes).expect(name);
    }
}

#[test]
fn encoding_responses_allocates_nothing() {
    let tokens = ResponseFrame {
        driver_id: 0,
        aborted: false,
        payload: ResponsePayload::Forward(samples::token_outputs(&[9; 300])),
    };
    let mut buffer = vec![0; 4096];
    assert_eq!(
        allocations(|| drop(encode_response(&tokens, &mut buffer))),
        0
    );
    assert_eq!(
        allocations(|| drop(encode_response(&tokens, &mut buffer[..99]))),
        0
    );
    assert_eq!(
        allocations(|| drop(encode_fast_tokens(0, &[9; 300], &mut buffer))),
        0
    );
    for (name, message) in samples::all() {
        if message.kind() != "request" {
            let count = allocations(|| drop(message.encode_into(&mut buffer)));
            assert_eq!(count, 0, "{name}");
        }
    }
}
