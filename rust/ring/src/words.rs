//! The words of a region. They are atomics, so a peer that writes at the wrong time is a wrong value
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
    /// Number of the request among all of its client. Written before `req_seq`.
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
