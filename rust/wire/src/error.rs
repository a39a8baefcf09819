//! The crate's error.

use std::fmt;

use rkyv::rancor::BoxedError;

use crate::extension::ExtensionError;

/// Which side of the conversation a payload belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadKind {
    /// Server to driver.
    Request,
    /// Driver to server.
    Response,
}

impl fmt::Display for PayloadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Request => "request",
            Self::Response => "response",
        })
    }
}

/// Why a payload could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The payload cannot even hold its root.
    #[error("{kind} payload has {len} bytes, but its root alone takes {min}")]
    TooShort {
        /// Request or response.
        kind: PayloadKind,
        /// Bytes given.
        len: usize,
        /// Bytes of the root.
        min: usize,
    },
    /// The payload starts at an address where its root cannot be read in place.
    #[error("{kind} payload starts at {address:#x}, which is not a multiple of {align}")]
    Misaligned {
        /// Request or response.
        kind: PayloadKind,
        /// Address of the first byte.
        address: usize,
        /// Alignment needed, in bytes.
        align: usize,
    },
    /// The bytes break a rule of the archive format (§5.2, §5.3).
    #[error("{kind} payload of {len} bytes is not a valid archive: {source}")]
    InvalidArchive {
        /// Request or response.
        kind: PayloadKind,
        /// Bytes given.
        len: usize,
        /// The rule broken.
        source: BoxedError,
    },
    /// A fast token reply ends inside its header (§8.2).
    #[error("fast token reply has {len} bytes, but its header alone takes {min}")]
    FastTooShort {
        /// Bytes given.
        len: usize,
        /// Bytes of the header.
        min: usize,
    },
    /// A fast token reply does not hold one token per request (§8.2).
    #[error("fast token reply has {tokens} tokens for {requests} requests; it must be one each")]
    FastCount {
        /// Requests announced.
        requests: u32,
        /// Tokens announced.
        tokens: u32,
    },
    /// A fast token reply is longer or shorter than its header says (§8.2).
    #[error(
        "fast token reply has {len} bytes, but its header announces {tokens} tokens, \
         which take {expected}"
    )]
    FastLength {
        /// Tokens announced.
        tokens: u32,
        /// Bytes that this many tokens take.
        expected: u64,
        /// Bytes given.
        len: usize,
    },
    /// What follows the archive is no extension.
    #[error(transparent)]
    Extension(#[from] ExtensionError),
    /// The encoded payload does not fit into the caller's buffer.
    #[error("encoded payload takes {needed} bytes, but the buffer holds {capacity}")]
    BufferTooSmall {
        /// Bytes of the encoded payload.
        needed: usize,
        /// Bytes of the buffer.
        capacity: usize,
    },
    /// The payload is beyond what 32-bit relative pointers can address.
    #[error("encoded payload would take more than the {limit} bytes that the format can address")]
    TooLarge {
        /// Most bytes that a payload can have.
        limit: usize,
    },
}
