//! Image spans: the rows whose embeddings a vision encoder computes from pixels.

use std::ops::Range;

use pie_wire::NativeSlice;
use thiserror::Error;

use crate::fault::Medium;
use crate::frame::{Frame, check_indptr, range};
use crate::plan::{Planner, Segment, pass_rows};
use crate::{FrameError, LimitError, Limits, RequestFault};

/// What the engine's vision encoder takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vision {
    /// Numbers of one patch: channels x frames x height x width.
    pub patch_values: u32,
    /// Side of the square of patches that one row stands for.
    pub merge_size: u32,
    /// Longest side of an image, in patches.
    pub max_side: u32,
}

impl Vision {
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

    /// Rows that an image of this grid (time, height, width in patches) takes.
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

/// Why an image span cannot be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ImageError {
    /// More than one step in time.
    #[error("its grid has {time} steps in time; video clips are not supported, only still images")]
    Video {
        /// Steps in time.
        time: u32,
    },
    /// Sides that the encoder cannot merge.
    #[error(
        "its grid is {time} x {height} x {width}; height and width must be multiples of {merge} patches"
    )]
    Grid {
        /// Steps in time.
        time: u32,
        /// Patches.
        height: u32,
        /// Patches.
        width: u32,
        /// Patches that are merged, per side.
        merge: u32,
    },
    /// A side beyond the encoder's position table.
    #[error("it is {side} patches long, the model's limit is {limit}; send a smaller image")]
    Side {
        /// The longer side, in patches.
        side: u32,
        /// The limit.
        limit: u32,
    },
    /// Pixels that do not fill the grid.
    #[error("it has {found} bytes of pixels, its grid needs {expected}")]
    Pixels {
        /// Bytes found.
        found: u64,
        /// Bytes needed.
        expected: u64,
    },
    /// Rows outside of the request.
    #[error("its {tokens} rows from row {row} on leave the request's rows {start}..{end}")]
    Rows {
        /// First row, counted from the frame's first.
        row: u32,
        /// Rows.
        tokens: u64,
        /// The request's first row.
        start: usize,
        /// Behind the request's last row.
        end: usize,
    },
    /// Rows that the span before it has, or rows before that.
    #[error("it begins at row {row}, but the span before it ends at row {end}")]
    Overlap {
        /// First row.
        row: u32,
        /// Behind the last row of the span before.
        end: usize,
    },
    /// A row that carries text.
    #[error("row {row} has token {token}, not the placeholder 0")]
    Token {
        /// Row, counted from the frame's first.
        row: usize,
        /// Its token.
        token: u32,
    },
    /// The anchor's position is not that of its row.
    #[error("its anchor position is {anchor}, its first row has position {position}")]
    Anchor {
        /// `image_anchor_positions`.
        anchor: u32,
        /// `position_ids` of the row.
        position: u32,
    },
    /// A wrong number of rotary positions.
    #[error("it has {found} rotary positions, expected none or {expected} (three per row)")]
    Axes {
        /// Numbers found.
        found: usize,
        /// Numbers needed.
        expected: u64,
    },
    /// A rotary position outside the model's position table.
    #[error("rotary position {position} is outside the model's limit of {limit}")]
    Position {
        /// The position.
        position: u32,
        /// The limit.
        limit: u32,
    },
    /// A wrong number of patch positions, of all images of the frame together: nobody can tell whose is wrong.
    #[error(
        "`image_patch_positions` must have two numbers per patch of the frame's images, or none"
    )]
    PatchPositions,
}

impl ImageError {
    /// As [`RequestFault::kind`].
    pub(crate) const fn kind(self) -> &'static str {
        match self {
            Self::Video { .. } => "video",
            Self::Grid { .. } => "image-grid",
            Self::Side { .. } => "image-side",
            Self::Pixels { .. } => "image-pixels",
            Self::Rows { .. } => "image-rows",
            Self::Overlap { .. } => "image-overlap",
            Self::Token { .. } => "image-token",
            Self::Anchor { .. } => "image-anchor",
            Self::Axes { .. } => "image-axes",
            Self::Position { .. } => "image-position",
            Self::PatchPositions => "patch-positions",
        }
    }
}

/// The arrays that describe a frame's images; what is counted per span has the right length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageArrays<'a> {
    vision: Vision,
    grids: &'a [[u32; 3]],
    anchor_positions: &'a [u32],
    anchor_rows: &'a [u32],
    pixel_indptr: &'a [u32],
    axes: &'a [u32],
    axes_indptr: &'a [u32],
    /// There are two patch positions for each patch that the pixels hold, or none. They are for encoders that know no
    /// grid; this one takes an image's patches in the order of its grid.
    patch_positions_fit: bool,
}

impl<'a> ImageArrays<'a> {
    /// `None` when the frame brings no images.
    pub(crate) fn check(frame: &Frame<'a>, vision: Vision) -> Result<Option<Self>, FrameError> {
        let spans = frame.image_indptr.last().map_or(0, |&end| end as usize);
        if spans == 0 {
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
        let patches = (0..spans)
            .map(|span| range(pixel_indptr, span).len() as u64 / vision.patch_bytes())
            .sum::<u64>();
        let patch_positions = request.image_patch_positions.len() as u64;
        Ok(Some(Self {
            vision,
            grids: grids.as_chunks().0,
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

    /// Checks one span of the request with the given rows, counted from the frame's first. `free` is the first row that
    /// the span may have. Returns its rows.
    fn check_span(
        &self,
        frame: &Frame<'_>,
        limits: &Limits,
        span: usize,
        rows: &Range<usize>,
        free: usize,
    ) -> Result<Range<usize>, ImageError> {
        let grid = self.grids[span];
        self.vision.check_grid(grid)?;
        let found = range(self.pixel_indptr, span).len() as u64;
        let expected = u64::from(grid[1]) * u64::from(grid[2]) * self.vision.patch_bytes();
        if found != expected {
            return Err(ImageError::Pixels { found, expected });
        }
        let (row, tokens) = (self.anchor_rows[span], self.vision.rows(grid));
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
    ) -> Result<(), RequestFault> {
        let spans = range(frame.image_indptr, index);
        let rows = range(frame.qo_indptr, index);
        let mut free = rows.start;
        for (number, span) in spans.clone().enumerate() {
            let fault = |problem| RequestFault::Image { number, problem };
            let checked = self.check_span(frame, limits, span, &rows, free);
            free = checked.map_err(fault)?.end;
            if !self.patch_positions_fit {
                return Err(fault(ImageError::PatchPositions));
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

/// Refuses the media of request `index` that the model does not take, and images that are wrong.
pub(crate) fn check_media(
    frame: &Frame<'_>,
    images: Option<&ImageArrays<'_>>,
    limits: &Limits,
    index: usize,
) -> Result<(), RequestFault> {
    let spans = range(frame.image_indptr, index).len();
    match images {
        Some(images) => images.check_request(frame, limits, index)?,
        None if spans > 0 => {
            let medium = Medium::Image;
            return Err(RequestFault::Media { medium, spans });
        }
        None => {}
    }
    let spans = range(frame.audio_indptr, index).len();
    if spans > 0 {
        let medium = Medium::Audio;
        return Err(RequestFault::Media { medium, spans });
    }
    Ok(())
}

/// An image of a request that is served.
#[derive(Debug, Clone)]
struct Span {
    /// Its rows in [`Planner::token_ids`].
    rows: Range<usize>,
    grid: [u32; 3],
    /// Its bytes of `image_pixels`.
    pixels: Range<usize>,
    /// Its rotary positions in [`Images::axes`], three per row; none: as for text.
    axes: Range<usize>,
}

/// The images of a frame, in the order of their rows.
#[derive(Debug, Default)]
pub(crate) struct Images {
    spans: Vec<Span>,
    axes: Vec<u32>,
    /// Images of all frames before this one.
    before: u64,
}

impl Images {
    pub(crate) fn clear(&mut self) {
        self.before += self.spans.len() as u64;
        self.spans.clear();
        self.axes.clear();
    }

    /// Takes the checked images of request `index`, whose rows of the plan begin at `first_row`. Their tokens become
    /// `placeholder`.
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
            let rows = start..start + arrays.vision.rows(grid) as usize;
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

    /// Which spans have rows among `rows`.
    fn within(&self, rows: &Range<usize>) -> Range<usize> {
        let spans = &self.spans;
        let start = spans.partition_point(|span| span.rows.end <= rows.start);
        let end = spans.partition_point(|span| span.rows.start < rows.end);
        start..end
    }

    /// Whether some of `rows` are an image's.
    pub(crate) fn touch(&self, rows: &Range<usize>) -> bool {
        !self.spans.is_empty() && !self.within(rows).is_empty()
    }
}

/// An image with rows in a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSpan {
    /// Tells it from every other image that the planner has seen.
    pub number: u64,
    /// Its request within the pass.
    pub request: usize,
    /// KV indices of its rows, also of those in other passes.
    pub kv: Range<usize>,
    /// Whether a later pass has rows of it.
    pub continues: bool,
    /// Patches in time, height and width.
    pub grid: [u32; 3],
    /// Its bytes of the frame's `image_pixels`: float32 `[patches, patch_values]`, little-endian.
    pub pixels: Range<usize>,
}

/// The images of a pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PassImages {
    /// In the order of their rows.
    pub spans: Vec<ImageSpan>,
    /// `[3, tokens]`: rotary position of each row on the axes time, height and width.
    pub positions: Vec<i64>,
}

impl Planner {
    /// For an engine with this encoder, which must pass [`Vision::check`]; without one requests with images are
    /// emptied. Rows whose embeddings come from an image are staged with token `vocab_size`, which no text has.
    #[must_use]
    pub const fn with_vision(mut self, vision: Vision) -> Self {
        self.vision = Some(vision);
        self
    }

    /// Whether requests that are served bring images.
    #[must_use]
    pub const fn has_images(&self) -> bool {
        !self.images.spans.is_empty()
    }

    /// The images of the last staged pass; `None` when it has none.
    #[must_use]
    pub fn pass_images(&self) -> Option<PassImages> {
        let pass = self.stage.next_pass.checked_sub(1)?;
        let segments = &self.segments[self.passes.get(pass)?.clone()];
        let rows = pass_rows(segments);
        let numbers = self.images.within(&rows);
        if numbers.is_empty() {
            return None;
        }
        let spans = &self.images.spans[numbers.clone()];
        Some(PassImages {
            spans: numbers
                .zip(spans)
                .map(|(number, span)| self.image_span(segments, rows.end, number, span))
                .collect(),
            positions: self.axis_positions(&rows, spans),
        })
    }

    fn image_span(
        &self,
        segments: &[Segment],
        pass_end: usize,
        number: usize,
        span: &Span,
    ) -> ImageSpan {
        // The first segment that reaches into the span is its request's: spans do not leave their requests.
        let entry = segments.partition_point(|segment| segment.rows().end <= span.rows.start);
        let request = &self.requests[segments[entry].request()];
        let kv = |row: usize| request.prefix as usize + (row - request.rows.start());
        ImageSpan {
            number: self.images.before + number as u64,
            request: entry,
            kv: kv(span.rows.start)..kv(span.rows.end),
            continues: span.rows.end > pass_end,
            grid: span.grid,
            pixels: span.pixels.clone(),
        }
    }

    /// `[3, rows]`: an image's own positions, the row's position on every axis elsewhere.
    fn axis_positions(&self, rows: &Range<usize>, spans: &[Span]) -> Vec<i64> {
        let plain = self.positions[rows.clone()].iter().map(|&at| i64::from(at));
        let mut positions: Vec<i64> = plain.clone().chain(plain.clone()).chain(plain).collect();
        for span in spans {
            let axes = self.images.axes[span.axes.clone()].as_chunks::<3>().0;
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
