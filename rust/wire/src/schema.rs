//! The schema: every type that crosses the wire, in declaration order.
//!
//! The order of fields and variants *is* the format. Do not reorder.

mod cold;
mod forward;
mod response;
mod sampler;

use rkyv::{Archive, Deserialize, Serialize};

pub use cold::{
    AdapterOp, AdapterRequest, ArchivedAdapterOp, ArchivedAdapterRequest, ArchivedCopyDirection,
    ArchivedCopyRequest, ArchivedCopyResource, CopyDirection, CopyRequest, CopyResource,
};
pub use forward::{
    AdapterBinding, ArchivedAdapterBinding, ArchivedBrle, ArchivedForwardRequest, Brle,
    ForwardRequest,
};
pub use response::{
    ArchivedForwardResponse, ArchivedResponseFrame, ArchivedResponsePayload,
    ArchivedStatusResponse, ForwardResponse, ResponseFrame, ResponsePayload, StatusResponse,
};
pub use sampler::{ArchivedSampler, Sampler, SamplerView};

/// A request: the root of every payload sent to the driver (§5.4).
///
/// The archived root takes 296 bytes at the end of the payload, aligned to 8.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[rkyv(derive(Debug))]
pub struct Frame {
    /// The driver that the server addresses; responses echo it.
    pub driver_id: u32,
    /// The request.
    pub payload: Payload,
}

/// The body of a request.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[rkyv(derive(Debug))]
#[expect(
    clippy::large_enum_variant,
    reason = "one frame exists at a time and boxing would change the layout"
)]
pub enum Payload {
    /// Run one batch of the model (§6).
    Forward(ForwardRequest),
    /// Copy pages or recurrent-state slots (§7.1).
    Copy(CopyRequest),
    /// Load, save or train an adapter (§7.2).
    Adapter(AdapterRequest),
    /// Ask whether the driver is alive (§7.3).
    Health,
}
