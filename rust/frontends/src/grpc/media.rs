//! The images of a request, which the gateway has made tensors of.

use pie_engine::{PromptImage, PromptImageError, PromptImages};
use pie_ingress::shown;
use tonic::Status;

use crate::grpc::settings::VisionInfo;

/// What says the size of each image.
const GRIDS: &str = "image_grid_thw";
/// Why something that is no image is refused.
const PICTURES: &str =
    "it takes images, with `pixel_values` and `image_grid_thw`, and no audio or video";

/// More have no use here, and would fill a refusal.
const MOST_DIMENSIONS: usize = 8;

/// A tensor of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor<'a> {
    pub(crate) shape: &'a [u32],
    /// As numpy names it.
    pub(crate) dtype: &'a str,
    /// Little-endian.
    pub(crate) data: &'a [u8],
}

/// Images of a request, in the words of neither contract.
#[derive(Clone, Debug)]
pub(crate) struct Media<'a> {
    /// The patches of all images, one after the other.
    pub(crate) pixels: Option<Tensor<'a>>,
    /// `[images, 3]`: frames, rows and columns of patches.
    pub(crate) grids: Option<Tensor<'a>>,
    /// The first token and the number of tokens of each image.
    pub(crate) placeholders: Vec<(u32, u32)>,
}

impl<'a> Media<'a> {
    /// The grids among a message's tensors by name.
    pub(crate) fn grids<T>(mut tensors: impl Iterator<Item = (&'a String, T)>) -> Option<T> {
        tensors
            .find(|(name, _)| name.as_str() == GRIDS)
            .map(|(_, tensor)| tensor)
    }
}

/// What is refused of a medium that is no image, or of a model that takes none.
pub(crate) fn refusal(vision: Option<VisionInfo>) -> Status {
    let why = match vision {
        Some(_) => PICTURES,
        None => "this model takes text alone",
    };
    wrong(why)
}

/// Images as the driver takes them, in a prompt of `prompt` tokens.
pub(crate) fn images(
    media: &Media<'_>,
    vision: Option<VisionInfo>,
    prompt: usize,
) -> Result<PromptImages, Status> {
    let (Some(vision), Some(pixels), Some(grids)) = (vision, media.pixels, media.grids) else {
        return Err(refusal(vision));
    };
    let grids = read_grids(grids)?;
    if grids.len() != media.placeholders.len() {
        let placeholders = media.placeholders.len();
        return Err(wrong(format!(
            "there are {} images, and placeholders in the prompt for {placeholders}",
            grids.len()
        )));
    }
    let patches = grids
        .iter()
        .fold(0, |sum: u64, &grid| sum.saturating_add(patches(grid)));
    let mut pixels = Pixels::new(pixels, patches)?;
    let mut found: Vec<PromptImage> = Vec::with_capacity(grids.len());
    // Index minus position of the next text token.
    let mut mrope_delta = 0;
    for (number, (&grid, &placeholder)) in grids.iter().zip(&media.placeholders).enumerate() {
        let of_image = |why: String| wrong(format!("image {number}: {why}"));
        let sides = merged(grid, vision.merge).map_err(of_image)?;
        check_placeholder(placeholder, sides, prompt).map_err(of_image)?;
        let (start, tokens) = placeholder;
        // Before its positions are made: images at one start could have any number of them.
        let free = found.last().map_or(0, PromptImage::end);
        if start < free {
            return Err(of_image(
                PromptImageError::Overlap { start, free }.to_string(),
            ));
        }
        let axes = axes(start - mrope_delta, sides);
        mrope_delta += tokens - sides.0.max(sides.1);
        let image = PromptImage::new(start, tokens, grid, pixels.take(grid), axes);
        found.push(image.map_err(|problem| of_image(problem.to_string()))?);
    }
    PromptImages::new(found)
        .map_err(|(number, problem)| wrong(format!("image {number}: {problem}")))
}

fn wrong(why: impl std::fmt::Display) -> Status {
    Status::invalid_argument(format!("`mm_inputs` cannot be served: {why}"))
}

const fn patches([frames, rows, columns]: [u32; 3]) -> u64 {
    (frames as u64)
        .saturating_mul(rows as u64)
        .saturating_mul(columns as u64)
}

/// Rows and columns of tokens.
fn merged([frames, rows, columns]: [u32; 3], merge: u32) -> Result<(u32, u32), String> {
    if frames != 1 {
        return Err(format!("it has {frames} frames, and images have one"));
    }
    let whole = |side: u32| side > 0 && side.is_multiple_of(merge);
    if !whole(rows) || !whole(columns) {
        return Err(format!(
            "its {rows} x {columns} patches are not whole squares of {merge} x {merge}"
        ));
    }
    Ok((rows / merge, columns / merge))
}

fn check_placeholder(
    (start, tokens): (u32, u32),
    (rows, columns): (u32, u32),
    prompt: usize,
) -> Result<(), String> {
    let expected = u64::from(rows) * u64::from(columns);
    if u64::from(tokens) != expected {
        return Err(format!(
            "it has {tokens} tokens of the prompt, and its patches make {expected}"
        ));
    }
    let end = u64::from(start) + expected;
    if end > prompt as u64 {
        return Err(format!(
            "its tokens end at {end}, and the prompt has {prompt}"
        ));
    }
    Ok(())
}

/// Three rotary positions of each token, by rows; the first token's is `first` on every axis.
fn axes(first: u32, (rows, columns): (u32, u32)) -> Box<[u32]> {
    let tokens = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
    tokens
        .flat_map(|(row, column)| [first, first + row, first + column])
        .collect()
}

/// The size of a number, or what is wrong with the length of a tensor.
fn checked(tensor: Tensor<'_>, size: u64) -> Result<(), Status> {
    let dimensions = tensor.shape.len();
    if dimensions > MOST_DIMENSIONS {
        return Err(wrong(format!(
            "a tensor has {dimensions} dimensions, {MOST_DIMENSIONS} are the most"
        )));
    }
    let numbers = tensor.shape.iter().map(|&side| u64::from(side));
    let expected = numbers.chain([size]).try_fold(1, u64::checked_mul);
    if expected == Some(tensor.data.len() as u64) {
        return Ok(());
    }
    let (shape, dtype, found) = (tensor.shape, tensor.dtype, tensor.data.len());
    Err(wrong(format!(
        "a tensor of shape {shape:?} in {dtype} has {found} bytes"
    )))
}

fn read_grids(tensor: Tensor<'_>) -> Result<Vec<[u32; 3]>, Status> {
    let sizes: Vec<u32> = match tensor.dtype {
        "int64" => {
            checked(tensor, 8)?;
            let (words, _) = tensor.data.as_chunks::<8>();
            let sizes = words
                .iter()
                .map(|word| u32::try_from(i64::from_le_bytes(*word)));
            sizes.collect::<Result<_, _>>().map_err(|_| {
                wrong(format!(
                    "`{GRIDS}` has a number outside of 0 to {}",
                    u32::MAX
                ))
            })?
        }
        "uint32" | "int32" => {
            checked(tensor, 4)?;
            let (words, _) = tensor.data.as_chunks::<4>();
            words.iter().map(|word| u32::from_le_bytes(*word)).collect()
        }
        dtype => return Err(unknown(GRIDS, dtype, "int64, int32 or uint32")),
    };
    let (grids, rest) = sizes.as_chunks::<3>();
    if !rest.is_empty() {
        return Err(wrong(format!(
            "`{GRIDS}` has {} numbers, not 3 for each image",
            sizes.len()
        )));
    }
    Ok(grids.to_vec())
}

fn unknown(name: &str, dtype: &str, known: &str) -> Status {
    let dtype = shown(dtype);
    wrong(format!("`{name}` is in {dtype}: send {known}"))
}

/// Patches that images take one after the other.
struct Pixels<'a> {
    rest: &'a [u8],
    /// Bytes of a patch.
    patch: usize,
    is_half: bool,
}

impl<'a> Pixels<'a> {
    fn new(tensor: Tensor<'a>, patches: u64) -> Result<Self, Status> {
        let is_half = match tensor.dtype {
            "float32" => false,
            "bfloat16" => true,
            dtype => return Err(unknown("pixel_values", dtype, "float32 or bfloat16")),
        };
        let size = if is_half { 2 } else { 4 };
        checked(tensor, size)?;
        let bytes = tensor.data.len() as u64;
        let row = patches.checked_mul(size).filter(|&row| row > 0);
        if row.is_none_or(|row| bytes == 0 || !bytes.is_multiple_of(row)) {
            return Err(wrong(format!(
                "`pixel_values` has {} numbers for {patches} patches",
                bytes / size
            )));
        }
        Ok(Self {
            rest: tensor.data,
            patch: (bytes / patches) as usize,
            is_half,
        })
    }

    /// The next image's, in float32.
    fn take(&mut self, grid: [u32; 3]) -> Box<[u8]> {
        let bytes = patches(grid) as usize * self.patch;
        let (own, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        if !self.is_half {
            return own.into();
        }
        // The upper half of a float32.
        let (halves, _) = own.as_chunks::<2>();
        halves
            .iter()
            .flat_map(|half| [0, 0, half[0], half[1]])
            .collect()
    }
}

#[cfg(test)]
mod tests;
