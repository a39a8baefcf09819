//! The arrays of a frame as slices, and the validation of the frame as a whole.

pub(crate) mod check;
pub(crate) mod query_tokens;
pub(crate) mod request;

use pie_wire::{ArchivedBrle, ArchivedForwardRequest, ArchivedSampler, NativeSlice};

use crate::error::FrameError;

/// Borrowed arrays of one forward frame. Absent optional offset arrays are empty and read as zeros.
pub(crate) struct Frame<'a> {
    pub(crate) requests: usize,
    pub(crate) token_ids: &'a [u32],
    pub(crate) positions: &'a [u32],
    pub(crate) qo_indptr: &'a [u32],
    pub(crate) pages: &'a [u32],
    pub(crate) page_indptr: &'a [u32],
    pub(crate) last_page_lens: &'a [u32],
    pub(crate) sampling_indices: &'a [u32],
    pub(crate) samplers: &'a [ArchivedSampler],
    pub(crate) sampler_indptr: &'a [u32],
    pub(crate) masks: &'a [ArchivedBrle],
    pub(crate) mask_indptr: &'a [u32],
    pub(crate) has_user_mask: bool,
    pub(crate) logit_masks: &'a [ArchivedBrle],
    pub(crate) logit_mask_indptr: &'a [u32],
    pub(crate) draft_ids: &'a [u32],
    /// Empty when the frame does not give one position per draft.
    pub(crate) draft_positions: &'a [u32],
    pub(crate) draft_indptr: &'a [u32],
    pub(crate) image_indptr: &'a [u32],
    pub(crate) audio_indptr: &'a [u32],
    /// 0 = no context; empty when the frame names no contexts.
    pub(crate) context_ids: &'a [u64],
    /// Recurrent state slots; empty, as the flags, when the frame has none.
    pub(crate) state_slots: &'a [u32],
    pub(crate) state_flags: &'a [u8],
    pub(crate) request: &'a ArchivedForwardRequest,
}

impl<'a> Frame<'a> {
    /// Checks every array length and offset array against the others.
    pub(crate) fn check(request: &'a ArchivedForwardRequest) -> Result<Self, FrameError> {
        let frame = Self::view(request);
        let requests = frame.requests;
        frame.check_lengths()?;
        let required = [
            ("qo_indptr", frame.qo_indptr, frame.token_ids.len()),
            ("kv_page_indptr", frame.page_indptr, frame.pages.len()),
            (
                "sampling_indptr",
                request.sampling_indptr.native(),
                frame.sampling_indices.len(),
            ),
            ("sampler_indptr", frame.sampler_indptr, frame.samplers.len()),
        ];
        for (array, indptr, end) in required {
            // A frame without requests may leave out their offsets too.
            if !(requests == 0 && indptr.is_empty() && end == 0) {
                check_indptr(array, indptr, requests, end)?;
            }
        }
        let images = request.image_grids.len() / 3;
        let optional = [
            ("mask_indptr", frame.mask_indptr, frame.masks.len()),
            (
                "logit_mask_indptr",
                frame.logit_mask_indptr,
                frame.logit_masks.len(),
            ),
            ("spec_indptr", frame.draft_indptr, frame.draft_ids.len()),
            ("image_indptr", frame.image_indptr, images),
            (
                "audio_indptr",
                frame.audio_indptr,
                request.audio_anchor_rows.len(),
            ),
        ];
        for (array, indptr, end) in optional {
            if !(indptr.is_empty() && end == 0) {
                check_indptr(array, indptr, requests, end)?;
            }
        }
        let sampling_indptr = request.sampling_indptr.native();
        match sampling_indptr
            .iter()
            .zip(frame.sampler_indptr)
            .position(|(a, b)| a != b)
        {
            Some(index) => Err(FrameError::SamplerPartition { index }),
            None => Ok(frame),
        }
    }

    fn view(request: &'a ArchivedForwardRequest) -> Self {
        let qo_indptr = request.qo_indptr.native();
        let draft_ids = request.spec_token_ids.native();
        let draft_positions = request.spec_position_ids.native();
        Self {
            requests: qo_indptr.len().saturating_sub(1),
            token_ids: request.token_ids.native(),
            positions: request.position_ids.native(),
            qo_indptr,
            pages: request.kv_page_indices.native(),
            page_indptr: request.kv_page_indptr.native(),
            last_page_lens: request.kv_last_page_lens.native(),
            sampling_indices: request.sampling_indices.native(),
            samplers: request.samplers.as_slice(),
            sampler_indptr: request.sampler_indptr.native(),
            masks: request.masks.as_slice(),
            mask_indptr: request.mask_indptr.native(),
            has_user_mask: request.has_user_mask,
            logit_masks: request.logit_masks.as_slice(),
            logit_mask_indptr: request.logit_mask_indptr.native(),
            draft_ids,
            draft_positions: if draft_positions.len() == draft_ids.len() {
                draft_positions
            } else {
                &[]
            },
            draft_indptr: request.spec_indptr.native(),
            image_indptr: request.image_indptr.native(),
            audio_indptr: request.audio_indptr.native(),
            context_ids: request.context_ids.native(),
            state_slots: request.rs_slot_ids.native(),
            state_flags: request.rs_slot_flags.as_slice(),
            request,
        }
    }

    fn check_lengths(&self) -> Result<(), FrameError> {
        let (requests, request) = (self.requests, self.request);
        let exact = [
            ("position_ids", self.positions.len(), self.token_ids.len()),
            ("kv_last_page_lens", self.last_page_lens.len(), requests),
            ("adapter_bindings", request.adapter_bindings.len(), requests),
        ];
        let optional = [
            ("context_ids", request.context_ids.len()),
            ("output_spec_flags", request.output_spec_flags.len()),
            ("rs_slot_ids", request.rs_slot_ids.len()),
            ("rs_slot_flags", request.rs_slot_flags.len()),
        ];
        let optional = optional.into_iter().filter(|&(_, found)| found != 0);
        for (array, found, expected) in exact
            .into_iter()
            .chain(optional.map(|(array, found)| (array, found, requests)))
        {
            if found != expected {
                return Err(FrameError::Length {
                    array,
                    found,
                    expected,
                });
            }
        }
        Ok(())
    }

    /// Whether request `index` wants drafts for its next step.
    pub(crate) fn wants_drafts(&self, index: usize) -> bool {
        let flags = &self.request.output_spec_flags;
        flags.get(index).is_some_and(|flag| *flag)
    }

    /// Adapter id of request `index`, -1 = none.
    pub(crate) fn adapter(&self, index: usize) -> i64 {
        self.request.adapter_bindings[index].adapter_id.to_native()
    }
}

/// The range of request `index` in a checked offset array; an absent one gives the empty range.
pub(crate) fn range(indptr: &[u32], index: usize) -> std::ops::Range<usize> {
    match indptr.get(index..index + 2) {
        Some(bounds) => bounds[0] as usize..bounds[1] as usize,
        None => 0..0,
    }
}

/// Checks that an offset array splits data of length `end` into `requests` ranges.
pub(crate) fn check_indptr(
    array: &'static str,
    indptr: &[u32],
    requests: usize,
    end: usize,
) -> Result<(), FrameError> {
    if indptr.len() != requests + 1 {
        return Err(FrameError::IndptrLength {
            array,
            found: indptr.len(),
            expected: requests + 1,
        });
    }
    let starts = indptr[0] == 0 && indptr[requests] as usize == end;
    // No early exit, so that the loop vectorizes.
    let pairs = indptr.iter().zip(&indptr[1..]);
    let falls = pairs.fold(0, |falls, (a, b)| falls | u32::from(a > b));
    if starts && falls == 0 {
        return Ok(());
    }
    let wrong = |index: usize| match index {
        0 => indptr[0] != 0,
        _ => {
            indptr[index] < indptr[index - 1]
                || (index == requests && indptr[index] as usize != end)
        }
    };
    let index = (0..requests)
        .find(|&index| wrong(index))
        .unwrap_or(requests);
    let value = indptr[index];
    Err(FrameError::IndptrOrder {
        array,
        end,
        index,
        value,
    })
}
