//! Payloads of the Pie driver protocol.
//!
//! A *request* ([`Frame`]) travels from the server to the driver, a *response*
//! ([`ResponseFrame`], or the shorter fast token reply) travels back. Both are
//! rkyv 0.8 archives: little-endian, naturally aligned, 32-bit relative
//! pointers, the root at the end.
//!
//! | To … | use |
//! |---|---|
//! | read a request in place | [`access_request`], then the `Archived…` fields |
//! | read a response in place | [`decode_reply`] or [`access_response`] |
//! | read into owned values | [`decode_request`], [`decode_response`] |
//! | write a response into the ring | [`encode_response`], [`status_frame`], [`encode_fast_tokens`] |
//! | write a request | [`encode_request`]; one after the other: [`encode_request_with`] |
//! | carry what the protocol has no place for | [`append_extension`], [`split_request`], [`LogprobRows`], [`split_response`] |
//! | see archived numbers as native slices | [`NativeSlice::native`] |
//! | read and write attention and logit masks | [`brle`] |
//!
//! Reading validates first and then borrows: nothing is copied and nothing is
//! allocated. Any byte string is either accepted or refused with a
//! [`WireError`]. Validation covers the *encoding* only; whether the arrays of
//! a request agree with each other (§6.13) is the planner's business.
//!
//! Section numbers (§) in this documentation refer to `docs/pie-protocol.md`.
//!
//! # Example
//!
//! ```
//! use pie_wire::{FastTokens, Reply, decode_reply, encode_fast_tokens};
//!
//! let mut buffer = [0; 64];
//! let len = encode_fast_tokens(3, &[17, 42], &mut buffer)?;
//! let Reply::Tokens(reply) = decode_reply(&buffer[..len])? else {
//!     panic!("not a fast token reply");
//! };
//! assert_eq!(reply.driver_id(), 3);
//! assert_eq!(reply.iter().collect::<Vec<_>>(), [17, 42]);
//! # Ok::<(), pie_wire::WireError>(())
//! ```
//!
//! # Modules
//!
//! | module | what it is |
//! |---|---|
//! | `schema`, `layout` | the types that cross the wire, and how they lie in an archive |
//! | `access`, `bounds`, `native` | validated reading, in place |
//! | `encode`, `fast` | writing; the fast token reply |
//! | `rules` | what the runtime takes for granted of responses |
//! | `extension`, `reason` | what a frame carries beyond the protocol; why a request was refused |
//! | `brle` | bit strings as run lengths |
#![deny(missing_docs)]

#[cfg(target_endian = "big")]
compile_error!("pie-wire reads archived numbers in place and needs a little-endian target");

mod access;
mod bounds;
pub mod brle;
mod encode;
mod error;
mod extension;
mod fast;
mod layout;
mod native;
mod reason;
mod rules;
mod schema;

pub use access::{
    Reply, access_request, access_response, decode_reply, decode_request, decode_response,
};
pub use encode::{
    MAX_ENCODED_LEN, Scratch, abort_frame, encode_request, encode_request_with, encode_response,
    request_len, response_len, set_response_build_us, status_frame,
};
pub use error::{PayloadKind, WireError};
pub use extension::{
    CombinedSampler, EXTENSION_MAGIC, Extension, ExtensionError, ExtensionRow, ExtensionRows,
    FAILURES_MAGIC, Failures, LogprobOptions, LogprobRow, LogprobRows, LogprobShape, Logprobs,
    MAX_FAILURE, MAX_HANDLES, MAX_KEPT_WORDS, Params, ParamsRef, ParamsRow, ParamsRows, Penalties,
    PromptLogprobs, RESPONSE_EXTENSION_MAGIC, RequestExtension, ResponseExtension, StepRow,
    WordSlice, append_extension, append_failures, extension_len, params_len, split_failures,
    split_request, split_response, write_extension,
};
pub use fast::{FAST_TOKENS_MAGIC, FastTokens, encode_fast_tokens, fast_tokens_len};
pub use layout::{REQUEST_ALIGN, REQUEST_ROOT_LEN, RESPONSE_ALIGN, RESPONSE_ROOT_LEN};
pub use native::{NativeSlice, Plain};
pub use reason::{MAX_REASON, REASON_MAGIC, reason_of, with_reason};
pub use rules::ResponseRule;
pub use schema::{
    AdapterBinding, AdapterOp, AdapterRequest, ArchivedAdapterBinding, ArchivedAdapterOp,
    ArchivedAdapterRequest, ArchivedBrle, ArchivedCopyDirection, ArchivedCopyRequest,
    ArchivedCopyResource, ArchivedForwardRequest, ArchivedForwardResponse, ArchivedFrame,
    ArchivedPayload, ArchivedResponseFrame, ArchivedResponsePayload, ArchivedSampler,
    ArchivedStatusResponse, Brle, CopyDirection, CopyRequest, CopyResource, ForwardRequest,
    ForwardResponse, Frame, Payload, ResponseFrame, ResponsePayload, Sampler, SamplerView,
    StatusResponse,
};

/// The schema hash that the shared-memory header must carry, verbatim (§4.2).
///
/// It is a hash of the schema's source text and cannot be derived from the
/// types of this crate.
pub const SCHEMA_HASH: [u8; 8] = [0x89, 0xd0, 0xc2, 0xd1, 0xb7, 0x8c, 0xbb, 0x75];

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
