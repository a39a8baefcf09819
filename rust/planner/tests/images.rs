//! Image spans: what is staged for those that are served, and why others are not.

use std::ops::Range;
use std::time::Duration;

use crate::common::builder::{Encoded, GREEDY, ROOMY, Req, frame};
use crate::common::device::{Answer, DRIVER, answer};
use crate::common::engine::{self, Engine, memory, put};
use pie_planner::{
    Computed, DraftOptions, FieldId, FrameError, ImageError, LimitError, Limits, Medium,
    NgramConfig, Outputs, Pass, PassImages, Plan, Planner, Probes, RequestFault, StagedGroup,
    StagedPass, Vision,
};
use pie_wire::{ArchivedForwardRequest, ForwardRequest};
use proptest::collection::vec;
use proptest::prelude::*;

const VISION: Vision = Vision {
    patch_values: 3,
    merge_size: 2,
    max_side: 40,
};
const PATCH_BYTES: u32 = 12;

/// An image; every field may be made wrong.
#[derive(Debug, Clone)]
struct Image {
    /// Counted from its request's first row.
    row: u32,
    grid: [u32; 3],
    bytes: u32,
    anchor: u32,
    axes: Vec<u32>,
}

impl Image {
    /// A sound image from `row` on of a request whose positions start at 0; its axes differ in their numbers.
    fn new(row: u32, height: u32, width: u32) -> Self {
        Self {
            row,
            grid: [1, height, width],
            bytes: height * width * PATCH_BYTES,
            anchor: row,
            axes: (0..3 * height * width / 4).map(|axis| 100 + axis).collect(),
        }
    }
}

/// A request without a prefix: token 7 and, where images are, token 0.
fn request(count: u32, images: &[Image], page: u32) -> Req {
    let mut tokens = vec![7; count as usize];
    for image in images {
        let rows = image.row as usize..(image.row + image.grid[1] * image.grid[2] / 4) as usize;
        tokens[rows].fill(0);
    }
    let pages: Vec<u32> = (page..).take(count.div_ceil(16) as usize).collect();
    Req::new(16, 0, &tokens, &pages)
}

/// The frame of requests with images.
fn with_images(requests: &[(Req, Vec<Image>)]) -> ForwardRequest {
    let plain: Vec<Req> = requests.iter().map(|(req, _)| req.clone()).collect();
    let mut frame = frame(&plain);
    frame.image_indptr = vec![0];
    frame.image_pixel_indptr = vec![0];
    frame.image_mrope_indptr = vec![0];
    for (index, (_, images)) in requests.iter().enumerate() {
        for image in images {
            let row = frame.qo_indptr[index].wrapping_add(image.row);
            frame.image_anchor_rows.push(row);
            frame.image_anchor_positions.push(image.anchor);
            frame.image_grids.extend(image.grid);
            let bytes = frame.image_pixels.len() + image.bytes as usize;
            frame.image_pixels.resize(bytes, index as u8);
            frame.image_pixel_indptr.push(bytes as u32);
            frame.image_mrope_positions.extend(&image.axes);
            let axes = frame.image_mrope_positions.len() as u32;
            frame.image_mrope_indptr.push(axes);
        }
        frame
            .image_indptr
            .push(frame.image_anchor_rows.len() as u32);
    }
    frame
}

fn planner(limits: Limits) -> Planner {
    Planner::new(limits, 0).with_vision(VISION)
}

/// A staged pass, its images, and its tokens and requests as the engine gets them.
struct Staged {
    pass: Pass,
    images: Option<PassImages>,
    tokens: Vec<i64>,
}

/// Plans a frame and stages its passes.
fn staged(planner: &mut Planner, frame: &ForwardRequest) -> Vec<Staged> {
    computed(planner, frame, 1).0
}

/// Plans a frame and stages its passes, and answers each slot with a token.
fn computed(planner: &mut Planner, frame: &ForwardRequest, token: i64) -> (Vec<Staged>, Computed) {
    let encoded = Encoded::new(DRIVER, frame);
    let plan = planner.plan(DRIVER, encoded.forward());
    let plan = plan.expect("a sound frame");
    let mut block = memory(planner.layout());
    let block: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
    let ids = planner.layout().field(FieldId::InputIds).offset;
    let mut passes = Vec::new();
    let see = |staged: &StagedPass, block: &[u8]| {
        let pass = *staged.pass();
        passes.push(Staged {
            pass,
            images: staged.images(),
            tokens: bytemuck::cast_slice(&block[ids..][..8 * pass.tokens]).to_vec(),
        });
    };
    let answer = |group: StagedGroup, _: &[u8]| {
        let outputs = Outputs {
            tokens: &vec![token; group.group().len()],
            ..Outputs::default()
        };
        put(group, &outputs)
    };
    let computed = engine::run(planner, plan, block, see, answer);
    (passes, computed)
}

/// The faults of a frame.
fn faults(planner: &mut Planner, frame: &ForwardRequest) -> Vec<(usize, RequestFault)> {
    computed(planner, frame, 1).1.faults().to_vec()
}

/// The fault of the first of three requests; the others, one with an image, must be served in any case.
fn fault(first: Req, images: Vec<Image>) -> Option<RequestFault> {
    let other = Image::new(1, 2, 4);
    let frame = with_images(&[
        (first, images),
        (request(4, std::slice::from_ref(&other), 30), vec![other]),
        (request(3, &[], 31), Vec::new()),
    ]);
    let mut planner = planner(ROOMY);
    let (passes, computed) = computed(&mut planner, &frame, 1);
    let images = passes[0].images.as_ref().expect("the second request's");
    let last = images.spans.last().expect("at least one");
    assert_eq!((last.kv.clone(), last.grid), (1..3, [1, 2, 4]));
    let [] = computed.faults() else {
        let [(0, fault)] = computed.faults() else {
            panic!("faults of others: {:?}", computed.faults());
        };
        assert_eq!(images.spans.len(), 1);
        assert!(!fault.keeps_kv());
        return Some(fault.clone());
    };
    None
}

/// The fault of a request of 9 tokens with an image of 4 rows from row 2 on, after a change of the image.
fn flaw(change: impl FnOnce(&mut Image)) -> Option<ImageError> {
    let mut image = Image::new(2, 4, 4);
    let request = request(9, std::slice::from_ref(&image), 0);
    change(&mut image);
    match fault(request, vec![image]) {
        None => None,
        Some(RequestFault::Image { number: 0, problem }) => Some(problem),
        Some(other) => panic!("{other}"),
    }
}

#[test]
fn images_are_staged_with_their_rows() {
    let (first, second) = (Image::new(1, 2, 4), Image::new(4, 2, 2));
    let third = Image::new(0, 4, 2);
    let frame = with_images(&[
        (request(3, &[], 0), Vec::new()),
        (
            request(6, &[first.clone(), second.clone()], 1),
            vec![first, second],
        ),
        (request(2, std::slice::from_ref(&third), 2), vec![third]),
    ]);
    let mut planner = planner(ROOMY);
    let [all] = &staged(&mut planner, &frame)[..] else {
        panic!("one pass");
    };
    let (text, hole) = (7, 1000);
    assert_eq!(
        all.tokens,
        [
            text, text, text, text, hole, hole, text, hole, text, hole, hole
        ]
    );
    let images = all.images.as_ref().expect("three images");
    let seen: Vec<_> = images
        .spans
        .iter()
        .map(|span| {
            (
                span.request,
                span.kv.clone(),
                span.grid,
                span.pixels.clone(),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            (1, 1..3, [1, 2, 4], 0..96),
            (1, 4..5, [1, 2, 2], 96..144),
            (2, 0..2, [1, 4, 2], 144..240),
        ]
    );
    assert!(images.spans.iter().all(|span| !span.continues));
    assert_eq!(
        images.positions.chunks(11).collect::<Vec<_>>(),
        [
            [0, 1, 2, 0, 100, 103, 3, 100, 5, 100, 103],
            [0, 1, 2, 0, 101, 104, 3, 101, 5, 101, 104],
            [0, 1, 2, 0, 102, 105, 3, 102, 5, 102, 105],
        ]
    );
}

#[test]
fn an_image_without_axes_has_its_rows_positions() {
    let mut image = Image::new(1, 2, 4);
    image.axes.clear();
    let frame = with_images(&[(request(4, std::slice::from_ref(&image), 0), vec![image])]);
    let passes = staged(&mut planner(ROOMY), &frame);
    let images = passes[0].images.as_ref().expect("an image");
    assert_eq!(images.positions, [0, 1, 2, 3].repeat(3));
}

#[test]
fn passes_cut_images() {
    let limits = Limits {
        chunk_tokens: 4,
        ..ROOMY
    };
    let (long, short) = (Image::new(2, 2, 14), Image::new(9, 2, 2));
    let mut first = request(10, &[long.clone(), short.clone()], 0);
    // 16 tokens were stored before.
    first.pages = vec![8, 9];
    first.last_page_len = 10;
    let frame = with_images(&[(first, vec![long, short])]);
    let passes = staged(&mut planner(limits), &frame);
    let seen: Vec<Vec<(u64, Range<usize>, bool)>> = passes
        .iter()
        .map(|staged| {
            let spans = &staged.images.as_ref().expect("images").spans;
            spans
                .iter()
                .map(|span| (span.number, span.kv.clone(), span.continues))
                .collect()
        })
        .collect();
    // KV indices count the 16 stored tokens.
    assert_eq!(
        seen,
        [
            vec![(0, 18..25, true)],
            vec![(0, 18..25, true)],
            vec![(0, 18..25, false), (1, 25..26, false)],
        ]
    );
    let axes = |pass: usize| {
        passes[pass]
            .images
            .as_ref()
            .expect("images")
            .positions
            .clone()
    };
    assert_eq!(axes(0)[..4], [0, 1, 100, 103]);
    assert_eq!(axes(1)[4..8], [107, 110, 113, 116]);
    assert_eq!(axes(2)[4..6], [120, 102]);
}

#[test]
fn a_pass_without_image_rows_has_no_images() {
    let limits = Limits {
        chunk_tokens: 4,
        ..ROOMY
    };
    let image = Image::new(4, 2, 8);
    let frame = with_images(&[(request(12, std::slice::from_ref(&image), 0), vec![image])]);
    let passes = staged(&mut planner(limits), &frame);
    let images: Vec<bool> = passes.iter().map(|pass| pass.images.is_some()).collect();
    assert_eq!(images, [false, true, false]);
}

#[test]
fn a_row_of_an_image_is_no_decode() {
    let image = Image::new(0, 2, 2);
    let alone = |images: Vec<Image>| {
        let frame = with_images(&[
            (request(1, &[], 0), Vec::new()),
            (request(1, &images, 1), images),
        ]);
        staged(&mut planner(ROOMY), &frame)[0].pass.decode
    };
    assert!(alone(Vec::new()));
    assert!(!alone(vec![image]));
}

#[test]
fn numbers_never_come_again() {
    let mut planner = planner(ROOMY);
    let mut numbers = Vec::new();
    for _ in 0..3 {
        let images = [Image::new(0, 2, 2), Image::new(1, 2, 2)];
        let frame = with_images(&[(request(2, &images, 0), images.to_vec())]);
        let (passes, frame) = computed(&mut planner, &frame, 1);
        assert!(frame.has_images());
        planner.recycle(frame);
        let spans = &passes[0].images.as_ref().expect("images").spans;
        numbers.extend(spans.iter().map(|span| span.number));
        let (_, text) = computed(&mut planner, &frame_of_text(), 1);
        assert!(!text.has_images());
        planner.recycle(text);
    }
    assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
}

fn frame_of_text() -> ForwardRequest {
    with_images(&[(request(2, &[], 0), Vec::new())])
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
    assert_eq!(fault(request, vec![widest]), None);
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
    let mut planner = planner(ROOMY);
    let found = faults(&mut planner, &frame);
    let fault = |row, start, end| RequestFault::Image {
        number: 0,
        problem: ImageError::Rows {
            row,
            tokens: 1,
            start,
            end,
        },
    };
    assert_eq!(found, [(0, fault(4, 0, 4)), (2, fault(5, 6, 9))]);
}

#[test]
fn images_stand_one_behind_the_other() {
    let touching = [Image::new(1, 4, 4), Image::new(5, 2, 2)];
    assert_eq!(fault(request(9, &touching, 0), touching.to_vec()), None);
    for (row, end) in [(4, 5), (1, 5), (0, 5)] {
        let images = [Image::new(1, 4, 4), Image::new(row, 2, 2)];
        let problem = ImageError::Overlap { row, end };
        assert_eq!(
            fault(request(9, &images, 0), images.to_vec()),
            Some(RequestFault::Image { number: 1, problem })
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
        let mut planner = planner(ROOMY);
        let found = faults(&mut planner, &frame);
        let fault = RequestFault::Image {
            number: 0,
            problem: ImageError::PatchPositions,
        };
        let expected = [(0, fault.clone()), (2, fault)];
        assert_eq!(found, if refused { &expected[..] } else { &[] });
    }
}

#[test]
fn media_that_the_model_does_not_take_are_named() {
    let image = Image::new(0, 2, 2);
    let mut blind = with_images(&[(request(1, std::slice::from_ref(&image), 0), vec![image])]);
    let media = |medium| vec![(0, RequestFault::Media { medium, spans: 1 })];
    assert_eq!(
        faults(&mut Planner::new(ROOMY, 0), &blind),
        media(Medium::Image)
    );
    assert_eq!(faults(&mut planner(ROOMY), &blind), []);
    (blind.audio_indptr, blind.audio_anchor_rows) = (vec![0, 1], vec![0]);
    assert_eq!(faults(&mut planner(ROOMY), &blind), media(Medium::Audio));
}

type Edit = fn(&mut ForwardRequest);
type Change = fn(&mut Vision);

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
        let error = planner(ROOMY).plan(DRIVER, Encoded::new(DRIVER, &frame).forward());
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

fn served(frame: &ForwardRequest, index: usize) -> bool {
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
        let mut planner = planner(Limits { chunk_tokens, ..ROOMY });
        if let Some(request) = encoded.try_forward()
            && let Ok(plan) = planner.plan(DRIVER, request)
        {
            check_passes(&mut planner, plan, request);
        }
    }

    /// A request is emptied exactly when one of its images is unsound.
    #[test]
    fn only_sound_images_are_served(frame in frames()) {
        let mut planner = planner(ROOMY);
        let encoded = Encoded::new(DRIVER, &frame);
        let planned = planner.plan(DRIVER, encoded.forward());
        let indptr = &frame.image_pixel_indptr;
        let cut = indptr.is_sorted()
            && indptr[0] == 0
            && indptr.last().is_some_and(|&end| end as usize == frame.image_pixels.len());
        let images = !frame.image_anchor_rows.is_empty();
        prop_assert_eq!(planned.is_ok(), cut || !images);
        if let Ok(plan) = planned && cut {
            let emptied: Vec<usize> = plan.faults().iter().map(|(index, _)| *index).collect();
            let expected: Vec<usize> = (0..frame.qo_indptr.len() - 1)
                .filter(|&index| !served(&frame, index))
                .collect();
            prop_assert_eq!(emptied, expected);
        }
    }
}

/// Answers a frame of one request with a token; returns the drafts after it.
fn drafts_behind(planner: &mut Planner, frame: &ForwardRequest, token: i64) -> Vec<u32> {
    let (_, mut computed) = computed(planner, frame, token);
    let mut reply = vec![0_u64; 1 << 10];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut reply);
    let length = planner.reply(&mut computed, Probes::default(), bytes);
    let length = length.expect("it fits");
    let time = Duration::from_millis(1);
    planner.step_took(&mut computed, time, time);
    match answer(&bytes[..length]) {
        Answer::Fast(_) => Vec::new(),
        Answer::Archive(response) => response.spec_tokens,
    }
}

#[test]
fn images_are_no_tokens_to_draft() {
    let mut planner = planner(ROOMY);
    let options = DraftOptions {
        ngram: NgramConfig::default(),
        num_drafts: 4,
        rungs: vec![1, 8],
        host_pages: 0,
    };
    planner.draft(&options).expect("right options");
    // What a step costs is known from here on.
    let first = Req::new(16, 0, &[3], &[9]).sample(0, GREEDY);
    drafts_behind(&mut planner, &frame(&[first]), 3);
    let mut asked = |id: u64, image: bool| {
        let page = id as u32;
        let prompt = Req::new(16, 0, &[7, 7, 0, 0, 8, 8, 8], &[page]).sample(6, GREEDY);
        let images = if image {
            vec![Image::new(2, 2, 4)]
        } else {
            Vec::new()
        };
        drafts_behind(&mut planner, &with_images(&[(prompt, images)]), 7);
        // Another context goes on in its pages, and asks.
        let mut again = frame(&[Req::new(16, 7, &[7], &[page]).sample(0, GREEDY)]);
        again.context_ids = vec![id + 10];
        again.output_spec_flags = vec![true];
        drafts_behind(&mut planner, &again, 7)
    };
    assert!(asked(1, true).is_empty());
    assert_eq!(asked(2, false), [0, 0, 8, 8]);
}
