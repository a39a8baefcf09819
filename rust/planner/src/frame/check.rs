//! Validation of one request: KV lengths, ids, positions, masks.

use std::ops::Range;

use pie_wire::{NativeSlice, brle};

use crate::error::{FrameError, RequestError};
use crate::frame::{Frame, range};
use crate::image::{ImageArrays, MediaConfig, check_media};
use crate::limits::Limits;
use crate::mask::{MaskMode, attention_words};

/// KV geometry of one request, in tokens. Input token `j` is stored at KV index `kv_end - inputs + j`, draft `d` at `kv_end + d`;
/// without a mask each attends to every KV index up to its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Input tokens.
    pub(crate) inputs: u32,
    /// Draft tokens after them.
    pub(crate) drafts: u32,
    /// KV length after the inputs, before the drafts.
    pub(crate) kv_end: u32,
    pub(crate) mask_mode: MaskMode,
}

impl Geometry {
    /// Cached prefix: tokens that earlier steps stored.
    pub(crate) const fn prefix(self) -> u32 {
        self.kv_end - self.inputs
    }

    /// Query tokens: inputs and drafts.
    pub(crate) const fn tokens(self) -> u32 {
        self.inputs + self.drafts
    }
}

/// Checks of the whole frame at once, which make those of single requests unnecessary.
#[derive(Debug, Clone)]
pub(crate) struct FrameChecks<'a> {
    /// Every input and draft token is in the vocabulary.
    ids_fit: bool,
    /// Every input position is below the limit.
    positions_fit: bool,
    /// Some request brings images or audio.
    media: bool,
    /// The images, if there are any and the model supports them.
    pub(crate) images: Option<ImageArrays<'a>>,
}

impl<'a> FrameChecks<'a> {
    pub(crate) fn of(
        frame: &Frame<'a>,
        limits: &Limits,
        media: MediaConfig,
    ) -> Result<Self, FrameError> {
        let below = |values: &[u32], limit: u32| {
            values.iter().fold(0, |max, &value| value.max(max)) < limit
        };
        let images = ImageArrays::check(frame, media)?;
        Ok(Self {
            ids_fit: below(frame.token_ids, limits.vocab_size)
                && below(frame.draft_ids, limits.vocab_size),
            positions_fit: below(frame.positions, limits.max_positions),
            media: [frame.image_indptr, frame.audio_indptr]
                .iter()
                .any(|indptr| indptr.last().is_some_and(|&end| end > 0)),
            images,
        })
    }
}

/// Whether request `index` has nothing to compute.
///
/// # Errors
/// [`RequestError::NoTokens`] when it has samplers or drafts.
pub(crate) fn is_idle(frame: &Frame<'_>, index: usize) -> Result<bool, RequestError> {
    if !range(frame.qo_indptr, index).is_empty() {
        return Ok(false);
    }
    let silent = range(frame.sampler_indptr, index).is_empty()
        && range(frame.draft_indptr, index).is_empty();
    if silent {
        Ok(true)
    } else {
        Err(RequestError::NoTokens)
    }
}

/// Checks everything that computing the request's KV needs, except the page ids.
pub(crate) fn check_compute(
    frame: &Frame<'_>,
    checks: &FrameChecks<'_>,
    limits: &Limits,
    index: usize,
) -> Result<Geometry, RequestError> {
    if checks.media {
        check_media(frame, checks.images.as_ref(), limits, index)?;
    }
    let tokens = range(frame.qo_indptr, index);
    let drafts = range(frame.draft_indptr, index);
    let pages = range(frame.page_indptr, index).len();
    let mut geometry = check_geometry(
        limits,
        tokens.len(),
        drafts.len(),
        pages,
        frame.last_page_lens[index],
    )?;
    if !checks.ids_fit {
        check_ids(&frame.token_ids[tokens.clone()], limits)?;
        check_ids(&frame.draft_ids[drafts.clone()], limits)?;
    }
    let positions = &frame.positions[tokens];
    if !checks.positions_fit {
        check_positions(positions.iter().copied(), limits)?;
    }
    if !drafts.is_empty() {
        check_positions(draft_positions(frame, drafts, positions), limits)?;
    }
    if frame.has_user_mask && !frame.masks.is_empty() {
        geometry.mask_mode = check_masks(frame, geometry, index)?;
    }
    Ok(geometry)
}

fn check_geometry(
    limits: &Limits,
    inputs: usize,
    drafts: usize,
    pages: usize,
    last_page_len: u32,
) -> Result<Geometry, RequestError> {
    let (inputs, drafts) = (inputs as u64, drafts as u64);
    if pages == 0 {
        return Err(RequestError::NoPages {
            tokens: inputs + drafts,
        });
    }
    let (length, page_size) = (last_page_len, limits.page_size);
    if length == 0 || length > page_size {
        return Err(RequestError::LastPageLength { length, page_size });
    }
    let page_size = u64::from(page_size);
    // The page list covers the drafts, the last page's length does not.
    let end = (pages as u64 - 1) * page_size + (u64::from(length) + drafts - 1) % page_size + 1;
    if end < inputs + drafts {
        return Err(RequestError::Geometry {
            tokens: inputs + drafts,
            capacity: end,
        });
    }
    if end > limits.max_kv_len() {
        return Err(RequestError::KvLength {
            length: end,
            limit: limits.max_kv_len(),
        });
    }
    Ok(Geometry {
        inputs: inputs as u32,
        drafts: drafts as u32,
        kv_end: (end - drafts) as u32,
        mask_mode: MaskMode::Causal,
    })
}

/// Checks page ids.
pub(crate) fn check_pages(pages: &[u32], limits: &Limits) -> Result<(), RequestError> {
    let total_pages = limits.total_pages;
    // The maximum vectorizes.
    if pages.iter().fold(0, |max, &page| page.max(max)) < total_pages {
        return Ok(());
    }
    match pages.iter().find(|&&page| page >= total_pages) {
        Some(&page) => Err(RequestError::PageId { page, total_pages }),
        None => Ok(()),
    }
}

fn check_ids(ids: &[u32], limits: &Limits) -> Result<(), RequestError> {
    match ids.iter().find(|&&token| token >= limits.vocab_size) {
        Some(&token) => Err(RequestError::TokenId {
            token,
            vocab_size: limits.vocab_size,
        }),
        None => Ok(()),
    }
}

fn check_positions(
    mut positions: impl Iterator<Item = u32>,
    limits: &Limits,
) -> Result<(), RequestError> {
    match positions.find(|&position| position >= limits.max_positions) {
        Some(position) => Err(RequestError::Position {
            position,
            limit: limits.max_positions,
        }),
        None => Ok(()),
    }
}

/// Positions of the request's drafts: those of the frame, else consecutive after the last input.
pub(crate) fn draft_positions<'a>(
    frame: &Frame<'a>,
    drafts: Range<usize>,
    inputs: &[u32],
) -> impl Iterator<Item = u32> + use<'a> {
    let given = frame.draft_positions;
    let last = inputs.last().copied().unwrap_or(0);
    let first = drafts.start;
    drafts.map(move |draft| match given.get(draft) {
        Some(&position) => position,
        None => last.saturating_add((draft - first) as u32 + 1),
    })
}

/// Classifies the request's attention mask.
fn check_masks(
    frame: &Frame<'_>,
    geometry: Geometry,
    index: usize,
) -> Result<MaskMode, RequestError> {
    let rows = &frame.masks[range(frame.mask_indptr, index)];
    let positions = &frame.positions[range(frame.qo_indptr, index)];
    if rows.is_empty() {
        return Ok(MaskMode::Causal);
    }
    if rows.len() != positions.len() {
        return Err(RequestError::MaskRows {
            rows: rows.len(),
            tokens: positions.len(),
        });
    }
    let causal_end = |row: usize| u64::from(geometry.prefix()) + row as u64 + 1;
    let causal = |row: usize| {
        let runs = rows[row].buffer.native();
        // The second form is what the runtime writes for causal rows, whatever the KV index.
        runs.is_empty()
            || *runs == [0, positions[row].saturating_add(1)]
            || brle::is_causal(runs, causal_end(row), u64::from(geometry.kv_end))
    };
    if (0..rows.len()).all(causal) {
        return Ok(MaskMode::Causal);
    }
    let stored = u64::from(geometry.kv_end) + u64::from(geometry.drafts);
    let sees_ahead = |row: usize| {
        let last = brle::true_ranges(rows[row].buffer.native(), stored).last();
        last.is_some_and(|visible| visible.end > causal_end(row))
    };
    if (0..rows.len()).any(sees_ahead) {
        return Ok(MaskMode::CustomLookahead);
    }
    Ok(MaskMode::Custom)
}

/// Checks that the engine supports the request's mask, and that a pass can hold it.
pub(crate) const fn check_mask_mode(
    geometry: Geometry,
    limits: &Limits,
    masks: bool,
) -> Result<(), RequestError> {
    match geometry.mask_mode {
        MaskMode::Custom | MaskMode::CustomLookahead if !masks => Err(RequestError::NonCausalMask),
        MaskMode::Causal | MaskMode::Custom => Ok(()),
        MaskMode::CustomLookahead => check_one_pass(geometry, limits),
    }
}

/// Checks that a request that cannot be chunked fits one pass, with its mask.
const fn check_one_pass(geometry: Geometry, limits: &Limits) -> Result<(), RequestError> {
    let (tokens, limit) = (geometry.tokens(), limits.chunk_tokens);
    let kv_len = geometry.kv_end as usize + geometry.drafts as usize;
    let words = attention_words(tokens as usize, kv_len);
    let max_words = limits.attention_words();
    if tokens > limit {
        return Err(RequestError::MaskAhead { tokens, limit });
    }
    if words > max_words {
        return Err(RequestError::MaskWords {
            tokens,
            kv_len,
            bytes: 4 * words,
            limit: 4 * max_words,
            // The mask of as many tokens without a prefix is as large.
            chunk: (32 * words - 1).isqrt() + 1,
        });
    }
    Ok(())
}
