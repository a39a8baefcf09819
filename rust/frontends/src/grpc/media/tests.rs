use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const VISION: Option<VisionInfo> = Some(VisionInfo { merge: 2 });
/// Numbers of a patch.
const NUMBERS: usize = 3;

/// Images one after the other, with text before each.
#[derive(Clone, Debug)]
struct Sent {
    grids: Vec<[u32; 3]>,
    placeholders: Vec<(u32, u32)>,
    pixels: Vec<f32>,
    prompt: usize,
}

impl Sent {
    fn new(images: &[(u32, u32, u32)]) -> Self {
        let (mut end, mut placeholders, mut grids) = (0, Vec::new(), Vec::new());
        for &(text, rows, columns) in images {
            placeholders.push((end + text, rows * columns));
            end += text + rows * columns;
            grids.push([1, 2 * rows, 2 * columns]);
        }
        let patches: u64 = grids.iter().map(|&grid| patches(grid)).sum();
        let numbers = patches as usize * NUMBERS;
        Self {
            grids,
            placeholders,
            pixels: (0..numbers).map(|number| number as f32).collect(),
            prompt: end as usize + 1,
        }
    }

    fn grid_bytes(&self) -> Vec<u8> {
        let numbers = self.grids.as_flattened().iter();
        numbers
            .flat_map(|&number| i64::from(number).to_le_bytes())
            .collect()
    }

    fn pixel_bytes(&self) -> Vec<u8> {
        self.pixels
            .iter()
            .flat_map(|pixel| pixel.to_le_bytes())
            .collect()
    }

    fn read(&self) -> Result<PromptImages, Status> {
        let (grids, pixels) = (self.grid_bytes(), self.pixel_bytes());
        let patches = (self.pixels.len() / NUMBERS) as u32;
        images(
            &Media {
                pixels: Some(tensor(&[patches, NUMBERS as u32], "float32", &pixels)),
                grids: Some(tensor(&[self.grids.len() as u32, 3], "int64", &grids)),
                placeholders: self.placeholders.clone(),
            },
            VISION,
            self.prompt,
        )
    }

    fn refusal(&self) -> String {
        self.read().unwrap_err().message().to_owned()
    }
}

fn tensor<'a>(shape: &'a [u32], dtype: &'a str, data: &'a [u8]) -> Tensor<'a> {
    Tensor { shape, dtype, data }
}

/// What the model's processor in Python does: axes by a grid, and text that continues after the largest position.
fn expected(sent: &Sent) -> PromptImages {
    let (mut position, mut end, mut at) = (0, 0, 0);
    let mut found = Vec::new();
    for (&grid, &(start, tokens)) in sent.grids.iter().zip(&sent.placeholders) {
        position += start - end;
        end = start + tokens;
        let (rows, columns) = (grid[1] / 2, grid[2] / 2);
        let mut axes = Vec::new();
        for token in 0..tokens {
            axes.extend([
                position,
                position + token / columns,
                position + token % columns,
            ]);
        }
        position += rows.max(columns);
        let numbers = patches(grid) as usize * NUMBERS;
        let pixels = &sent.pixels[at..at + numbers];
        at += numbers;
        let bytes: Vec<u8> = pixels
            .iter()
            .flat_map(|pixel| pixel.to_le_bytes())
            .collect();
        found.push(PromptImage::new(start, tokens, grid, bytes.into(), axes.into()).unwrap());
    }
    PromptImages::new(found).unwrap()
}

proptest! {
    #[test]
    fn images_are_cut_and_placed(images in vec((0_u32..9, 1_u32..6, 1_u32..6), 1..5)) {
        let sent = Sent::new(&images);
        prop_assert_eq!(sent.read().unwrap(), expected(&sent));
    }

    /// Whatever a message says, it is read or refused.
    #[test]
    fn nothing_that_is_sent_panics(
        shapes in (vec(any::<u32>(), 0..4), vec(0_u32..9, 0..4)),
        dtypes in ("(float32|bfloat16|int64|x)", "(int64|int32|uint32|float32)"),
        data in (vec(any::<u8>(), 0..99), vec(prop_oneof![Just(0_u8), Just(2), Just(255)], 0..72)),
        placeholders in vec((any::<u32>(), any::<u32>()), 0..4),
        prompt in 0_usize..99,
    ) {
        let media = Media {
            pixels: Some(tensor(&shapes.0, &dtypes.0, &data.0)),
            grids: Some(tensor(&shapes.1, &dtypes.1, &data.1)),
            placeholders,
        };
        if let Err(status) = images(&media, VISION, prompt) {
            prop_assert!(status.message().starts_with("`mm_inputs` cannot be served: "));
        }
    }
}

#[test]
fn halves_are_widened() {
    let sent = Sent::new(&[(1, 1, 1)]);
    let halves: Vec<u8> = sent
        .pixels
        .iter()
        .flat_map(|pixel| {
            let [.., low, high] = pixel.to_le_bytes();
            [low, high]
        })
        .collect();
    let grids: Vec<u8> = sent.grids[0]
        .iter()
        .flat_map(|side| side.to_le_bytes())
        .collect();
    let media = Media {
        pixels: Some(tensor(&[4, 3], "bfloat16", &halves)),
        grids: Some(tensor(&[1, 3], "uint32", &grids)),
        placeholders: sent.placeholders.clone(),
    };
    assert_eq!(images(&media, VISION, 2).unwrap(), expected(&sent));
    assert_eq!(
        images(&media, None, 2).unwrap_err().message(),
        "`mm_inputs` cannot be served: this model takes text alone"
    );
}

#[test]
fn what_is_wrong_is_named() {
    let sent = Sent::new(&[(2, 2, 3), (0, 1, 1)]);
    let changed = |change: &dyn Fn(&mut Sent)| {
        let mut sent = sent.clone();
        change(&mut sent);
        sent.refusal()
    };
    for (change, expected) in [
        (
            (&|sent: &mut Sent| sent.grids[0][0] = 2) as &dyn Fn(&mut Sent),
            "`pixel_values` has 84 numbers for 52 patches",
        ),
        (
            // Together they are more than any number holds.
            &|sent| sent.grids = vec![[u32::MAX; 3]; 2],
            "`pixel_values` has 84 numbers for 18446744073709551615 patches",
        ),
        (
            &|sent| sent.grids[0] = [1, 3, 8],
            "image 0: its 3 x 8 patches are not whole squares of 2 x 2",
        ),
        (
            &|sent| sent.placeholders[1].1 = 2,
            "image 1: it has 2 tokens of the prompt, and its patches make 1",
        ),
        (
            &|sent| sent.prompt = 8,
            "image 1: its tokens end at 9, and the prompt has 8",
        ),
        (
            &|sent| sent.placeholders[1].0 = 5,
            "image 1: it begins at token 5 of the prompt, and the image before it ends at 8",
        ),
        (
            &|sent| sent.placeholders[1].0 = 1,
            "image 1: it begins at token 1 of the prompt, and the image before it ends at 8",
        ),
        (
            &|sent| sent.placeholders.truncate(1),
            "there are 2 images, and placeholders in the prompt for 1",
        ),
        (
            &|sent| sent.pixels.truncate(83),
            "a tensor of shape [27, 3] in float32 has 332 bytes",
        ),
    ] {
        let found = changed(change);
        let (_, found) = found.split_once(": ").unwrap();
        assert_eq!(found, expected);
    }
    let named = |shape: &[u32], dtype: &str| {
        let (grids, pixels) = (sent.grid_bytes(), sent.pixel_bytes());
        let media = Media {
            pixels: Some(tensor(shape, dtype, &pixels)),
            grids: Some(tensor(&[2, 3], "int64", &grids)),
            placeholders: sent.placeholders.clone(),
        };
        let refusal = images(&media, VISION, sent.prompt).unwrap_err();
        refusal.message().to_owned()
    };
    assert_eq!(
        named(&[28, 3], &"float\n".repeat(1000)),
        format!(
            "`mm_inputs` cannot be served: `pixel_values` is in {}: send float32 or bfloat16",
            "float\\n".repeat(10)
        )
    );
    assert_eq!(
        named(&[1; 1000], "float32"),
        "`mm_inputs` cannot be served: a tensor has 1000 dimensions, 8 are the most"
    );
    let mut none = Sent::new(&[(0, 1, 1)]);
    none.pixels.clear();
    assert!(
        none.refusal()
            .ends_with("`pixel_values` has 0 numbers for 4 patches")
    );
    let mut frames = Sent::new(&[(0, 1, 1)]);
    frames.grids[0] = [2, 2, 2];
    frames.pixels = vec![0.0; 8 * NUMBERS];
    assert!(
        frames
            .refusal()
            .ends_with("image 0: it has 2 frames, and images have one")
    );
}
