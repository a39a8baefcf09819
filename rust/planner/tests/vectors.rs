//! Frames of the Pie runtime: golden vectors, captured frames and the protocol's worked example.
//!
//! The folder of vectors lies next to the repository; without it the tests only say so.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::common::builder::{Encoded, GREEDY, Req, frame};
use crate::common::device::Device;
use crate::common::engine::{memory, next_group, next_pass, put};
use crate::common::naive::Plan;
use pie_planner::{ForwardTimings, Limits, Outputs, Planner, SlotGroup};
use pie_wire::{
    ForwardRequest, Frame, Payload, ResponsePayload, Sampler, decode_request, decode_response,
    encode_response,
};

const LIMITS: Limits = Limits {
    page_size: 16,
    total_pages: 60_000,
    vocab_size: 2000,
    max_positions: 4096,
    row_pages: 256,
    max_requests: 256,
    chunk_tokens: 512,
    max_slots: 64,
    reply_bytes: 1 << 20,
};

/// What a frame comes to.
struct Expected {
    name: &'static str,
    /// KV indices that each request writes.
    rows: &'static [Range<u64>],
    /// Fault kinds by request.
    errors: &'static [(usize, &'static str)],
}

const fn served(name: &'static str, rows: &'static [Range<u64>]) -> Expected {
    Expected {
        name,
        rows,
        errors: &[],
    }
}

const fn faulty(
    name: &'static str,
    rows: &'static [Range<u64>],
    errors: &'static [(usize, &'static str)],
) -> Expected {
    Expected { name, rows, errors }
}

#[expect(clippy::single_range_in_vec_init, reason = "one range per request")]
const GOLDEN: [Expected; 6] = [
    served("forward_empty", &[]),
    served("forward_decode_1", &[37..38]),
    faulty(
        "forward_prefill_all_samplers",
        &[12..17, 0..0],
        &[(1, "adapter")],
    ),
    served("forward_masks", &[0..3]),
    served("forward_spec", &[24..29, 31..32]),
    faulty("forward_multimodal", &[0..0], &[(0, "media")]),
];

#[expect(clippy::single_range_in_vec_init, reason = "one range per request")]
const CAPTURED: [Expected; 25] = [
    served("prefill_4", &[0..4]),
    served("decode_1", &[4..5]),
    served("decode_2", &[21..22, 15..16]),
    served("extend_2", &[13..15]),
    served("mixed_decode_extend", &[20..21, 13..15]),
    served(
        "mixed_7_with_spec",
        &[5..6, 6..7, 6..10, 100..101, 7..8, 7..8, 10..14],
    ),
    served(
        "mixed_prefill_100",
        &[5..6, 4..8, 0..100, 6..7, 6..7, 6..10],
    ),
    served("prefill_2100", &[0..2100]),
    served("prefill_flush_no_sampler", &[0..13]),
    served("prefill_multi_positions", &[0..6]),
    served("prefill_spec_on", &[0..4]),
    served("prefill_all_samplers", &[0..4]),
    served("prefill_user_mask_logit_mask", &[0..4]),
    faulty("prefill_adapter", &[0..0], &[(0, "adapter")]),
    served("pressure_replay", &[41..42, 0..44]),
    served("pressure_replay_tail", &[43..44, 32..40]),
    served("pressure_shared_pages", &[47..48, 43..44, 44..45, 40..41]),
    served("same_context_twice", &[5..6, 5..6]),
    served("same_context_overlapping_drafts", &[7..8, 6..9]),
    served("verify_3_drafts", &[4..8]),
    served("verify_3_contexts", &[6..10, 6..10, 6..10]),
    served("verify_drafts_cross_page", &[15..19]),
    served("trimmed_window_mask", &[26..28]),
    served("trimmed_drafts_cross_page", &[31..35]),
    faulty("zero_tokens_with_sampler", &[0..0], &[(0, "no-tokens")]),
];

/// A folder of vectors, unless it is absent.
fn folder(relative: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/vectors");
    let folder = root.join(relative);
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!("skipped: there are no vectors at {}", folder.display());
    None
}

/// The forward request of a vector; `None` for other requests and for responses.
fn read(path: &Path) -> Option<ForwardRequest> {
    let encoded = Encoded::from_bytes(&fs::read(path).expect("the vector is readable"));
    encoded.try_forward()?;
    match decode_request(encoded.bytes()) {
        Ok(Frame {
            payload: Payload::Forward(request),
            ..
        }) => Some(request),
        other => panic!("{}: {other:?}", path.display()),
    }
}

fn captured(name: &str) -> Option<ForwardRequest> {
    let request = read(&folder("captured")?.join(format!("{name}.bin")));
    Some(request.expect("a forward"))
}

/// Runs a frame against the naive planner and returns the latter's plan.
fn run(limits: Limits, request: &ForwardRequest) -> Plan {
    let mut device = Device::new(limits);
    device.run(request, |_, slot| slot.number as u32);
    device.compute(request, |_, slot| slot.number as u32)
}

/// KV indices that each request writes.
fn written(plan: &Plan) -> Vec<Range<u64>> {
    let range = |rows: &Vec<crate::common::naive::Row>| {
        let first = rows.first().map_or(0, |row| row.index);
        first..first + rows.len() as u64
    };
    plan.requests
        .iter()
        .map(|request| range(&request.rows))
        .collect()
}

/// Storage slots of the first pass.
fn stored(plan: &Plan) -> Vec<i64> {
    plan.pass_rows(0)
        .into_iter()
        .map(|(_, storage)| storage)
        .collect()
}

fn check(folder: &Path, expected: &Expected) {
    let name = expected.name;
    let request = read(&folder.join(format!("{name}.bin"))).expect("a forward");
    let plan = run(LIMITS, &request);
    assert_eq!(written(&plan), expected.rows, "{name}");
    let mut errors = Vec::new();
    for (index, request) in plan.requests.iter().enumerate() {
        errors.extend(
            request
                .refused
                .iter()
                .chain(&request.rejected)
                .map(|&kind| (index, kind)),
        );
    }
    assert_eq!(errors, expected.errors, "{name}");
}

#[test]
fn golden_frames_plan_as_written_down() {
    let Some(folder) = folder("") else { return };
    for expected in &GOLDEN {
        check(&folder, expected);
    }
}

#[test]
fn captured_frames_plan_as_their_notes_say() {
    let Some(folder) = folder("captured") else {
        return;
    };
    for expected in &CAPTURED {
        check(&folder, expected);
    }
}

#[test]
fn every_forward_vector_equals_the_naive_plan() {
    let tight = Limits {
        max_requests: 3,
        chunk_tokens: 7,
        max_slots: 2,
        ..LIMITS
    };
    for folder in ["", "captured"].into_iter().filter_map(folder) {
        let mut count = 0;
        for entry in fs::read_dir(folder).expect("the folder is readable") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|extension| extension == "bin")
                && let Some(request) = read(&path)
            {
                run(LIMITS, &request);
                run(tight, &request);
                count += 1;
            }
        }
        assert!(count > 0);
    }
}

#[test]
fn the_large_decode_batch_is_one_pass() {
    let Some(folder) = folder("") else { return };
    let request = read(&folder.join("forward_decode_256.bin")).expect("a forward");
    let mut device = Device::new(LIMITS);
    let answer = device.run(&request, |_, slot| slot.request as u32);
    assert!(answer.is_fast());
    assert_eq!(device.last().pass_count(), 1);
    let plan = device.compute(&request, |_, _| 0);
    for request in &plan.requests {
        assert_eq!(request.rows[0].index / 16 + 1, request.pages.len() as u64);
    }
}

#[test]
fn the_later_row_of_a_context_keeps_the_slot() {
    if let Some(request) = captured("same_context_twice") {
        assert_eq!(stored(&run(LIMITS, &request)), [0, 1023 * 16 + 5]);
    }
    if let Some(request) = captured("same_context_overlapping_drafts") {
        // Index 7 is the first request's input and the second one's first draft.
        let page = 1023 * 16;
        assert_eq!(
            stored(&run(LIMITS, &request)),
            [0, page + 6, page + 7, page + 8]
        );
    }
}

#[test]
fn drafts_cross_into_the_next_page() {
    if let Some(request) = captured("verify_drafts_cross_page") {
        let (anchor, drafts) = (1024 * 16 + 15, 1023 * 16);
        assert_eq!(
            stored(&run(LIMITS, &request)),
            [anchor, drafts, drafts + 1, drafts + 2]
        );
    }
}

#[test]
fn trimmed_lists_count_from_their_own_start() {
    for (name, rows) in [
        ("trimmed_window_mask", 26..28),
        ("trimmed_drafts_cross_page", 31..35),
    ] {
        if let Some(mut request) = captured(name) {
            // Without the flag the mask is not looked at and the geometry shows.
            request.has_user_mask = false;
            assert_eq!(written(&run(LIMITS, &request)), [rows], "{name}");
        }
    }
}

#[test]
fn prompts_beyond_the_models_positions_are_rejected() {
    if let Some(request) = captured("prefill_2100") {
        let plan = run(
            Limits {
                max_positions: 2048,
                ..LIMITS
            },
            &request,
        );
        assert_eq!(
            plan.requests[0].refused.iter().collect::<Vec<_>>(),
            [&"position"]
        );
    }
}

#[test]
fn pages_of_a_small_pool_are_all_known() {
    for name in [
        "pressure_replay",
        "pressure_replay_tail",
        "pressure_shared_pages",
    ] {
        if let Some(request) = captured(name) {
            let plan = run(
                Limits {
                    total_pages: 10,
                    ..LIMITS
                },
                &request,
            );
            assert!(
                plan.requests
                    .iter()
                    .all(|request| request.refused.is_empty()),
                "{name}"
            );
        }
    }
}

/// The protocol's worked example: a decode, a scored prompt and a replay.
fn worked_example() -> ForwardRequest {
    let decode = Req::new(16, 20, &[1000], &[7, 3])
        .masked([&[0, 21]])
        .sample(0, GREEDY);
    let top_p = Sampler::TopP {
        temperature: 0.8,
        p: 0.95,
    };
    let dist = Sampler::Dist {
        temperature: 1.0,
        num_tokens: 2,
    };
    let prompt = Req::new(16, 0, &[5, 6, 7, 8, 9], &[9])
        .masked([&[0, 1], &[0, 2], &[0, 3], &[0, 4], &[0, 5]])
        .sample(4, Sampler::Entropy)
        .sample(4, top_p)
        .sample(2, dist)
        .sample(
            4,
            Sampler::Logprobs {
                token_ids: vec![7, 9],
            },
        )
        .sample(1, Sampler::Logprob { token_id: 3 });
    let replay =
        Req::new(16, 16, &[1, 2, 3, 4], &[2, 12]).masked([&[0, 17], &[0, 18], &[0, 19], &[0, 20]]);
    let mut request = frame(&[decode, prompt, replay]);
    request.context_ids = vec![11, 12, 0];
    request.has_user_mask = true;
    request.image_pixel_indptr = vec![0];
    request.image_mrope_indptr = vec![0];
    request.audio_feature_indptr = vec![0];
    request
}

#[test]
fn the_worked_mixed_batch_is_planned() {
    let request = worked_example();
    assert_eq!(
        Encoded::new(0, &request).bytes().len(),
        1016,
        "the protocol's own length"
    );
    let mut device = Device::new(LIMITS);
    let answer = device.run(&request, |_, slot| 42 + slot.request as u32);
    assert_eq!(answer.tokens(), [vec![42], vec![43], vec![]]);
    let plan = device.compute(&request, |_, _| 42);
    assert_eq!(written(&plan), [20..21, 0..5, 16..20]);
    let (page_3, page_9, page_12) = (4 * 16, 10 * 16, 13 * 16);
    let expected = [
        page_3 + 4,
        page_9,
        page_9 + 1,
        page_9 + 2,
        page_9 + 3,
        page_9 + 4,
        page_12,
        page_12 + 1,
        page_12 + 2,
        page_12 + 3,
    ];
    assert_eq!(stored(&plan), expected);
    assert!(device.request_errors().is_empty());
}

/// The protocol's response to its worked example.
const WORKED_RESPONSE: &str = "
    00000000 01000000 02000000 02000000 2a000000 1f000000 00000000 00000000
    01000000 01000000 00000000 02000000 1f000000 08000000 0000003f 0000803e
    00000000 00000000 00000000 00000000 00000000 00000000 00000000 02000000
    02000000 00000000 02000000 03000000 0000c0bf 000000c0 000040c0 00000000
    00000000 01000000 01000000 00000040 00000000 00000000 00000000 00000000
    00000000 00000000 00000000 03000000 50ffffff 04000000 58ffffff 02000000
    58ffffff 04000000 60ffffff 02000000 60ffffff 02000000 60ffffff 02000000
    60ffffff 04000000 68ffffff 01000000 64ffffff 00000000 5cffffff 04000000
    64ffffff 03000000 68ffffff 03000000 6cffffff 04000000 74ffffff 01000000
    70ffffff 04000000 78ffffff 00000000 70ffffff 00000000 00000000 00000000
    00000000 00000000 00000000 00000000";

fn bytes_of(hex: &str) -> Vec<u8> {
    let digits: String = hex.split_whitespace().collect();
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hex digits");
    (0..digits.len()).step_by(2).map(byte).collect()
}

#[test]
fn the_worked_mixed_batch_is_answered_byte_for_byte() {
    let mut planner = Planner::new(LIMITS, 0);
    let encoded = Encoded::new(0, &worked_example());
    let plan = planner.plan(0, encoded.forward()).expect("a sound frame");
    let mut block = memory(planner.layout());
    let block = bytemuck::cast_slice_mut(&mut block);
    let pass = next_pass(&mut planner, plan, block).expect("a pass");
    let group = next_group(&planner, pass, block).expect("a group");
    // A greedy and a top-p token, one distribution, no raw logits, two log-probability entries, one entropy.
    let counts = [1, 0, 1, 1, 0, 2, 1, 0];
    let expected = SlotGroup {
        counts,
        ..SlotGroup::default()
    };
    assert_eq!(*group.group(), expected);
    assert_eq!(group.labels(), [[0, 7], [0, 9], [1, 3]]);
    let outputs = Outputs {
        tokens: &[42, 31],
        dist_ids: &[31, 8],
        dist_probs: &[0.5, 0.25],
        logits: &[],
        logprobs: &[-1.5, -2.0, -3.0],
        entropies: &[2.0],
        ..Outputs::default()
    };
    let plan = next_group(&planner, put(group, &outputs), block).expect_err("one group");
    let mut computed = plan.computed().expect("one pass");
    let mut reply = vec![0_u64; 512];
    let reply: &mut [u8] = bytemuck::cast_slice_mut(&mut reply);
    let length = planner
        .reply(&mut computed, ForwardTimings::default(), reply)
        .expect("it fits");
    pie_wire::set_response_build_us(&mut reply[..length], 0);

    // The protocol's own bytes give zero offsets to the kinds that no request asks for, where empty arrays will do.
    let written_down = Encoded::from_bytes(&bytes_of(WORKED_RESPONSE));
    let mut frame = decode_response(written_down.bytes()).expect("a response");
    let ResponsePayload::Forward(response) = &mut frame.payload else {
        panic!("no forward response");
    };
    assert_eq!(response.logits_req_indptr, [0; 4]);
    assert_eq!(
        (&*response.logits_byte_indptr, &*response.spec_indptr),
        (&[0][..], &[0; 4][..])
    );
    response.check().expect("an answer that keeps the rules");
    response.logits_req_indptr.clear();
    response.logits_byte_indptr.clear();
    response.spec_indptr.clear();
    let mut expected = vec![0; 512];
    let expected_length = encode_response(&frame, &mut expected).expect("it fits");
    assert_eq!(reply[..length], expected[..expected_length]);
}
