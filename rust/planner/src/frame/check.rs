//! One request of a frame: its KV geometry, and whether it can be served.

use std::ops::Range;

use pie_wire::{NativeSlice, brle};

use crate::fault::{FrameError, RequestFault};
use crate::frame::{Frame, range};
use crate::image::{ImageArrays, Vision, check_media};
use crate::limits::Limits;
use crate::mask::{Visibility, attention_words};

/// KV geometry of one request, in tokens. Input row `j` is stored at KV index `kv_end - inputs + j`, draft `d` at
/// `kv_end + d`; unless a mask says otherwise, each row sees every KV index up to its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Input tokens.
    pub(crate) inputs: u32,
    /// Draft tokens after them.
    pub(crate) drafts: u32,
    /// KV length after the inputs, before the drafts.
    pub(crate) kv_end: u32,
    pub(crate) visibility: Visibility,
}

impl Geometry {
    /// Tokens that earlier passes stored.
    pub(crate) const fn prefix(self) -> u32 {
        self.kv_end - self.inputs
    }

    /// Rows that the forward pass computes.
    pub(crate) const fn rows(self) -> u32 {
        self.inputs + self.drafts
    }
}

/// What holds for the whole frame, so that single requests need not be asked.
#[derive(Debug, Clone)]
pub(crate) struct FrameFacts<'a> {
    /// Every input and draft token is in the vocabulary.
    ids_fit: bool,
    /// Every input position is below the limit.
    positions_fit: bool,
    /// Some request brings images or audio.
    media: bool,
    /// The images, if there are some and the model takes them.
    pub(crate) images: Option<ImageArrays<'a>>,
}

impl<'a> FrameFacts<'a> {
    pub(crate) fn of(
        frame: &Frame<'a>,
        limits: &Limits,
        vision: Option<Vision>,
    ) -> Result<Self, FrameError> {
        let below = |values: &[u32], limit: u32| {
            values.iter().fold(0, |max, &value| value.max(max)) < limit
        };
        let images = vision.map(|vision| ImageArrays::check(frame, vision));
        Ok(Self {
            ids_fit: below(frame.token_ids, limits.vocab_size)
                && below(frame.draft_ids, limits.vocab_size),
            positions_fit: below(frame.positions, limits.max_positions),
            media: [frame.image_indptr, frame.audio_indptr]
                .iter()
                .any(|indptr| indptr.last().is_some_and(|&end| end > 0)),
            images: images.transpose()?.flatten(),
        })
    }
}

/// Whether request `index` has nothing to compute.
///
/// # Errors
/// [`RequestFault::NoTokens`] when it asks for outputs all the same.
pub(crate) fn is_idle(frame: &Frame<'_>, index: usize) -> Result<bool, RequestFault> {
    if !range(frame.qo_indptr, index).is_empty() {
        return Ok(false);
    }
    let silent = range(frame.sampler_indptr, index).is_empty()
        && range(frame.draft_indptr, index).is_empty();
    if silent {
        Ok(true)
    } else {
        Err(RequestFault::NoTokens)
    }
}

/// Checks all that decides whether the request's KV can be computed, but the page ids.
pub(crate) fn check_compute(
    frame: &Frame<'_>,
    facts: &FrameFacts<'_>,
    limits: &Limits,
    index: usize,
) -> Result<Geometry, RequestFault> {
    if facts.media {
        check_media(frame, facts.images.as_ref(), limits, index)?;
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
    if !facts.ids_fit {
        check_ids(&frame.token_ids[tokens.clone()], limits)?;
        check_ids(&frame.draft_ids[drafts.clone()], limits)?;
    }
    let positions = &frame.positions[tokens];
    if !facts.positions_fit {
        check_positions(positions.iter().copied(), limits)?;
    }
    if !drafts.is_empty() {
        check_positions(draft_positions(frame, drafts, positions), limits)?;
    }
    if frame.has_user_mask && !frame.masks.is_empty() {
        geometry.visibility = check_masks(frame, geometry, index)?;
    }
    Ok(geometry)
}

fn check_geometry(
    limits: &Limits,
    inputs: usize,
    drafts: usize,
    pages: usize,
    last_page_len: u32,
) -> Result<Geometry, RequestFault> {
    let (inputs, drafts) = (inputs as u64, drafts as u64);
    if pages == 0 {
        return Err(RequestFault::NoPages {
            tokens: inputs + drafts,
        });
    }
    let (length, page_size) = (last_page_len, limits.page_size);
    if length == 0 || length > page_size {
        return Err(RequestFault::LastPageLength { length, page_size });
    }
    let page_size = u64::from(page_size);
    // The list covers the drafts, the last page's length does not.
    let end = (pages as u64 - 1) * page_size + (u64::from(length) + drafts - 1) % page_size + 1;
    if end < inputs + drafts {
        return Err(RequestFault::Geometry {
            tokens: inputs + drafts,
            capacity: end,
        });
    }
    if end > limits.max_kv_len() {
        return Err(RequestFault::KvLength {
            length: end,
            limit: limits.max_kv_len(),
        });
    }
    Ok(Geometry {
        inputs: inputs as u32,
        drafts: drafts as u32,
        kv_end: (end - drafts) as u32,
        visibility: Visibility::Causal,
    })
}

/// Checks page ids.
pub(crate) fn check_pages(pages: &[u32], limits: &Limits) -> Result<(), RequestFault> {
    let total_pages = limits.total_pages;
    // The largest one is found several at a time.
    if pages.iter().fold(0, |max, &page| page.max(max)) < total_pages {
        return Ok(());
    }
    match pages.iter().find(|&&page| page >= total_pages) {
        Some(&page) => Err(RequestFault::PageId { page, total_pages }),
        None => Ok(()),
    }
}

fn check_ids(ids: &[u32], limits: &Limits) -> Result<(), RequestFault> {
    match ids.iter().find(|&&token| token >= limits.vocab_size) {
        Some(&token) => Err(RequestFault::TokenId {
            token,
            vocab_size: limits.vocab_size,
        }),
        None => Ok(()),
    }
}

fn check_positions(
    mut positions: impl Iterator<Item = u32>,
    limits: &Limits,
) -> Result<(), RequestFault> {
    match positions.find(|&position| position >= limits.max_positions) {
        Some(position) => Err(RequestFault::Position {
            position,
            limit: limits.max_positions,
        }),
        None => Ok(()),
    }
}

/// Positions of the request's drafts: the frame's, or consecutive ones after the last input.
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

/// What the request's mask rows let it see.
fn check_masks(
    frame: &Frame<'_>,
    geometry: Geometry,
    index: usize,
) -> Result<Visibility, RequestFault> {
    let rows = &frame.masks[range(frame.mask_indptr, index)];
    let positions = &frame.positions[range(frame.qo_indptr, index)];
    if rows.is_empty() {
        return Ok(Visibility::Causal);
    }
    if rows.len() != positions.len() {
        return Err(RequestFault::MaskRows {
            rows: rows.len(),
            tokens: positions.len(),
        });
    }
    let causal_end = |row: usize| u64::from(geometry.prefix()) + row as u64 + 1;
    let causal = |row: usize| {
        let runs = rows[row].buffer.native();
        // Every row that the runtime itself wrote has the first form, whatever the row's KV index.
        runs.is_empty()
            || *runs == [0, positions[row].saturating_add(1)]
            || brle::is_causal(runs, causal_end(row), u64::from(geometry.kv_end))
    };
    if (0..rows.len()).all(causal) {
        return Ok(Visibility::Causal);
    }
    let stored = u64::from(geometry.kv_end) + u64::from(geometry.drafts);
    let sees_ahead = |row: usize| {
        let last = brle::true_ranges(rows[row].buffer.native(), stored).last();
        last.is_some_and(|visible| visible.end > causal_end(row))
    };
    if (0..rows.len()).any(sees_ahead) {
        return Ok(Visibility::MaskedAhead);
    }
    Ok(Visibility::Masked)
}

/// Checks that a pass can apply the request's mask, on an engine that applies masks or does not.
pub(crate) const fn check_visibility(
    geometry: Geometry,
    limits: &Limits,
    masks: bool,
) -> Result<(), RequestFault> {
    match geometry.visibility {
        Visibility::Masked | Visibility::MaskedAhead if !masks => Err(RequestFault::NonCausalMask),
        Visibility::Causal | Visibility::Masked => Ok(()),
        Visibility::MaskedAhead => check_one_pass(geometry, limits),
    }
}

/// Checks that a request that cannot be cut fits one pass, with its mask.
const fn check_one_pass(geometry: Geometry, limits: &Limits) -> Result<(), RequestFault> {
    let (tokens, limit) = (geometry.rows(), limits.chunk_tokens);
    let kv_len = geometry.kv_end as usize + geometry.drafts as usize;
    let words = attention_words(tokens as usize, kv_len);
    let max_words = limits.attention_words();
    if tokens > limit {
        return Err(RequestFault::MaskAhead { tokens, limit });
    }
    if words > max_words {
        return Err(RequestFault::MaskWords {
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
