//! Images: placeholder tokens whose embeddings the vision encoder computes from pixels. Also `input_embeds`: placeholder tokens that bring
//! their embeddings.

pub(crate) mod error;

use std::ops::Range;

use pie_wire::NativeSlice;

use crate::error::{FrameError, Modality, RequestError};
use crate::frame::{Frame, check_indptr, range};
use crate::image::error::ImageError;
use crate::limits::{LimitError, Limits};

/// Geometry of the vision encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VisionConfig {
    /// Values of one patch: channels x frames x height x width.
    pub patch_values: u32,
    /// Side of the square of patches merged into one token.
    pub merge_size: u32,
    /// Longest side of an image, in patches.
    pub max_side: u32,
}

impl VisionConfig {
    /// Checks that nothing is 0.
    ///
    /// # Errors
    /// [`LimitError`] names the first number that is.
    pub fn check(self) -> Result<(), LimitError> {
        let numbers = [
            ("patch_values", self.patch_values),
            ("merge_size", self.merge_size),
            ("max_side", self.max_side),
        ];
        let zero = numbers.into_iter().find(|&(_, value)| value == 0);
        zero.map_or(Ok(()), |(name, _)| Err(LimitError::Zero(name)))
    }

    /// Tokens of an image with this grid (time, height, width in patches).
    fn rows(self, [_, height, width]: [u32; 3]) -> u64 {
        u64::from(height / self.merge_size) * u64::from(width / self.merge_size)
    }

    fn check_grid(self, [time, height, width]: [u32; 3]) -> Result<(), ImageError> {
        if time > 1 {
            return Err(ImageError::Video { time });
        }
        let merge = self.merge_size;
        let whole = |side: u32| side > 0 && side.is_multiple_of(merge);
        if time == 0 || !whole(height) || !whole(width) {
            return Err(ImageError::Grid {
                time,
                height,
                width,
                merge,
            });
        }
        let (side, limit) = (height.max(width), self.max_side);
        if side > limit {
            return Err(ImageError::Side { side, limit });
        }
        Ok(())
    }

    /// Bytes of the pixels of one patch.
    const fn patch_bytes(self) -> u64 {
        size_of::<f32>() as u64 * self.patch_values as u64
    }
}

/// What the image arrays of a frame may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct MediaConfig {
    /// `None`: no images.
    pub(crate) vision: Option<VisionConfig>,
    /// Numbers of an embedding of `input_embeds`; 0: none are taken.
    pub(crate) embed_size: u32,
}

impl MediaConfig {
    const fn takes_nothing(self) -> bool {
        self.vision.is_none() && self.embed_size == 0
    }

    /// Whether a grid is that of embeddings: 0, tokens, numbers of each. Images have one step in time.
    const fn is_embeds(self, grid: [u32; 3]) -> bool {
        grid[0] == 0 && self.embed_size > 0
    }

    /// Tokens of a checked grid.
    fn rows(self, grid: [u32; 3]) -> u64 {
        match self.vision {
            Some(vision) if !self.is_embeds(grid) => vision.rows(grid),
            _ => grid[1].into(),
        }
    }

    /// Checks a grid, and returns its tokens and bytes.
    fn check_grid(self, grid: [u32; 3]) -> Result<(u64, u64), ImageError> {
        let [_, rows, columns] = grid.map(u64::from);
        if self.is_embeds(grid) {
            let [_, tokens, width] = grid;
            let size = self.embed_size;
            if tokens == 0 || width != size {
                return Err(ImageError::Embeds {
                    tokens,
                    width,
                    size,
                });
            }
            return Ok((rows, rows * columns * size_of::<f32>() as u64));
        }
        let vision = self.vision.ok_or(ImageError::NoVision)?;
        vision.check_grid(grid)?;
        Ok((vision.rows(grid), rows * columns * vision.patch_bytes()))
    }

    /// Patches of an image with so many bytes of pixels.
    fn patches(self, bytes: usize) -> u64 {
        (self.vision).map_or(0, |vision| bytes as u64 / vision.patch_bytes())
    }
}

/// The image arrays of a frame, with checked lengths.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageArrays<'a> {
    config: MediaConfig,
    grids: &'a [[u32; 3]],
    anchor_positions: &'a [u32],
    anchor_rows: &'a [u32],
    pixel_indptr: &'a [u32],
    axes: &'a [u32],
    axes_indptr: &'a [u32],
    /// Whether there are two patch positions per patch, or none. They are otherwise ignored: patches are in grid order.
    patch_positions_fit: bool,
}

impl<'a> ImageArrays<'a> {
    /// `None` when the frame has no images, or none are taken.
    pub(crate) fn check(
        frame: &Frame<'a>,
        config: MediaConfig,
    ) -> Result<Option<Self>, FrameError> {
        let spans = frame.image_indptr.last().map_or(0, |&end| end as usize);
        if spans == 0 || config.takes_nothing() {
            return Ok(None);
        }
        let request = frame.request;
        let grids = request.image_grids.native();
        let anchor_positions = request.image_anchor_positions.native();
        let anchor_rows = request.image_anchor_rows.native();
        let lengths = [
            ("image_grids", grids.len(), 3 * spans),
            ("image_anchor_positions", anchor_positions.len(), spans),
            ("image_anchor_rows", anchor_rows.len(), spans),
        ];
        for (array, found, expected) in lengths {
            if found != expected {
                return Err(FrameError::Length {
                    array,
                    found,
                    expected,
                });
            }
        }
        let pixel_indptr = request.image_pixel_indptr.native();
        let pixels = request.image_pixels.len();
        check_indptr("image_pixel_indptr", pixel_indptr, spans, pixels)?;
        let axes = request.image_mrope_positions.native();
        let axes_indptr = request.image_mrope_indptr.native();
        check_indptr("image_mrope_indptr", axes_indptr, spans, axes.len())?;
        let grids = grids.as_chunks().0;
        let patches = (0..spans)
            .filter(|&span| !config.is_embeds(grids[span]))
            .map(|span| config.patches(range(pixel_indptr, span).len()))
            .sum::<u64>();
        let patch_positions = request.image_patch_positions.len() as u64;
        Ok(Some(Self {
            config,
            grids,
            anchor_positions,
            anchor_rows,
            pixel_indptr,
            axes,
            axes_indptr,
            patch_positions_fit: patch_positions == 0 || patch_positions == 2 * patches,
        }))
    }

    fn axes(&self, span: usize) -> &'a [u32] {
        &self.axes[range(self.axes_indptr, span)]
    }

    /// Checks one image of the request whose tokens in the frame are `rows`; `free` is the first token after the image before.
    /// Returns its tokens.
    fn check_span(
        &self,
        frame: &Frame<'_>,
        limits: &Limits,
        span: usize,
        rows: &Range<usize>,
        free: usize,
    ) -> Result<Range<usize>, ImageError> {
        let (tokens, expected) = self.config.check_grid(self.grids[span])?;
        let found = range(self.pixel_indptr, span).len() as u64;
        if found != expected {
            return Err(ImageError::Pixels { found, expected });
        }
        let row = self.anchor_rows[span];
        let (start, end) = (row as usize, u64::from(row) + tokens);
        if start < rows.start || end > rows.end as u64 {
            let (start, end) = (rows.start, rows.end);
            return Err(ImageError::Rows {
                row,
                tokens,
                start,
                end,
            });
        }
        if start < free {
            return Err(ImageError::Overlap { row, end: free });
        }
        let span_rows = start..end as usize;
        if let Some(row) = span_rows.clone().find(|&row| frame.token_ids[row] != 0) {
            let token = frame.token_ids[row];
            return Err(ImageError::Token { row, token });
        }
        let (anchor, position) = (self.anchor_positions[span], frame.positions[start]);
        if anchor != position {
            return Err(ImageError::Anchor { anchor, position });
        }
        check_axes(self.axes(span), tokens, limits)?;
        Ok(span_rows)
    }

    /// Checks the images of request `index`.
    pub(crate) fn check_request(
        &self,
        frame: &Frame<'_>,
        limits: &Limits,
        index: usize,
    ) -> Result<(), RequestError> {
        let spans = range(frame.image_indptr, index);
        let rows = range(frame.qo_indptr, index);
        let mut free = rows.start;
        for (number, span) in spans.clone().enumerate() {
            let error = |problem| RequestError::Image { number, problem };
            let checked = self.check_span(frame, limits, span, &rows, free);
            free = checked.map_err(error)?.end;
            if !self.patch_positions_fit {
                return Err(error(ImageError::PatchPositions));
            }
        }
        Ok(())
    }
}

fn check_axes(axes: &[u32], tokens: u64, limits: &Limits) -> Result<(), ImageError> {
    let (found, expected) = (axes.len(), 3 * tokens);
    if found != 0 && found as u64 != expected {
        return Err(ImageError::Axes { found, expected });
    }
    let limit = limits.max_positions;
    match axes.iter().find(|&&position| position >= limit) {
        Some(&position) => Err(ImageError::Position { position, limit }),
        None => Ok(()),
    }
}

/// Rejects unsupported modalities and invalid images of request `index`.
pub(crate) fn check_media(
    frame: &Frame<'_>,
    images: Option<&ImageArrays<'_>>,
    limits: &Limits,
    index: usize,
) -> Result<(), RequestError> {
    let spans = range(frame.image_indptr, index).len();
    match images {
        Some(images) => images.check_request(frame, limits, index)?,
        None if spans > 0 => {
            let medium = Modality::Image;
            return Err(RequestError::Media { medium, spans });
        }
        None => {}
    }
    let spans = range(frame.audio_indptr, index).len();
    if spans > 0 {
        let medium = Modality::Audio;
        return Err(RequestError::Media { medium, spans });
    }
    Ok(())
}

/// An image of an accepted request.
#[derive(Debug, Clone)]
struct Span {
    /// Its query tokens in the plan.
    rows: Range<usize>,
    grid: [u32; 3],
    /// Its bytes of `image_pixels`.
    pixels: Range<usize>,
    /// Its M-RoPE positions in [`Images::axes`], three per token; empty = as text.
    axes: Range<usize>,
}

/// The images of a frame, in the order of their tokens.
#[derive(Debug, Default)]
pub(crate) struct Images {
    spans: Vec<Span>,
    axes: Vec<u32>,
    /// Number of the first image: images of all earlier frames.
    first: u64,
}

impl Images {
    /// Starts a frame, whose first image has number `first`.
    pub(crate) fn start(&mut self, first: u64) {
        self.first = first;
        self.spans.clear();
        self.axes.clear();
    }

    /// Number of images.
    pub(crate) const fn len(&self) -> usize {
        self.spans.len()
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Adds the checked images of request `index`, whose query tokens begin at `first_row`. Their tokens become `placeholder`.
    pub(crate) fn add(
        &mut self,
        frame: &Frame<'_>,
        arrays: &ImageArrays<'_>,
        index: usize,
        first_row: usize,
        (tokens, placeholder): (&mut [u32], u32),
    ) {
        let frame_row = range(frame.qo_indptr, index).start;
        for span in range(frame.image_indptr, index) {
            let start = first_row + arrays.anchor_rows[span] as usize - frame_row;
            let grid = arrays.grids[span];
            let rows = start..start + arrays.config.rows(grid) as usize;
            tokens[rows.clone()].fill(placeholder);
            let first_axis = self.axes.len();
            self.axes.extend_from_slice(arrays.axes(span));
            self.spans.push(Span {
                rows,
                grid,
                pixels: range(arrays.pixel_indptr, span),
                axes: first_axis..self.axes.len(),
            });
        }
    }

    /// The spans with tokens among `rows`.
    fn within(&self, rows: &Range<usize>) -> Range<usize> {
        let spans = &self.spans;
        let start = spans.partition_point(|span| span.rows.end <= rows.start);
        let end = spans.partition_point(|span| span.rows.start < rows.end);
        start..end
    }

    /// Whether some of `rows` belong to an image.
    pub(crate) fn touch(&self, rows: &Range<usize>) -> bool {
        !self.spans.is_empty() && !self.within(rows).is_empty()
    }

    /// The images of the pass that computes `rows`; `None` without any. `positions` are those of the whole plan; `locate` returns the
    /// request within the pass and the KV indices of tokens.
    pub(crate) fn of_pass(
        &self,
        rows: &Range<usize>,
        positions: &[u32],
        locate: impl Fn(&Range<usize>) -> (usize, Range<usize>),
    ) -> Option<PassImages> {
        let numbers = self.within(rows);
        if numbers.is_empty() {
            return None;
        }
        let spans = &self.spans[numbers.clone()];
        let image = |(number, span): (usize, &Span)| {
            let (request, kv) = locate(&span.rows);
            ImageSpan {
                number: self.first + number as u64,
                request,
                kv,
                continues: span.rows.end > rows.end,
                grid: span.grid,
                pixels: span.pixels.clone(),
            }
        };
        Some(PassImages {
            spans: numbers.zip(spans).map(image).collect(),
            positions: self.axis_positions(rows, positions, spans),
        })
    }

    /// `[3, tokens]` M-RoPE positions: those of images, and for text the position on every axis.
    fn axis_positions(&self, rows: &Range<usize>, positions: &[u32], spans: &[Span]) -> Vec<i64> {
        let plain = positions[rows.clone()].iter().map(|&at| i64::from(at));
        let mut positions: Vec<i64> = plain.clone().chain(plain.clone()).chain(plain).collect();
        for span in spans {
            let axes = self.axes[span.axes.clone()].as_chunks::<3>().0;
            for (row, axes) in span.rows.clone().zip(axes) {
                if rows.contains(&row) {
                    for (axis, &position) in axes.iter().enumerate() {
                        positions[axis * rows.len() + row - rows.start] = i64::from(position);
                    }
                }
            }
        }
        positions
    }
}

/// An image with tokens in a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSpan {
    /// Unique over all frames of the planner.
    pub number: u64,
    /// Its request within the pass.
    pub request: usize,
    /// KV indices of its tokens, those in other passes included.
    pub kv: Range<usize>,
    /// Whether a later pass has tokens of it.
    pub continues: bool,
    /// Patches in time, height and width; of `input_embeds` 0, tokens, and numbers of each.
    pub grid: [u32; 3],
    /// Its bytes of the frame's `image_pixels`: float32 `[patches, patch_values]`, little-endian; of `input_embeds` `[tokens, numbers]`.
    pub pixels: Range<usize>,
}

/// The images of a pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PassImages {
    /// In the order of their tokens.
    pub spans: Vec<ImageSpan>,
    /// `[3, tokens]`: M-RoPE position on the axes time, height and width.
    pub positions: Vec<i64>,
}
