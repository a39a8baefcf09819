//! Random frames with images, of which some are invalid.

use std::ops::Range;

use pie_planner::{Limits, Plan, Planner};
use pie_wire::{ArchivedForwardRequest, ForwardRequest};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::builder::{Encoded, LARGE, Req};
use crate::common::device::DRIVER;
use crate::common::engine::{Engine, memory};
use crate::images::{Image, PATCH_BYTES, planner, request, with_images};

/// Whether an image of a request with rows `rows` can be served, by the words of the protocol.
fn is_sound(frame: &ForwardRequest, span: usize, rows: &Range<u64>, free: u64) -> Option<u64> {
    let grid = &frame.image_grids[3 * span..3 * span + 3];
    let [time, height, width] = [0, 1, 2].map(|axis| u64::from(grid[axis]));
    let start = u64::from(frame.image_anchor_rows[span]);
    let tokens = time * (height / 2) * (width / 2);
    let end = start + tokens;
    let range = |indptr: &[u32]| indptr[span] as usize..indptr[span + 1] as usize;
    let axes = &frame.image_mrope_positions[range(&frame.image_mrope_indptr)];
    let sound = time == 1
        && tokens > 0
        && height % 2 == 0
        && width % 2 == 0
        && height <= 40
        && width <= 40
        && range(&frame.image_pixel_indptr).len() as u64 == 12 * height * width
        && free <= start
        && rows.contains(&start)
        && end <= rows.end
        && (start..end).all(|row| frame.token_ids[row as usize] == 0)
        && frame.image_anchor_positions[span] == frame.position_ids[start as usize]
        && (axes.is_empty() || axes.len() as u64 == 3 * tokens)
        && axes.iter().all(|&axis| axis < 512);
    sound.then_some(end)
}

pub(crate) fn served(frame: &ForwardRequest, index: usize) -> bool {
    let rows = u64::from(frame.qo_indptr[index])..u64::from(frame.qo_indptr[index + 1]);
    let mut spans = frame.image_indptr[index] as usize..frame.image_indptr[index + 1] as usize;
    let patches: u32 = frame
        .image_pixel_indptr
        .windows(2)
        .map(|ends| (ends[1] - ends[0]) / PATCH_BYTES)
        .sum();
    let positions = frame.image_patch_positions.len();
    let fit = positions == 0 || positions == 2 * patches as usize;
    let images = !spans.is_empty();
    let ends = spans.try_fold(rows.start, |free, span| is_sound(frame, span, &rows, free));
    ends.is_some() && (fit || !images)
}

/// Requests with up to two images, and up to two elements of their arrays replaced.
fn frames() -> impl Strategy<Value = ForwardRequest> {
    let side = prop_oneof![4 => Just(2_u32), 2 => Just(4), 1 => 0_u32..7];
    let image = (0_u32..4, side.clone(), side, any::<bool>());
    let request = (vec(image, 0..3), 1_u32..6);
    let edit = (0_usize..7, any::<prop::sample::Index>(), 0_u32..60);
    (vec(request, 1..4), vec(edit, 0..3), 0_usize..40).prop_map(|(requests, edits, patches)| {
        let built: Vec<_> = requests
            .iter()
            .map(|(images, tail)| build(images, *tail))
            .collect();
        let mut frame = with_images(&built);
        if patches > 20 {
            frame.image_patch_positions = vec![0; 2 * (patches - 20)];
        }
        for (array, index, value) in edits {
            let arrays = [
                &mut frame.token_ids,
                &mut frame.position_ids,
                &mut frame.image_grids,
                &mut frame.image_anchor_rows,
                &mut frame.image_anchor_positions,
                &mut frame.image_mrope_positions,
                &mut frame.image_pixel_indptr,
            ];
            let array = arrays.into_iter().nth(array).expect("one of them");
            if !array.is_empty() {
                let at = index.index(array.len());
                array[at] = value;
            }
        }
        frame
    })
}

fn build(images: &[(u32, u32, u32, bool)], tail: u32) -> (Req, Vec<Image>) {
    let mut row = 0;
    let images: Vec<Image> = images
        .iter()
        .map(|&(gap, height, width, axes)| {
            let mut image = Image::new(row + gap, height, width);
            row += gap + height * width / 4;
            if !axes {
                image.axes.clear();
            }
            image
        })
        .collect();
    (request(row + tail, &images, 0), images)
}

/// What the engine relies on, for whatever frame: rows in order, and pixels that the frame has.
fn check_passes(planner: &mut Planner, plan: Plan, request: &ArchivedForwardRequest) {
    let mut block = memory(planner.layout());
    let block: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
    Engine::default().run_seeing(planner, plan, block, |staged, _| {
        let pass = staged.pass();
        let Some(images) = staged.images() else {
            return;
        };
        assert!(!pass.decode && !images.spans.is_empty());
        assert_eq!(images.positions.len(), 3 * pass.tokens);
        assert!(images.positions.iter().all(|at| (0..512).contains(at)));
        assert!(
            images
                .spans
                .is_sorted_by_key(|span| (span.request, span.kv.start))
        );
        for span in &images.spans {
            let [_, height, width] = span.grid;
            assert!(span.request < pass.requests);
            assert!(span.pixels.end <= request.image_pixels.len());
            assert_eq!(span.pixels.len() as u32, 12 * height * width);
            assert_eq!(span.kv.len() as u32, height * width / 4);
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Words of a frame's root and of its arrays are replaced.
    #[test]
    fn damaged_frames_do_no_harm(
        frame in frames(),
        damage in vec((any::<prop::sample::Index>(), prop_oneof![0_u32..70, any::<u32>()]), 1..4),
        chunk_tokens in 1_u32..9,
    ) {
        let mut encoded = Encoded::new(DRIVER, &frame);
        let words = encoded.bytes().len() / 4;
        for (index, value) in damage {
            // The last 300 bytes hold where each array lies.
            let at = 4 * (words - 1 - index.index(words.min(150)));
            encoded.bytes_mut()[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        let mut planner = planner(Limits { chunk_tokens, ..LARGE });
        if let Some(request) = encoded.try_forward()
            && let Ok(plan) = planner.plan(DRIVER, request)
        {
            check_passes(&mut planner, plan, request);
        }
    }

    /// A request is rejected exactly when one of its images is unsound.
    #[test]
    fn only_sound_images_are_served(frame in frames()) {
        let mut planner = planner(LARGE);
        let encoded = Encoded::new(DRIVER, &frame);
        let planned = planner.plan(DRIVER, encoded.forward());
        let indptr = &frame.image_pixel_indptr;
        let cut = indptr.is_sorted()
            && indptr[0] == 0
            && indptr.last().is_some_and(|&end| end as usize == frame.image_pixels.len());
        let images = !frame.image_anchor_rows.is_empty();
        prop_assert_eq!(planned.is_ok(), cut || !images);
        if let Ok(plan) = planned && cut {
            let rejected: Vec<usize> = plan.request_errors().iter().map(|(index, _)| *index).collect();
            let expected: Vec<usize> = (0..frame.qo_indptr.len() - 1)
                .filter(|&index| !served(&frame, index))
                .collect();
            prop_assert_eq!(rejected, expected);
        }
    }
}
