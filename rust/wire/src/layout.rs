//! The archived layout, checked at compile time against §5.4 to §5.7.

use std::mem::{align_of, offset_of, size_of};

use crate::schema::{
    ArchivedAdapterBinding, ArchivedAdapterRequest, ArchivedBrle, ArchivedCopyRequest,
    ArchivedForwardRequest, ArchivedForwardResponse, ArchivedFrame, ArchivedPayload,
    ArchivedResponseFrame, ArchivedResponsePayload, ArchivedSampler, ArchivedStatusResponse,
};

/// Bytes of a request's root, which is also the shortest request.
pub const REQUEST_ROOT_LEN: usize = size_of::<ArchivedFrame>();

/// Alignment of a request payload's first byte.
pub const REQUEST_ALIGN: usize = align_of::<ArchivedFrame>();

/// Bytes of a response's root, which is also the shortest archived response.
pub const RESPONSE_ROOT_LEN: usize = size_of::<ArchivedResponseFrame>();

/// Alignment of an archived response payload's first byte.
pub const RESPONSE_ALIGN: usize = align_of::<ArchivedResponseFrame>();

/// Asserts size and alignment of an archived type, and field offsets.
macro_rules! assert_layout {
    ($type:ty, $size:literal / $align:literal $(, $field:ident @ $offset:literal)* $(,)?) => {
        const _: () = {
            assert!(size_of::<$type>() == $size);
            assert!(align_of::<$type>() == $align);
            $(assert!(offset_of!($type, $field) == $offset);)*
        };
    };
}

assert_layout!(ArchivedFrame, 296 / 8, driver_id @ 0, payload @ 8);
assert_layout!(ArchivedPayload, 288 / 8);
assert_layout!(ArchivedResponseFrame, 176 / 4, driver_id @ 0, aborted @ 4, payload @ 8);
assert_layout!(ArchivedResponsePayload, 168 / 4);
assert_layout!(ArchivedStatusResponse, 4 / 4, status @ 0);
assert_layout!(ArchivedBrle, 16 / 8, buffer @ 0, total_size @ 8);
assert_layout!(ArchivedAdapterBinding, 16 / 8, adapter_id @ 0, seed @ 8);
assert_layout!(ArchivedSampler, 16 / 4);
assert_layout!(ArchivedCopyRequest, 24 / 4, dir @ 0, srcs @ 4, dsts @ 12, resource @ 20);
assert_layout!(ArchivedAdapterRequest, 24 / 8, op @ 0, adapter_id @ 8, path @ 16);
assert_layout!(
    ArchivedForwardRequest,
    284 / 4,
    token_ids @ 0,
    position_ids @ 8,
    kv_page_indices @ 16,
    kv_page_indptr @ 24,
    kv_last_page_lens @ 32,
    qo_indptr @ 40,
    rs_slot_ids @ 48,
    rs_slot_flags @ 56,
    masks @ 64,
    mask_indptr @ 72,
    logit_masks @ 80,
    logit_mask_indptr @ 88,
    sampling_indices @ 96,
    sampling_indptr @ 104,
    samplers @ 112,
    sampler_indptr @ 120,
    adapter_bindings @ 128,
    spec_token_ids @ 136,
    spec_position_ids @ 144,
    spec_indptr @ 152,
    output_spec_flags @ 160,
    context_ids @ 168,
    single_token_mode @ 176,
    has_user_mask @ 177,
    image_indptr @ 180,
    image_grids @ 188,
    image_anchor_positions @ 196,
    image_pixels @ 204,
    image_pixel_indptr @ 212,
    image_mrope_positions @ 220,
    image_mrope_indptr @ 228,
    image_patch_positions @ 236,
    image_anchor_rows @ 244,
    audio_features @ 252,
    audio_feature_indptr @ 260,
    audio_anchor_rows @ 268,
    audio_indptr @ 276,
);
assert_layout!(
    ArchivedForwardResponse,
    164 / 4,
    num_requests @ 0,
    tokens_indptr @ 4,
    tokens @ 12,
    dists_req_indptr @ 20,
    dists_kv_indptr @ 28,
    dists_ids @ 36,
    dists_probs @ 44,
    logits_req_indptr @ 52,
    logits_byte_indptr @ 60,
    logits_bytes @ 68,
    logprobs_req_indptr @ 76,
    logprobs_val_indptr @ 84,
    logprobs_values @ 92,
    entropies_indptr @ 100,
    entropies @ 108,
    spec_indptr @ 116,
    spec_tokens @ 124,
    spec_positions @ 132,
    probe_wire_parse_us @ 140,
    probe_plan_us @ 144,
    probe_h2d_us @ 148,
    probe_kernel_launch_us @ 152,
    probe_sync_us @ 156,
    probe_response_build_us @ 160,
);
