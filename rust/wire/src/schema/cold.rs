//! Requests off the hot path: copies and adapters (§5.6, §7).

use rkyv::{Archive, Deserialize, Serialize};

/// Copy whole pages or recurrent-state slots (§7.1).
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[rkyv(derive(Debug))]
pub struct CopyRequest {
    /// Between which memories.
    pub dir: CopyDirection,
    /// Source ids, in the memory named first by `dir`.
    pub srcs: Vec<u32>,
    /// Destination ids, parallel to `srcs`.
    pub dsts: Vec<u32>,
    /// The resource that the ids name.
    pub resource: CopyResource,
}

/// The two memories of a copy, source first.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[rkyv(derive(Debug, Clone, Copy, PartialEq, Eq))]
pub enum CopyDirection {
    /// Device pages to host slots (suspension).
    D2H,
    /// Host slots to device pages (restoration).
    H2D,
    /// Device pages to device pages (fork).
    D2D,
    /// Host slots to host slots.
    H2H,
}

impl ArchivedCopyDirection {
    /// The same direction as an owned value.
    pub const fn to_native(self) -> CopyDirection {
        match self {
            Self::D2H => CopyDirection::D2H,
            Self::H2D => CopyDirection::H2D,
            Self::D2D => CopyDirection::D2D,
            Self::H2H => CopyDirection::H2H,
        }
    }
}

/// The resource that a copy moves.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[rkyv(derive(Debug, Clone, Copy, PartialEq, Eq))]
pub enum CopyResource {
    /// Pages of the KV cache, all layers, keys and values.
    #[default]
    Kv,
    /// Recurrent-state slots.
    Rs,
}

impl ArchivedCopyResource {
    /// The same resource as an owned value.
    pub const fn to_native(self) -> CopyResource {
        match self {
            Self::Kv => CopyResource::Kv,
            Self::Rs => CopyResource::Rs,
        }
    }
}

/// Act on an adapter (§7.2).
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[rkyv(derive(Debug))]
pub struct AdapterRequest {
    /// The operation.
    pub op: AdapterOp,
    /// The adapter's id, assigned by the runtime from 1.
    pub adapter_id: u64,
    /// A file path, or JSON parameters for [`AdapterOp::GenerateAudio`].
    pub path: String,
}

/// An operation on an adapter.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[rkyv(derive(Debug, Clone, Copy, PartialEq, Eq))]
pub enum AdapterOp {
    /// Load a file under the given id, replacing an earlier one.
    Load,
    /// Save the adapter; the path is empty.
    Save,
    /// Start zeroth-order training.
    ZoInit,
    /// Apply a step of zeroth-order training.
    ZoUpdate,
    /// Synthesize audio; the path holds JSON and the id is 0.
    GenerateAudio,
}

impl ArchivedAdapterOp {
    /// The same operation as an owned value.
    pub const fn to_native(self) -> AdapterOp {
        match self {
            Self::Load => AdapterOp::Load,
            Self::Save => AdapterOp::Save,
            Self::ZoInit => AdapterOp::ZoInit,
            Self::ZoUpdate => AdapterOp::ZoUpdate,
            Self::GenerateAudio => AdapterOp::GenerateAudio,
        }
    }
}
