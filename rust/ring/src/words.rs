//! The words of a region and of a broadcast. They are atomics, so a peer that writes at the wrong time is a wrong value
//! and never a data race.

use crate::sync::atomic::{AtomicU32, AtomicU64};

/// The region's first cache line. Only the wake counter changes after the start.
#[repr(C)]
pub(crate) struct HeaderWords {
    pub(crate) fixed: [AtomicU32; 8],
    /// Raised by a send; the server sleeps on it.
    pub(crate) req_wake: AtomicU32,
    pub(crate) rest: [AtomicU32; 7],
}

/// The first cache line of a slot. `req_seq`, `resp_seq` and `resp_wake` carry the protocol; the
/// others are plain values published by them.
#[repr(C)]
pub(crate) struct SlotWords {
    /// Number of requests sent through this slot. Written by the client.
    pub(crate) req_seq: AtomicU64,
    /// The last answered `req_seq`. Written by the server.
    pub(crate) resp_seq: AtomicU64,
    /// Running number of the request among all of its client's. Written before `req_seq`.
    pub(crate) req_id: AtomicU32,
    pub(crate) reserved: AtomicU32,
    /// Length of the request. Written before `req_seq`.
    pub(crate) req_len: AtomicU32,
    /// Length of the response. Written before `resp_seq`.
    pub(crate) resp_len: AtomicU32,
    /// Time of the send in microseconds since the epoch. Written before `req_seq`.
    pub(crate) sent_us: AtomicU64,
    /// Time of the answer in microseconds since the epoch. Written before `resp_seq`.
    pub(crate) responded_us: AtomicU64,
    /// Raised by an answer or an abort; the client sleeps on it.
    pub(crate) resp_wake: AtomicU32,
    pub(crate) rest: [AtomicU32; 3],
}

/// The writer's line of a broadcast.
#[repr(C)]
pub(crate) struct WriterWords {
    /// Fragments written so far. Written by the writer, which never reads it back.
    pub(crate) published: AtomicU64,
    /// Changes with `published`; readers sleep on it. Written by the writer.
    pub(crate) wake: AtomicU32,
    /// Readers that sleep or are about to. A count that stays too high after a death costs the writer system calls.
    pub(crate) sleepers: AtomicU32,
    pub(crate) rest: [AtomicU32; 12],
}

/// A reader's line of a broadcast.
#[repr(C)]
pub(crate) struct ReaderWords {
    /// Fragments read so far. Written by the reader; the writer checks what it reads.
    pub(crate) taken: AtomicU64,
    /// Whether the reader's number is in use, or was.
    pub(crate) claimed: AtomicU32,
    pub(crate) rest: [AtomicU32; 13],
}

/// The first cache line of a broadcast's slot. Plain values published by [`WriterWords::published`].
#[repr(C)]
pub(crate) struct FragmentWords {
    /// The message's kind.
    pub(crate) kind: AtomicU32,
    /// Bytes of this fragment.
    pub(crate) len: AtomicU32,
    /// Whether the message continues in the next slot.
    pub(crate) has_more: AtomicU32,
    pub(crate) rest: [AtomicU32; 13],
}
