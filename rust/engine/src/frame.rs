//! Forward frames, made in buffers that are used again.

use std::convert::Infallible;
use std::sync::Arc;

use pie_wire::{
    AdapterBinding, Brle, ForwardRequest, Frame, ParamsRef, Payload, PromptLogprobs,
    RequestExtension, Sampler, Scratch, StepRow, WireError,
};

use self::bits::BitMasks;
use self::params::Registry;
use crate::answer::{Asked, Scored};
use crate::mask::{all_but, only};
use crate::picture::Pictures;

/// What one context brings to a frame.
#[derive(Clone, Copy, Debug)]
pub struct FrameRow<'a> {
    /// By which the driver knows a context again; 0 for none.
    pub context_id: u64,
    /// Input: a prompt, a part of one, or the last token.
    pub tokens: &'a [u32],
    /// The request of the frame before whose last token is the input; `tokens` only keeps its place.
    pub awaits: Option<usize>,
    /// KV index of the first token; its position, too, without images.
    pub start: u32,
    /// After the tokens, to be verified.
    pub drafts: &'a [u32],
    /// Whether it asks for drafts.
    pub wants_drafts: bool,
    /// Every page up to the last token, or draft.
    pub pages: &'a [u32],
    /// For the last token; `None` to sample nothing.
    pub sampler: Option<&'a Sampler>,
    /// The loaded adapter that it is computed with.
    pub adapter: Option<u64>,
    /// Tokens that must not be drawn, in rising order, each once.
    pub forbidden: &'a [u32],
    /// A bit for each token that may be drawn; what is beyond is not allowed. `None`: every token.
    pub mask: Option<&'a [u32]>,
    /// What it asks for beyond the Pie protocol.
    pub extension: Option<Extended<'a>>,
    /// The images of its prompt, by their places there; the tokens have no part of one.
    pub pictures: Option<&'a Pictures>,
}

/// What a context asks for beyond the Pie protocol.
#[derive(Clone, Copy, Debug)]
pub struct Extended<'a> {
    /// The same in every turn, so that it is sent once. Its mask does not count: [`FrameRow::mask`] does.
    pub asked: &'a Arc<RequestExtension>,
    /// Tokens that count and lie right before the turn's, where these do not follow a turn before.
    pub history: &'a [u32],
    /// Tokens of the prompt whose log-probabilities it wants, by their indices `start..end`; the one after the turn's may be the last.
    pub prompt_logprobs: (u32, u32),
    /// The token after the turn's, if it is known.
    pub next: Option<u32>,
}

impl FrameRow<'_> {
    /// A request without a token. With it the answer must be an archive, which has the driver's probes.
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
        pictures: None,
    };

    /// KV index after the last token.
    pub const fn end(&self) -> u32 {
        self.start + self.tokens.len() as u32
    }

    /// Position after the last token.
    fn next_position(&self) -> u32 {
        let lag = self.pictures.map_or(0, |pictures| pictures.lag(self.end()));
        self.end() - lag
    }
}

/// A token that is not known when its frame is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPatch {
    /// Index among the frame's tokens.
    place: usize,
    /// The request of the frame before whose answer it is.
    request: usize,
}

/// Puts what the requests of the frame before were `answered` into an encoded frame, by `write`, which takes offsets and
/// bytes.
pub(crate) fn fill_gaps<E>(
    gaps: &[TokenPatch],
    answered: impl Fn(usize) -> Option<u32>,
    mut write: impl FnMut(usize, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    // An archive begins with the first array of its schema: the tokens.
    gaps.iter().try_for_each(|gap| match answered(gap.request) {
        Some(token) => write(size_of::<u32>() * gap.place, &token.to_le_bytes()),
        // The answer was checked: a request that samples has a token.
        None => Ok(()),
    })
}

/// Fills the gaps of an encoded frame, whose former frame was answered with one token for each request.
///
/// # Panics
/// If `frame` is too short for its gaps.
pub fn fill(frame: &mut [u8], gaps: &[TokenPatch], answered: &[u32]) {
    let write = |at: usize, token: &[u8]| {
        frame[at..at + token.len()].copy_from_slice(token);
        Ok::<_, Infallible>(())
    };
    let Ok(()) = fill_gaps(gaps, |request| answered.get(request).copied(), write);
}

/// What there is to know of a frame besides its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrameMeta {
    /// Requests of the frame.
    pub requests: usize,
    /// Requests with a sampler; they come first.
    pub sampled: usize,
    /// Input tokens, without drafts.
    pub tokens: usize,
    /// Tokens to fill in.
    pub gaps: Vec<TokenPatch>,
    /// Of each request, its drafts and what follows them; empty when no request has drafts or asks for some.
    drafting: Vec<Drafting>,
    drafts: Vec<u32>,
    /// The log-probabilities of the first requests; others want none.
    scored: Vec<Scored>,
}

/// What one request has to do with drafts.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Drafting {
    /// Where its drafts end among all.
    drafts_end: usize,
    wants: bool,
    /// Position after its last token.
    end: u32,
}

impl FrameMeta {
    /// What each request asks for.
    pub fn asked(&self) -> impl Iterator<Item = Asked<'_>> + Clone {
        (0..self.requests).map(|request| {
            let samples = request < self.sampled;
            let scored = self.scored.get(request).copied().unwrap_or_default();
            let Some(drafting) = self.drafting.get(request) else {
                return Asked {
                    scored,
                    ..Asked::plainly(samples)
                };
            };
            let before = request.checked_sub(1);
            let start = before.map_or(0, |before| self.drafting[before].drafts_end);
            Asked {
                samples,
                drafts: &self.drafts[start..drafting.drafts_end],
                wants_drafts: drafting.wants,
                end: drafting.end,
                scored,
            }
        })
    }

    /// Notes what a request is to be answered.
    fn note_scored(&mut self, request: usize, scored: Scored) {
        self.scored.resize(request, Scored::default());
        self.scored.push(scored);
    }

    fn note_drafts<'a>(&mut self, turns: impl Iterator<Item = FrameRow<'a>> + Clone) {
        self.drafting.clear();
        self.drafts.clear();
        if !turns
            .clone()
            .any(|turn| turn.wants_drafts || !turn.drafts.is_empty())
        {
            return;
        }
        for turn in turns {
            self.drafts.extend(turn.drafts);
            self.drafting.push(Drafting {
                drafts_end: self.drafts.len(),
                wants: turn.wants_drafts,
                end: turn.next_position(),
            });
        }
    }
}

/// Builds frames one after the other.
#[derive(Debug)]
pub struct FrameBuilder {
    frame: Frame,
    page_size: u32,
    /// `None`: all masks go as runs.
    bit_masks: Option<BitMasks>,
    as_pie: bool,
    scratch: Scratch,
    steps: Vec<Step>,
    registry: Registry,
}

/// The extension's row of one request.
#[derive(Clone, Debug, Default)]
struct Step {
    request: u32,
    params: ParamsRef,
    returns_logprobs: bool,
    prompt: Option<PromptLogprobs>,
    history: Vec<u32>,
    mask: Vec<u32>,
    shares_mask: bool,
}

impl Step {
    fn row(&self) -> StepRow<'_> {
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
    /// A builder of frames without what the driver does not read: the rows of causal masks.
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
            steps: Vec::new(),
            registry: Registry::default(),
        }
    }

    /// A frame may not have been taken: what contexts ask for is sent again.
    pub fn forget_params(&mut self) {
        self.registry.forget();
    }

    /// With masks as bits where these take less room than runs. The driver knows extensions and has such a vocabulary.
    #[must_use]
    pub fn with_bit_masks(self, vocab_size: u32) -> Self {
        Self {
            bit_masks: Some(BitMasks::new(vocab_size)),
            ..self
        }
    }

    /// A builder of frames byte for byte as the Pie runtime sends them.
    pub fn as_pie(page_size: u32) -> Self {
        Self {
            as_pie: true,
            ..Self::new(page_size)
        }
    }

    /// Writes the frame that was laid out last to `buffer` and returns its length.
    ///
    /// # Errors
    /// [`WireError::BufferTooSmall`], [`WireError::TooLarge`].
    pub fn encode(&mut self, buffer: &mut [u8]) -> Result<usize, WireError> {
        let length = pie_wire::encode_request_with(&self.frame, buffer, &mut self.scratch)?;
        let rows = self.steps.iter().map(Step::row);
        pie_wire::write_extension(self.registry.records(), rows, buffer, length)
    }

    /// Lays out the frame of `turns`; those that sample come first.
    pub fn lay_out<'a>(&mut self, turns: impl Iterator<Item = FrameRow<'a>> + Clone) -> FrameMeta {
        let mut outline = FrameMeta::default();
        self.lay_out_in(&mut outline, turns);
        outline
    }

    /// As [`lay_out`](Self::lay_out), in an outline that is used again.
    pub(crate) fn lay_out_in<'a>(
        &mut self,
        outline: &mut FrameMeta,
        turns: impl Iterator<Item = FrameRow<'a>> + Clone,
    ) {
        let Payload::Forward(body) = &mut self.frame.payload else {
            // It is made with this payload.
            return;
        };
        clear(body);
        match &mut self.bit_masks {
            Some(masks) => masks.recycle(self.steps.drain(..)),
            None => self.steps.clear(),
        }
        self.registry.begin();
        body.single_token_mode = turns.clone().all(|turn| turn.tokens.len() <= 1);
        // Mask rows are left out of the whole frame when every request has one token and no draft.
        let plain = body.single_token_mode && turns.clone().all(|turn| turn.drafts.is_empty());
        let with_masks = self.as_pie && !plain;
        outline.gaps.clear();
        outline.scored.clear();
        outline.note_drafts(turns.clone());
        let mut last_mask = None;
        for turn in turns {
            let place = body.token_ids.len();
            let gap = turn.awaits.map(|request| TokenPatch { place, request });
            outline.gaps.extend(gap);
            let request = body.context_ids.len() as u32;
            let mut step = turn.extension.and_then(|extended| {
                let params = self.registry.place(extended.asked);
                let step = extended.step(&turn, params);
                let scored = step.as_ref().filter(|step| step.returns_logprobs);
                if let Some(scored) = scored.and_then(|it| Scored::of(extended.asked, it.prompt)) {
                    outline.note_scored(request as usize, scored);
                }
                step
            });
            let is_bound = turn.mask.is_some() || !turn.forbidden.is_empty();
            let as_bits = turn.mask.unwrap_or(&[]);
            let as_bits = self
                .bit_masks
                .as_mut()
                .filter(|_| is_bound)
                .map(|masks| (as_bits, masks));
            let as_bits = as_bits.is_some_and(|(mask, masks)| {
                masks.put(mask, turn.forbidden, &self.steps, &mut last_mask, &mut step)
            });
            self.steps.extend(step.map(|step| Step { request, ..step }));
            let turn = if as_bits {
                FrameRow {
                    mask: None,
                    forbidden: &[],
                    ..turn
                }
            } else {
                turn
            };
            append(body, &turn, self.page_size, with_masks);
        }
        outline.requests = body.context_ids.len();
        outline.sampled = body.samplers.len();
        outline.tokens = body.token_ids.len();
    }
}

impl Extended<'_> {
    /// The row of a turn with these parameters; `None` where it would change nothing.
    fn step(&self, turn: &FrameRow<'_>, params: ParamsRef) -> Option<Step> {
        let asked = self.asked;
        let counts = asked.penalties.any();
        let (from, end) = self.prompt_logprobs;
        let next = self.next.unwrap_or(0);
        let prompt = (from < end).then_some(PromptLogprobs { from, end, next });
        let scores = asked.logprobs.is_some() && (prompt.is_some() || turn.sampler.is_some());
        if !counts && !scores && turn.sampler.is_none() {
            return None;
        }
        Some(Step {
            params,
            returns_logprobs: scores,
            prompt: prompt.filter(|_| scores),
            history: if counts {
                self.history.to_vec()
            } else {
                Vec::new()
            },
            ..Step::default()
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
    pictures::clear(body);
}

fn append(body: &mut ForwardRequest, turn: &FrameRow<'_>, page_size: u32, with_masks: bool) {
    let places = turn.start..turn.end();
    body.token_ids.extend(turn.tokens);
    match turn.pictures {
        None => body.position_ids.extend(places.clone()),
        Some(pictures) => pictures::append(body, pictures, places.clone()),
    }
    body.kv_page_indices.extend(turn.pages);
    body.kv_last_page_lens
        .push((turn.end() - 1) % page_size + 1);
    if with_masks {
        body.masks.extend(places.map(|place| Brle {
            buffer: vec![0, place + 1],
            total_size: u64::from(place) + 1,
        }));
    }
    if let Some(sampler) = turn.sampler {
        body.sampling_indices.push(turn.tokens.len() as u32 - 1);
        body.samplers.push(sampler.clone());
    }
    if let Some(mask) = turn.mask {
        body.logit_masks.push(only(mask, turn.forbidden));
    } else if !turn.forbidden.is_empty() {
        body.logit_masks.push(all_but(turn.forbidden));
    }
    body.adapter_bindings.push(AdapterBinding {
        adapter_id: turn.adapter.map_or(-1, u64::cast_signed),
        ..AdapterBinding::NONE
    });
    body.spec_token_ids.extend(turn.drafts);
    let next = turn.next_position();
    body.spec_position_ids
        .extend(next..next + turn.drafts.len() as u32);
    body.output_spec_flags.push(turn.wants_drafts);
    body.context_ids.push(turn.context_id);
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

/// The offsets of requests, in the order of the ends in [`append`].
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
mod params;
mod pictures;
#[cfg(test)]
mod tests;
