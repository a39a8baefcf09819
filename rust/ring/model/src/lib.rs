//! The ring's own source files, run through every interleaving and every order of memory accesses
//! that loom can think of.
//!
//! `client`, `dispatch`, `lease`, `shared`, `wait`, `words` and the ends of `broadcast` are the files of
//! the product. Around them stand models of what they touch: `sync` (atomics, locks, the clock), `futex`
//! (the kernel) and `mapping` (the region, and the broadcast). A lost wake-up shows as a deadlock, a torn message as a forbidden access
//! to a payload, a missing answer as a spin loop without end.

#![allow(dead_code, reason = "the product uses the rest")]

mod broadcast;
mod broadcasts;
#[path = "../../src/client.rs"]
mod client;
#[path = "../../src/dispatch.rs"]
mod dispatch;
#[path = "../../src/error.rs"]
mod error;
mod futex;
#[path = "../../src/layout.rs"]
mod layout;
#[path = "../../src/lease.rs"]
mod lease;
mod mapping;
mod models;
#[path = "../../src/shared.rs"]
mod shared;
mod sync;
#[path = "../../src/wait.rs"]
mod wait;
#[path = "../../src/words.rs"]
mod words;

pub use broadcasts::*;
pub use models::*;
