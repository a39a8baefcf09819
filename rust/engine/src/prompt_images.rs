//! The images of a prompt: pixels, M-RoPE positions, and pad values for the prefix index. Also prompts of embeddings.

use std::ops::Range;

use pie_scheduler::Image;
use sha2::{Digest, Sha256};

/// Pad values of image tokens are at least this; ids of a vocabulary are below.
const FIRST_PAD_VALUE: u32 = 1 << 31;
/// Axes of an M-RoPE position: time, height and width.
const AXES: usize = 3;
/// Tokens of a block of embeddings, which one step computes.
const EMBEDS_BLOCK: u32 = 16;

/// An image of a prompt.
#[derive(Clone, PartialEq, Eq)]
pub struct PromptImage {
    start: u32,
    tokens: u32,
    grid: [u32; 3],
    pixels: Box<[u8]>,
    mrope_positions: Box<[u32]>,
    /// SHA-256 of grid and pixels.
    digest: [u8; 32],
}

/// Why an image is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PromptImageError {
    /// It has no tokens.
    #[error("it has no tokens")]
    Empty,
    /// Another number of M-RoPE positions than it has tokens.
    #[error("it has {found} rotary positions, its {tokens} tokens need {expected}, or none")]
    PositionCount {
        /// How many there are.
        found: usize,
        /// Tokens.
        tokens: u32,
        /// How many there must be.
        expected: u64,
    },
    /// It overlaps the previous image.
    #[error("it begins at token {start} of the prompt, and the image before it ends at {free}")]
    Overlap {
        /// Its first token.
        start: u32,
        /// The first token after the previous image.
        free: u32,
    },
    /// Its positions do not continue those of the text before it.
    #[error(
        "its rotary positions are from {first} to {last}, and its {tokens} tokens begin at position {expected}"
    )]
    Positions {
        /// The smallest.
        first: u32,
        /// The largest.
        last: u32,
        /// Its tokens.
        tokens: u32,
        /// Where they must begin.
        expected: u32,
    },
}

impl PromptImage {
    /// An image that has the prompt tokens `start..start + tokens`.
    ///
    /// `grid`: size in patches (time, height, width). `pixels`: patches in that order, little-endian float32 `[patches, patch values]`.
    /// `mrope_positions`: three (time, height, width) for each token; empty where they equal the token's index, as in text.
    ///
    /// # Errors
    /// [`PromptImageError::Empty`], [`PromptImageError::PositionCount`].
    pub fn new(
        start: u32,
        tokens: u32,
        grid: [u32; 3],
        pixels: Box<[u8]>,
        mrope_positions: Box<[u32]>,
    ) -> Result<Self, PromptImageError> {
        if tokens == 0 {
            return Err(PromptImageError::Empty);
        }
        let (found, expected) = (mrope_positions.len(), AXES as u64 * u64::from(tokens));
        if found != 0 && found as u64 != expected {
            return Err(PromptImageError::PositionCount {
                found,
                tokens,
                expected,
            });
        }
        Ok(Self::of_content(
            start,
            tokens,
            grid,
            pixels,
            mrope_positions,
        ))
    }

    fn of_content(
        start: u32,
        tokens: u32,
        grid: [u32; 3],
        pixels: Box<[u8]>,
        mrope_positions: Box<[u32]>,
    ) -> Self {
        // The grid is hashed, too: single-coloured pixels are equal in grids of equal area.
        let mut digest = Sha256::new();
        for side in grid {
            digest.update(side.to_le_bytes());
        }
        digest.update(&pixels);
        Self {
            start,
            tokens,
            grid,
            pixels,
            mrope_positions,
            digest: digest.finalize().into(),
        }
    }

    /// Index of its first token in the prompt.
    pub const fn start(&self) -> u32 {
        self.start
    }

    /// Index of the token after it.
    pub const fn end(&self) -> u32 {
        self.start.saturating_add(self.tokens)
    }

    pub(crate) const fn tokens(&self) -> u32 {
        self.tokens
    }

    pub(crate) const fn grid(&self) -> [u32; 3] {
        self.grid
    }

    pub(crate) const fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    pub(crate) const fn mrope_positions(&self) -> &[u32] {
        &self.mrope_positions
    }

    /// Bytes of pixels and positions in a frame.
    fn bytes(&self) -> u32 {
        let bytes = self.pixels.len() + size_of_val(&*self.mrope_positions);
        u32::try_from(bytes).unwrap_or(u32::MAX)
    }

    /// Pad values of its tokens, derived from its content: equal for equal images at any index, different for others.
    fn pad_values(&self) -> impl Iterator<Item = u32> + '_ {
        let (words, _) = self.digest.as_chunks::<4>();
        let word = |at: usize| u32::from_le_bytes(words[at % words.len()]);
        // An odd multiple of the index is added, so that the repeated words of the digest give different values.
        (0..self.tokens as usize).map(move |at| {
            word(at).wrapping_add((at as u32).wrapping_mul(0x9e37_79b1)) | FIRST_PAD_VALUE
        })
    }
}

impl std::fmt::Debug for PromptImage {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("PromptImage")
            .field("start", &self.start)
            .field("tokens", &self.tokens)
            .field("grid", &self.grid)
            .field("pixel_bytes", &self.pixels.len())
            .finish_non_exhaustive()
    }
}

/// Why `input_embeds` are invalid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum InputEmbedsError {
    /// There are none.
    #[error("`input_embeds` has no embeddings: give one or more, each of {size} numbers")]
    Empty {
        /// Numbers of an embedding.
        size: u32,
    },
    /// An embedding of another size than the model's.
    #[error(
        "embedding {index} of `input_embeds` has {found} numbers, and this model's have {size}: give {size} numbers for each token"
    )]
    Size {
        /// The embedding.
        index: usize,
        /// Its numbers.
        found: usize,
        /// Numbers that it must have.
        size: u32,
    },
    /// A number that is not finite in float32.
    #[error(
        "number {at} of embedding {index} of `input_embeds` is {value}: give numbers that are finite in float32"
    )]
    NotFinite {
        /// The embedding.
        index: usize,
        /// Its number.
        at: usize,
        /// What it is.
        value: f32,
    },
}

/// The images of one prompt, in their order; or its `input_embeds`, in blocks of 16 tokens that stand for images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptImages {
    images: Box<[PromptImage]>,
    /// Index minus position of the text after each image.
    mrope_deltas: Box<[u32]>,
}

impl PromptImages {
    /// Checks that images are in order, do not overlap, and have no more positions than tokens.
    ///
    /// # Errors
    /// The index of the first invalid image, and its error.
    pub fn new(images: Vec<PromptImage>) -> Result<Self, (usize, PromptImageError)> {
        let (mut free, mut mrope_delta) = (0, 0);
        let mut mrope_deltas = Vec::with_capacity(images.len());
        for (number, image) in images.iter().enumerate() {
            let PromptImage { start, tokens, .. } = *image;
            if start < free || start.checked_add(tokens).is_none() {
                return Err((number, PromptImageError::Overlap { start, free }));
            }
            free = image.end();
            let positions = image.mrope_positions.iter().copied();
            if let (Some(first), Some(last)) = (positions.clone().min(), positions.max()) {
                let expected = start - mrope_delta;
                if first != expected || last - first >= tokens {
                    let problem = PromptImageError::Positions {
                        first,
                        last,
                        tokens,
                        expected,
                    };
                    return Err((number, problem));
                }
                mrope_delta = free - (last + 1);
            }
            mrope_deltas.push(mrope_delta);
        }
        Ok(Self {
            images: images.into(),
            mrope_deltas: mrope_deltas.into(),
        })
    }

    /// A prompt of embeddings: float32 `[tokens, size]`, row by row. A frame has them as images whose grid is 0, tokens, `size`.
    ///
    /// # Errors
    /// [`InputEmbedsError`].
    pub fn of_embeds(embeds: &[f32], size: u32) -> Result<Self, InputEmbedsError> {
        let width = size as usize;
        if embeds.is_empty() || width == 0 {
            return Err(InputEmbedsError::Empty { size });
        }
        if !embeds.len().is_multiple_of(width) {
            return Err(InputEmbedsError::Size {
                index: embeds.len() / width,
                found: embeds.len() % width,
                size,
            });
        }
        if let Some(at) = embeds.iter().position(|value| !value.is_finite()) {
            return Err(InputEmbedsError::NotFinite {
                index: at / width,
                at: at % width,
                value: embeds[at],
            });
        }
        let blocks = embeds.chunks(width * EMBEDS_BLOCK as usize);
        let images: Box<[PromptImage]> = (0..)
            .step_by(EMBEDS_BLOCK as usize)
            .zip(blocks)
            .map(|(start, block)| {
                let tokens = (block.len() / width) as u32;
                let bytes = block.iter().flat_map(|value| value.to_le_bytes()).collect();
                PromptImage::of_content(start, tokens, [0, tokens, size], bytes, [].into())
            })
            .collect();
        Ok(Self {
            mrope_deltas: vec![0; images.len()].into(),
            images,
        })
    }

    /// Whether they are `input_embeds`.
    pub fn are_embeds(&self) -> bool {
        self.images.first().is_some_and(|image| image.grid[0] == 0)
    }

    /// Spans and sizes of the images, for the scheduler.
    pub(crate) fn spans(&self) -> Box<[Image]> {
        let image = |image: &PromptImage| Image {
            start: image.start,
            tokens: image.tokens,
            bytes: image.bytes(),
        };
        self.images.iter().map(image).collect()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.images.len()
    }

    /// Bytes of their pixels and positions.
    pub fn bytes(&self) -> u64 {
        self.images
            .iter()
            .map(|image| u64::from(image.bytes()))
            .sum()
    }

    /// Tokens of all of them.
    pub fn tokens(&self) -> u32 {
        self.images.iter().map(|image| image.tokens).sum()
    }

    /// Replaces image tokens of the prompt by their pad values, so that the prefix index tells images apart. Images beyond the prompt are
    /// ignored.
    pub(crate) fn write_pad_values(&self, prompt: &mut [u32]) {
        for image in &self.images {
            let indices = image.start as usize..image.end() as usize;
            let tokens = prompt.get_mut(indices).unwrap_or_default();
            for (token, value) in tokens.iter_mut().zip(image.pad_values()) {
                *token = value;
            }
        }
    }

    /// The images that begin at one of these indices.
    pub(crate) fn within(&self, indices: &Range<u32>) -> &[PromptImage] {
        let before = |limit| self.images.partition_point(|image| image.start < limit);
        &self.images[before(indices.start)..before(indices.end)]
    }

    /// Index minus position of a text token.
    pub(crate) fn mrope_delta(&self, index: u32) -> u32 {
        let before = self.images.partition_point(|image| image.end() <= index);
        before
            .checked_sub(1)
            .map_or(0, |last| self.mrope_deltas[last])
    }
}

#[cfg(test)]
mod tests;
