//! Frames for the benches, as the runtime sends them; timing and report.

pub mod conditions;
pub mod report;
pub mod timing;

use pie_batch::{Layout, Limits, Planner};
use pie_wire::{AdapterBinding, ForwardRequest, Frame, Payload, Sampler};

/// Tokens of a page.
pub const PAGE_SIZE: u32 = 16;

/// Limits of a model of the size that people serve on one GPU.
pub const LIMITS: Limits = Limits {
    page_size: PAGE_SIZE,
    total_pages: 65_536,
    vocab_size: 151_936,
    max_positions: 40_960,
    row_pages: 2_564,
    max_requests: 256,
    chunk_tokens: 8_192,
    max_slots: 512,
};

/// `requests` contexts of `context` tokens that decode one token each, greedily. `step` moves them on.
#[must_use]
pub fn decode_frame(requests: u32, context: u32, step: u32) -> Frame {
    let length = context + step;
    let pages = length.div_ceil(PAGE_SIZE);
    let indptr: Vec<u32> = (0..=requests).collect();
    Frame {
        driver_id: 0,
        payload: Payload::Forward(ForwardRequest {
            token_ids: vec![100; requests as usize],
            position_ids: vec![length - 1; requests as usize],
            kv_page_indices: (0..requests)
                .flat_map(|r| r * 160..r * 160 + pages)
                .collect(),
            kv_page_indptr: (0..=requests).map(|r| r * pages).collect(),
            kv_last_page_lens: vec![(length - 1) % PAGE_SIZE + 1; requests as usize],
            qo_indptr: indptr.clone(),
            mask_indptr: vec![0; requests as usize + 1],
            logit_mask_indptr: vec![0; requests as usize + 1],
            sampling_indices: vec![0; requests as usize],
            sampling_indptr: indptr.clone(),
            samplers: vec![
                Sampler::TopP {
                    temperature: 0.0,
                    p: 1.0
                };
                requests as usize
            ],
            sampler_indptr: indptr,
            adapter_bindings: vec![AdapterBinding::NONE; requests as usize],
            spec_indptr: vec![0; requests as usize + 1],
            output_spec_flags: vec![false; requests as usize],
            context_ids: (1..=u64::from(requests)).collect(),
            single_token_mode: true,
            image_indptr: vec![0; requests as usize + 1],
            image_pixel_indptr: vec![0],
            image_mrope_indptr: vec![0],
            audio_indptr: vec![0; requests as usize + 1],
            audio_feature_indptr: vec![0],
            ..ForwardRequest::default()
        }),
    }
}

/// A frame's bytes at the alignment of a ring slot.
pub struct Bytes {
    words: Vec<u64>,
    len: usize,
}

impl Bytes {
    /// Encodes a frame.
    ///
    /// # Panics
    /// When the frame cannot be encoded.
    #[must_use]
    pub fn of(frame: &Frame) -> Self {
        let len = pie_wire::request_len(frame).expect("the frame is small");
        let mut bytes = Self {
            words: vec![0; len.div_ceil(8)],
            len,
        };
        pie_wire::encode_request(frame, bytes.as_mut()).expect("the buffer has its length");
        bytes
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    fn as_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

/// The planner with a staging block and a response buffer: all of the host path but ring and model.
pub struct HostPath {
    planner: Planner,
    block: Vec<u64>,
    response: Vec<u8>,
    tokens: Vec<i64>,
    dropped: Vec<usize>,
}

impl Default for HostPath {
    fn default() -> Self {
        let bytes = Layout::new(&LIMITS).bytes();
        Self {
            planner: Planner::new(LIMITS, 42),
            block: vec![0; bytes.div_ceil(8)],
            response: vec![0; 4 << 20],
            tokens: Vec::new(),
            dropped: Vec::new(),
        }
    }
}

impl HostPath {
    /// Request bytes to response bytes; every slot samples `token`.
    ///
    /// # Panics
    /// When the frame is not a forward that the planner takes.
    pub fn run(&mut self, request: &[u8], token: i64) -> &[u8] {
        let frame = pie_wire::access_request(request).expect("a valid frame");
        let pie_wire::ArchivedPayload::Forward(forward) = &frame.payload else {
            panic!("a forward frame");
        };
        self.planner.plan(0, forward).expect("a consistent frame");
        let block = bytemuck::cast_slice_mut(&mut self.block);
        while self.planner.stage(block).expect("the block fits").is_some() {
            while let Some(group) = self.planner.stage_slots(block).expect("the block fits") {
                self.tokens.clear();
                self.tokens.resize(group.len(), token);
                self.planner
                    .put_tokens(&self.tokens)
                    .expect("one token per slot");
            }
        }
        let written = self.planner.reply(
            pie_batch::Probes::default(),
            &mut self.response,
            &mut self.dropped,
        );
        &self.response[..written.expect("the response fits")]
    }
}
