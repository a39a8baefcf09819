//! The compiler process, a sandbox in which a grammar may overflow the stack, exhaust memory or loop.
//!
//! Its parent is [`Process`](crate::process::parent::Process). Both ends share a socket, which is the standard input of the process:
//!
//! 1. The parent sends a [`Setup`] and the bytes of all tokens. The process builds the token trie, limits its own memory,
//!    and answers [`CompileReply::Ready`].
//! 2. For each [`Grammar`] it answers whether it compiles. It ends when the parent closes the socket or ends.
//!
//! A message is its length in bytes as a little-endian `u32`, and JSON; tokens are bytes.

mod child;
mod parent;

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::grammar::JsonSpace;

pub use child::compiler_process;
pub(crate) use parent::{Failure, Process};

/// The first message to a compiler process; the token bytes follow.
#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    /// Bytes of each token.
    lengths: Vec<u32>,
    special: Vec<(u32, String)>,
    ends: Vec<u32>,
    space: JsonSpace,
    strict_schemas: bool,
    /// Bytes of stack.
    stack: usize,
    /// Bytes that may be allocated beyond what the tokens take.
    memory: u64,
}

/// The reply of a compiler process.
#[derive(Debug, Serialize, Deserialize)]
enum CompileReply {
    /// It compiles; as an answer to [`Setup`]: grammars may come.
    Ready,
    /// The grammar is wrong, for this reason.
    Wrong(String),
    /// The compiler panicked.
    Panicked,
}

/// Sends a message.
fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    send_bytes(to, &serde_json::to_vec(message)?)
}

fn send_bytes(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(bytes)
}

/// Reads a message.
fn receive<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    Ok(serde_json::from_slice(&receive_bytes(from)?)?)
}

fn receive_bytes(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}
