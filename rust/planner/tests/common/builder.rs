//! Forward frames, request by request.

use pie_planner::Limits;
use pie_wire::{
    AdapterBinding, ArchivedForwardRequest, ArchivedPayload, Brle, ForwardRequest, Frame, Payload,
    Sampler, access_request, encode_request, request_len,
};

/// Limits that leave ordinary requests alone: pages of 16 tokens, one pass, one slot group.
pub(crate) const LARGE: Limits = Limits {
    page_size: 16,
    total_pages: 64,
    vocab_size: 1000,
    max_positions: 512,
    row_pages: 32,
    max_requests: 16,
    chunk_tokens: 256,
    max_slots: 64,
    reply_bytes: 1 << 16,
};

/// Arg-max, as the SDK writes it.
pub(crate) const GREEDY: Sampler = Sampler::TopP {
    temperature: 0.0,
    p: 1.0,
};

/// One request of a frame; every field may be made wrong.
#[derive(Debug, Clone, Default)]
pub(crate) struct Req {
    pub(crate) tokens: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    pub(crate) pages: Vec<u32>,
    pub(crate) last_page_len: u32,
    /// Request-relative row and sampler.
    pub(crate) samplers: Vec<(u32, Sampler)>,
    pub(crate) masks: Vec<Brle>,
    pub(crate) logit_masks: Vec<Brle>,
    pub(crate) drafts: Vec<u32>,
    pub(crate) draft_positions: Vec<u32>,
    /// -1 = none.
    pub(crate) adapter: i64,
    pub(crate) images: u32,
    pub(crate) audios: u32,
}

impl Req {
    /// A request that appends `tokens` to `prefix` stored ones, with positions equal to the KV indices.
    pub(crate) fn new(page_size: u32, prefix: u32, tokens: &[u32], pages: &[u32]) -> Self {
        let end = prefix + tokens.len() as u32;
        Self {
            tokens: tokens.to_vec(),
            positions: (prefix..end).collect(),
            pages: pages.to_vec(),
            last_page_len: end.saturating_sub(1) % page_size + 1,
            adapter: -1,
            ..Self::default()
        }
    }

    /// Adds a sampler.
    pub(crate) fn sample(mut self, row: u32, sampler: Sampler) -> Self {
        self.samplers.push((row, sampler));
        self
    }

    /// Adds drafts at the positions after the last input.
    pub(crate) fn verify(mut self, drafts: &[u32]) -> Self {
        let next = self.positions.last().map_or(0, |last| last + 1);
        self.drafts = drafts.to_vec();
        self.draft_positions = (next..).take(drafts.len()).collect();
        self
    }

    /// Replaces the mask rows by the given runs.
    pub(crate) fn masked<const N: usize>(mut self, rows: [&[u32]; N]) -> Self {
        self.masks = rows.map(brle).to_vec();
        self
    }

    /// Allows the tokens that the given runs allow.
    pub(crate) fn allow(mut self, runs: &[u32]) -> Self {
        self.logit_masks.push(brle(runs));
        self
    }
}

/// A greedy decode step at KV index `prefix`.
pub(crate) fn decode(prefix: u32, token: u32, pages: &[u32]) -> Req {
    Req::new(16, prefix, &[token], pages).sample(0, GREEDY)
}

/// A bit string of the given runs.
pub(crate) fn brle(runs: &[u32]) -> Brle {
    Brle {
        buffer: runs.to_vec(),
        total_size: runs.iter().map(|&run| u64::from(run)).sum(),
    }
}

/// Offsets of consecutive ranges of the given lengths.
fn indptr(lengths: impl Iterator<Item = usize>) -> Vec<u32> {
    let ends = lengths.scan(0, |end, length| {
        *end += length as u32;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// The frame of some requests, without user masks.
pub(crate) fn frame(requests: &[Req]) -> ForwardRequest {
    fn concat<T: Clone>(requests: &[Req], part: impl Fn(&Req) -> &Vec<T>) -> Vec<T> {
        requests.iter().flat_map(|r| part(r).clone()).collect()
    }
    let offsets = |length: fn(&Req) -> usize| indptr(requests.iter().map(length));
    let count = requests.len();
    let samplers = offsets(|r| r.samplers.len());
    let images: u32 = requests.iter().map(|r| r.images).sum();
    let audios: u32 = requests.iter().map(|r| r.audios).sum();
    let (rows, kinds) = concat(requests, |r| &r.samplers).into_iter().unzip();
    ForwardRequest {
        token_ids: concat(requests, |r| &r.tokens),
        position_ids: concat(requests, |r| &r.positions),
        kv_page_indices: concat(requests, |r| &r.pages),
        kv_page_indptr: offsets(|r| r.pages.len()),
        kv_last_page_lens: requests.iter().map(|r| r.last_page_len).collect(),
        qo_indptr: offsets(|r| r.tokens.len()),
        masks: concat(requests, |r| &r.masks),
        mask_indptr: offsets(|r| r.masks.len()),
        logit_masks: concat(requests, |r| &r.logit_masks),
        logit_mask_indptr: offsets(|r| r.logit_masks.len()),
        sampling_indices: rows,
        sampling_indptr: samplers.clone(),
        samplers: kinds,
        sampler_indptr: samplers,
        adapter_bindings: requests
            .iter()
            .map(|r| AdapterBinding {
                adapter_id: r.adapter,
                seed: -1,
            })
            .collect(),
        spec_token_ids: concat(requests, |r| &r.drafts),
        spec_position_ids: concat(requests, |r| &r.draft_positions),
        spec_indptr: offsets(|r| r.drafts.len()),
        output_spec_flags: vec![false; count],
        context_ids: (1..=count as u64).collect(),
        image_indptr: offsets(|r| r.images as usize),
        image_grids: vec![1; 3 * images as usize],
        audio_indptr: offsets(|r| r.audios as usize),
        audio_anchor_rows: vec![0; audios as usize],
        ..ForwardRequest::default()
    }
}

/// Request bytes at the alignment that reading needs.
#[derive(Debug, Clone)]
pub(crate) struct Encoded {
    words: Vec<u64>,
    len: usize,
}

impl Encoded {
    pub(crate) fn new(driver_id: u32, request: &ForwardRequest) -> Self {
        let frame = Frame {
            driver_id,
            payload: Payload::Forward(request.clone()),
        };
        let len = request_len(&frame).expect("the frame is small");
        let mut words = vec![0; len.div_ceil(8)];
        encode_request(&frame, bytemuck::cast_slice_mut(&mut words)).expect("the length is right");
        Self { words, len }
    }

    /// Takes bytes as they are.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let mut words = vec![0; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self {
            words,
            len: bytes.len(),
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }

    /// The forward request in place; `None` when the bytes are not a valid forward.
    pub(crate) fn try_forward(&self) -> Option<&ArchivedForwardRequest> {
        match &access_request(self.bytes()).ok()?.payload {
            ArchivedPayload::Forward(request) => Some(request),
            _ => None,
        }
    }

    pub(crate) fn forward(&self) -> &ArchivedForwardRequest {
        self.try_forward().expect("a valid forward frame")
    }
}
