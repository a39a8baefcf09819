//! Builder of forward frames: the rows of a step as Pie's wire format, in reused buffers.

use std::convert::Infallible;
use std::sync::Arc;

use pie_wire::{
    AdapterBinding, Brle, ForwardRequest, Frame, ParamsRef, Payload, PromptLogprobs,
    RequestExtension, Sampler, Scratch, StepRow, WireError,
};

use self::bits::BitMasks;
use self::params::ParamRegistry;
use crate::mask::{except, only};
use crate::prompt_images::PromptImages;
use crate::reply::{ExpectedLogprobs, ExpectedReply};

/// One sequence of a step: input tokens, KV pages, sampling.
#[derive(Clone, Copy, Debug)]
pub struct FrameRow<'a> {
    /// The driver's key for state of this sequence (drafter, token history); 0 for none.
    pub context_id: u64,
    /// Input tokens: a prompt, a chunk of one, or the last token.
    pub tokens: &'a [u32],
    /// The request of the previous frame whose sampled token is the input; `tokens` holds a placeholder.
    pub awaits: Option<usize>,
    /// KV index of the first token; without images also its position.
    pub start: u32,
    /// Draft tokens to verify, after `tokens`.
    pub drafts: &'a [u32],
    /// Whether the reply may bring drafts for the next step.
    pub wants_drafts: bool,
    /// Block table: every page up to the last token or draft.
    pub pages: &'a [u32],
    /// Sampler of the last token; `None` to sample nothing.
    pub sampler: Option<&'a Sampler>,
    /// Adapter id.
    pub adapter: Option<u64>,
    /// Tokens that must not be sampled, sorted and unique.
    pub forbidden: &'a [u32],
    /// Token bitmask of the allowed tokens; tokens beyond its end are not allowed. `None`: every token.
    pub mask: Option<&'a [u32]>,
    /// Parameters beyond the Pie protocol.
    pub extension: Option<RowExtension<'a>>,
    /// Images of the prompt; `tokens` never splits one.
    pub images: Option<&'a PromptImages>,
}

/// Parameters of a row beyond the Pie protocol.
#[derive(Clone, Copy, Debug)]
pub struct RowExtension<'a> {
    /// Parameters of the request, sent once and then referred to by a handle. Their mask is ignored for [`FrameRow::mask`].
    pub params: &'a Arc<RequestExtension>,
    /// Tokens for penalties right before this row's, where these do not continue the previous row of the sequence.
    pub history: &'a [u32],
    /// Prompt tokens `start..end` whose log-probabilities are wanted; the one after this row's may be the last.
    pub prompt_logprobs: (u32, u32),
    /// The prompt token after this row's, if there is one.
    pub next: Option<u32>,
}

impl FrameRow<'_> {
    /// A request without a sampled token: it forces an archive reply, which has the driver's probes.
    pub const EMPTY: Self = Self {
        context_id: 0,
        tokens: &[],
        awaits: None,
        start: 1,
        drafts: &[],
        wants_drafts: false,
        pages: &[],
        sampler: None,
        adapter: None,
        forbidden: &[],
        mask: None,
        extension: None,
        images: None,
    };

    /// KV index after the last token.
    pub const fn end(&self) -> u32 {
        self.start + self.tokens.len() as u32
    }

    /// Position after the last token.
    fn next_position(&self) -> u32 {
        let delta = self
            .images
            .map_or(0, |images| images.mrope_delta(self.end()));
        self.end() - delta
    }
}

/// An input token that the previous step samples: patched into the encoded frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPatch {
    /// Index among the frame's tokens.
    index: usize,
    /// The request of the previous frame that samples it.
    request: usize,
}

/// Writes sampled tokens (`sampled(request)`) into an encoded frame by `write(offset, bytes)`.
pub(crate) fn write_patches<E>(
    patches: &[TokenPatch],
    sampled: impl Fn(usize) -> Option<u32>,
    mut write: impl FnMut(usize, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    // The tokens are the first array of the schema, so they are at the start of the archive.
    patches
        .iter()
        .try_for_each(|patch| match sampled(patch.request) {
            Some(token) => write(size_of::<u32>() * patch.index, &token.to_le_bytes()),
            // The reply was checked: a request that samples has a token.
            None => Ok(()),
        })
}

/// Patches an encoded frame; `sampled` has one token for each request of the previous frame.
///
/// # Panics
/// If a patch lies beyond `frame`.
pub fn patch_tokens(frame: &mut [u8], patches: &[TokenPatch], sampled: &[u32]) {
    let write = |at: usize, token: &[u8]| {
        frame[at..at + token.len()].copy_from_slice(token);
        Ok::<_, Infallible>(())
    };
    let Ok(()) = write_patches(patches, |request| sampled.get(request).copied(), write);
}

/// Metadata of a frame: what is needed to patch it and to check its reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrameMeta {
    /// Requests of the frame.
    pub requests: usize,
    /// Requests with a sampler; they come first.
    pub sampled: usize,
    /// Input tokens, without drafts.
    pub tokens: usize,
    /// Tokens to patch in.
    pub patches: Vec<TokenPatch>,
    /// Per request; empty when no request has drafts or asks for some.
    drafting: Vec<Drafting>,
    drafts: Vec<u32>,
    /// Of the first requests; the others want no log-probabilities.
    logprobs: Vec<ExpectedLogprobs>,
}

/// Speculative decoding of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Drafting {
    /// End of its drafts in [`FrameMeta::drafts`].
    drafts_end: usize,
    wants: bool,
    /// Position after its last token.
    end: u32,
}

impl FrameMeta {
    /// The expected reply, request by request.
    pub fn expected(&self) -> impl Iterator<Item = ExpectedReply<'_>> + Clone {
        (0..self.requests).map(|request| {
            let samples = request < self.sampled;
            let logprobs = self.logprobs.get(request).copied().unwrap_or_default();
            let Some(drafting) = self.drafting.get(request) else {
                return ExpectedReply {
                    logprobs,
                    ..ExpectedReply::without_drafts(samples)
                };
            };
            let before = request.checked_sub(1);
            let start = before.map_or(0, |before| self.drafting[before].drafts_end);
            ExpectedReply {
                samples,
                drafts: &self.drafts[start..drafting.drafts_end],
                wants_drafts: drafting.wants,
                end: drafting.end,
                logprobs,
            }
        })
    }

    fn expect_logprobs(&mut self, request: usize, logprobs: ExpectedLogprobs) {
        self.logprobs.resize(request, ExpectedLogprobs::default());
        self.logprobs.push(logprobs);
    }

    fn record_drafts<'a>(&mut self, rows: impl Iterator<Item = FrameRow<'a>> + Clone) {
        self.drafting.clear();
        self.drafts.clear();
        let drafts = |row: FrameRow<'_>| row.wants_drafts || !row.drafts.is_empty();
        if !rows.clone().any(drafts) {
            return;
        }
        for row in rows {
            self.drafts.extend(row.drafts);
            self.drafting.push(Drafting {
                drafts_end: self.drafts.len(),
                wants: row.wants_drafts,
                end: row.next_position(),
            });
        }
    }
}

/// Builds one frame after the other.
#[derive(Debug)]
pub struct FrameBuilder {
    frame: Frame,
    page_size: u32,
    /// `None`: all masks are run-length encoded.
    bit_masks: Option<BitMasks>,
    as_pie: bool,
    scratch: Scratch,
    extension_rows: Vec<ExtensionRow>,
    params: ParamRegistry,
}

/// The row of one request in the frame's extension.
#[derive(Clone, Debug, Default)]
struct ExtensionRow {
    request: u32,
    params: ParamsRef,
    returns_logprobs: bool,
    prompt: Option<PromptLogprobs>,
    history: Vec<u32>,
    mask: Vec<u32>,
    shares_mask: bool,
}

impl ExtensionRow {
    fn as_wire(&self) -> StepRow<'_> {
        StepRow {
            request: self.request,
            params: self.params,
            returns_logprobs: self.returns_logprobs,
            prompt: self.prompt,
            history: &self.history,
            mask: &self.mask,
            shares_mask: self.shares_mask,
        }
    }
}

impl FrameBuilder {
    /// A builder that omits causal mask rows, which the driver does not read.
    pub fn new(page_size: u32) -> Self {
        let body = ForwardRequest {
            image_pixel_indptr: vec![0],
            image_mrope_indptr: vec![0],
            audio_feature_indptr: vec![0],
            ..ForwardRequest::default()
        };
        let frame = Frame {
            driver_id: 0,
            payload: Payload::Forward(body),
        };
        Self {
            frame,
            page_size,
            bit_masks: None,
            as_pie: false,
            scratch: Scratch::default(),
            extension_rows: Vec::new(),
            params: ParamRegistry::default(),
        }
    }

    /// Sends parameters again: the driver may not have received the last frames.
    pub fn resend_params(&mut self) {
        self.params.reset();
    }

    /// Sends masks as bits where these are shorter than runs, to a driver that supports the extension.
    #[must_use]
    pub fn with_bit_masks(self, vocab_size: u32) -> Self {
        Self {
            bit_masks: Some(BitMasks::new(vocab_size)),
            ..self
        }
    }

    /// A builder of frames that equal the Pie runtime's byte for byte.
    pub fn as_pie(page_size: u32) -> Self {
        Self {
            as_pie: true,
            ..Self::new(page_size)
        }
    }

    /// Encodes the frame that was built last into `buffer` and returns its length.
    ///
    /// # Errors
    /// [`WireError::BufferTooSmall`], [`WireError::TooLarge`].
    pub fn encode(&mut self, buffer: &mut [u8]) -> Result<usize, WireError> {
        let length = pie_wire::encode_request_with(&self.frame, buffer, &mut self.scratch)?;
        let rows = self.extension_rows.iter().map(ExtensionRow::as_wire);
        pie_wire::write_extension(self.params.records(), rows, buffer, length)
    }

    /// Builds the frame of `rows`; those that sample come first.
    pub fn build<'a>(&mut self, rows: impl Iterator<Item = FrameRow<'a>> + Clone) -> FrameMeta {
        let mut meta = FrameMeta::default();
        self.build_into(&mut meta, rows);
        meta
    }

    /// As [`build`](Self::build), into a reused `meta`.
    pub(crate) fn build_into<'a>(
        &mut self,
        meta: &mut FrameMeta,
        rows: impl Iterator<Item = FrameRow<'a>> + Clone,
    ) {
        let Payload::Forward(body) = &mut self.frame.payload else {
            // It is made with this payload.
            return;
        };
        clear(body);
        match &mut self.bit_masks {
            Some(masks) => masks.recycle(self.extension_rows.drain(..)),
            None => self.extension_rows.clear(),
        }
        self.params.begin_frame();
        body.single_token_mode = rows.clone().all(|row| row.tokens.len() <= 1);
        // Mask rows are left out of the whole frame when every request has one token and no draft.
        let plain = body.single_token_mode && rows.clone().all(|row| row.drafts.is_empty());
        let with_masks = self.as_pie && !plain;
        meta.patches.clear();
        meta.logprobs.clear();
        meta.record_drafts(rows.clone());
        let mut last_mask = None;
        for mut row in rows {
            let index = body.token_ids.len();
            let patch = row.awaits.map(|request| TokenPatch { index, request });
            meta.patches.extend(patch);
            let request = body.context_ids.len() as u32;
            let mut extension = row.extension.and_then(|extension| {
                let params = self.params.register(extension.params);
                let found = extension.row(&row, params)?;
                let expected = ExpectedLogprobs::of(extension.params, found.prompt);
                if let Some(expected) = expected.filter(|_| found.returns_logprobs) {
                    meta.expect_logprobs(request as usize, expected);
                }
                Some(found)
            });
            let is_masked = row.mask.is_some() || !row.forbidden.is_empty();
            if let Some(masks) = self.bit_masks.as_mut().filter(|_| is_masked) {
                let (mask, rows) = (row.mask.unwrap_or(&[]), &self.extension_rows);
                if masks.put(mask, row.forbidden, rows, &mut last_mask, &mut extension) {
                    (row.mask, row.forbidden) = (None, &[]);
                }
            }
            let extension = extension.map(|row| ExtensionRow { request, ..row });
            self.extension_rows.extend(extension);
            append(body, &row, self.page_size, with_masks);
        }
        meta.requests = body.context_ids.len();
        meta.sampled = body.samplers.len();
        meta.tokens = body.token_ids.len();
    }
}

impl RowExtension<'_> {
    /// The extension row with these parameters; `None` where it would change nothing.
    fn row(&self, row: &FrameRow<'_>, params: ParamsRef) -> Option<ExtensionRow> {
        let counts = self.params.penalties.any();
        let is_processed = !self.params.processor.is_empty() && row.sampler.is_some();
        let penalizes = counts || is_processed;
        let (from, end) = self.prompt_logprobs;
        let next = self.next.unwrap_or(0);
        let prompt = (from < end).then_some(PromptLogprobs { from, end, next });
        let samples = row.sampler.is_some();
        let returns_logprobs = self.params.logprobs.is_some() && (prompt.is_some() || samples);
        if !penalizes && !returns_logprobs && !samples {
            return None;
        }
        let history = if penalizes { self.history } else { &[] };
        Some(ExtensionRow {
            params,
            returns_logprobs,
            prompt: prompt.filter(|_| returns_logprobs),
            history: history.to_vec(),
            ..ExtensionRow::default()
        })
    }
}

fn clear(body: &mut ForwardRequest) {
    for array in [
        &mut body.token_ids,
        &mut body.position_ids,
        &mut body.kv_page_indices,
        &mut body.kv_last_page_lens,
        &mut body.sampling_indices,
        &mut body.spec_token_ids,
        &mut body.spec_position_ids,
    ] {
        array.clear();
    }
    body.masks.clear();
    body.logit_masks.clear();
    body.samplers.clear();
    body.adapter_bindings.clear();
    body.output_spec_flags.clear();
    body.context_ids.clear();
    for indptr in indptrs(body) {
        indptr.clear();
        indptr.push(0);
    }
    images::clear(body);
}

fn append(body: &mut ForwardRequest, row: &FrameRow<'_>, page_size: u32, with_masks: bool) {
    let indices = row.start..row.end();
    body.token_ids.extend(row.tokens);
    match row.images {
        None => body.position_ids.extend(indices.clone()),
        Some(prompt) => images::append(body, prompt, indices.clone()),
    }
    body.kv_page_indices.extend(row.pages);
    body.kv_last_page_lens.push((row.end() - 1) % page_size + 1);
    if with_masks {
        body.masks.extend(indices.map(|index| Brle {
            buffer: vec![0, index + 1],
            total_size: u64::from(index) + 1,
        }));
    }
    if let Some(sampler) = row.sampler {
        body.sampling_indices.push(row.tokens.len() as u32 - 1);
        body.samplers.push(sampler.clone());
    }
    if let Some(mask) = row.mask {
        body.logit_masks.push(only(mask, row.forbidden));
    } else if !row.forbidden.is_empty() {
        body.logit_masks.push(except(row.forbidden));
    }
    body.adapter_bindings.push(AdapterBinding {
        adapter_id: row.adapter.map_or(-1, u64::cast_signed),
        ..AdapterBinding::NONE
    });
    body.spec_token_ids.extend(row.drafts);
    let next = row.next_position();
    body.spec_position_ids
        .extend(next..next + row.drafts.len() as u32);
    body.output_spec_flags.push(row.wants_drafts);
    body.context_ids.push(row.context_id);
    let ends = [
        body.token_ids.len(),
        body.kv_page_indices.len(),
        body.masks.len(),
        body.samplers.len(),
        body.samplers.len(),
        body.logit_masks.len(),
        body.spec_token_ids.len(),
        body.image_anchor_rows.len(),
        0,
    ];
    for (indptr, end) in indptrs(body).into_iter().zip(ends) {
        indptr.push(end as u32);
    }
}

/// The per-request offsets, in the order of the ends in [`append`].
fn indptrs(body: &mut ForwardRequest) -> [&mut Vec<u32>; 9] {
    [
        &mut body.qo_indptr,
        &mut body.kv_page_indptr,
        &mut body.mask_indptr,
        &mut body.sampling_indptr,
        &mut body.sampler_indptr,
        &mut body.logit_mask_indptr,
        &mut body.spec_indptr,
        &mut body.image_indptr,
        &mut body.audio_indptr,
    ]
}

mod bits;
pub(crate) mod bytes;
mod images;
mod params;
#[cfg(test)]
mod tests;
