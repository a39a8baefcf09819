//! Responses (§5.4, §5.7, §8).

use rkyv::{Archive, Deserialize, Serialize};

/// A response: the root of every archived payload sent back (§5.4).
///
/// The archived root takes 176 bytes at the end of the payload, aligned to 4.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[rkyv(derive(Debug))]
pub struct ResponseFrame {
    /// The request's `driver_id`, echoed; the server ignores it.
    pub driver_id: u32,
    /// The driver gave up; the server discards the payload.
    pub aborted: bool,
    /// The answer.
    pub payload: ResponsePayload,
}

/// The body of a response.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[rkyv(derive(Debug))]
#[expect(
    clippy::large_enum_variant,
    reason = "one response exists at a time and boxing would change the layout"
)]
pub enum ResponsePayload {
    /// The outputs of a batch.
    Forward(ForwardResponse),
    /// A status: the answer to everything but a forward, or a batch error.
    Status(StatusResponse),
}

/// The outputs of one batch (§8.1).
///
/// `…_req_indptr` fields hold R + 1 entries and count outputs of that kind
/// per request; the second-level `indptr` partitions the values of each
/// output. All arrays of a kind that no request produced may be empty, except
/// `tokens_indptr`. **The server indexes these arrays without checking them**:
/// a response that breaks the rules of §8.1 kills its scheduler.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[rkyv(derive(Debug))]
pub struct ForwardResponse {
    /// R of the request; any other value fails the batch.
    pub num_requests: u32,
    /// R + 1 entries: partition of `tokens`.
    pub tokens_indptr: Vec<u32>,
    /// Sampled or verified tokens.
    pub tokens: Vec<u32>,
    /// Distributions per request.
    pub dists_req_indptr: Vec<u32>,
    /// Per distribution: partition of `dists_ids` and `dists_probs`.
    pub dists_kv_indptr: Vec<u32>,
    /// Token ids, most probable first.
    pub dists_ids: Vec<u32>,
    /// Probabilities, parallel to `dists_ids`.
    pub dists_probs: Vec<f32>,
    /// Logit rows per request.
    pub logits_req_indptr: Vec<u32>,
    /// Per logit row: partition of `logits_bytes`, in bytes.
    pub logits_byte_indptr: Vec<u32>,
    /// Logits, f32 little-endian.
    pub logits_bytes: Vec<u8>,
    /// Log-probability entries per request.
    pub logprobs_req_indptr: Vec<u32>,
    /// Per entry: partition of `logprobs_values`.
    pub logprobs_val_indptr: Vec<u32>,
    /// Log-probabilities.
    pub logprobs_values: Vec<f32>,
    /// Entropies per request.
    pub entropies_indptr: Vec<u32>,
    /// Entropies in nats.
    pub entropies: Vec<f32>,
    /// Drafts per request.
    pub spec_indptr: Vec<u32>,
    /// Draft tokens for the next step.
    pub spec_tokens: Vec<u32>,
    /// Positions, parallel to `spec_tokens`.
    pub spec_positions: Vec<u32>,
    /// Time spent decoding the request, in µs; 0 = not measured.
    pub probe_wire_parse_us: u32,
    /// Time spent planning, in µs.
    pub probe_plan_us: u32,
    /// Time spent copying inputs to the device, in µs.
    pub probe_h2d_us: u32,
    /// Time spent launching kernels, in µs.
    pub probe_kernel_launch_us: u32,
    /// Time spent waiting for the device, in µs.
    pub probe_sync_us: u32,
    /// Time spent building the response, in µs.
    pub probe_response_build_us: u32,
}

/// The outcome of a request without outputs (§7, §8.3).
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[rkyv(derive(Debug, Clone, Copy))]
pub struct StatusResponse {
    /// 0 success; 2 malformed, 3 id out of range, 4 unsupported, 5 internal
    /// failure; −1 in the canonical abort.
    pub status: i32,
}
