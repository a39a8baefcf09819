//! Validated reading.

use rkyv::api::access_with_context;
use rkyv::bytecheck::CheckBytes;
use rkyv::rancor::{BoxedError, Strategy};
use rkyv::{Deserialize, Portable, deserialize};

use crate::bounds::Bounds;
use crate::error::{PayloadKind, WireError};
use crate::fast::{FAST_TOKENS_MAGIC, FastTokens};
use crate::schema::{ArchivedFrame, ArchivedResponseFrame, Frame, ResponseFrame};

/// A response as the server receives it.
#[derive(Debug, Clone, Copy)]
pub enum Reply<'a> {
    /// The fast token reply (§8.2): one token per request.
    Tokens(FastTokens<'a>),
    /// An archived response.
    Frame(&'a ArchivedResponseFrame),
}

/// Validates a request and borrows it in place (§5.2).
///
/// `bytes` is the payload exactly, without trailing bytes, and must start at
/// a multiple of [`REQUEST_ALIGN`](crate::REQUEST_ALIGN). Nothing is
/// allocated unless the payload is refused.
///
/// # Errors
///
/// [`WireError::TooShort`], [`WireError::Misaligned`] or
/// [`WireError::InvalidArchive`].
pub fn access_request(bytes: &[u8]) -> Result<&ArchivedFrame, WireError> {
    access(PayloadKind::Request, bytes)
}

/// Validates an archived response and borrows it in place (§5.3).
///
/// `bytes` is the payload exactly and must start at a multiple of
/// [`RESPONSE_ALIGN`](crate::RESPONSE_ALIGN). Nothing is allocated unless the
/// payload is refused. A fast token reply is not an archive: see
/// [`decode_reply`].
///
/// # Errors
///
/// [`WireError::TooShort`], [`WireError::Misaligned`] or
/// [`WireError::InvalidArchive`].
pub fn access_response(bytes: &[u8]) -> Result<&ArchivedResponseFrame, WireError> {
    access(PayloadKind::Response, bytes)
}

/// Reads a response of either form, distinguished by the first 8 bytes (§8.2).
///
/// # Errors
///
/// [`WireError::FastTooShort`], [`WireError::FastCount`] or
/// [`WireError::FastLength`] when the payload starts with
/// [`FAST_TOKENS_MAGIC`], those of [`access_response`] otherwise.
pub fn decode_reply(bytes: &[u8]) -> Result<Reply<'_>, WireError> {
    if bytes.starts_with(&FAST_TOKENS_MAGIC) {
        FastTokens::parse(bytes).map(Reply::Tokens)
    } else {
        access_response(bytes).map(Reply::Frame)
    }
}

/// Reads a request into owned values.
///
/// # Errors
///
/// Those of [`access_request`].
pub fn decode_request(bytes: &[u8]) -> Result<Frame, WireError> {
    to_owned_value(PayloadKind::Request, bytes, access_request(bytes)?)
}

/// Reads an archived response into owned values.
///
/// # Errors
///
/// Those of [`access_response`].
pub fn decode_response(bytes: &[u8]) -> Result<ResponseFrame, WireError> {
    to_owned_value(PayloadKind::Response, bytes, access_response(bytes)?)
}

fn access<T>(kind: PayloadKind, bytes: &[u8]) -> Result<&T, WireError>
where
    T: Portable + CheckBytes<Strategy<Bounds, BoxedError>>,
{
    let len = bytes.len();
    let min = size_of::<T>();
    if len < min {
        return Err(WireError::TooShort { kind, len, min });
    }
    let address = bytes.as_ptr().addr();
    let align = align_of::<T>();
    if !address.is_multiple_of(align) {
        return Err(WireError::Misaligned {
            kind,
            address,
            align,
        });
    }
    access_with_context(bytes, &mut Bounds::of(bytes)).map_err(|source| WireError::InvalidArchive {
        kind,
        len,
        source,
    })
}

fn to_owned_value<A, T>(kind: PayloadKind, bytes: &[u8], archived: &A) -> Result<T, WireError>
where
    A: Deserialize<T, rkyv::api::high::HighDeserializer<BoxedError>>,
{
    deserialize(archived).map_err(|source| WireError::InvalidArchive {
        kind,
        len: bytes.len(),
        source,
    })
}
