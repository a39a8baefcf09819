//! The body of a forward request (§5.5, §6).

use rkyv::{Archive, Deserialize, Serialize};

use super::sampler::Sampler;
use crate::native::NativeSlice;

/// One batch of the model (§5.5, §6.1).
///
/// The batch concatenates R requests. A field named `…_indptr` holds R + 1
/// offsets that start at 0; request `r` owns `[indptr[r], indptr[r + 1])` of
/// the array it partitions. Span-level `indptr`s have one entry per span
/// plus one. Nothing here is checked by decoding: lengths, order and ranges
/// are the planner's to verify.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[rkyv(derive(Debug))]
pub struct ForwardRequest {
    /// Input tokens of all requests; ids are unchecked.
    pub token_ids: Vec<u32>,
    /// Absolute rotary positions, one per input token.
    pub position_ids: Vec<u32>,
    /// Page ids of all requests, in the order of their KV cache.
    pub kv_page_indices: Vec<u32>,
    /// Partition of `kv_page_indices`.
    pub kv_page_indptr: Vec<u32>,
    /// Per request: tokens in the last page after the input, before drafts.
    pub kv_last_page_lens: Vec<u32>,
    /// Partition of `token_ids` and `position_ids`.
    pub qo_indptr: Vec<u32>,
    /// Per request, or empty: recurrent-state slot.
    pub rs_slot_ids: Vec<u32>,
    /// Per request, or empty: bit 0 resets the slot before use.
    pub rs_slot_flags: Vec<u8>,
    /// Attention rows over the listed pages, one per input token, or none.
    pub masks: Vec<Brle>,
    /// Partition of `masks`.
    pub mask_indptr: Vec<u32>,
    /// Allowed vocabulary, at most one per request.
    pub logit_masks: Vec<Brle>,
    /// Partition of `logit_masks`.
    pub logit_mask_indptr: Vec<u32>,
    /// Sampled rows, counted from the request's own first token.
    pub sampling_indices: Vec<u32>,
    /// Partition of `sampling_indices`; equals `sampler_indptr`.
    pub sampling_indptr: Vec<u32>,
    /// One sampler per sampling index.
    pub samplers: Vec<Sampler>,
    /// Partition of `samplers`.
    pub sampler_indptr: Vec<u32>,
    /// One adapter per request.
    pub adapter_bindings: Vec<AdapterBinding>,
    /// Draft tokens to verify; not contained in `token_ids`.
    pub spec_token_ids: Vec<u32>,
    /// Positions of the draft tokens.
    pub spec_position_ids: Vec<u32>,
    /// Partition of `spec_token_ids` and `spec_position_ids`.
    pub spec_indptr: Vec<u32>,
    /// Per request: drafts for the next step are welcome.
    pub output_spec_flags: Vec<bool>,
    /// Per request: the context's id, 0 for replays.
    pub context_ids: Vec<u64>,
    /// Every request has at most one input token and no user mask.
    pub single_token_mode: bool,
    /// Some request brought its own attention rows, or is a replay.
    pub has_user_mask: bool,
    /// Image spans per request.
    pub image_indptr: Vec<u32>,
    /// Three per image span: time, height and width in patches.
    pub image_grids: Vec<u32>,
    /// Per image span: position of its first soft token.
    pub image_anchor_positions: Vec<u32>,
    /// Patch matrices of all spans, f32 little-endian.
    pub image_pixels: Vec<u8>,
    /// Span-level partition of `image_pixels`, in bytes.
    pub image_pixel_indptr: Vec<u32>,
    /// Three positions per soft token of models with multi-axis positions.
    pub image_mrope_positions: Vec<u32>,
    /// Span-level partition of `image_mrope_positions`.
    pub image_mrope_indptr: Vec<u32>,
    /// Two per patch: x and y.
    pub image_patch_positions: Vec<u32>,
    /// Per image span: row of its first placeholder in `token_ids`.
    pub image_anchor_rows: Vec<u32>,
    /// Log-mel features of all spans, f32 little-endian.
    pub audio_features: Vec<u8>,
    /// Span-level partition of `audio_features`, in bytes.
    pub audio_feature_indptr: Vec<u32>,
    /// Per audio span: row of its first placeholder in `token_ids`.
    pub audio_anchor_rows: Vec<u32>,
    /// Audio spans per request.
    pub audio_indptr: Vec<u32>,
}

/// A bit string as run lengths that alternate false, true, false, … (§5.8).
///
/// See [`brle`](crate::brle) for reading and writing it.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[rkyv(derive(Debug))]
pub struct Brle {
    /// Run lengths in bits, the first of them false.
    pub buffer: Vec<u32>,
    /// Length of the string in bits, as claimed by the sender.
    pub total_size: u64,
}

impl ArchivedBrle {
    /// The run lengths as native numbers.
    pub fn runs(&self) -> &[u32] {
        self.buffer.native()
    }
}

/// The adapter of one request (§6.11).
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[rkyv(derive(Debug, Clone, Copy))]
pub struct AdapterBinding {
    /// Id of a loaded adapter, −1 for none.
    pub adapter_id: i64,
    /// Seed of zeroth-order adapter noise, −1 for none.
    pub seed: i64,
}

impl AdapterBinding {
    /// No adapter.
    pub const NONE: Self = Self {
        adapter_id: -1,
        seed: -1,
    };
}

impl Default for AdapterBinding {
    fn default() -> Self {
        Self::NONE
    }
}
