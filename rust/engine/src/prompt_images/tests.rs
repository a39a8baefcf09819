//! Images of prompts against a list of every token's positions.

use super::*;
use crate::frame::{FrameBuilder, FrameRow};
use crate::sampling::RowParams;
use pie_scheduler::NewRequest;
use pie_wire::{ForwardRequest, Payload, Sampler};
use proptest::prelude::*;

const PATCH: usize = 8;

/// What is in a prompt: so many tokens of text, or an image of so many rows and columns.
#[derive(Debug, Clone, Copy)]
enum Part {
    Text(u32),
    Image(u32, u32),
}

/// A prompt as a list of tokens, with the three positions of each, and where its images are.
#[derive(Debug, Default)]
struct Naive {
    positions: Vec<[u32; 3]>,
    images: Vec<(u32, [u32; 2])>,
    next: u32,
}

impl Naive {
    fn of(parts: &[Part]) -> Self {
        let mut naive = Self::default();
        for &part in parts {
            match part {
                Part::Text(tokens) => {
                    let text = naive.next..naive.next + tokens;
                    naive.positions.extend(text.map(|at| [at; 3]));
                    naive.next += tokens;
                }
                Part::Image(height, width) => {
                    let start = naive.positions.len() as u32;
                    naive.images.push((start, [height, width]));
                    for at in 0..height * width {
                        let (row, column) = (at / width, at % width);
                        let first = naive.next;
                        naive.positions.push([first, first + row, first + column]);
                    }
                    naive.next += height.max(width);
                }
            }
        }
        naive
    }

    fn images(&self) -> PromptImages {
        let image = |&(start, [height, width]): &(u32, [u32; 2])| {
            let (tokens, grid) = (height * width, [1, 2 * height, 2 * width]);
            let indices = start as usize..(start + tokens) as usize;
            let axes = self.positions[indices].as_flattened().into();
            let pixels = vec![start as u8; PATCH * 4 * tokens as usize].into();
            PromptImage::new(start, tokens, grid, pixels, axes).unwrap()
        };
        PromptImages::new(self.images.iter().map(image).collect()).unwrap()
    }

    /// Whether a step may end before this token: no image is cut.
    fn may_cut(&self, at: u32) -> bool {
        self.images
            .iter()
            .all(|&(start, [height, width])| at <= start || at >= start + height * width)
    }
}

fn decoded(bytes: &[u8]) -> ForwardRequest {
    let mut words = vec![0u64; bytes.len().div_ceil(8)];
    let aligned = as_bytes(&mut words);
    aligned[..bytes.len()].copy_from_slice(bytes);
    match pie_wire::decode_request(&aligned[..bytes.len()])
        .unwrap()
        .payload
    {
        Payload::Forward(body) => body,
        other => panic!("{other:?}"),
    }
}

/// An archive is read in place and must start at a multiple of 8.
fn as_bytes(words: &mut [u64]) -> &mut [u8] {
    bytemuck::cast_slice_mut(words)
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    let part = prop_oneof![
        (0..6u32).prop_map(Part::Text),
        (1..5u32, 1..5u32).prop_map(|(height, width)| Part::Image(height, width)),
    ];
    prop::collection::vec(part, 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// A prompt in steps, and the token after it: every row gets its positions, every image its pixels, once.
    #[test]
    fn frames_have_what_a_list_of_positions_says(parts in parts(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4)) {
        let naive = Naive::of(&parts);
        prop_assume!(!naive.positions.is_empty());
        let length = naive.positions.len() as u32;
        let images = naive.images();
        let mut prompt: Vec<u32> = (1..=length).collect();
        images.write_pad_values(&mut prompt);
        let mut ends: Vec<u32> = cuts.iter().map(|cut| cut.index(length as usize) as u32).collect();
        ends.retain(|&end| end > 0 && naive.may_cut(end));
        ends.push(length);
        ends.push(length + 1);
        ends.sort_unstable();
        ends.dedup();
        prompt.push(7);
        let sampler = Sampler::RawLogits;
        let mut builder = FrameBuilder::new(16);
        let pages: Vec<u32> = (0..16).collect();
        let mut start = 0;
        let mut seen = 0;
        for end in ends {
            let row = FrameRow {
                tokens: &prompt[start as usize..end as usize],
                start,
                pages: &pages[..end.div_ceil(16) as usize],
                sampler: Some(&sampler),
                images: Some(&images),
                ..FrameRow::EMPTY
            };
            let text = FrameRow { images: None, tokens: &[3, 4], start: 5, pages: &[9], ..row };
            let mut buffer = vec![0; 1 << 16];
            let meta = builder.build([text, row].into_iter());
            prop_assert_eq!(meta.expected().count(), 2);
            let length = builder.encode(&mut buffer).unwrap();
            let body = decoded(&buffer[..length]);
            let images: Vec<_> = naive.images.iter().filter(|(at, _)| (start..end).contains(at)).collect();
            prop_assert_eq!(&body.image_indptr, &[0, 0, images.len() as u32]);
            prop_assert_eq!(&body.position_ids[..2], &[5, 6]);
            prop_assert_eq!(body.kv_last_page_lens[1], (end - 1) % 16 + 1);
            let at = |row: usize| start as usize + row - 2;
            let is_image = |row: usize| prompt[at(row)] >= FIRST_PAD_VALUE;
            for row in 2..body.position_ids.len() {
                let expected = naive.positions.get(at(row)).map_or(naive.next, |axes| axes[0]);
                if is_image(row) {
                    prop_assert_eq!(body.token_ids[row], 0);
                } else {
                    prop_assert_eq!(body.position_ids[row], expected);
                    prop_assert_eq!(body.token_ids[row], prompt[at(row)]);
                }
            }
            for (number, &&(at, [height, width])) in images.iter().enumerate() {
                let row = (at - start) as usize + 2;
                let tokens = (height * width) as usize;
                prop_assert_eq!(body.image_anchor_rows[number] as usize, row);
                prop_assert_eq!(body.image_anchor_positions[number], naive.positions[at as usize][0]);
                prop_assert_eq!(body.position_ids[row], body.image_anchor_positions[number]);
                prop_assert_eq!(&body.image_grids[3 * number..3 * number + 3], &[1, 2 * height, 2 * width]);
                let range = |indptr: &[u32]| indptr[number] as usize..indptr[number + 1] as usize;
                let pixels = &body.image_pixels[range(&body.image_pixel_indptr)];
                prop_assert_eq!(pixels, &vec![at as u8; PATCH * 4 * tokens][..]);
                let axes = &body.image_mrope_positions[range(&body.image_mrope_indptr)];
                prop_assert_eq!(axes, naive.positions[at as usize..at as usize + tokens].as_flattened());
                seen += 1;
            }
            start = end;
        }
        prop_assert_eq!(seen, naive.images.len());
    }
}

fn image(start: u32, tokens: u32, grid: [u32; 3], pixel: u8, axes: &[u32]) -> PromptImage {
    let pixels = vec![pixel; 64].into();
    PromptImage::new(start, tokens, grid, pixels, axes.into()).unwrap()
}

#[test]
fn names_say_what_an_image_shows_and_not_where() {
    let names = |start, grid, pixel| {
        image(start, 24, grid, pixel, &[])
            .pad_values()
            .collect::<Vec<_>>()
    };
    let first = names(3, [1, 8, 12], 1);
    assert_eq!(first, names(70, [1, 8, 12], 1));
    // One colour in another shape has the same pixels.
    for other in [names(3, [1, 12, 8], 1), names(3, [1, 8, 12], 2)] {
        assert!(first.iter().zip(&other).all(|(name, other)| name != other));
    }
    assert!(first.iter().all(|&value| value >= FIRST_PAD_VALUE));
    let mut sorted = first.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), 24, "no part of an image is like another");
}

#[test]
fn images_that_cannot_be_are_refused() {
    let empty = PromptImage::new(0, 0, [1, 2, 2], [].into(), [].into());
    assert_eq!(empty.unwrap_err(), PromptImageError::Empty);
    let axes = PromptImage::new(0, 2, [1, 2, 4], [].into(), [1, 2, 3].into());
    assert_eq!(
        axes.unwrap_err().to_string(),
        "it has 3 rotary positions, its 2 tokens need 6, or none"
    );
    let plain = |start| image(start, 2, [1, 2, 4], 0, &[]);
    let over = PromptImages::new(vec![plain(4), plain(5)]);
    assert_eq!(
        over.unwrap_err(),
        (1, PromptImageError::Overlap { start: 5, free: 6 })
    );
    let far = PromptImages::new(vec![plain(u32::MAX)]);
    assert!(matches!(far, Err((0, PromptImageError::Overlap { .. }))));
    for axes in [[4, 4, 4, 4, 4, 5], [3, 3, 3, 3, 3, 5]] {
        let wrong = PromptImages::new(vec![image(3, 2, [1, 2, 4], 0, &axes)]);
        assert!(matches!(
            wrong,
            Err((0, PromptImageError::Positions { .. }))
        ));
    }
}

#[test]
fn a_request_takes_its_images_along() {
    let sampler = Sampler::RawLogits;
    let mut request = NewRequest::new(0, vec![5; 8], RowParams::from(sampler), 1);
    let images = PromptImages::new(vec![image(2, 3, [1, 2, 6], 0, &[])]).unwrap();
    assert_eq!(images.tokens(), 3);
    RowParams::attach(images, &mut request);
    let span = Image {
        start: 2,
        tokens: 3,
        bytes: 64,
    };
    assert_eq!(*request.images, [span]);
    assert_eq!((request.prompt[1], request.prompt[5]), (5, 5));
    assert!(
        request.prompt[2..5]
            .iter()
            .all(|&value| value >= FIRST_PAD_VALUE)
    );
    // A prompt that was cut keeps what it has.
    let mut short = NewRequest::new(0, vec![5; 4], RowParams::from(Sampler::RawLogits), 1);
    let images = PromptImages::new(vec![image(2, 3, [1, 2, 6], 0, &[])]).unwrap();
    RowParams::attach(images, &mut short);
    assert_eq!(short.prompt, [5; 4]);
}

#[test]
fn embeddings_come_in_blocks() {
    let mut numbers: Vec<f32> = (0..37 * 4).map(|number| (number % 64) as f32).collect();
    let embeds = PromptImages::of_embeds(&numbers, 4).unwrap();
    assert!(embeds.are_embeds() && !embeds.is_empty());
    assert_eq!((embeds.tokens(), embeds.bytes()), (37, 37 * 16));
    let spans: Vec<_> = embeds
        .spans()
        .iter()
        .map(|span| (span.start, span.tokens))
        .collect();
    assert_eq!(spans, [(0, 16), (16, 16), (32, 5)]);
    let first = embeds.within(&(0..1))[0].clone();
    assert_eq!(first.grid(), [0, 16, 4]);
    assert_eq!(first.pixels()[4..8], 1.0_f32.to_le_bytes());
    let pads = |embeds: &PromptImages| {
        let mut prompt = vec![0; 37];
        embeds.write_pad_values(&mut prompt);
        prompt
    };
    let before = pads(&embeds);
    assert_eq!(before[..16], before[16..32], "equal blocks");
    numbers[20 * 4] += 1.0;
    let after = pads(&PromptImages::of_embeds(&numbers, 4).unwrap());
    assert_eq!(before[..16], after[..16]);
    assert!((16..32).all(|at| before[at] != after[at]));
    assert_eq!(before[32..], after[32..]);
    assert!(before.iter().all(|&pad| pad >= FIRST_PAD_VALUE));
    let image = image(0, 2, [1, 2, 4], 0, &[]);
    assert!(!PromptImages::new(vec![image]).unwrap().are_embeds());
}

#[test]
fn embeddings_that_cannot_be_are_refused() {
    let empty = PromptImages::of_embeds(&[], 4).unwrap_err();
    assert_eq!(empty, InputEmbedsError::Empty { size: 4 });
    let cut = PromptImages::of_embeds(&[0.0; 7], 4).unwrap_err();
    let expected = InputEmbedsError::Size {
        index: 1,
        found: 3,
        size: 4,
    };
    assert_eq!(cut, expected);
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut numbers = [0.0; 8];
        numbers[6] = value;
        let error = PromptImages::of_embeds(&numbers, 4).unwrap_err();
        assert!(matches!(
            error,
            InputEmbedsError::NotFinite {
                index: 1,
                at: 2,
                ..
            }
        ));
        assert!(!error.to_string().contains('\n'));
    }
}
