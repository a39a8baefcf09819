//! Why an image is refused.

use thiserror::Error;

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
    /// Embeddings that the model cannot take.
    #[error(
        "its embeddings are {tokens} x {width}; this model takes one or more of {size} numbers"
    )]
    Embeds {
        /// Embeddings.
        tokens: u32,
        /// Numbers of each.
        width: u32,
        /// The model's.
        size: u32,
    },
    /// An image for a model of text.
    #[error("this model takes text, no images")]
    NoVision,
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
        /// One past the request's last row.
        end: usize,
    },
    /// Rows that the span before it has, or rows before that.
    #[error("it begins at row {row}, but the span before it ends at row {end}")]
    Overlap {
        /// First row.
        row: u32,
        /// One past the last row of the span before.
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
    /// A wrong number of patch positions, of all images of the frame together: which image is wrong is not known.
    #[error(
        "`image_patch_positions` must have two numbers per patch of the frame's images, or none"
    )]
    PatchPositions,
}

impl ImageError {
    /// As [`RequestError::kind`].
    pub(crate) const fn kind(self) -> &'static str {
        match self {
            Self::Video { .. } => "video",
            Self::Grid { .. } => "image-grid",
            Self::Side { .. } => "image-side",
            Self::Embeds { .. } => "input-embeds",
            Self::NoVision => "image",
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
