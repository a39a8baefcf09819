//! Frames taken apart again.

mod masks;
mod params;

use super::*;

fn encoded(builder: &mut FrameBuilder, rows: &[FrameRow<'_>]) -> Vec<u8> {
    let mut buffer = vec![0; 1 << 16];
    builder.build(rows.iter().copied());
    let length = builder.encode(&mut buffer).unwrap();
    buffer.truncate(length);
    buffer
}

/// An archive is read in place and must start at a multiple of 8.
#[repr(align(8))]
struct Aligned([u8; 2048]);

fn decoded(bytes: &[u8]) -> ForwardRequest {
    let mut aligned = Aligned([0; 2048]);
    aligned.0[..bytes.len()].copy_from_slice(bytes);
    let frame = pie_wire::decode_request(&aligned.0[..bytes.len()]).unwrap();
    match frame.payload {
        Payload::Forward(body) => body,
        other => panic!("{other:?}"),
    }
}

/// The golden decode frame of the protocol's vectors, taken apart and made again, in a builder that has made a
/// larger frame before.
#[test]
fn a_decode_frame_has_the_golden_bytes() {
    let golden = include_bytes!("../../../../tests/data/wire/forward_decode.bin");
    let body = decoded(golden);
    let rows: Vec<FrameRow<'_>> = (0..body.context_ids.len())
        .map(|request| FrameRow {
            context_id: body.context_ids[request],
            tokens: &body.token_ids[request..=request],
            awaits: None,
            start: body.position_ids[request],
            drafts: &[],
            wants_drafts: false,
            pages: &body.kv_page_indices[2 * request..2 * request + 2],
            sampler: Some(&body.samplers[request]),
            ..FrameRow::EMPTY
        })
        .collect();
    let mut builder = FrameBuilder::as_pie(16);
    let prompt = FrameRow {
        tokens: &[1; 40],
        start: 0,
        pages: &[9, 8, 7],
        ..rows[0]
    };
    encoded(&mut builder, &[prompt, rows[0]]);
    assert_eq!(encoded(&mut builder, &rows), golden);
}

#[test]
fn one_prompt_brings_the_mask_rows_back() {
    let sampler = Sampler::RawLogits;
    let decode = FrameRow {
        context_id: 5,
        tokens: &[30],
        start: 4,
        pages: &[2, 6],
        sampler: Some(&sampler),
        ..FrameRow::EMPTY
    };
    let prompt = FrameRow {
        context_id: 6,
        tokens: &[10, 11, 12],
        start: 0,
        pages: &[3],
        sampler: Some(&sampler),
        ..FrameRow::EMPTY
    };
    let body = decoded(&encoded(
        &mut FrameBuilder::as_pie(4),
        &[decode, prompt, FrameRow::EMPTY],
    ));
    let rows: Vec<&[u32]> = body.masks.iter().map(|row| &row.buffer[..]).collect();
    assert_eq!(rows, [&[0, 5][..], &[0, 1], &[0, 2], &[0, 3]]);
    assert_eq!(body.mask_indptr, [0, 1, 4, 4]);
    assert!(!body.single_token_mode && !body.has_user_mask);
    assert_eq!(body.position_ids, [4, 0, 1, 2]);
    assert_eq!(body.kv_page_indices, [2, 6, 3]);
    assert_eq!(body.kv_page_indptr, [0, 2, 3, 3]);
    assert_eq!(body.kv_last_page_lens, [1, 3, 1]);
    assert_eq!(body.sampling_indices, [0, 2]);
    assert_eq!(body.sampler_indptr, [0, 1, 2, 2]);
    assert_eq!(body.sampling_indptr, body.sampler_indptr);
    assert_eq!(body.context_ids, [5, 6, 0]);

    let pair = FrameRow {
        tokens: &[10, 11],
        ..prompt
    };
    let body = decoded(&encoded(&mut FrameBuilder::as_pie(4), &[pair]));
    assert!(!body.single_token_mode && body.masks.len() == 2);
}

#[test]
fn a_lean_frame_is_the_same_without_its_masks() {
    let sampler = Sampler::RawLogits;
    let prompt = FrameRow {
        context_id: 6,
        tokens: &[10, 11, 12],
        start: 0,
        pages: &[3],
        sampler: Some(&sampler),
        ..FrameRow::EMPTY
    };
    let body = decoded(&encoded(&mut FrameBuilder::new(4), &[prompt, prompt]));
    assert!(body.masks.is_empty() && !body.has_user_mask);
    assert_eq!(body.mask_indptr, [0, 0, 0]);
    let like_pie = decoded(&encoded(&mut FrameBuilder::as_pie(4), &[prompt, prompt]));
    let expected = ForwardRequest {
        masks: Vec::new(),
        mask_indptr: vec![0; 3],
        ..like_pie
    };
    assert_eq!(body, expected);
}

#[test]
fn forbidden_tokens_are_masked() {
    for forbidden in [&[7][..], &[0], &[2, 3, 9], &[0, 1, 5], &[4, u32::MAX - 1]] {
        let mask = except(forbidden);
        assert_eq!(
            mask.buffer.iter().map(|&run| u64::from(run)).sum::<u64>(),
            mask.total_size
        );
        let allowed: Vec<_> = pie_wire::brle::true_ranges(&mask.buffer, 12).collect();
        for token in 0..12 {
            let found = allowed.iter().any(|range| range.contains(&token));
            assert_eq!(found, !forbidden.contains(&(token as u32)), "{forbidden:?}");
        }
    }
    let sampler = Sampler::RawLogits;
    let plain = FrameRow {
        context_id: 5,
        tokens: &[30],
        start: 4,
        pages: &[2, 6],
        sampler: Some(&sampler),
        ..FrameRow::EMPTY
    };
    let masked = FrameRow {
        forbidden: &[2],
        ..plain
    };
    let mut builder = FrameBuilder::new(4);
    let body = decoded(&encoded(&mut builder, &[plain, masked, plain]));
    assert_eq!(body.logit_mask_indptr, [0, 0, 1, 1]);
    assert_eq!(body.logit_masks, [except(&[2])]);
    assert!(
        decoded(&encoded(&mut builder, &[plain]))
            .logit_masks
            .is_empty()
    );
}

#[test]
fn a_frame_is_made_before_its_tokens_are_known() {
    let prompt = FrameRow {
        context_id: 5,
        tokens: &[10, 11, 12],
        start: 0,
        pages: &[3],
        sampler: Some(&Sampler::RawLogits),
        ..FrameRow::EMPTY
    };
    let decode = |token: &'static [u32], awaits| FrameRow {
        tokens: token,
        awaits,
        start: 7,
        ..prompt
    };
    let known = [decode(&[91], None), prompt, decode(&[92], None)];
    let awaiting = [decode(&[0], Some(3)), prompt, decode(&[0], Some(1))];
    let mut builder = FrameBuilder::as_pie(4);
    let mut frame = encoded(&mut builder, &awaiting);
    let FrameMeta {
        requests,
        sampled,
        tokens,
        patches,
        ..
    } = builder.build(awaiting.into_iter().chain([FrameRow::EMPTY]));
    assert_eq!((requests, sampled, tokens), (4, 3, 5));
    patch_tokens(&mut frame, &patches, &[90, 92, 90, 91]);
    assert_eq!(frame, encoded(&mut builder, &known));
    assert_eq!(builder.build(known.into_iter()).patches, []);
}

/// The worked example of the protocol, with a request that has no drafts.
#[test]
fn drafts_lie_behind_the_last_page_length() {
    let sampler = Sampler::RawLogits;
    let verifies = FrameRow {
        context_id: 5,
        tokens: &[30],
        awaits: None,
        start: 13,
        drafts: &[40, 41, 42, 43],
        wants_drafts: true,
        pages: &[2, 6],
        sampler: Some(&sampler),
        ..FrameRow::EMPTY
    };
    let plain = FrameRow {
        context_id: 6,
        start: 15,
        drafts: &[],
        wants_drafts: false,
        pages: &[3],
        ..verifies
    };
    let mut builder = FrameBuilder::as_pie(16);
    let body = decoded(&encoded(&mut builder, &[verifies, plain]));
    assert_eq!(body.spec_token_ids, [40, 41, 42, 43]);
    assert_eq!(body.spec_position_ids, [14, 15, 16, 17]);
    assert_eq!(body.spec_indptr, [0, 4, 4]);
    assert_eq!(body.output_spec_flags, [true, false]);
    assert_eq!(body.kv_last_page_lens, [14, 16]);
    assert_eq!(
        (&body.token_ids[..], &body.sampling_indices[..]),
        (&[30, 30][..], &[0, 0][..])
    );
    let rows: Vec<&[u32]> = body.masks.iter().map(|row| &row.buffer[..]).collect();
    assert_eq!(rows, [[0, 14], [0, 16]]);
    assert!(body.single_token_mode);

    let meta = builder.build([verifies, plain].into_iter());
    let expected: Vec<_> = meta.expected().collect();
    assert_eq!(expected[0].drafts, [40, 41, 42, 43]);
    assert!(expected[0].wants_drafts && expected[0].samples && expected[0].end == 14);
    assert!(expected[1].drafts.is_empty() && !expected[1].wants_drafts);
    assert_eq!(expected.len(), 2);

    let body = decoded(&encoded(&mut builder, &[plain]));
    assert!(body.masks.is_empty() && body.spec_token_ids.is_empty());
    assert_eq!(body.spec_indptr, [0, 0]);
}
