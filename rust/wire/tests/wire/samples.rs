//! Payloads of every kind, with values chosen to reach every type.

use pie_wire::{
    AdapterBinding, AdapterOp, AdapterRequest, CopyDirection, CopyRequest, CopyResource,
    ForwardRequest, ForwardResponse, Frame, Payload, ResponseFrame, ResponsePayload, Sampler,
    StatusResponse, brle,
};

use crate::message::Message;

/// All samples with their names.
pub(crate) fn all() -> Vec<(&'static str, Message)> {
    let mut samples = requests();
    samples.extend(copies());
    samples.extend(adapters());
    samples.extend(responses());
    samples.extend(fast_replies());
    samples
}

fn forward(driver_id: u32, body: ForwardRequest) -> Message {
    Message::Request(Frame {
        driver_id,
        payload: Payload::Forward(body),
    })
}

fn requests() -> Vec<(&'static str, Message)> {
    vec![
        (
            "health",
            Message::Request(Frame {
                driver_id: 0xA1B2_C3D4,
                payload: Payload::Health,
            }),
        ),
        ("forward_empty", forward(1, ForwardRequest::default())),
        ("forward_decode", forward(0, decode_batch(6))),
        ("forward_mixed", forward(2, mixed_batch())),
        ("forward_samplers", forward(0, sampler_batch())),
        ("forward_spans", forward(5, span_batch())),
    ]
}

/// `0, step, 2·step, …` for a batch of `requests`.
fn indptr(requests: u32, step: u32) -> Vec<u32> {
    (0..=requests).map(|index| index * step).collect()
}

/// Arrays of a text batch in which no request uses any extra.
fn plain_batch(requests: u32) -> ForwardRequest {
    ForwardRequest {
        mask_indptr: indptr(requests, 0),
        logit_mask_indptr: indptr(requests, 0),
        spec_indptr: indptr(requests, 0),
        image_indptr: indptr(requests, 0),
        audio_indptr: indptr(requests, 0),
        image_pixel_indptr: vec![0],
        image_mrope_indptr: vec![0],
        audio_feature_indptr: vec![0],
        adapter_bindings: vec![AdapterBinding::NONE; requests as usize],
        output_spec_flags: vec![false; requests as usize],
        context_ids: (0..u64::from(requests)).map(|id| 501 + 3 * id).collect(),
        ..ForwardRequest::default()
    }
}

/// One token each, two pages each, greedy and sampled in turns.
fn decode_batch(requests: u32) -> ForwardRequest {
    let ids = 0..requests;
    ForwardRequest {
        token_ids: ids.clone().map(|id| 9000 + 17 * id).collect(),
        position_ids: ids.clone().map(|id| 16 + id).collect(),
        kv_page_indices: ids.clone().flat_map(|id| [200 - id, 40 + id]).collect(),
        kv_page_indptr: indptr(requests, 2),
        kv_last_page_lens: ids.clone().map(|id| 1 + id).collect(),
        qo_indptr: indptr(requests, 1),
        sampling_indices: vec![0; requests as usize],
        sampling_indptr: indptr(requests, 1),
        samplers: ids
            .map(|id| match id % 2 {
                0 => Sampler::TopP {
                    temperature: 0.0,
                    p: 1.0,
                },
                _ => Sampler::Multinomial {
                    temperature: 0.75,
                    seed: id,
                },
            })
            .collect(),
        sampler_indptr: indptr(requests, 1),
        single_token_mode: true,
        ..plain_batch(requests)
    }
}

/// A decode with drafts, a constrained prefill with its own rows, a replay.
fn mixed_batch() -> ForwardRequest {
    let causal = |visible: usize| brle::encode(std::iter::repeat_n(true, visible));
    let window = |hole: usize| brle::encode((0..hole + 3).map(|bit| bit < 1 || bit >= hole));
    ForwardRequest {
        token_ids: vec![71, 301, 302, 303, 8, 9],
        position_ids: vec![30, 0, 1, 2, 16, 17],
        kv_page_indices: vec![12, 5, 6, 33, 2, 4],
        kv_page_indptr: vec![0, 3, 4, 6],
        kv_last_page_lens: vec![15, 3, 2],
        qo_indptr: vec![0, 1, 4, 6],
        masks: vec![
            causal(31),
            causal(1),
            window(1),
            window(2),
            causal(17),
            causal(18),
        ],
        mask_indptr: vec![0, 1, 4, 6],
        logit_masks: vec![brle::encode((0..1000).map(|token| token % 100 > 97))],
        logit_mask_indptr: vec![0, 0, 1, 1],
        sampling_indices: vec![0, 2, 1],
        sampling_indptr: vec![0, 1, 3, 3],
        samplers: vec![
            Sampler::Multinomial {
                temperature: 0.0,
                seed: 1,
            },
            Sampler::MinP {
                temperature: 1.25,
                p: 0.125,
            },
            Sampler::Logprobs {
                token_ids: vec![302, 303, 7],
            },
        ],
        sampler_indptr: vec![0, 1, 3, 3],
        adapter_bindings: vec![
            AdapterBinding::NONE,
            AdapterBinding {
                adapter_id: 4,
                seed: -77,
            },
            AdapterBinding::NONE,
        ],
        spec_token_ids: vec![72, 73, 74],
        spec_position_ids: vec![31, 32, 33],
        spec_indptr: vec![0, 3, 3, 3],
        output_spec_flags: vec![true, false, false],
        context_ids: vec![u64::MAX - 1, 1 << 40, 0],
        has_user_mask: true,
        ..plain_batch(3)
    }
}

/// One request with every sampler, all at its last row.
fn sampler_batch() -> ForwardRequest {
    let samplers = every_sampler();
    let count = samplers.len() as u32;
    ForwardRequest {
        token_ids: vec![1, u32::MAX],
        position_ids: vec![7, 8],
        kv_page_indices: vec![0],
        kv_page_indptr: vec![0, 1],
        kv_last_page_lens: vec![9],
        qo_indptr: vec![0, 2],
        sampling_indices: vec![1; samplers.len()],
        sampling_indptr: vec![0, count],
        samplers,
        sampler_indptr: vec![0, count],
        ..plain_batch(1)
    }
}

pub(crate) fn every_sampler() -> Vec<Sampler> {
    let temperature = 0.625;
    vec![
        Sampler::Multinomial {
            temperature,
            seed: 0xDEAD_BEEF,
        },
        Sampler::TopK { temperature, k: 50 },
        Sampler::TopP {
            temperature,
            p: 0.875,
        },
        Sampler::MinP {
            temperature,
            p: 0.0625,
        },
        Sampler::TopKTopP {
            temperature,
            k: 12,
            p: 0.5,
        },
        Sampler::Embedding,
        Sampler::Dist {
            temperature,
            num_tokens: 5,
        },
        Sampler::RawLogits,
        Sampler::Logprob { token_id: 31_999 },
        Sampler::Logprobs { token_ids: vec![] },
        Sampler::Logprobs {
            token_ids: vec![3, 1, 4, 1, 5],
        },
        Sampler::Entropy,
    ]
}

/// Image and audio spans, recurrent state, byte arrays of odd length.
fn span_batch() -> ForwardRequest {
    ForwardRequest {
        token_ids: vec![0, 0, 12],
        position_ids: vec![0, 1, 2],
        kv_page_indices: vec![90],
        kv_page_indptr: vec![0, 1],
        kv_last_page_lens: vec![3],
        qo_indptr: vec![0, 3],
        rs_slot_ids: vec![6],
        rs_slot_flags: vec![1],
        sampling_indices: vec![2],
        sampling_indptr: vec![0, 1],
        samplers: vec![Sampler::Entropy],
        sampler_indptr: vec![0, 1],
        image_indptr: vec![0, 2],
        image_grids: vec![1, 2, 2, 1, 4, 2],
        image_anchor_positions: vec![0, 1],
        image_pixels: (0..37).map(|byte| byte * 5).collect(),
        image_pixel_indptr: vec![0, 16, 37],
        image_mrope_positions: vec![0, 1, 2, 3, 4, 5],
        image_mrope_indptr: vec![0, 3, 6],
        image_patch_positions: vec![0, 0, 0, 1, 1, 0, 1, 1],
        image_anchor_rows: vec![0, 1],
        audio_features: vec![1, 2, 3],
        audio_feature_indptr: vec![0, 3],
        audio_anchor_rows: vec![2],
        audio_indptr: vec![0, 1],
        ..plain_batch(1)
    }
}

fn copies() -> Vec<(&'static str, Message)> {
    let copy = |dir, resource, ids: std::ops::Range<u32>| {
        Message::Request(Frame {
            driver_id: 0,
            payload: Payload::Copy(CopyRequest {
                dir,
                srcs: ids.clone().collect(),
                dsts: ids.map(|id| 1000 + id).rev().collect(),
                resource,
            }),
        })
    };
    vec![
        (
            "copy_d2h",
            copy(CopyDirection::D2H, CopyResource::Kv, 7..12),
        ),
        ("copy_h2d", copy(CopyDirection::H2D, CopyResource::Kv, 0..1)),
        (
            "copy_d2d_state",
            copy(CopyDirection::D2D, CopyResource::Rs, 2..4),
        ),
        (
            "copy_h2h_empty",
            copy(CopyDirection::H2H, CopyResource::Kv, 0..0),
        ),
    ]
}

/// Paths around the lengths at which the format of strings changes.
fn adapters() -> Vec<(&'static str, Message)> {
    let adapter = |op, adapter_id, path: String| {
        Message::Request(Frame {
            driver_id: 8,
            payload: Payload::Adapter(AdapterRequest {
                op,
                adapter_id,
                path,
            }),
        })
    };
    let long = |len| "abcdefghij".chars().cycle().take(len).collect::<String>();
    vec![
        ("adapter_load_9", adapter(AdapterOp::Load, 1, long(9))),
        ("adapter_load_63", adapter(AdapterOp::Load, 2, long(63))),
        (
            "adapter_load_64",
            adapter(AdapterOp::Load, u64::MAX, long(64)),
        ),
        ("adapter_load_700", adapter(AdapterOp::Load, 3, long(700))),
        (
            "adapter_load_unicode",
            adapter(AdapterOp::Load, 4, "Größe/Ωmega.bin".into()),
        ),
        ("adapter_save", adapter(AdapterOp::Save, 5, String::new())),
        ("adapter_zo_init", adapter(AdapterOp::ZoInit, 6, long(7))),
        (
            "adapter_zo_update",
            adapter(AdapterOp::ZoUpdate, 7, long(8)),
        ),
        (
            "adapter_audio",
            adapter(
                AdapterOp::GenerateAudio,
                0,
                r#"{"prompt":[4],"max_frames":9}"#.into(),
            ),
        ),
    ]
}

fn responses() -> Vec<(&'static str, Message)> {
    let response = |driver_id, aborted, payload| {
        Message::Response(ResponseFrame {
            driver_id,
            aborted,
            payload,
        })
    };
    let status = |status| ResponsePayload::Status(StatusResponse { status });
    let outputs = |outputs| response(6, false, ResponsePayload::Forward(outputs));
    vec![
        ("response_ok", response(0, false, status(0))),
        (
            "response_malformed",
            response(0xFFFF_0001, false, status(2)),
        ),
        ("response_abort", response(3, true, status(-1))),
        ("response_empty", outputs(ForwardResponse::default())),
        (
            "response_tokens",
            outputs(token_outputs(&[801, 802, 803, 804])),
        ),
        ("response_probes", outputs(probe_outputs())),
    ]
}

/// One token per request and nothing else.
pub(crate) fn token_outputs(tokens: &[u32]) -> ForwardResponse {
    let requests = tokens.len() as u32;
    ForwardResponse {
        num_requests: requests,
        tokens_indptr: indptr(requests, 1),
        tokens: tokens.to_vec(),
        ..ForwardResponse::default()
    }
}

/// Every kind of output, with logits of odd length.
fn probe_outputs() -> ForwardResponse {
    ForwardResponse {
        num_requests: 3,
        tokens_indptr: vec![0, 1, 1, 4],
        tokens: vec![55, 61, 62, 63],
        dists_req_indptr: vec![0, 2, 2, 2],
        dists_kv_indptr: vec![0, 2, 3],
        dists_ids: vec![55, 4, 19],
        dists_probs: vec![0.75, 0.125, 1.0],
        logits_req_indptr: vec![0, 0, 2, 2],
        logits_byte_indptr: vec![0, 4, 7],
        logits_bytes: vec![0, 0, 160, 64, 1, 2, 3],
        logprobs_req_indptr: vec![0, 1, 2, 2],
        logprobs_val_indptr: vec![0, 3, 3],
        logprobs_values: vec![-0.25, -3.5, -12.0],
        entropies_indptr: vec![0, 0, 1, 2],
        entropies: vec![2.75, 0.0],
        spec_indptr: vec![0, 0, 0, 2],
        spec_tokens: vec![64, 65],
        spec_positions: vec![21, 22],
        probe_wire_parse_us: 11,
        probe_plan_us: 12,
        probe_h2d_us: 13,
        probe_kernel_launch_us: 14,
        probe_sync_us: 15,
        probe_response_build_us: u32::MAX,
    }
}

fn fast_replies() -> Vec<(&'static str, Message)> {
    let fast = |driver_id, tokens| Message::Fast { driver_id, tokens };
    vec![
        ("fast_empty", fast(9, vec![])),
        ("fast_one", fast(0, vec![u32::MAX])),
        (
            "fast_many",
            fast(0x0102_0304, (0..40).map(|index| index * index).collect()),
        ),
    ]
}
