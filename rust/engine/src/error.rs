//! One error enum for the crate. A message names the value, the limit and, after a blank line, the remedy.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use pie_ring::{CallError, RegionError};
use pie_scheduler::SchedulerError;
use pie_wire::WireError;

/// Why a driver cannot be started, or why it cannot serve any longer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The folder of the model cannot be used.
    #[error(
        "cannot find the model {}: {source}\n\nhint: name the folder of a snapshot, with `config.json` in it",
        path.display()
    )]
    Model {
        /// The folder, as the caller wrote it.
        path: PathBuf,
        /// What the file system says.
        source: io::Error,
    },

    /// A file of the runtime's own cannot be made.
    #[error("cannot write {}: {source}\n\nhint: point TMPDIR to a folder with room", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What the file system says.
        source: io::Error,
    },

    /// The kernel has no random numbers.
    #[error("cannot draw a random number: {0}\n\nhint: the kernel lacks getrandom(2); see `dmesg`")]
    Random(#[source] io::Error),

    /// The threads of the service, and its drivers, belong to another process.
    #[error(
        "this process was forked from the one that started the driver, which only that one can use\n\n\
         hint: start a driver of its own after the fork"
    )]
    Forked,

    /// The driver's process cannot be started.
    #[error(
        "cannot spawn {}: {source}\n\nhint: name an interpreter that has `pie_driver_sglang` installed",
        python.display()
    )]
    Spawn {
        /// The interpreter.
        python: PathBuf,
        /// What the system says.
        source: io::Error,
    },

    /// A thread cannot be started.
    #[error(
        "cannot start {what}: {source}\n\nhint: raise the limit of processes (`ulimit -u`), or of memory"
    )]
    Thread {
        /// Which one.
        what: &'static str,
        /// What the system says.
        source: io::Error,
    },

    /// A driver that was started again has less than before.
    #[error(
        "the driver came back with {found} {what}, its requests count on {needed}\n\n\
         hint: free the memory that another process took meanwhile"
    )]
    Shrunk {
        /// What it has less of.
        what: &'static str,
        /// How much there was before.
        needed: u32,
        /// How much there is.
        found: u32,
    },

    /// There is a trace already.
    #[error("steps are traced already\n\nhint: end the trace first")]
    Tracing,

    /// A bug of this crate, or of the scheduler.
    #[error(
        "a thread of the runtime has failed\n\nhint: its own message is on standard error; please report it"
    )]
    Panicked,

    /// A setting of the scheduler cannot be meant.
    #[error("the scheduler cannot be made: {0}")]
    Scheduler(#[from] SchedulerError),

    /// The handshake does not follow the protocol.
    #[error("the handshake has the line {line:?}: {problem}")]
    Handshake {
        /// The line's first characters.
        line: String,
        /// What is wrong with it.
        problem: String,
    },

    /// The start took longer than it may.
    #[error("the driver was not ready after {after:?}; its log ends so:\n{log}")]
    NotReady {
        /// The limit.
        after: Duration,
        /// The log's last lines.
        log: String,
    },

    /// The process ended before its time.
    #[error("the driver {how} {when}; its log ends so:\n{log}")]
    Ended {
        /// The exit status, in words.
        how: String,
        /// What it did then.
        when: &'static str,
        /// The log's last lines.
        log: String,
    },

    /// The process lives and answers nothing.
    #[error(
        "the driver is alive but did not answer a frame within {after:?}; its log ends so:\n{log}"
    )]
    Stuck {
        /// The limit.
        after: Duration,
        /// The log's last lines.
        log: String,
    },

    /// The driver answered something else than was asked for.
    #[error("the driver {what}; its log ends so:\n{log}")]
    Refused {
        /// What it did.
        what: String,
        /// The log's last lines.
        log: String,
    },

    /// The ring failed.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A call of the driver.
    #[error(transparent)]
    Call(#[from] CallError),

    /// Bytes that are not a frame, or a frame that is too large.
    #[error("a frame cannot be encoded, or its answer not be read: {0}")]
    Wire(#[from] WireError),

    /// The driver does not take an adapter.
    #[error("{}", adapter_text(path, *status, reason.as_deref()))]
    Adapter {
        /// Where it lies.
        path: String,
        /// What was answered.
        status: i32,
        /// What the driver said of it.
        reason: Option<String>,
    },

    /// An answer that is not what was asked for.
    #[error("the driver {0}")]
    Reply(#[from] ReplyError),
}

/// An answer that is not what was asked for.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReplyError {
    /// The driver gave the whole batch up.
    #[error("gave the batch up")]
    Aborted,
    /// A status instead of outputs.
    #[error("answered a forward with status {0}")]
    Status(i32),
    /// Outputs instead of a status.
    #[error("answered with outputs where a status was expected")]
    Outputs,
    /// Another number of requests.
    #[error("answered {found} requests, the frame had {expected}")]
    Requests {
        /// How many were answered.
        found: usize,
        /// How many were asked.
        expected: usize,
    },
    /// Another number of tokens.
    #[error("answered request {request} with {found} tokens, expected {expected}")]
    Tokens {
        /// Its index in the frame.
        request: usize,
        /// How many there are.
        found: usize,
        /// How many there should be, without accepted drafts.
        expected: usize,
    },
    /// Offsets that do not rise, or end outside of their array.
    #[error("answered with offsets that lead nowhere")]
    Offsets,
    /// Accepted tokens that are not the drafts.
    #[error("accepted other drafts of request {0} than it was sent")]
    Accepted(usize),
    /// Drafts that do not follow the context, or that the request did not ask for.
    #[error(
        "drafted {drafts} tokens for request {request}, at positions that do not follow, or unasked"
    )]
    Drafts {
        /// Its index in the frame.
        request: usize,
        /// How many there are.
        drafts: usize,
    },
    /// Log-probabilities that a request did not ask for.
    #[error("answered request {0} with other log-probabilities than it asked for")]
    Logprobs(usize),
}

/// With the driver's reason and remedy, where it gave them.
fn adapter_text(path: &str, status: i32, reason: Option<&str>) -> String {
    match reason {
        Some(reason) => format!("the adapter {path} cannot be loaded: {reason}"),
        None => format!(
            "the driver did not load the adapter {path}, by status {status}\n\n\
             hint: its log may name the reason; adapters need `enable_lora`"
        ),
    }
}
