//! The errors of the crate, one type for each thing that can be done. A message names the value, the limit and, after a
//! blank line, the remedy.

use std::io;
use std::time::Duration;

use thiserror::Error;

/// The system refused a call.
#[derive(Debug, Error)]
#[error("cannot {action} {target}: {source}{}{hint}", if hint.is_empty() { "" } else { "\n\nhint: " })]
pub struct SystemError {
    /// What was tried.
    pub action: &'static str,
    /// What it was tried on.
    pub target: String,
    /// The system's answer.
    pub source: io::Error,
    /// The remedy; empty if it is not known.
    pub hint: &'static str,
}

impl SystemError {
    pub(crate) fn new(
        action: &'static str,
        target: impl Into<String>,
        source: impl Into<io::Error>,
    ) -> Self {
        Self {
            action,
            target: target.into(),
            source: source.into(),
            hint: "",
        }
    }
}

/// The slots and capacities of a [`RegionLayout`](crate::RegionLayout) break a rule of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{slots} slots of {request} + {response} bytes are not a usable layout: {problem}")]
pub struct LayoutError {
    /// Number of slots.
    pub slots: u32,
    /// Request capacity of a slot in bytes.
    pub request: u32,
    /// Response capacity of a slot in bytes.
    pub response: u32,
    /// The broken rule and its limit.
    pub problem: &'static str,
}

/// A file is not a region, or not a broadcast, of this version of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file is shorter than its header says.
    #[error("{name} has {size} bytes, {needed} are needed: it is damaged or still being made")]
    TooShort {
        /// Name of the file.
        name: String,
        /// Size of the file.
        size: u64,
        /// Smallest acceptable size.
        needed: u64,
    },
    /// A header field does not have the value that this version of the protocol demands.
    #[error(
        "{name} has {field} {found}, expected {expected}\n\n\
         hint: the two sides speak different versions of the protocol, or the server is still starting"
    )]
    Field {
        /// Name of the file.
        name: String,
        /// The field.
        field: &'static str,
        /// Its value.
        found: String,
        /// The demanded value.
        expected: String,
    },
}

/// A region cannot be created or opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The name cannot be used.
    #[error(
        "region name {name:?} is not usable\n\n\
         hint: use one slash followed by 1 to 250 characters without a slash, such as /my_region"
    )]
    Name {
        /// The refused name.
        name: String,
    },
    /// The abort reply does not fit a response.
    #[error(
        "the abort reply has {len} bytes, a response may have {capacity}\n\n\
         hint: raise the response capacity of the layout"
    )]
    AbortReplyTooLarge {
        /// Length of the abort reply.
        len: usize,
        /// Response capacity of a slot.
        capacity: usize,
    },
    /// A running process owns the region.
    #[error(
        "region {name} belongs to a running process ({}) that did not leave within {waited:?}\n\n\
         hint: stop that process or wait for its end (`fuser -v /dev/shm{name}` lists the users), use another name, or \
         give this process a /dev/shm of its own",
        owner.map_or_else(|| "pid unknown".to_owned(), |pid| format!("pid {pid}"))
    )]
    Owned {
        /// Name of the region.
        name: String,
        /// The owner, if the kernel gives it.
        owner: Option<u32>,
        /// How long the owner was given to leave.
        waited: Duration,
    },
    /// `/dev/shm` cannot hold the region.
    #[error(
        "region {name} needs {needed} bytes, /dev/shm has {available} bytes free\n\n\
         hint: enlarge /dev/shm (docker run --shm-size, or mount -o remount,size=), delete stale \
         files there, or raise the memory limit of the container"
    )]
    NoSpace {
        /// Name of the region.
        name: String,
        /// Size of the region.
        needed: u64,
        /// Free bytes of the file system.
        available: u64,
    },
    /// No region has this name.
    #[error("region {name} does not exist\n\nhint: start its server first")]
    NotFound {
        /// Name of the region.
        name: String,
    },
    /// The file of this name is not a region of this version of the protocol.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The system refused a call.
    #[error(transparent)]
    System(#[from] SystemError),
}

/// A client has no answer to a request.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CallError {
    /// The request does not fit a slot. Nothing was sent.
    #[error(
        "the request has {len} bytes, a slot takes {capacity}\n\n\
         hint: send less at once, or raise the request capacity of the server's layout"
    )]
    RequestTooLarge {
        /// Length of the request.
        len: usize,
        /// Request capacity of a slot.
        capacity: usize,
    },
    /// The server announced a response longer than its slot.
    #[error("slot {slot} announces a response of {len} bytes, it can hold {capacity}")]
    ResponseLength {
        /// Index of the slot.
        slot: usize,
        /// Announced length.
        len: usize,
        /// Response capacity of a slot.
        capacity: usize,
    },
    /// Another client of the region sent a request in a slot that this one had taken. The answer is dropped.
    #[error(
        "another client sent a request in slot {slot} while this one waited for its answer\n\n\
         hint: open one client for each region and share it between threads"
    )]
    OtherClient {
        /// Index of the slot.
        slot: usize,
    },
    /// No answer came in time.
    #[error(
        "no answer to request {id} within {after:?}\n\nhint: look for errors in the server's log"
    )]
    TimedOut {
        /// The request's id.
        id: u32,
        /// The time limit.
        after: Duration,
    },
    /// [`Client::abort`](crate::Client::abort) was called.
    #[error("the client was aborted")]
    Aborted,
    /// The system refused to wait.
    #[error(transparent)]
    System(#[from] SystemError),
}

/// A request cannot be read, or its response not sent.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The client announced a request longer than its slot.
    #[error("slot {slot} announces a request of {len} bytes, it can hold {capacity}")]
    RequestLength {
        /// Index of the slot.
        slot: usize,
        /// Announced length.
        len: usize,
        /// Request capacity of a slot.
        capacity: usize,
    },
    /// The client gave up, and has sent its next request in the slot.
    #[error("the client gave up on its request in slot {slot} and has sent another one")]
    Stale {
        /// Index of the slot.
        slot: usize,
    },
    /// The answer does not fit a slot. The abort reply was sent instead.
    #[error(
        "the response has {len} bytes, a slot takes {capacity}; the request was answered with the \
         abort reply\n\nhint: answer less at once, or raise the response capacity of the layout"
    )]
    ResponseTooLarge {
        /// Length of the response.
        len: usize,
        /// Response capacity of a slot.
        capacity: usize,
    },
}

/// A broadcast cannot be made, opened, sent to or received from.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BroadcastError {
    /// The number of readers is out of range.
    #[error("a broadcast to {readers} readers is not possible, it may have 1 to {limit}")]
    Readers {
        /// The refused number.
        readers: usize,
        /// The largest one.
        limit: usize,
    },
    /// There is no reader of this number.
    #[error("reader {reader} does not exist: the broadcast has {readers}, counted from 0")]
    Reader {
        /// Number of the reader.
        reader: usize,
        /// How many there are.
        readers: usize,
    },
    /// The reader of this number was opened before.
    #[error(
        "reader {reader} of the broadcast was opened before\n\n\
         hint: give each worker a number of its own, and workers of a new leader a new broadcast"
    )]
    ReaderTaken {
        /// Number of the reader.
        reader: usize,
    },
    /// A reader's count is impossible: its process has written to the shared memory what it must not.
    #[error(
        "reader {reader} says that it has taken {taken} fragments: {published} were published, of \
         which at most {slots} may be left"
    )]
    ReaderCount {
        /// Number of the reader.
        reader: usize,
        /// Its count.
        taken: u64,
        /// Fragments published.
        published: u64,
        /// Slots of the broadcast.
        slots: u64,
    },
    /// An earlier message was sent in part.
    #[error("the broadcast ended within a message, by an error that was reported then")]
    Torn,
    /// The leader announced a fragment longer than its slot.
    #[error("slot {slot} announces a fragment of {len} bytes, it can hold {capacity}")]
    FragmentLength {
        /// Index of the slot.
        slot: usize,
        /// Announced length.
        len: usize,
        /// Bytes that a slot takes.
        capacity: usize,
    },
    /// The file is not a broadcast of this version.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The system refused a call.
    #[error(transparent)]
    System(#[from] SystemError),
}

/// An exit guard cannot be installed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GuardError {
    /// The process has one already.
    #[error("this process already has an exit guard\n\nhint: install one and share it")]
    Active,
    /// The system refused a call.
    #[error(transparent)]
    System(#[from] SystemError),
}

/// Any error of this crate, for callers that do several of these things. Every other error converts to it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RingError {
    /// Of a layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Of creating or opening a region.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Of a client's call.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Of a request that a server has taken.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// Of a broadcast.
    #[error(transparent)]
    Broadcast(#[from] BroadcastError),
    /// Of the exit guard.
    #[error(transparent)]
    Guard(#[from] GuardError),
    /// Of waiting.
    #[error(transparent)]
    System(#[from] SystemError),
}
