//! Frames for the benches, as the runtime sends them; timing and report.

#[cfg(feature = "timing")]
pub mod conditions;
#[cfg(feature = "timing")]
pub mod python;
#[cfg(feature = "timing")]
pub mod report;
pub mod sched;
pub mod text;
#[cfg(feature = "timing")]
pub mod timing;

use pie_planner::{
    ComputedPlan, FieldId, ForwardTimings, Layout, Limits, Outputs, Plan, Planner, SlotClass,
    Staged, StagedSlots,
};
use pie_wire::{
    AdapterBinding, Brle, ForwardRequest, Frame, Params, ParamsRef, Payload, RequestExtension,
    Sampler, StepRow,
};

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
    reply_bytes: 4 << 20,
};

/// Pages that each context of a frame may use.
const PAGES_PER_CONTEXT: u32 = 256;

/// What one context brings to a frame.
#[derive(Clone, Debug)]
struct Turn {
    /// Tokens stored before.
    prefix: u32,
    /// Tokens to compute; the last one is sampled.
    tokens: u32,
    /// What is asked of it.
    samplers: Vec<Sampler>,
    /// The tokens that may be sampled.
    mask: Option<Brle>,
}

const GREEDY: Sampler = Sampler::TopP {
    temperature: 0.0,
    p: 1.0,
};

/// `requests` contexts of `context` tokens that decode one token each, greedily. `step` moves them on.
#[must_use]
pub fn decode_frame(requests: u32, context: u32, step: u32) -> Frame {
    let turn = Turn {
        prefix: context + step - 1,
        tokens: 1,
        samplers: vec![GREEDY],
        mask: None,
    };
    frame(&vec![turn; requests as usize])
}

/// The contexts of [`decode_frame`] as forks of one: all their full pages are the same.
#[must_use]
pub fn forked_frame(requests: u32, context: u32, step: u32) -> Frame {
    let mut frame = decode_frame(requests, context, step);
    let Payload::Forward(body) = &mut frame.payload else {
        unreachable!("made so by `frame`");
    };
    let full = (context + step - 1) / PAGE_SIZE;
    body.kv_page_indices = (0..requests)
        .flat_map(|request| (0..full).chain([full + request]))
        .collect();
    frame
}

/// What the requests of [`asking_frame`] ask for in addition to a greedy token.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// One probe each, of all kinds whose answers are small.
    pub probes: bool,
    /// One logit mask each, of 20 runs.
    pub masks: bool,
}

/// The contexts of [`decode_frame`] with more to answer.
#[must_use]
pub fn asking_frame(requests: u32, context: u32, step: u32, asked: Asked) -> Frame {
    let probes = [
        Sampler::Dist {
            temperature: 1.0,
            num_tokens: DIST_TOKENS as u32,
        },
        Sampler::Logprob { token_id: 11 },
        Sampler::Logprobs {
            token_ids: vec![1, 2, 3],
        },
        Sampler::Entropy,
    ];
    let turns = (0..requests).map(|request| {
        let probe = asked
            .probes
            .then(|| probes[request as usize % probes.len()].clone());
        Turn {
            prefix: context + step - 1,
            tokens: 1,
            samplers: std::iter::once(GREEDY).chain(probe).collect(),
            mask: asked.masks.then(|| mask(request + step)),
        }
    });
    frame(&turns.collect::<Vec<_>>())
}

/// A tenth of the vocabulary, in ten ranges that depend on `number`.
fn mask(number: u32) -> Brle {
    let (forbidden, allowed) = (13_500 + number % 100, 1_500 - number % 7);
    Brle {
        buffer: [forbidden, allowed].repeat(10),
        total_size: 10 * u64::from(forbidden + allowed),
    }
}

/// A prompt of `tokens` tokens.
#[must_use]
pub fn prefill_frame(tokens: u32) -> Frame {
    frame(&[Turn {
        prefix: 0,
        tokens,
        samplers: vec![GREEDY],
        mask: None,
    }])
}

/// 60 contexts that decode with samplers of every kind, and 4 prompts that come in chunks of 512 tokens.
#[must_use]
pub fn mixed_frame(step: u32) -> Frame {
    let samplers = [
        GREEDY,
        Sampler::TopP {
            temperature: 0.7,
            p: 0.9,
        },
        Sampler::Multinomial {
            temperature: 1.0,
            seed: 42,
        },
        Sampler::TopKTopP {
            temperature: 0.8,
            k: 40,
            p: 0.95,
        },
        Sampler::MinP {
            temperature: 1.1,
            p: 0.05,
        },
    ];
    let decode = samplers
        .iter()
        .cycle()
        .zip(0..60)
        .map(|(sampler, context)| Turn {
            prefix: 300 + 40 * context + step,
            tokens: 1,
            samplers: vec![sampler.clone()],
            mask: None,
        });
    let prefill = Turn {
        prefix: 512 * (step % 4),
        tokens: 512,
        samplers: vec![GREEDY],
        mask: None,
    };
    frame(&decode.chain(vec![prefill; 4]).collect::<Vec<_>>())
}

fn frame(turns: &[Turn]) -> Frame {
    let count = turns.len();
    let none: Vec<u32> = vec![0; count + 1];
    let ends = |length: &dyn Fn(&Turn) -> u32| {
        let ends = turns.iter().scan(0, |end, turn| {
            *end += length(turn);
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect::<Vec<u32>>()
    };
    let samplers = ends(&|turn| turn.samplers.len() as u32);
    let end = |turn: &Turn| turn.prefix + turn.tokens;
    let pages = |turn: &Turn| end(turn).div_ceil(PAGE_SIZE);
    let first_pages = (0..).step_by(PAGES_PER_CONTEXT as usize);
    Frame {
        driver_id: 0,
        payload: Payload::Forward(ForwardRequest {
            token_ids: turns
                .iter()
                .flat_map(|turn| (0..turn.tokens).map(|token| 100 + token % 999))
                .collect(),
            position_ids: turns
                .iter()
                .flat_map(|turn| turn.prefix..end(turn))
                .collect(),
            kv_page_indices: turns
                .iter()
                .zip(first_pages)
                .flat_map(|(turn, first)| first..first + pages(turn))
                .collect(),
            kv_page_indptr: ends(&pages),
            kv_last_page_lens: turns
                .iter()
                .map(|turn| (end(turn) - 1) % PAGE_SIZE + 1)
                .collect(),
            qo_indptr: ends(&|turn| turn.tokens),
            mask_indptr: none.clone(),
            logit_masks: turns.iter().filter_map(|turn| turn.mask.clone()).collect(),
            logit_mask_indptr: ends(&|turn| u32::from(turn.mask.is_some())),
            sampling_indices: turns
                .iter()
                .flat_map(|turn| turn.samplers.iter().map(|_| turn.tokens - 1))
                .collect(),
            sampling_indptr: samplers.clone(),
            samplers: turns
                .iter()
                .flat_map(|turn| turn.samplers.clone())
                .collect(),
            sampler_indptr: samplers,
            adapter_bindings: vec![AdapterBinding::NONE; count],
            spec_indptr: none.clone(),
            output_spec_flags: vec![false; count],
            context_ids: (1..=count as u64).collect(),
            single_token_mode: turns.iter().all(|turn| turn.tokens == 1),
            image_indptr: none.clone(),
            image_pixel_indptr: vec![0],
            image_mrope_indptr: vec![0],
            audio_indptr: none,
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

    /// Encodes a frame whose requests, so many, all ask for `asked`, each under a handle of its own. Parameters that are not
    /// `kept` by the driver come with it.
    ///
    /// # Panics
    /// When the frame cannot be encoded.
    #[must_use]
    pub fn asking(frame: &Frame, requests: u32, asked: &RequestExtension, kept: bool) -> Self {
        let archive = Self::of(frame);
        let params = (0..requests).filter(|_| !kept).map(|request| Params {
            handle: Some(request),
            asked,
        });
        let rows = (0..requests).map(|request| StepRow {
            request,
            params: ParamsRef::Kept(request),
            ..StepRow::default()
        });
        let mut bytes = archive.as_slice().to_vec();
        bytes.resize(
            bytes.len() + pie_wire::params_len(asked) * requests as usize + (1 << 14),
            0,
        );
        let len = pie_wire::write_extension(params, rows, &mut bytes, archive.len);
        let len = len.expect("there is room");
        let mut words = vec![0; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(&bytes);
        Self { words, len }
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
    /// As planned, until it is answered.
    plan: Option<Plan>,
    /// The frame that was answered last.
    answered: Option<ComputedPlan>,
    request: Vec<u64>,
    block: Vec<u64>,
    response: Vec<u8>,
    tokens: Vec<i64>,
    ids: Vec<i64>,
    numbers: Vec<f32>,
}

impl Default for HostPath {
    fn default() -> Self {
        let bytes = Layout::new(&LIMITS).bytes();
        Self {
            planner: Planner::new(LIMITS, 42),
            plan: None,
            answered: None,
            request: Vec::new(),
            block: vec![0; bytes.div_ceil(8)],
            response: vec![0; 4 << 20],
            tokens: vec![TOKEN; LIMITS.max_slots as usize],
            ids: vec![TOKEN; DIST_TOKENS * LIMITS.max_slots as usize],
            numbers: vec![0.5; DIST_TOKENS * LIMITS.max_slots as usize],
        }
    }
}

/// The token that every slot samples.
pub const TOKEN: i64 = 7;
/// Tokens of every distribution.
const DIST_TOKENS: usize = 5;

impl HostPath {
    /// Request bytes to response bytes; every token slot samples [`TOKEN`].
    ///
    /// # Panics
    /// When the frame is not a forward that the planner takes.
    pub fn run(&mut self, request: &[u8]) -> &[u8] {
        self.plan(request);
        self.answer()
    }

    /// Stages the planned passes and builds the response.
    ///
    /// # Panics
    /// When no plan was made.
    pub fn answer(&mut self) -> &[u8] {
        let mut plan = self.plan.take().expect("a plan");
        let memory = bytemuck::cast_slice_mut(&mut self.block);
        let mut block = self.planner.block(memory).expect("the block fits");
        let mut computed = loop {
            let staged = self.planner.stage(plan, &mut block);
            let mut pass = match staged.expect("the last plan") {
                Staged::Pass(pass) => pass,
                Staged::Computed(computed) => break computed,
            };
            plan = loop {
                let staged = match pass.stage_slots(&mut block) {
                    StagedSlots::Group(group) => group,
                    StagedSlots::Done(plan) => break plan,
                };
                let group = staged.group();
                let tokens = group.count(SlotClass::Greedy)
                    + group.count(SlotClass::Plain)
                    + group.count(SlotClass::Filtered);
                let dists = DIST_TOKENS * group.count(SlotClass::Dist);
                let outputs = Outputs {
                    tokens: &self.tokens[..tokens],
                    dist_ids: &self.ids[..dists],
                    dist_probs: &self.numbers[..dists],
                    logits: &[],
                    logprobs: &self.numbers[..staged.labels().len()],
                    entropies: &self.numbers[..group.count(SlotClass::Entropy)],
                    ..Outputs::default()
                };
                let put = staged.put_outputs(&outputs).map_err(|(_, error)| error);
                pass = put.expect("one token per slot");
            };
        };
        let written =
            self.planner
                .reply(&mut computed, ForwardTimings::default(), &mut self.response);
        self.answered = Some(computed);
        &self.response[..written.expect("the response fits")]
    }

    /// Plans a request and no more.
    ///
    /// # Panics
    /// As [`HostPath::run`].
    pub fn plan(&mut self, request: &[u8]) {
        // As the driver does: a client may rewrite its slot while it is read.
        self.request.resize(request.len().div_ceil(8), 0);
        let bytes = &mut bytemuck::cast_slice_mut(&mut self.request)[..request.len()];
        bytes.copy_from_slice(request);
        let (bytes, extension) = pie_wire::split_request(bytes).expect("a valid extension");
        let frame = pie_wire::access_request(bytes).expect("a valid frame");
        let pie_wire::ArchivedPayload::Forward(forward) = &frame.payload else {
            panic!("a forward frame");
        };
        if let Some(last) = self.answered.take() {
            self.planner.recycle(last);
        }
        let plan = self.planner.plan_extended(0, forward, &extension);
        let plan = plan.expect("a consistent frame");
        assert!(
            plan.request_errors().is_empty(),
            "{:?}",
            plan.request_errors()
        );
        self.plan = Some(plan);
    }

    /// Groups the planned rows; see [`Planner::find_prefix_groups`].
    ///
    /// # Panics
    /// When no plan was made.
    pub fn find_prefix_groups(&mut self) -> bool {
        let plan = self.plan.as_mut().expect("a plan");
        self.planner.find_prefix_groups(plan, 0)
    }

    /// The first `count` entries of an array, as the last pass and slot group left it.
    #[must_use]
    pub fn staged(&self, id: FieldId, count: usize) -> &[u8] {
        let field = self.planner.layout().field(id);
        let bytes: &[u8] = bytemuck::cast_slice(&self.block);
        &bytes[field.offset..][..count * field.dtype.size()]
    }

    /// The planner.
    #[must_use]
    pub const fn planner(&self) -> &Planner {
        &self.planner
    }

    /// The frame that was answered last.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub const fn answered(&self) -> &ComputedPlan {
        self.answered.as_ref().expect("an answered frame")
    }
}
