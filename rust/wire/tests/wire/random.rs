//! Random payloads survive a round trip.

use pie_wire::{
    AdapterBinding, AdapterOp, AdapterRequest, Brle, CopyDirection, CopyRequest, CopyResource,
    ForwardRequest, ForwardResponse, Frame, Payload, ResponseFrame, ResponsePayload, Sampler,
    StatusResponse,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::message::Message;

fn words() -> impl Strategy<Value = Vec<u32>> {
    vec(any::<u32>(), 0..7)
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..19)
}

fn masks() -> impl Strategy<Value = Vec<Brle>> {
    let row = (words(), any::<u64>()).prop_map(|(buffer, total_size)| Brle { buffer, total_size });
    vec(row, 0..5)
}

fn sampler() -> impl Strategy<Value = Sampler> {
    let pair = || (any::<f32>(), any::<u32>());
    let floats = || (any::<f32>(), any::<f32>());
    prop_oneof![
        pair().prop_map(|(temperature, seed)| Sampler::Multinomial { temperature, seed }),
        pair().prop_map(|(temperature, k)| Sampler::TopK { temperature, k }),
        floats().prop_map(|(temperature, p)| Sampler::TopP { temperature, p }),
        floats().prop_map(|(temperature, p)| Sampler::MinP { temperature, p }),
        (any::<f32>(), any::<u32>(), any::<f32>())
            .prop_map(|(temperature, k, p)| Sampler::TopKTopP { temperature, k, p }),
        Just(Sampler::Embedding),
        pair().prop_map(|(temperature, num_tokens)| Sampler::Dist {
            temperature,
            num_tokens
        }),
        Just(Sampler::RawLogits),
        any::<u32>().prop_map(|token_id| Sampler::Logprob { token_id }),
        words().prop_map(|token_ids| Sampler::Logprobs { token_ids }),
        Just(Sampler::Entropy),
    ]
}

fn bindings() -> impl Strategy<Value = Vec<AdapterBinding>> {
    let binding =
        any::<(i64, i64)>().prop_map(|(adapter_id, seed)| AdapterBinding { adapter_id, seed });
    vec(binding, 0..4)
}

fn forward() -> impl Strategy<Value = ForwardRequest> {
    let words = proptest::array::uniform28(words());
    let bytes = proptest::array::uniform3(bytes());
    let rest = (masks(), masks(), vec(sampler(), 0..6), bindings());
    let per_request = (vec(any::<bool>(), 0..5), vec(any::<u64>(), 0..5));
    (words, bytes, rest, per_request, any::<(bool, bool)>()).prop_map(
        |(words, bytes, rest, per_request, flags)| {
            let (masks, logit_masks, samplers, adapter_bindings) = rest;
            let (output_spec_flags, context_ids) = per_request;
            let (single_token_mode, has_user_mask) = flags;
            ForwardRequest {
                masks,
                logit_masks,
                samplers,
                adapter_bindings,
                output_spec_flags,
                context_ids,
                single_token_mode,
                has_user_mask,
                ..arrays(words, bytes)
            }
        },
    )
}

/// A request with its word and byte arrays filled.
fn arrays(words: [Vec<u32>; 28], bytes: [Vec<u8>; 3]) -> ForwardRequest {
    let mut words = words.into_iter();
    let mut next = || words.next().unwrap_or_default();
    let [rs_slot_flags, image_pixels, audio_features] = bytes;
    ForwardRequest {
        token_ids: next(),
        position_ids: next(),
        kv_page_indices: next(),
        kv_page_indptr: next(),
        kv_last_page_lens: next(),
        qo_indptr: next(),
        rs_slot_ids: next(),
        rs_slot_flags,
        mask_indptr: next(),
        logit_mask_indptr: next(),
        sampling_indices: next(),
        sampling_indptr: next(),
        sampler_indptr: next(),
        spec_token_ids: next(),
        spec_position_ids: next(),
        spec_indptr: next(),
        image_indptr: next(),
        image_grids: next(),
        image_anchor_positions: next(),
        image_pixels,
        image_pixel_indptr: next(),
        image_mrope_positions: next(),
        image_mrope_indptr: next(),
        image_patch_positions: next(),
        image_anchor_rows: next(),
        audio_features,
        audio_feature_indptr: next(),
        audio_anchor_rows: next(),
        audio_indptr: next(),
        ..ForwardRequest::default()
    }
}

fn copy() -> impl Strategy<Value = CopyRequest> {
    let dir = prop_oneof![
        Just(CopyDirection::D2H),
        Just(CopyDirection::H2D),
        Just(CopyDirection::D2D),
        Just(CopyDirection::H2H),
    ];
    let resource = prop_oneof![Just(CopyResource::Kv), Just(CopyResource::Rs)];
    (dir, words(), words(), resource).prop_map(|(dir, srcs, dsts, resource)| CopyRequest {
        dir,
        srcs,
        dsts,
        resource,
    })
}

fn adapter() -> impl Strategy<Value = AdapterRequest> {
    let op = prop_oneof![
        Just(AdapterOp::Load),
        Just(AdapterOp::Save),
        Just(AdapterOp::ZoInit),
        Just(AdapterOp::ZoUpdate),
        Just(AdapterOp::GenerateAudio),
    ];
    let path = vec(any::<char>(), 0..30).prop_map(String::from_iter);
    (op, any::<u64>(), path).prop_map(|(op, adapter_id, path)| AdapterRequest {
        op,
        adapter_id,
        path,
    })
}

fn outputs() -> impl Strategy<Value = ForwardResponse> {
    let words = proptest::array::uniform13(words());
    let floats = proptest::array::uniform3(vec(any::<f32>(), 0..7));
    let probes = proptest::array::uniform7(any::<u32>());
    (words, floats, bytes(), probes).prop_map(|(words, floats, logits_bytes, numbers)| {
        let mut words = words.into_iter();
        let mut next = || words.next().unwrap_or_default();
        let [dists_probs, logprobs_values, entropies] = floats;
        ForwardResponse {
            num_requests: numbers[0],
            tokens_indptr: next(),
            tokens: next(),
            dists_req_indptr: next(),
            dists_kv_indptr: next(),
            dists_ids: next(),
            dists_probs,
            logits_req_indptr: next(),
            logits_byte_indptr: next(),
            logits_bytes,
            logprobs_req_indptr: next(),
            logprobs_val_indptr: next(),
            logprobs_values,
            entropies_indptr: next(),
            entropies,
            spec_indptr: next(),
            spec_tokens: next(),
            spec_positions: next(),
            probe_wire_parse_us: numbers[1],
            probe_plan_us: numbers[2],
            probe_h2d_us: numbers[3],
            probe_kernel_launch_us: numbers[4],
            probe_sync_us: numbers[5],
            probe_response_build_us: numbers[6],
        }
    })
}

/// Any payload.
pub(crate) fn message() -> impl Strategy<Value = Message> {
    let payload = prop_oneof![
        6 => forward().prop_map(Payload::Forward),
        1 => copy().prop_map(Payload::Copy),
        2 => adapter().prop_map(Payload::Adapter),
        1 => Just(Payload::Health),
    ];
    let answer = prop_oneof![
        4 => outputs().prop_map(ResponsePayload::Forward),
        1 => any::<i32>().prop_map(|status| ResponsePayload::Status(StatusResponse { status })),
    ];
    prop_oneof![
        3 => (any::<u32>(), payload)
            .prop_map(|(driver_id, payload)| Message::Request(Frame { driver_id, payload })),
        2 => (any::<u32>(), any::<bool>(), answer).prop_map(|(driver_id, aborted, payload)| {
            Message::Response(ResponseFrame { driver_id, aborted, payload })
        }),
        1 => (any::<u32>(), words())
            .prop_map(|(driver_id, tokens)| Message::Fast { driver_id, tokens }),
    ]
}

proptest! {
    #[test]
    fn messages_round_trip(message in message()) {
        let bytes = message.encode();
        prop_assert_eq!(bytes.len(), message.encoded_len());
        let decoded = Message::decode(message.kind(), &bytes);
        prop_assert_eq!(decoded.expect("valid bytes"), message);
    }
}
