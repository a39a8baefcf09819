//! One request of a frame: its KV geometry, and whether it can be served.

use std::ops::Range;

use pie_wire::{ArchivedSampler, NativeSlice, brle};

use crate::frame::{Frame, range};
use crate::{Limits, RequestFault, TokenSampler};

/// KV geometry of one request, in tokens. Input row `j` is stored at KV index `kv_end - inputs + j`, draft `d` at
/// `kv_end + d`; each row sees every KV index up to its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Input tokens.
    pub(crate) inputs: u32,
    /// Draft tokens behind them.
    pub(crate) drafts: u32,
    /// KV length after the inputs, before the drafts.
    pub(crate) kv_end: u32,
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

/// What the planner found out about one request.
#[derive(Debug)]
pub(crate) struct Checked {
    /// `None`: nothing to compute.
    pub(crate) geometry: Option<Geometry>,
    /// Set: the request's outputs are empty.
    pub(crate) fault: Option<RequestFault>,
}

impl Checked {
    pub(crate) fn request(frame: &Frame<'_>, limits: &Limits, index: usize) -> Self {
        let tokens = range(frame.qo_indptr, index);
        if tokens.is_empty() {
            let idle = range(frame.sampler_indptr, index).is_empty()
                && range(frame.draft_indptr, index).is_empty();
            return Self {
                geometry: None,
                fault: (!idle).then_some(RequestFault::NoTokens),
            };
        }
        match check_compute(frame, limits, index) {
            Err(fault) => Self {
                geometry: None,
                fault: Some(fault),
            },
            Ok(geometry) => Self {
                geometry: Some(geometry),
                fault: check_outputs(frame, limits, index).err(),
            },
        }
    }
}

/// Checks all that decides whether the request's KV can be computed.
fn check_compute(
    frame: &Frame<'_>,
    limits: &Limits,
    index: usize,
) -> Result<Geometry, RequestFault> {
    let spans = frame.spans(index);
    if spans > 0 {
        return Err(RequestFault::Media { spans });
    }
    let adapter = frame.adapter(index);
    if adapter >= 0 {
        return Err(RequestFault::Adapter { id: adapter });
    }
    let geometry = check_geometry(frame, limits, index)?;
    let tokens = range(frame.qo_indptr, index);
    let drafts = range(frame.draft_indptr, index);
    check_ids(&frame.token_ids[tokens.clone()], limits)?;
    check_ids(&frame.draft_ids[drafts.clone()], limits)?;
    let positions = &frame.positions[tokens];
    check_positions(positions.iter().copied(), limits)?;
    check_positions(draft_positions(frame, drafts, positions), limits)?;
    check_masks(frame, geometry, positions, index)?;
    Ok(geometry)
}

fn check_geometry(
    frame: &Frame<'_>,
    limits: &Limits,
    index: usize,
) -> Result<Geometry, RequestFault> {
    let pages = &frame.pages[range(frame.page_indptr, index)];
    let inputs = range(frame.qo_indptr, index).len() as u64;
    let drafts = range(frame.draft_indptr, index).len() as u64;
    let page_size = u64::from(limits.page_size);
    if pages.is_empty() {
        return Err(RequestFault::NoPages {
            tokens: inputs + drafts,
        });
    }
    if let Some(&page) = pages.iter().find(|&&page| page >= limits.total_pages) {
        return Err(RequestFault::PageId {
            page,
            total_pages: limits.total_pages,
        });
    }
    let length = frame.last_page_lens[index];
    if length == 0 || length > limits.page_size {
        return Err(RequestFault::LastPageLength {
            length,
            page_size: limits.page_size,
        });
    }
    // The list covers the drafts, the last page's length does not.
    let end =
        (pages.len() as u64 - 1) * page_size + (u64::from(length) + drafts - 1) % page_size + 1;
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
    })
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

/// Positions of the request's drafts: the frame's, or consecutive ones behind the last input.
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

/// Accepts only rows that mean "causal"; without the frame's flag the rows are not looked at.
fn check_masks(
    frame: &Frame<'_>,
    geometry: Geometry,
    positions: &[u32],
    index: usize,
) -> Result<(), RequestFault> {
    let rows = &frame.masks[range(frame.mask_indptr, index)];
    if !frame.has_user_mask || rows.is_empty() {
        return Ok(());
    }
    if rows.len() != positions.len() {
        return Err(RequestFault::MaskRows {
            rows: rows.len(),
            tokens: positions.len(),
        });
    }
    let causal = |row: usize| {
        let runs = rows[row].buffer.native();
        // Every row that the runtime itself wrote has the first form, whatever the row's KV index.
        runs.is_empty()
            || *runs == [0, positions[row].saturating_add(1)]
            || brle::is_causal(
                runs,
                u64::from(geometry.prefix()) + row as u64 + 1,
                u64::from(geometry.kv_end),
            )
    };
    match (0..rows.len()).find(|&row| !causal(row)) {
        Some(row) => Err(RequestFault::NonCausalMask { row }),
        None => Ok(()),
    }
}

/// Checks what concerns the request's outputs alone.
fn check_outputs(frame: &Frame<'_>, limits: &Limits, index: usize) -> Result<(), RequestFault> {
    let rows = range(frame.qo_indptr, index).len() as u32;
    let slots = range(frame.sampler_indptr, index);
    if let Some(&index) = frame.sampling_indices[slots.clone()]
        .iter()
        .find(|&&row| row >= rows)
    {
        return Err(RequestFault::SamplingIndex { index, rows });
    }
    for sampler in &frame.samplers[slots.clone()] {
        if matches!(sampler, ArchivedSampler::Embedding) {
            // Reserved: it has no output that could be missing.
            continue;
        }
        TokenSampler::from_wire(sampler.view(), limits.vocab_size)
            .map_err(|sampler| RequestFault::Probe { sampler })?;
    }
    let logit_masks = &frame.logit_masks[range(frame.logit_mask_indptr, index)];
    let constrains = logit_masks.iter().any(|mask| !mask.buffer.is_empty());
    if constrains && !slots.is_empty() {
        Err(RequestFault::LogitMask)
    } else {
        Ok(())
    }
}
