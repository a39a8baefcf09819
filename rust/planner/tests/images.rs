//! Image spans: what is staged for those that are served, and why others are not.

use std::ops::Range;
use std::time::Duration;

use pie_planner::{
    ComputedPlan, DraftOptions, FieldId, ForwardTimings, Limits, NgramConfig, Outputs, Pass,
    PassImages, Planner, StagedGroup, StagedPass, VisionConfig,
};
use pie_wire::ForwardRequest;

use crate::common::answer::{Answer, answer};
use crate::common::builder::{Encoded, GREEDY, LARGE, Req, frame};
use crate::common::device::DRIVER;
use crate::common::engine;
use crate::common::engine::{memory, put};

pub(crate) const VISION: VisionConfig = VisionConfig {
    patch_values: 3,
    merge_size: 2,
    max_side: 40,
};

pub(crate) const PATCH_BYTES: u32 = 12;

/// An image; every field may be made wrong.
#[derive(Debug, Clone)]
pub(crate) struct Image {
    /// Counted from its request's first row.
    pub(crate) row: u32,
    pub(crate) grid: [u32; 3],
    pub(crate) bytes: u32,
    pub(crate) anchor: u32,
    pub(crate) axes: Vec<u32>,
}

impl Image {
    /// A sound image from `row` on of a request whose positions start at 0; its axes differ in their numbers.
    pub(crate) fn new(row: u32, height: u32, width: u32) -> Self {
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
pub(crate) fn request(count: u32, images: &[Image], page: u32) -> Req {
    let mut tokens = vec![7; count as usize];
    for image in images {
        let rows = image.row as usize..(image.row + image.grid[1] * image.grid[2] / 4) as usize;
        tokens[rows].fill(0);
    }
    let pages: Vec<u32> = (page..).take(count.div_ceil(16) as usize).collect();
    Req::new(16, 0, &tokens, &pages)
}

/// The frame of requests with images.
pub(crate) fn with_images(requests: &[(Req, Vec<Image>)]) -> ForwardRequest {
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

pub(crate) fn planner(limits: Limits) -> Planner {
    Planner::new(limits, 0).with_vision(VISION)
}

/// A staged pass, its images, and its tokens and requests as the engine gets them.
pub(crate) struct Staged {
    pub(crate) pass: Pass,
    pub(crate) images: Option<PassImages>,
    pub(crate) tokens: Vec<i64>,
}

/// Plans a frame and stages its passes.
pub(crate) fn staged(planner: &mut Planner, frame: &ForwardRequest) -> Vec<Staged> {
    computed(planner, frame, 1).0
}

/// Plans a frame and stages its passes, and answers each slot with a token.
pub(crate) fn computed(
    planner: &mut Planner,
    frame: &ForwardRequest,
    token: i64,
) -> (Vec<Staged>, ComputedPlan) {
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
    let mut planner = planner(LARGE);
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
    let passes = staged(&mut planner(LARGE), &frame);
    let images = passes[0].images.as_ref().expect("an image");
    assert_eq!(images.positions, [0, 1, 2, 3].repeat(3));
}

#[test]
fn passes_cut_images() {
    let limits = Limits {
        chunk_tokens: 4,
        ..LARGE
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
        ..LARGE
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
        staged(&mut planner(LARGE), &frame)[0].pass.decode
    };
    assert!(alone(Vec::new()));
    assert!(!alone(vec![image]));
}

#[test]
fn numbers_never_come_again() {
    let mut planner = planner(LARGE);
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

/// Answers a frame of one request with a token; returns the drafts after it.
fn drafts_behind(planner: &mut Planner, frame: &ForwardRequest, token: i64) -> Vec<u32> {
    let (_, mut computed) = computed(planner, frame, token);
    let mut reply = vec![0_u64; 1 << 10];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut reply);
    let length = planner.reply(&mut computed, ForwardTimings::default(), bytes);
    let length = length.expect("it fits");
    let time = Duration::from_millis(1);
    planner.record_step_time(&mut computed, time, time);
    match answer(&bytes[..length]) {
        Answer::Fast(_) => Vec::new(),
        Answer::Archive(response) => response.spec_tokens,
    }
}

#[test]
fn images_are_no_tokens_to_draft() {
    let mut planner = planner(LARGE);
    let options = DraftOptions {
        ngram: Some(NgramConfig::default()),
        num_drafts: 4,
        graph_sizes: vec![1, 8],
        model_sizes: Vec::new(),
        host_pages: 0,
    };
    planner.enable_drafts(&options).expect("right options");
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
        // Another context continues in its pages, and asks.
        let mut again = frame(&[Req::new(16, 7, &[7], &[page]).sample(0, GREEDY)]);
        again.context_ids = vec![id + 10];
        again.output_spec_flags = vec![true];
        drafts_behind(&mut planner, &again, 7)
    };
    assert!(asked(1, true).is_empty());
    assert_eq!(asked(2, false), [0, 0, 8, 8]);
}

/// Embeddings of tokens `1..5` of a request of 6, in rows of three numbers.
pub(crate) fn embeds() -> (Req, Image) {
    let image = Image {
        row: 1,
        grid: [0, 4, 3],
        bytes: 48,
        anchor: 1,
        axes: Vec::new(),
    };
    (Req::new(16, 0, &[7, 0, 0, 0, 0, 7], &[3]), image)
}

#[test]
fn input_embeds_are_spans_of_any_model() {
    let (request, image) = embeds();
    let frame = with_images(&[(request, vec![image])]);
    let text = Planner::new(LARGE, 0).with_input_embeds(3);
    let vision = planner(LARGE).with_input_embeds(3);
    for mut planner in [text, vision] {
        let passes = staged(&mut planner, &frame);
        let [pass] = &passes[..] else {
            panic!("{} passes", passes.len());
        };
        let placeholder = i64::from(LARGE.vocab_size);
        assert_eq!(
            pass.tokens[..6],
            [7, placeholder, placeholder, placeholder, placeholder, 7]
        );
        let images = pass.images.as_ref().unwrap();
        assert_eq!(images.spans.len(), 1);
        assert_eq!(images.spans[0].kv, 1..5);
        assert_eq!(images.spans[0].grid, [0, 4, 3]);
        assert_eq!(images.spans[0].pixels, 0..48);
        assert_eq!(images.positions[..6], [0, 1, 2, 3, 4, 5]);
    }
}
