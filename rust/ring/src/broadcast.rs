//! One leader tells several workers the same, in order, and nothing is lost.
//!
//! The algorithm is the ring buffer with one writer and a cursor per reader. A *broadcast* is an
//! anonymous file: a header, a line for what the writer says, a line for each reader, then a few
//! *slots*. The writer fills the next slot and raises the count of what is *published*; each reader
//! reads the slot where it is and raises its own count of what it has *taken*. A slot is written again
//! when the slowest reader has taken it. A message longer than a slot travels in several, its
//! *fragments*, so the readers drain what the writer still writes.
//!
//! A reader that is about to sleep says so and then looks at the published count once more; the writer
//! raises the count and then looks for sleepers. One of the two sees the other, so the writer makes a
//! system call only when somebody sleeps. The writer itself sleeps by the clock: it waits only when a
//! reader is a whole ring behind.

mod listener;
mod mapping;
mod memfd;
mod sender;
mod shape;
#[cfg(test)]
mod tests;

pub use listener::{Listener, Message};
pub use sender::Broadcast;
