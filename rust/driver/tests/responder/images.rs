//! Batches with images.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use pie_driver::{Batch, DeviceTimes, Job, Media, Responder};
use pie_planner::{Layout, Planner};
use pie_ring::Wait;
use pie_wire::{ForwardRequest, Payload};

use crate::common::{LIMITS, VISION, converse_with, encode, forward};

/// Two requests of two rows: an image of 2 x 2 patches and one token. The pixels of both are `first..first + 32`.
fn with_images(first: u8) -> ForwardRequest {
    ForwardRequest {
        token_ids: vec![0, 5, 0, 5],
        image_indptr: vec![0, 1, 2],
        image_grids: vec![1, 2, 2, 1, 2, 2],
        image_anchor_rows: vec![0, 2],
        image_anchor_positions: vec![0, 0],
        image_pixels: (first..first + 32).collect(),
        image_pixel_indptr: vec![0, 16, 32],
        image_mrope_indptr: vec![0, 0, 0],
        ..forward(&[2, 2])
    }
}

/// The pixels of each image of a batch of one pass, and what holds them.
fn pixels(batch: &mut Batch) -> Option<(Vec<Vec<u8>>, Arc<Media>)> {
    let mut block = vec![0_u64; Layout::new(&LIMITS).bytes().div_ceil(8)];
    let block = bytemuck::cast_slice_mut(&mut block);
    batch.stage(block).unwrap().expect("one pass");
    let (images, media) = batch.pass_images()?;
    let pixels = |range: &Range<usize>| media.pixels()[range.clone()].to_vec();
    let pixels = images.spans.iter().map(|span| pixels(&span.pixels));
    Some((pixels.collect(), Arc::clone(media)))
}

#[test]
fn pixels_stay_as_they_were_sent() {
    let mut faulty = with_images(100);
    faulty.image_grids[0] = 3;
    let frames = [with_images(0), forward(&[2]), faulty, with_images(50)];
    let requests = frames.map(|frame| encode(Payload::Forward(frame)));
    let kept = RefCell::new(Vec::new());
    converse_with((0, 0), &requests, |job| {
        let Job::Batch(mut batch) = job else { return };
        kept.borrow_mut().push(pixels(&mut batch));
        batch.commit(DeviceTimes::default());
    });
    let image = |first: u8| (first..first + 16).collect::<Vec<u8>>();
    let expected = [
        (Some(vec![image(0), image(16)]), 0),
        (None, 0),
        // The first request was rejected, the second image is where it was.
        (Some(vec![image(116)]), 100),
        (Some(vec![image(50), image(66)]), 50),
    ];
    let kept = kept.into_inner();
    assert_eq!(kept.len(), expected.len());
    for (kept, (pixels, first)) in kept.into_iter().zip(expected) {
        assert_eq!(kept.as_ref().map(|(pixels, _)| pixels), pixels.as_ref());
        if let Some((_, media)) = kept {
            // Later requests have not touched it, and no other has it.
            assert_eq!(media.pixels(), (first..first + 32).collect::<Vec<u8>>());
            assert!(Arc::into_inner(media).is_some());
        }
    }
}

#[test]
fn warm_ups_have_images_too() {
    let planner = Planner::new(LIMITS, 1).with_vision(VISION);
    let responder = Responder::new(planner, 0, Wait::Park);
    let bytes = encode(Payload::Forward(with_images(7)));
    let mut batch = responder.warm_up(&bytes).unwrap();
    let (seen, _) = pixels(&mut batch).expect("images");
    assert_eq!(seen.concat(), (7..39).collect::<Vec<u8>>());
}
