//! Requests as Python builds them, for the client side: demo, tests and tools.

use pie_wire::{AdapterBinding, Brle, ForwardRequest, Frame, Payload, RequestExtension};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::from_wire;
use crate::extension::Extension;

/// What to compute from one row's logits. Make one with the static methods.
#[pyclass(frozen, from_py_object, module = "pie_driver_sglang._core")]
#[derive(Clone)]
pub(crate) struct Sampler(pie_wire::Sampler);

#[pymethods]
impl Sampler {
    /// Samples the whole distribution; seeds 0 and 1 ask for fresh randomness.
    #[staticmethod]
    #[pyo3(signature = (temperature, seed = 0))]
    fn multinomial(temperature: f32, seed: u32) -> Self {
        Self(pie_wire::Sampler::Multinomial { temperature, seed })
    }

    /// Samples among the k most probable tokens; 0 keeps all.
    #[staticmethod]
    fn top_k(temperature: f32, k: u32) -> Self {
        Self(pie_wire::Sampler::TopK { temperature, k })
    }

    /// Samples within the smallest set of tokens of mass p.
    #[staticmethod]
    fn top_p(temperature: f32, p: f32) -> Self {
        Self(pie_wire::Sampler::TopP { temperature, p })
    }

    /// Samples among tokens at least p times as probable as the best.
    #[staticmethod]
    fn min_p(temperature: f32, p: f32) -> Self {
        Self(pie_wire::Sampler::MinP { temperature, p })
    }

    /// Top-k, then top-p on the renormalised rest.
    #[staticmethod]
    fn top_k_top_p(temperature: f32, k: u32, p: f32) -> Self {
        Self(pie_wire::Sampler::TopKTopP { temperature, k, p })
    }

    /// The arg-max, as the SDKs ask for it.
    #[staticmethod]
    fn greedy() -> Self {
        Self::top_p(0.0, 1.0)
    }

    /// The num_tokens most probable tokens with their probabilities.
    #[staticmethod]
    fn dist(temperature: f32, num_tokens: u32) -> Self {
        Self(pie_wire::Sampler::Dist {
            temperature,
            num_tokens,
        })
    }

    /// All logits of the row.
    #[staticmethod]
    fn raw_logits() -> Self {
        Self(pie_wire::Sampler::RawLogits)
    }

    /// The log-probability of one token.
    #[staticmethod]
    fn logprob(token_id: u32) -> Self {
        Self(pie_wire::Sampler::Logprob { token_id })
    }

    /// The log-probabilities of some tokens, in their order.
    #[staticmethod]
    fn logprobs(token_ids: Vec<u32>) -> Self {
        Self(pie_wire::Sampler::Logprobs { token_ids })
    }

    /// Of an embedding model: the pooled row. Otherwise reserved by the protocol: no output.
    #[staticmethod]
    fn embedding() -> Self {
        Self(pie_wire::Sampler::Embedding)
    }

    /// The entropy of the distribution.
    #[staticmethod]
    fn entropy() -> Self {
        Self(pie_wire::Sampler::Entropy)
    }
}

/// An image of a request.
#[pyclass(frozen, from_py_object, module = "pie_driver_sglang._core")]
#[derive(Clone)]
pub(crate) struct Image {
    row: u32,
    grid: [u32; 3],
    pixels: Vec<u8>,
    positions: Vec<u32>,
    anchor: Option<u32>,
    patch_positions: Vec<u32>,
}

#[pymethods]
impl Image {
    /// Describes an image; its rows of the request have token 0.
    ///
    /// Args:
    ///     row: Its first row, counted from the request's first token.
    ///     grid: Patches in time, height and width.
    ///     pixels: float32 `[patches, values of a patch]`, little-endian.
    ///     positions: Rotary positions (time, height, width) of each row, one after the other; empty = as for text.
    ///     anchor: Position of the first row; None = as the request says.
    ///     patch_positions: x and y of each patch, for models that need them.
    #[new]
    #[pyo3(signature = (row, grid, pixels, positions = Vec::new(), *, anchor = None, patch_positions = Vec::new()))]
    fn new(
        row: u32,
        grid: (u32, u32, u32),
        pixels: &[u8],
        positions: Vec<u32>,
        anchor: Option<u32>,
        patch_positions: Vec<u32>,
    ) -> Self {
        Self {
            row,
            grid: grid.into(),
            pixels: pixels.to_vec(),
            positions,
            anchor,
            patch_positions,
        }
    }
}

/// One request of a forward frame. KV geometry follows from `pages`, `last_page_len`, `tokens` and `drafts` as the Pie
/// driver protocol defines it.
#[pyclass(frozen, from_py_object, module = "pie_driver_sglang._core")]
#[derive(Clone)]
pub(crate) struct Request {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    pages: Vec<u32>,
    last_page_len: u32,
    samplers: Vec<(u32, Sampler)>,
    context_id: u64,
    masks: Option<Vec<Vec<u32>>>,
    logit_mask: Option<Vec<u32>>,
    drafts: Vec<u32>,
    draft_positions: Vec<u32>,
    adapter_id: i64,
    images: Vec<Image>,
    audio: Vec<(u32, Vec<u8>)>,
    state_slot: Option<u32>,
    state_reset: bool,
    wants_drafts: bool,
    extension: Option<Extension>,
}

#[pymethods]
impl Request {
    /// Describes one request.
    ///
    /// Args:
    ///     tokens: Input token ids.
    ///     positions: One position per token.
    ///     pages: Page ids in KV order.
    ///     last_page_len: Tokens in the last page after the inputs.
    ///     samplers: (row, sampler) pairs; rows count from the request's first token.
    ///     context_id: The runtime's id of the context, 0 = none.
    ///     masks: One run-length row per token, None = causal.
    ///     logit_mask: Run lengths over the vocabulary, None = no constraint.
    ///     drafts: Draft tokens to verify.
    ///     draft_positions: One position per draft, empty = consecutive.
    ///     adapter_id: -1 = none.
    ///     images: In the order of their rows.
    ///     audio: (row, features) pairs: first row of a clip, and its log-mel features.
    ///     state_slot: Slot of recurrent state, None = none. All requests of a batch have one, or none has.
    ///     state_reset: The slot starts from zeros.
    ///     wants_drafts: The answer may bring drafts for the next request.
    ///     extension: What it asks for beyond the Pie protocol.
    #[new]
    #[pyo3(signature = (tokens, positions, pages, last_page_len, samplers = Vec::new(), *, context_id = 0, masks = None, logit_mask = None, drafts = Vec::new(), draft_positions = Vec::new(), adapter_id = -1, images = Vec::new(), audio = Vec::new(), state_slot = None, state_reset = false, wants_drafts = false, extension = None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "one keyword per field of the request"
    )]
    const fn new(
        tokens: Vec<u32>,
        positions: Vec<u32>,
        pages: Vec<u32>,
        last_page_len: u32,
        samplers: Vec<(u32, Sampler)>,
        context_id: u64,
        masks: Option<Vec<Vec<u32>>>,
        logit_mask: Option<Vec<u32>>,
        drafts: Vec<u32>,
        draft_positions: Vec<u32>,
        adapter_id: i64,
        images: Vec<Image>,
        audio: Vec<(u32, Vec<u8>)>,
        state_slot: Option<u32>,
        state_reset: bool,
        wants_drafts: bool,
        extension: Option<Extension>,
    ) -> Self {
        Self {
            tokens,
            positions,
            pages,
            last_page_len,
            samplers,
            context_id,
            masks,
            logit_mask,
            drafts,
            draft_positions,
            adapter_id,
            images,
            audio,
            state_slot,
            state_reset,
            wants_drafts,
            extension,
        }
    }
}

/// Encodes a forward frame as the runtime does.
///
/// Args:
///     requests: The batch, in order.
///     driver_id: Echoed by the response.
#[pyfunction]
#[pyo3(signature = (requests, driver_id = 0))]
#[expect(
    clippy::needless_pass_by_value,
    reason = "arguments from Python are owned"
)]
pub(crate) fn encode_forward(
    py: Python<'_>,
    requests: Vec<Request>,
    driver_id: u32,
) -> PyResult<Py<PyBytes>> {
    Ok(PyBytes::new(py, &encode_batch(&requests, driver_id)?).unbind())
}

/// The bytes of a batch, with its extension.
pub(crate) fn encode_batch(requests: &[Request], driver_id: u32) -> PyResult<Vec<u8>> {
    let mut bytes = encode(&frame(requests, driver_id))?;
    let rows = (0..).zip(requests).filter_map(|(index, request)| {
        let extension: &RequestExtension = request.extension.as_ref()?.inner();
        Some((index, extension))
    });
    let length = bytes.len();
    bytes.resize(length + pie_wire::extension_len(rows.clone()), 0);
    pie_wire::append_extension(rows, &mut bytes, length).map_err(|error| from_wire(&error))?;
    Ok(bytes)
}

pub(crate) fn encode(frame: &Frame) -> PyResult<Vec<u8>> {
    let mut bytes = vec![0; pie_wire::request_len(frame).map_err(|error| from_wire(&error))?];
    pie_wire::encode_request(frame, &mut bytes).map_err(|error| from_wire(&error))?;
    Ok(bytes)
}

/// Concatenates requests into one frame. Mask rows are left out where the runtime leaves them out: when no request has
/// more than one token, drafts or rows of its own.
fn frame(requests: &[Request], driver_id: u32) -> Frame {
    let plain = |request: &Request| {
        request.tokens.len() <= 1 && request.drafts.is_empty() && request.masks.is_none()
    };
    let elide_masks = requests.iter().all(plain);
    let mut body = ForwardRequest {
        single_token_mode: requests
            .iter()
            .all(|request| request.tokens.len() <= 1 && request.masks.is_none()),
        has_user_mask: requests.iter().any(|request| request.masks.is_some()),
        image_pixel_indptr: vec![0],
        image_mrope_indptr: vec![0],
        audio_feature_indptr: vec![0],
        ..ForwardRequest::default()
    };
    for indptr in indptrs(&mut body) {
        indptr.push(0);
    }
    for request in requests {
        append(&mut body, request, elide_masks);
    }
    Frame {
        driver_id,
        payload: Payload::Forward(body),
    }
}

fn indptrs(body: &mut ForwardRequest) -> [&mut Vec<u32>; 9] {
    [
        &mut body.qo_indptr,
        &mut body.kv_page_indptr,
        &mut body.mask_indptr,
        &mut body.logit_mask_indptr,
        &mut body.sampling_indptr,
        &mut body.sampler_indptr,
        &mut body.spec_indptr,
        &mut body.image_indptr,
        &mut body.audio_indptr,
    ]
}

/// Adds the spans of a request whose first row is `first_row` of the frame.
fn append_media(body: &mut ForwardRequest, request: &Request, first_row: u32) {
    for image in &request.images {
        let position = request.positions.get(image.row as usize).copied();
        body.image_grids.extend(image.grid);
        body.image_anchor_positions
            .push(image.anchor.or(position).unwrap_or(0));
        body.image_anchor_rows.push(first_row + image.row);
        body.image_pixels.extend(&image.pixels);
        body.image_pixel_indptr.push(body.image_pixels.len() as u32);
        body.image_mrope_positions.extend(&image.positions);
        body.image_mrope_indptr
            .push(body.image_mrope_positions.len() as u32);
        body.image_patch_positions.extend(&image.patch_positions);
    }
    for (row, features) in &request.audio {
        body.audio_anchor_rows.push(first_row + row);
        body.audio_features.extend(features);
        body.audio_feature_indptr
            .push(body.audio_features.len() as u32);
    }
}

fn append(body: &mut ForwardRequest, request: &Request, elide_masks: bool) {
    append_media(body, request, body.token_ids.len() as u32);
    body.token_ids.extend(&request.tokens);
    body.position_ids.extend(&request.positions);
    body.kv_page_indices.extend(&request.pages);
    body.kv_last_page_lens.push(request.last_page_len);
    match &request.masks {
        Some(rows) => body.masks.extend(rows.iter().map(|runs| brle(runs))),
        None if elide_masks => {}
        None => body.masks.extend(
            request
                .positions
                .iter()
                .map(|position| brle(&[0, position.saturating_add(1)])),
        ),
    }
    body.logit_masks
        .extend(request.logit_mask.as_deref().map(brle));
    for (row, sampler) in &request.samplers {
        body.sampling_indices.push(*row);
        body.samplers.push(sampler.0.clone());
    }
    body.adapter_bindings.push(AdapterBinding {
        adapter_id: request.adapter_id,
        seed: -1,
    });
    body.spec_token_ids.extend(&request.drafts);
    body.spec_position_ids.extend(&request.draft_positions);
    if let Some(slot) = request.state_slot {
        body.rs_slot_ids.push(slot);
        body.rs_slot_flags.push(u8::from(request.state_reset));
    }
    body.output_spec_flags.push(request.wants_drafts);
    body.context_ids.push(request.context_id);
    let ends = [
        body.token_ids.len(),
        body.kv_page_indices.len(),
        body.masks.len(),
        body.logit_masks.len(),
        body.samplers.len(),
        body.samplers.len(),
        body.spec_token_ids.len(),
        body.image_anchor_rows.len(),
        body.audio_anchor_rows.len(),
    ];
    for (indptr, end) in indptrs(body).into_iter().zip(ends) {
        indptr.push(end as u32);
    }
}

fn brle(runs: &[u32]) -> Brle {
    Brle {
        buffer: runs.to_vec(),
        total_size: runs.iter().map(|&run| u64::from(run)).sum(),
    }
}
