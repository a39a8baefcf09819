//! Messages between Linux processes over shared memory: requests from a client to a server with their answers, and
//! broadcasts from a leader to its workers.
//!
//! A *region* is one POSIX shared-memory object: a 64-byte header, then a few *slots*. A slot is a
//! buffer for one request and its answer, so there is no queue to overflow and nothing to allocate
//! on the way. Two sequence numbers per slot carry the whole protocol: the client raises the request
//! sequence to send, the server sets the response sequence to the same value to answer. A wake
//! counter next to each of them lets the other side sleep in a futex.
//!
//! | module | contents |
//! |---|---|
//! | `layout` | every offset and size of the region, header encoding and validation |
//! | `words`, `memory`, `mapping` | the mapped memory: atomic words, and payloads that are copied in and out |
//! | `region`, `named_file` | ownership of the name in `/dev/shm`: an exclusive `flock`, which the kernel releases when its process ends |
//! | `wait`, `futex` | spin, spin then park, or park until a condition holds |
//! | `server`, `dispatch`, `lease` | receive the oldest request, respond exactly once |
//! | `shared` | the state of a slot that server and leases share, and deferred wakes |
//! | `client`, `connect` | open a region, send a request, wait for its answer |
//! | `broadcast` | messages from one leader to several workers, over an unnamed file |
//! | `guard`, `signal`, `stderr` | removal of the regions on SIGTERM or when the parent dies, with a last log line |
//! | `reaper` | a process that removes them after SIGKILL |
//! | `sync` | synchronization primitives and clock, which loom replaces |
//!
//! Two sides that spin exchange messages without a system call: each defers the other's wake until it is
//! idle, and cancels it when the other side has been seen awake.
//!
//! The crate in `model` runs the files that hold the protocol under loom, which tries interleavings
//! and memory orders exhaustively up to a number of preemptions; it replaces `sync`. `tests/kill`
//! kills either side after each step that the other can see.
//!
//! The ring never looks inside a payload, and lends none of it in place: see `memory`.
//!
//! ```
//! use pie_ring::{Client, ClientConfig, ExitGuard, RegionLayout, Server, ServerConfig, Wait};
//!
//! # fn main() -> Result<(), pie_ring::RingError> {
//! let name = format!("/pie_ring_doc_{}", std::process::id());
//! let mut config = ServerConfig::new(&name, *b"schema-1", b"aborted".to_vec());
//! config.layout = RegionLayout::new(1, 4096, 4096)?;
//! let mut server = Server::create(&config, &ExitGuard::inert())?;
//! let client = Client::open(&name, *b"schema-1", ClientConfig::default())?;
//! std::thread::scope(|scope| {
//!     let answer = scope.spawn(|| client.call(b"ping", <[u8]>::to_vec));
//!     if let Some(lease) = server.wait(Wait::Park)? {
//!         let mut words = Vec::new();
//!         let request = lease.copy_request(&mut words)?;
//!         assert_eq!(request, b"ping");
//!         lease.reply(b"pong")?;
//!     }
//!     assert_eq!(answer.join().unwrap()?, b"pong");
//!     Ok(())
//! })
//! # }
//! ```

#[cfg(not(all(
    target_os = "linux",
    target_endian = "little",
    target_pointer_width = "64"
)))]
compile_error!("the ring needs Linux on a 64-bit little-endian machine");

mod broadcast;
mod client;
mod connect;
mod dispatch;
mod error;
mod futex;
mod guard;
mod layout;
mod lease;
mod mapping;
mod memory;
mod named_file;
mod reaper;
mod region;
mod server;
mod shared;
mod signal;
mod stderr;
mod sync;
mod wait;
mod words;

pub use broadcast::{Broadcast, Listener, Message};
pub use client::{Client, ClientConfig, InFlightRequest, RequestSlot};
pub use error::{
    BroadcastError, CallError, GuardError, HeaderError, LayoutError, LeaseError, RegionError,
    RingError, SystemError,
};
pub use guard::{ExitGuard, die_with_parent};
pub use layout::{HEADER_BYTES, MAGIC, RegionLayout, SLOT_HEADER_BYTES, VERSION};
pub use lease::{Lease, Publish};
pub use region::{region_exists, remove_stale_region};
pub use server::{DEFAULT_TAKEOVER, Server, ServerConfig};
pub use shared::{Stop, Waker};
pub use wait::Wait;

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
