//! Reads every field of a payload in place.

use std::hash::{DefaultHasher, Hash, Hasher};

use pie_wire::{
    ArchivedAdapterRequest, ArchivedBrle, ArchivedCopyRequest, ArchivedForwardRequest,
    ArchivedForwardResponse, ArchivedFrame, ArchivedPayload, ArchivedResponseFrame,
    ArchivedResponsePayload, ArchivedSampler, NativeSlice, Reply, SamplerView, WireError,
    access_request, brle, decode_reply,
};

/// Validates a payload and folds all of its values into one number.
pub(crate) fn payload(kind: &str, bytes: &[u8]) -> Result<u64, WireError> {
    let mut sum = DefaultHasher::new();
    if kind == "request" {
        request(access_request(bytes)?, &mut sum);
    } else {
        match decode_reply(bytes)? {
            Reply::Tokens(reply) => {
                reply.driver_id().hash(&mut sum);
                reply.iter().for_each(|token| token.hash(&mut sum));
            }
            Reply::Frame(frame) => response(frame, &mut sum),
        }
    }
    Ok(sum.finish())
}

fn request(frame: &ArchivedFrame, sum: &mut DefaultHasher) {
    frame.driver_id.hash(sum);
    match &frame.payload {
        ArchivedPayload::Forward(body) => forward(body, sum),
        ArchivedPayload::Copy(body) => copy(body, sum),
        ArchivedPayload::Adapter(body) => adapter(body, sum),
        ArchivedPayload::Health => {}
    }
}

/// Folds fields that have a native slice.
macro_rules! fold {
    ($sum:ident, $body:ident: $($field:ident),* $(,)?) => {
        $($body.$field.native().hash($sum);)*
    };
}

fn forward(body: &ArchivedForwardRequest, sum: &mut DefaultHasher) {
    fold!(sum, body:
        token_ids, position_ids, kv_page_indices, kv_page_indptr, kv_last_page_lens, qo_indptr,
        rs_slot_ids, rs_slot_flags, mask_indptr, logit_mask_indptr, sampling_indices,
        sampling_indptr, sampler_indptr, spec_token_ids, spec_position_ids, spec_indptr,
        output_spec_flags, context_ids, image_indptr, image_grids, image_anchor_positions,
        image_pixels, image_pixel_indptr, image_mrope_positions, image_mrope_indptr,
        image_patch_positions, image_anchor_rows, audio_features, audio_feature_indptr,
        audio_anchor_rows, audio_indptr,
    );
    body.masks.iter().for_each(|row| mask(row, sum));
    body.logit_masks.iter().for_each(|row| mask(row, sum));
    body.samplers.iter().for_each(|item| sampler(item, sum));
    for binding in body.adapter_bindings.iter() {
        binding.adapter_id.hash(sum);
        binding.seed.hash(sum);
    }
    (body.single_token_mode, body.has_user_mask).hash(sum);
}

fn mask(row: &ArchivedBrle, sum: &mut DefaultHasher) {
    let size = row.total_size.to_native();
    (size, row.runs()).hash(sum);
    brle::true_ranges(row.runs(), size).for_each(|range| range.hash(sum));
    brle::is_causal(row.runs(), size, size).hash(sum);
}

fn sampler(item: &ArchivedSampler, sum: &mut DefaultHasher) {
    let view = item.view();
    view.is_token().hash(sum);
    match view {
        SamplerView::Multinomial {
            temperature,
            seed: count,
        }
        | SamplerView::TopK {
            temperature,
            k: count,
        }
        | SamplerView::Dist {
            temperature,
            num_tokens: count,
        } => {
            (temperature.to_bits(), count).hash(sum);
        }
        SamplerView::TopP { temperature, p } | SamplerView::MinP { temperature, p } => {
            (temperature.to_bits(), p.to_bits()).hash(sum);
        }
        SamplerView::TopKTopP { temperature, k, p } => {
            (temperature.to_bits(), k, p.to_bits()).hash(sum);
        }
        SamplerView::Logprob { token_id } => token_id.hash(sum),
        SamplerView::Logprobs { token_ids } => token_ids.hash(sum),
        SamplerView::Embedding | SamplerView::RawLogits | SamplerView::Entropy => {}
    }
}

fn copy(body: &ArchivedCopyRequest, sum: &mut DefaultHasher) {
    (body.dir.to_native() as u8, body.resource.to_native() as u8).hash(sum);
    fold!(sum, body: srcs, dsts);
}

fn adapter(body: &ArchivedAdapterRequest, sum: &mut DefaultHasher) {
    (body.op.to_native() as u8, body.adapter_id.to_native()).hash(sum);
    // Counting characters decodes the text.
    body.path.chars().count().hash(sum);
}

fn response(frame: &ArchivedResponseFrame, sum: &mut DefaultHasher) {
    (frame.driver_id.to_native(), frame.aborted).hash(sum);
    match &frame.payload {
        ArchivedResponsePayload::Forward(body) => outputs(body, sum),
        ArchivedResponsePayload::Status(body) => body.status.hash(sum),
    }
}

fn outputs(body: &ArchivedForwardResponse, sum: &mut DefaultHasher) {
    fold!(sum, body:
        tokens_indptr, tokens, dists_req_indptr, dists_kv_indptr, dists_ids, logits_req_indptr,
        logits_byte_indptr, logits_bytes, logprobs_req_indptr, logprobs_val_indptr,
        entropies_indptr, spec_indptr, spec_tokens, spec_positions,
    );
    for values in [&body.dists_probs, &body.logprobs_values, &body.entropies] {
        values
            .native()
            .iter()
            .for_each(|value| value.to_bits().hash(sum));
    }
    for number in [
        body.num_requests,
        body.probe_wire_parse_us,
        body.probe_plan_us,
        body.probe_h2d_us,
        body.probe_kernel_launch_us,
        body.probe_sync_us,
        body.probe_response_build_us,
    ] {
        number.hash(sum);
    }
}
