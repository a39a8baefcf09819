//! One error enum for the crate. A message names the value, the limit and, after a blank line, the
//! remedy.

use std::io;
use std::time::Duration;

/// Everything that can go wrong with a ring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The region name cannot be used.
    #[error(
        "region name {name:?} is not usable\n\n\
         hint: use one slash followed by 1 to 250 characters without a slash, such as /pie_shmem_g0"
    )]
    Name {
        /// The refused name.
        name: String,
    },

    /// The slot geometry breaks a rule of the protocol.
    #[error("{slots} slots of {request} + {response} bytes are not a usable layout: {problem}")]
    Layout {
        /// Number of slots.
        slots: u32,
        /// Request capacity of a slot in bytes.
        request: u32,
        /// Response capacity of a slot in bytes.
        response: u32,
        /// The broken rule and its limit.
        problem: &'static str,
    },

    /// The abort reply could never be sent.
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

    /// A living process holds the region.
    #[error(
        "region {name} belongs to a running process ({}) that did not leave within {waited:?}\n\n\
         hint: run one Pie server per host, or per container with a /dev/shm of its own; stop the other one, or wait for \
         the end of its driver (`fuser -v /dev/shm{name}` lists the users)",
        owner.map_or_else(|| "pid unknown".to_owned(), |pid| format!("pid {pid}"))
    )]
    Owned {
        /// Name of the region.
        name: String,
        /// The owner, when the kernel tells.
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
    #[error("region {name} does not exist\n\nhint: start the driver of this group first")]
    NotFound {
        /// Name of the region.
        name: String,
    },

    /// The file is shorter than its header says.
    #[error(
        "region {name} has {size} bytes, {needed} are needed: it is damaged or still being made"
    )]
    TooShort {
        /// Name of the region.
        name: String,
        /// Size of the file.
        size: u64,
        /// Smallest acceptable size.
        needed: u64,
    },

    /// A header field does not have the value that this version of the protocol demands.
    #[error(
        "region {name} has {field} {found}, expected {expected}\n\n\
         hint: the two sides speak different protocol versions, or the driver is still starting"
    )]
    Header {
        /// Name of the region.
        name: String,
        /// The field.
        field: &'static str,
        /// Its value.
        found: String,
        /// The demanded value.
        expected: String,
    },

    /// The caller's request does not fit into a slot. Nothing was sent.
    #[error(
        "the request has {len} bytes, a slot takes {capacity}\n\n\
         hint: send a smaller batch or raise the request capacity of the driver"
    )]
    RequestTooLarge {
        /// Length of the request.
        len: usize,
        /// Request capacity of a slot.
        capacity: usize,
    },

    /// A client announced a request longer than its slot.
    #[error("slot {slot} announces a request of {len} bytes, it can hold {capacity}")]
    RequestLength {
        /// Index of the slot.
        slot: usize,
        /// Announced length.
        len: usize,
        /// Request capacity of a slot.
        capacity: usize,
    },

    /// The server's answer does not fit into a slot. The abort reply was sent instead.
    #[error(
        "the response has {len} bytes, a slot takes {capacity}; the request was answered with the \
         abort reply\n\nhint: answer fewer requests at once or raise the response capacity"
    )]
    ResponseTooLarge {
        /// Length of the response.
        len: usize,
        /// Response capacity of a slot.
        capacity: usize,
    },

    /// A server announced a response longer than its slot.
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
        "no answer to request {id} within {after:?}\n\nhint: look for errors in the driver's log"
    )]
    TimedOut {
        /// The request's id.
        id: u32,
        /// The time limit.
        after: Duration,
    },

    /// The client was told to give up.
    #[error("the client was aborted")]
    Aborted,

    /// A broadcast cannot have so many readers.
    #[error("a broadcast to {readers} readers is not possible, it may have 1 to {limit}")]
    Readers {
        /// The refused number.
        readers: usize,
        /// The largest one.
        limit: usize,
    },

    /// A broadcast has no such reader.
    #[error("reader {reader} does not exist: the broadcast has {readers}, counted from 0")]
    Reader {
        /// Number of the reader.
        reader: usize,
        /// How many there are.
        readers: usize,
    },

    /// Somebody else is this reader of a broadcast, or was.
    #[error(
        "reader {reader} of the broadcast was opened before\n\n\
         hint: give each worker a number of its own, and workers of a new leader a new broadcast"
    )]
    ReaderTaken {
        /// Number of the reader.
        reader: usize,
    },

    /// A reader claims what cannot be.
    #[error(
        "reader {reader} says that it has taken {taken} fragments: {published} were published, of \
         which at most {slots} may be left"
    )]
    ReaderCount {
        /// Number of the reader.
        reader: usize,
        /// What it says.
        taken: u64,
        /// Fragments published.
        published: u64,
        /// Slots of the broadcast.
        slots: u64,
    },

    /// An earlier message was sent in part.
    #[error("the broadcast ended within a message, by an error that was reported then")]
    Torn,

    /// A leader announced a fragment longer than its slot.
    #[error("slot {slot} announces a fragment of {len} bytes, it can hold {capacity}")]
    FragmentLength {
        /// Index of the slot.
        slot: usize,
        /// Announced length.
        len: usize,
        /// Bytes that a slot takes.
        capacity: usize,
    },

    /// The process already has an exit guard.
    #[error("this process already has an exit guard\n\nhint: install one and share it")]
    GuardActive,

    /// A system call failed.
    #[error("cannot {action} {target}: {source}{}{hint}", if hint.is_empty() { "" } else { "\n\nhint: " })]
    System {
        /// What was tried.
        action: &'static str,
        /// On what.
        target: String,
        /// The system's answer.
        source: io::Error,
        /// What to do; empty if that is not known.
        hint: &'static str,
    },
}

impl RingError {
    pub(crate) fn system(
        action: &'static str,
        target: impl Into<String>,
        source: impl Into<io::Error>,
    ) -> Self {
        Self::System {
            action,
            target: target.into(),
            source: source.into(),
            hint: "",
        }
    }
}
