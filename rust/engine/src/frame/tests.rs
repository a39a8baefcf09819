//! Frames taken apart again.

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

/// Rows of a frame with a vocabulary of 96 tokens, as the extension has them: the request, its own mask, and whether it has that of
/// the row before.
fn mask_rows(builder: &mut FrameBuilder, rows: &[FrameRow<'_>]) -> Vec<(u32, Vec<u32>, bool)> {
    builder.build(rows.iter().copied());
    let rows = builder.extension_rows.iter();
    rows.map(|row| (row.request, row.mask.clone(), row.shares_mask))
        .collect()
}

/// Every other token.
const DENSE: [u32; 3] = [0x5555_5555; 3];

fn bound<'a>(mask: &'a [u32], forbidden: &'a [u32]) -> FrameRow<'a> {
    FrameRow {
        context_id: 5,
        tokens: &[30],
        start: 4,
        pages: &[2, 6],
        sampler: Some(&Sampler::RawLogits),
        forbidden,
        mask: Some(mask),
        ..FrameRow::EMPTY
    }
}

#[test]
fn a_mask_that_rows_share_is_sent_once() {
    let mut builder = FrameBuilder::new(4).with_bit_masks(96);
    let copy = DENSE;
    let free = FrameRow {
        mask: None,
        ..bound(&DENSE, &[])
    };
    let rows = mask_rows(
        &mut builder,
        &[
            bound(&DENSE, &[]),
            // The same array, and one that holds the same, with a free row between them.
            bound(&DENSE, &[]),
            free,
            bound(&copy, &[]),
        ],
    );
    let shared = |request| (request, Vec::new(), true);
    assert_eq!(rows, [(0, DENSE.to_vec(), false), shared(1), shared(3)]);
    // The masks went as bits, and none as runs.
    let Payload::Forward(body) = &builder.frame.payload else {
        panic!();
    };
    assert!(body.logit_masks.is_empty());
}

#[test]
fn a_mask_is_shared_with_the_last_that_differs() {
    let other = [0xAAAA_AAAA; 3];
    let mut builder = FrameBuilder::new(4).with_bit_masks(96);
    let inputs = [&DENSE, &other, &other, &DENSE].map(|mask| bound(mask, &[]));
    let rows = mask_rows(&mut builder, &inputs);
    let wanted = [
        (0, DENSE.to_vec(), false),
        (1, other.to_vec(), false),
        (2, Vec::new(), true),
        (3, DENSE.to_vec(), false),
    ];
    assert_eq!(rows, wanted);
    // In buffers of the frame before.
    assert_eq!(mask_rows(&mut builder, &inputs), wanted);
    // A mask that is shorter than the vocabulary.
    let short = mask_rows(&mut builder, &[bound(&other[..2], &[])]);
    assert_eq!(short, [(0, vec![other[0], other[1], 0], false)]);
}

#[test]
fn forbidden_tokens_are_no_part_of_a_shared_mask() {
    let mut builder = FrameBuilder::new(4).with_bit_masks(96);
    let without_2 = [DENSE[0] & !(1 << 2), DENSE[1], DENSE[2]];
    let rows = mask_rows(
        &mut builder,
        &[
            bound(&DENSE, &[]),
            bound(&DENSE, &[2]),
            bound(&DENSE, &[2]),
            // They allow the same, by other arrays.
            bound(&DENSE, &[1, 2]),
            bound(&without_2, &[]),
            bound(&DENSE, &[1]),
            bound(&without_2, &[2, 1]),
        ],
    );
    let wanted = [
        (0, DENSE.to_vec(), false),
        (1, without_2.to_vec(), false),
        (2, Vec::new(), true),
        (3, Vec::new(), true),
        (4, Vec::new(), true),
        (5, DENSE.to_vec(), false),
        (6, without_2.to_vec(), false),
    ];
    assert_eq!(rows, wanted);
}

#[test]
fn a_mask_of_few_runs_goes_as_runs_between_those_that_share() {
    let few = [0xFF, 0, 0];
    let mut builder = FrameBuilder::new(4).with_bit_masks(96);
    let inputs = [
        bound(&DENSE, &[]),
        bound(&few, &[3]),
        bound(&few, &[3]),
        bound(&DENSE, &[]),
    ];
    let rows = mask_rows(&mut builder, &inputs);
    assert_eq!(rows, [(0, DENSE.to_vec(), false), (3, Vec::new(), true)]);
    let Payload::Forward(body) = &builder.frame.payload else {
        panic!();
    };
    assert_eq!(body.logit_mask_indptr, [0, 0, 1, 2, 2]);
    assert_eq!(body.logit_masks, [only(&few, &[3]), only(&few, &[3])]);
    // A driver that does not know masks as bits takes all as runs.
    let mut plain = FrameBuilder::new(4);
    assert!(mask_rows(&mut plain, &inputs).is_empty());
}

#[test]
fn the_mask_of_the_parameters_is_ignored() {
    let params = Arc::new(RequestExtension {
        biases: vec![(7, 1.0)],
        mask: vec![1; 3],
        shares_mask: true,
        ..RequestExtension::default()
    });
    let extension = RowExtension {
        params: &params,
        history: &[],
        prompt_logprobs: (0, 0),
        next: None,
    };
    let row = FrameRow {
        extension: Some(extension),
        ..bound(&DENSE, &[])
    };
    let free = FrameRow { mask: None, ..row };
    let mut builder = FrameBuilder::new(4).with_bit_masks(96);
    let rows = mask_rows(&mut builder, &[free, row, free, row]);
    let wanted = [
        (0, Vec::new(), false),
        (1, DENSE.to_vec(), false),
        (2, Vec::new(), false),
        (3, Vec::new(), true),
    ];
    assert_eq!(rows, wanted);
}

/// What a driver has under each handle, by frames that are read one after the other.
#[derive(Default)]
struct Keeper(std::collections::HashMap<u32, RequestExtension>);

impl Keeper {
    /// Reads a frame; returns its parameters and what each row asks for.
    fn read(&mut self, frame: &[u8]) -> (usize, Vec<RequestExtension>) {
        let (_, extension) = pie_wire::split_request(frame).unwrap();
        let in_frame: Vec<_> = extension.params().collect();
        for params in &in_frame {
            let handle = params.handle();
            self.0
                .extend(handle.map(|handle| (handle, params.to_owned())));
        }
        let rows = extension.rows().map(|row| match row.params() {
            ParamsRef::None => RequestExtension::default(),
            ParamsRef::InFrame(number) => in_frame[number as usize].to_owned(),
            ParamsRef::Kept(handle) => self.0[&handle].clone(),
        });
        (in_frame.len(), rows.collect())
    }

    fn words(&self) -> usize {
        self.0.values().map(|asked| asked.biases.len()).sum()
    }
}

fn biased(id: u32, count: usize) -> Arc<RequestExtension> {
    Arc::new(RequestExtension {
        biases: vec![(id, 1.0); count],
        ..RequestExtension::default()
    })
}

fn frame_of(builder: &mut FrameBuilder, params: &[Arc<RequestExtension>]) -> Vec<u8> {
    let sampler = Sampler::RawLogits;
    let row = |params| FrameRow {
        extension: Some(RowExtension {
            params,
            history: &[],
            prompt_logprobs: (0, 0),
            next: None,
        }),
        tokens: &[1],
        pages: &[1],
        sampler: Some(&sampler),
        ..FrameRow::EMPTY
    };
    builder.build(params.iter().map(row));
    let mut buffer = vec![0; 8 << 20];
    let length = builder.encode(&mut buffer).unwrap();
    buffer.truncate(length);
    buffer
}

#[test]
fn what_a_context_asks_for_is_sent_once() {
    let mut builder = FrameBuilder::new(4);
    let mut keeper = Keeper::default();
    let asked = [biased(1, 3), biased(2, 5)];
    // Two samples of one request share it.
    let all = [asked[0].clone(), asked[0].clone(), asked[1].clone()];
    let first = frame_of(&mut builder, &all);
    let wanted: Vec<_> = all.iter().map(|asked| (**asked).clone()).collect();
    assert_eq!(keeper.read(&first), (2, wanted.clone()));
    let second = frame_of(&mut builder, &all);
    assert_eq!(keeper.read(&second), (0, wanted.clone()));
    assert_eq!(first.len() - second.len(), 4 * (2 * 17 + 2 * 8));
    // After a failure it is sent again, in the place of what the driver may have.
    builder.resend_params();
    let third = frame_of(&mut builder, &all);
    assert_eq!(keeper.read(&third), (2, wanted));
    assert_eq!(keeper.words(), 8);
}

/// Contexts come and go: the driver keeps what lives, and not much more.
#[test]
fn what_ended_contexts_asked_for_is_freed() {
    let mut builder = FrameBuilder::new(4);
    let mut keeper = Keeper::default();
    let mut live = std::collections::VecDeque::new();
    let mut random = fastrand::Rng::with_seed(3);
    let mut most = (0, 0);
    for round in 0..3000 {
        // Some are freed, others replaced.
        let large = if random.u8(..8) == 0 { 200 } else { 0 };
        live.push_back(biased(round, large + random.usize(..40)));
        while live.len() > random.usize(1..60) {
            live.pop_front();
        }
        if random.u32(..500) == 0 {
            builder.resend_params();
        }
        let frame = frame_of(&mut builder, live.make_contiguous());
        let (_, rows) = keeper.read(&frame);
        assert!(rows.iter().eq(live.iter().map(|asked| &**asked)), "{round}");
        most = (most.0.max(keeper.0.len()), most.1.max(keeper.words()));
    }
    // 60 live at once, twice as many as were found to live, and those that a failure left over.
    assert!(most.0 < 400 && most.1 < 400 * 60, "{most:?}");
    // Large ones are looked for early.
    let large = |id| biased(id, 60_000);
    for round in 0..200 {
        let frame = frame_of(&mut builder, &[large(round)]);
        keeper.read(&frame);
    }
    assert!(8 * keeper.words() < 5 << 22, "{}", keeper.words());
}

/// However many contexts begin and end with each frame, and whatever their lists' sizes: each is sent once, and what is left of
/// those that have ended takes no more than what lived with them.
#[test]
fn contexts_that_begin_and_end_in_each_frame_leave_little_behind() {
    let mut random = fastrand::Rng::with_seed(5);
    for (starts, life, most) in [(12, 8, 300), (60, 3, 400), (20, 10, 4000), (5, 4, 20_000)] {
        let (mut builder, mut keeper) = (FrameBuilder::new(4), Keeper::default());
        let mut live = std::collections::VecDeque::new();
        let (mut most_live, mut most_kept) = (0, 0);
        for round in 0..400 {
            if round == 300 {
                builder.resend_params();
            }
            while live.len() >= starts * life {
                live.pop_front();
            }
            let sizes = [most, random.usize(1..=most)];
            let one = |at: usize| biased(round * 100 + at as u32, sizes[at % 2]);
            live.extend((0..starts).map(one));
            let all = live.make_contiguous();
            let frame = frame_of(&mut builder, all);
            let (sent, rows) = keeper.read(&frame);
            assert!(rows.iter().eq(all.iter().map(|asked| &**asked)), "{round}");
            let brought = if round == 300 {
                all.len()
            } else {
                starts.min(all.len())
            };
            let words = |all: &[Arc<RequestExtension>]| -> usize {
                all.iter().map(|asked| asked.biases.len()).sum()
            };
            let freed: usize = all[all.len() - brought..]
                .iter()
                .map(|asked| pie_wire::params_len(asked) / super::params::LARGE)
                .sum();
            let expected = brought..=brought + freed + super::params::MAX_FREED;
            assert!(
                expected.contains(&sent),
                "{sent} of {expected:?} in {round}"
            );
            (most_live, most_kept) = (most_live.max(words(all)), most_kept.max(keeper.words()));
        }
        assert!(
            most_kept <= 2 * most_live.max(1 << 19),
            "{most_kept} {most_live}"
        );
    }
}

/// What a frame has freed that was never taken counts as kept.
#[test]
fn a_frame_that_fails_frees_nothing() {
    let (mut builder, mut keeper) = (FrameBuilder::new(4), Keeper::default());
    let count = 60_000;
    for round in 0..600 {
        let frame = frame_of(&mut builder, &[biased(round, count)]);
        if round % 3 == 1 {
            // It does not come to the driver.
            builder.resend_params();
        } else {
            let (_, rows) = keeper.read(&frame);
            assert_eq!(rows[0].biases.len(), count);
        }
    }
    assert!(8 * keeper.words() < 5 << 22, "{}", keeper.words());
}
