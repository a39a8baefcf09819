//! Logit masks in frames: rows that share one send it once.

use super::*;

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
