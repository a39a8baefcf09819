//! Images that are rejected.

use pie_planner::{
    FrameError, ImageError, LimitError, Modality, Planner, RequestError, VisionConfig,
};
use pie_wire::ForwardRequest;

use crate::common::builder::{Encoded, LARGE, Req};
use crate::common::device::DRIVER;
use crate::images::{Image, VISION, computed, embeds, planner, request, with_images};

/// The errors of a frame.
fn errors(planner: &mut Planner, frame: &ForwardRequest) -> Vec<(usize, RequestError)> {
    computed(planner, frame, 1).1.request_errors().to_vec()
}

/// The error of the first of three requests; the others, one with an image, must be served in any case.
fn error(first: Req, images: Vec<Image>) -> Option<RequestError> {
    let other = Image::new(1, 2, 4);
    let frame = with_images(&[
        (first, images),
        (request(4, std::slice::from_ref(&other), 30), vec![other]),
        (request(3, &[], 31), Vec::new()),
    ]);
    let mut planner = planner(LARGE);
    let (passes, computed) = computed(&mut planner, &frame, 1);
    let images = passes[0].images.as_ref().expect("the second request's");
    let last = images.spans.last().expect("at least one");
    assert_eq!((last.kv.clone(), last.grid), (1..3, [1, 2, 4]));
    let [] = computed.request_errors() else {
        let [(0, error)] = computed.request_errors() else {
            panic!("errors of others: {:?}", computed.request_errors());
        };
        assert_eq!(images.spans.len(), 1);
        assert!(!error.keeps_kv());
        return Some(error.clone());
    };
    None
}

/// The error of a request of 9 tokens with an image of 4 rows from row 2 on, after a change of the image.
fn flaw(change: impl FnOnce(&mut Image)) -> Option<ImageError> {
    let mut image = Image::new(2, 4, 4);
    let request = request(9, std::slice::from_ref(&image), 0);
    change(&mut image);
    match error(request, vec![image]) {
        None => None,
        Some(RequestError::Image { number: 0, problem }) => Some(problem),
        Some(other) => panic!("{other}"),
    }
}

#[test]
fn grids_are_whole_and_still() {
    assert_eq!(flaw(|_| ()), None);
    assert_eq!(
        flaw(|image| image.grid = [2, 4, 4]),
        Some(ImageError::Video { time: 2 })
    );
    for grid in [[0, 4, 4], [1, 0, 4], [1, 4, 0], [1, 3, 4], [1, 4, 5]] {
        let [time, height, width] = grid;
        assert_eq!(
            flaw(|image| image.grid = grid),
            Some(ImageError::Grid {
                time,
                height,
                width,
                merge: 2
            })
        );
    }
    for grid in [[1, 42, 2], [1, 2, 42], [1, u32::MAX - 1, u32::MAX - 1]] {
        let side = grid[1].max(grid[2]);
        assert_eq!(
            flaw(|image| image.grid = grid),
            Some(ImageError::Side { side, limit: 40 })
        );
    }
    let widest = Image::new(0, 2, 40);
    let request = request(20, std::slice::from_ref(&widest), 0);
    assert_eq!(error(request, vec![widest]), None);
}

#[test]
fn pixels_fill_the_grid() {
    for found in [0, 191, 193, 96] {
        let expected = 192;
        assert_eq!(
            flaw(|image| image.bytes = found),
            Some(ImageError::Pixels {
                found: u64::from(found),
                expected
            })
        );
    }
}

#[test]
fn rows_belong_to_the_request_and_carry_no_text() {
    for row in [6, 8, 9, 12, u32::MAX] {
        assert_eq!(
            flaw(|image| image.row = row),
            Some(ImageError::Rows {
                row,
                tokens: 4,
                start: 0,
                end: 9
            })
        );
    }
    for row in [0, 1] {
        let text = flaw(|image| (image.row, image.anchor) = (row, row));
        let row = row as usize;
        assert_eq!(text, Some(ImageError::Token { row, token: 7 }));
    }
    assert_eq!(
        flaw(|image| (image.row, image.anchor) = (3, 3)),
        Some(ImageError::Token { row: 6, token: 7 })
    );
}

#[test]
fn an_image_of_the_rows_of_another_request_is_refused() {
    let (behind, good) = (Image::new(4, 2, 2), Image::new(0, 2, 2));
    // One row in front of its request.
    let before = Image::new(u32::MAX, 2, 2);
    let frame = with_images(&[
        (request(4, &[], 0), vec![behind]),
        (request(2, std::slice::from_ref(&good), 1), vec![good]),
        (request(3, &[], 2), vec![before]),
    ]);
    let mut planner = planner(LARGE);
    let found = errors(&mut planner, &frame);
    let error = |row, start, end| RequestError::Image {
        number: 0,
        problem: ImageError::Rows {
            row,
            tokens: 1,
            start,
            end,
        },
    };
    assert_eq!(found, [(0, error(4, 0, 4)), (2, error(5, 6, 9))]);
}

#[test]
fn images_stand_one_behind_the_other() {
    let touching = [Image::new(1, 4, 4), Image::new(5, 2, 2)];
    assert_eq!(error(request(9, &touching, 0), touching.to_vec()), None);
    for (row, end) in [(4, 5), (1, 5), (0, 5)] {
        let images = [Image::new(1, 4, 4), Image::new(row, 2, 2)];
        let problem = ImageError::Overlap { row, end };
        assert_eq!(
            error(request(9, &images, 0), images.to_vec()),
            Some(RequestError::Image { number: 1, problem })
        );
    }
}

#[test]
fn positions_agree() {
    assert_eq!(
        flaw(|image| image.anchor = 3),
        Some(ImageError::Anchor {
            anchor: 3,
            position: 2
        })
    );
    assert_eq!(flaw(|image| image.axes.clear()), None);
    for found in [1, 4, 11, 13] {
        assert_eq!(
            flaw(|image| image.axes.resize(found, 0)),
            Some(ImageError::Axes {
                found,
                expected: 12
            })
        );
    }
    assert_eq!(flaw(|image| image.axes[11] = 511), None);
    assert_eq!(
        flaw(|image| image.axes[11] = 512),
        Some(ImageError::Position {
            position: 512,
            limit: 512
        })
    );
}

#[test]
fn patch_positions_count_the_patches_of_the_frame() {
    let (first, second) = (Image::new(0, 2, 2), Image::new(1, 4, 2));
    let requests = [
        (request(1, std::slice::from_ref(&first), 0), vec![first]),
        (request(3, &[], 1), Vec::new()),
        (request(3, std::slice::from_ref(&second), 2), vec![second]),
    ];
    for (count, refused) in [(0, false), (24, false), (23, true), (25, true), (2, true)] {
        let mut frame = with_images(&requests);
        frame.image_patch_positions = vec![u32::MAX; count];
        let mut planner = planner(LARGE);
        let found = errors(&mut planner, &frame);
        let error = RequestError::Image {
            number: 0,
            problem: ImageError::PatchPositions,
        };
        let expected = [(0, error.clone()), (2, error)];
        assert_eq!(found, if refused { &expected[..] } else { &[] });
    }
}

#[test]
fn media_that_the_model_does_not_take_are_named() {
    let image = Image::new(0, 2, 2);
    let mut blind = with_images(&[(request(1, std::slice::from_ref(&image), 0), vec![image])]);
    let media = |medium| vec![(0, RequestError::Media { medium, spans: 1 })];
    assert_eq!(
        errors(&mut Planner::new(LARGE, 0), &blind),
        media(Modality::Image)
    );
    assert_eq!(errors(&mut planner(LARGE), &blind), []);
    (blind.audio_indptr, blind.audio_anchor_rows) = (vec![0, 1], vec![0]);
    assert_eq!(errors(&mut planner(LARGE), &blind), media(Modality::Audio));
}

type Edit = fn(&mut ForwardRequest);

type Change = fn(&mut VisionConfig);

#[test]
fn arrays_that_contradict_each_other_refuse_the_frame() {
    let edits: [(&str, Edit); 8] = [
        ("image_grids", |f| f.image_grids.push(1)),
        ("image_grids", |f| f.image_grids.truncate(5)),
        ("image_anchor_positions", |f| {
            f.image_anchor_positions.push(0);
        }),
        ("image_anchor_rows", |f| f.image_anchor_rows.truncate(1)),
        ("image_pixel_indptr", |f| f.image_pixel_indptr[1] = 999),
        ("image_pixel_indptr", |f| f.image_pixels.push(0)),
        ("image_mrope_indptr", |f| f.image_mrope_indptr.truncate(1)),
        ("image_mrope_indptr", |f| f.image_mrope_indptr[0] = 1),
    ];
    for (name, edit) in edits {
        let images = [Image::new(0, 2, 2), Image::new(1, 2, 2)];
        let mut frame = with_images(&[(request(3, &images, 0), images.to_vec())]);
        edit(&mut frame);
        let error = planner(LARGE).plan(DRIVER, Encoded::new(DRIVER, &frame).forward());
        let found = match error.expect_err(name) {
            FrameError::Length { array, .. }
            | FrameError::IndptrLength { array, .. }
            | FrameError::IndptrOrder { array, .. } => array,
            other @ (FrameError::SamplerPartition { .. } | FrameError::Extension { .. }) => {
                panic!("{other}")
            }
        };
        assert!(found == name || found == "image_indptr", "{found}");
    }
}

#[test]
fn an_encoder_of_nothing_is_refused() {
    let zero = |change: Change| {
        let mut vision = VISION;
        change(&mut vision);
        vision.check()
    };
    assert_eq!(zero(|_| ()), Ok(()));
    let names: [(&str, Change); 3] = [
        ("patch_values", |vision| vision.patch_values = 0),
        ("merge_size", |vision| vision.merge_size = 0),
        ("max_side", |vision| vision.max_side = 0),
    ];
    for (name, change) in names {
        assert_eq!(zero(change), Err(LimitError::Zero(name)));
    }
}

#[test]
fn input_embeds_have_the_models_size() {
    let flaw = |planner: Planner, change: fn(&mut Image)| {
        let (request, mut image) = embeds();
        change(&mut image);
        let mut planner = planner;
        let found = errors(&mut planner, &with_images(&[(request, vec![image])]));
        match found.as_slice() {
            [] => None,
            [(0, RequestError::Image { problem, .. })] => Some(*problem),
            other => panic!("{other:?}"),
        }
    };
    let text = || Planner::new(LARGE, 0).with_input_embeds(3);
    let wrong = |tokens, width| ImageError::Embeds {
        tokens,
        width,
        size: 3,
    };
    assert_eq!(flaw(text(), |_| ()), None);
    assert_eq!(
        flaw(text(), |image| image.grid = [0, 3, 4]),
        Some(wrong(3, 4))
    );
    assert_eq!(
        flaw(text(), |image| image.grid = [0, 0, 3]),
        Some(wrong(0, 3))
    );
    assert_eq!(
        flaw(text(), |image| image.bytes = 44),
        Some(ImageError::Pixels {
            found: 44,
            expected: 48
        })
    );
    assert_eq!(
        flaw(text(), |image| image.grid = [1, 4, 4]),
        Some(ImageError::NoVision)
    );
    let problem = flaw(planner(LARGE), |_| ());
    assert!(matches!(problem, Some(ImageError::Grid { time: 0, .. })));
}
