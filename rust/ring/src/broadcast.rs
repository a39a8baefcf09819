//! Messages from one leader to several workers, in order and without loss.
//!
//! The algorithm is the ring buffer with one writer and a cursor per reader. A *broadcast* is an
//! anonymous file: a header, a line of the writer, a line of each reader, then a few
//! *slots*. The writer fills the next slot and raises the count of *published* fragments; each reader
//! reads its next slot and raises its own count of *taken* fragments. A slot is written again
//! when the slowest reader has taken it. A message longer than a slot travels in several, its
//! *fragments*, so readers read its beginning while the writer still writes its end.
//!
//! A reader that is about to sleep announces it and then checks the published count once more; the writer
//! raises the count and then checks for sleepers. One of the two sees the other, so the writer makes a
//! system call only when a reader sleeps. The writer itself sleeps by the clock: it waits only when the
//! slowest reader has taken nothing of a whole ring.

mod layout;
mod listener;
mod mapping;
mod memfd;
mod sender;
#[cfg(test)]
mod tests;

pub use listener::{Listener, Message};
pub use sender::Broadcast;
