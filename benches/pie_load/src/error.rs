//! One error for the program. A message says what happened and, after a blank line, what to do.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use pie_ring::{CallError, RegionError};
use pie_wire::WireError;

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    #[error("{action} {}: {source}", path.display())]
    File {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(
        "--option {fragment:?} is not a line of TOML: {problem}\n\nhint: write key=value; strings need quotes, as in 'attention_backend=\"triton\"'"
    )]
    Option { fragment: String, problem: String },
    #[error("{} is not a list of prompts, lists of token ids: {problem}", path.display())]
    Prompts { path: PathBuf, problem: String },
    #[error("the lengths are not usable: {0}")]
    Lengths(String),
    #[error("cannot spawn {}: {source}", python.display())]
    Spawn { python: PathBuf, source: io::Error },
    #[error("the handshake has the line {line:?}: {problem}")]
    Handshake { line: String, problem: String },
    #[error("the driver was not ready after {after:?}; its log ends so:\n{log}")]
    NotReady { after: Duration, log: String },
    #[error("the driver {how} {when}; its log ends so:\n{log}")]
    Ended {
        how: String,
        when: &'static str,
        log: String,
    },
    #[error(
        "the driver is alive but did not answer a frame within {after:?}; its log ends so:\n{log}"
    )]
    Stuck { after: Duration, log: String },
    #[error("the driver {what}; its log ends so:\n{log}")]
    Refused { what: String, log: String },
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("a frame cannot be encoded, or its answer not be read: {0}")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Answer(#[from] AnswerError),
    #[error("no page is free, of {0}")]
    NoPage(u32),
    #[error("a prompt of {prompt} and {output} tokens of output never fit: {why}")]
    NeverFits {
        prompt: u32,
        output: u32,
        why: String,
    },
}

/// An answer that is not what was asked for.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum AnswerError {
    #[error("gave the batch up")]
    Aborted,
    #[error("answered a forward with status {0}")]
    Status(i32),
    #[error("answered {found} requests, the frame had {expected}")]
    Requests { found: usize, expected: usize },
    #[error("answered request {request} with {found} tokens, expected {expected}")]
    Tokens {
        request: usize,
        found: usize,
        expected: usize,
    },
    #[error("answered with offsets that lead nowhere")]
    Offsets,
    #[error("accepted other drafts of request {0} than it was sent")]
    Accepted(usize),
    #[error(
        "drafted {drafts} tokens for request {request}, at positions that do not follow, or unasked"
    )]
    Drafts { request: usize, drafts: usize },
}
