//! The images of a prompt, as the driver takes them.

use std::ops::Range;

use pie_scheduler::Image;
use sha2::{Digest, Sha256};

/// Image tokens have names from here on; those of a vocabulary are below.
const FIRST_NAME: u32 = 1 << 31;
/// Axes of a rotary position: time, height and width.
const AXES: usize = 3;

/// An image of a prompt.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    start: u32,
    tokens: u32,
    grid: [u32; 3],
    pixels: Box<[u8]>,
    axes: Box<[u32]>,
    /// Of what it shows.
    digest: [u8; 32],
}

/// An image that contradicts itself, or its prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PictureError {
    /// It has no tokens.
    #[error("it has no tokens")]
    Empty,
    /// Positions for other tokens than it has.
    #[error("it has {found} rotary positions, its {tokens} tokens need {expected}, or none")]
    Axes {
        /// Numbers that there are.
        found: usize,
        /// Tokens.
        tokens: u32,
        /// Numbers that there must be.
        expected: u64,
    },
    /// It lies over the one before it.
    #[error("it begins at token {start} of the prompt, and the image before it ends at {free}")]
    Place {
        /// Its first token.
        start: u32,
        /// The first that it may have.
        free: u32,
    },
    /// Its positions do not follow those of the text before it.
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

impl Picture {
    /// An image with `tokens` tokens of the prompt from `start` on.
    ///
    /// `grid` is its size in patches (time, height, width), `pixels` its patches in that order: float32 `[patches, values of a
    /// patch]`, little-endian. `axes` are three rotary positions of each token (time, height, width); none where they are the
    /// token's place, as in text.
    ///
    /// # Errors
    /// [`PictureError::Empty`], [`PictureError::Axes`].
    pub fn new(
        start: u32,
        tokens: u32,
        grid: [u32; 3],
        pixels: Box<[u8]>,
        axes: Box<[u32]>,
    ) -> Result<Self, PictureError> {
        if tokens == 0 {
            return Err(PictureError::Empty);
        }
        let (found, expected) = (axes.len(), AXES as u64 * u64::from(tokens));
        if found != 0 && found as u64 != expected {
            return Err(PictureError::Axes {
                found,
                tokens,
                expected,
            });
        }
        // Pixels of one colour are the same in grids of one area.
        let mut digest = Sha256::new();
        for side in grid {
            digest.update(side.to_le_bytes());
        }
        digest.update(&pixels);
        Ok(Self {
            start,
            tokens,
            grid,
            pixels,
            axes,
            digest: digest.finalize().into(),
        })
    }

    /// Place of its first token in the prompt.
    pub const fn start(&self) -> u32 {
        self.start
    }

    /// Place of the token after it.
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

    pub(crate) const fn axes(&self) -> &[u32] {
        &self.axes
    }

    /// What it brings to a frame besides its rows.
    fn bytes(&self) -> u32 {
        let bytes = self.pixels.len() + size_of_val(&*self.axes);
        u32::try_from(bytes).unwrap_or(u32::MAX)
    }

    /// Names of its tokens: those of one image are the same wherever it is, those of two images differ.
    fn names(&self) -> impl Iterator<Item = u32> + '_ {
        let (words, _) = self.digest.as_chunks::<4>();
        let word = |at: usize| u32::from_le_bytes(words[at % words.len()]);
        // After one round of the digest its words come again, moved on by an odd number, so that no run repeats.
        (0..self.tokens as usize).map(move |at| {
            word(at).wrapping_add((at as u32).wrapping_mul(0x9e37_79b1)) | FIRST_NAME
        })
    }
}

impl std::fmt::Debug for Picture {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Picture")
            .field("start", &self.start)
            .field("tokens", &self.tokens)
            .field("grid", &self.grid)
            .field("pixel_bytes", &self.pixels.len())
            .finish_non_exhaustive()
    }
}

/// The images of one prompt, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pictures {
    pictures: Box<[Picture]>,
    /// By how much positions after each are smaller than places.
    lags: Box<[u32]>,
}

impl Pictures {
    /// Checks that the images follow each other, and that text may go on after each: an image takes fewer positions than it has
    /// tokens, or as many.
    ///
    /// # Errors
    /// The number of the first image that is wrong, and what is.
    pub fn new(pictures: Vec<Picture>) -> Result<Self, (usize, PictureError)> {
        let (mut free, mut lag) = (0, 0);
        let mut lags = Vec::with_capacity(pictures.len());
        for (number, picture) in pictures.iter().enumerate() {
            let Picture { start, tokens, .. } = *picture;
            if start < free || start.checked_add(tokens).is_none() {
                return Err((number, PictureError::Place { start, free }));
            }
            free = picture.end();
            let axes = picture.axes.iter().copied();
            if let (Some(first), Some(last)) = (axes.clone().min(), axes.max()) {
                let expected = start - lag;
                if first != expected || last - first >= tokens {
                    let problem = PictureError::Positions {
                        first,
                        last,
                        tokens,
                        expected,
                    };
                    return Err((number, problem));
                }
                lag = free - (last + 1);
            }
            lags.push(lag);
        }
        Ok(Self {
            pictures: pictures.into(),
            lags: lags.into(),
        })
    }

    /// Where the images are, for a scheduler.
    pub(crate) fn images(&self) -> Box<[Image]> {
        let image = |picture: &Picture| Image {
            start: picture.start,
            tokens: picture.tokens,
            bytes: picture.bytes(),
        };
        self.pictures.iter().map(image).collect()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pictures.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.pictures.len()
    }

    /// Bytes of their pixels and positions.
    pub fn bytes(&self) -> u64 {
        self.pictures
            .iter()
            .map(|picture| u64::from(picture.bytes()))
            .sum()
    }

    /// Tokens of all of them.
    pub fn tokens(&self) -> u32 {
        self.pictures.iter().map(|picture| picture.tokens).sum()
    }

    /// Gives the tokens of the images the names of what they show, so that a prefix index tells images apart. Images outside of
    /// the prompt are left out.
    pub(crate) fn name(&self, prompt: &mut [u32]) {
        for picture in &self.pictures {
            let places = picture.start as usize..picture.end() as usize;
            let tokens = prompt.get_mut(places).unwrap_or_default();
            for (token, name) in tokens.iter_mut().zip(picture.names()) {
                *token = name;
            }
        }
    }

    /// The images that begin at one of these places.
    pub(crate) fn within(&self, places: &Range<u32>) -> &[Picture] {
        let before = |limit| {
            self.pictures
                .partition_point(|picture| picture.start < limit)
        };
        &self.pictures[before(places.start)..before(places.end)]
    }

    /// By how much the position of a token of text is smaller than its place.
    pub(crate) fn lag(&self, place: u32) -> u32 {
        let before = self
            .pictures
            .partition_point(|picture| picture.end() <= place);
        before.checked_sub(1).map_or(0, |last| self.lags[last])
    }
}

#[cfg(test)]
mod tests;
