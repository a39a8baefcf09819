//! Consistent frames, built from any bytes, and what is done to them.

use arbitrary::{Arbitrary, Unstructured};
use pie_planner::Limits;
use pie_wire::{Brle, ForwardRequest, Sampler};
use rkyv::util::AlignedVec;

use crate::common::builder::{Encoded, Req, frame};
use crate::common::device::DRIVER;
use crate::common::generate::{VOCAB, elide_empty};
use crate::plan::Trial;
use crate::wire::exact;

/// Limits and frames for one planner.
#[derive(Debug, Arbitrary)]
struct Case {
    limits: u8,
    lack: u8,
    frames: Vec<Batch>,
}

/// A consistent frame, then what is wrong with it.
#[derive(Debug, Arbitrary)]
#[expect(clippy::struct_excessive_bools, reason = "independent choices")]
struct Batch {
    requests: Vec<Request>,
    user_mask: bool,
    elide: bool,
    no_draft_positions: bool,
    lose_table: bool,
    /// Changes to the frame's arrays: which one, where, and the new value.
    edits: Vec<(u8, u8, Value)>,
    /// Changes to the frame's bytes: word, counted from the end, and its new value.
    damage: Vec<(u16, Value)>,
}

/// Values that mean something, and any other.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Value {
    Small(u8),
    Negative(u8),
    Any(u32),
}

impl Value {
    fn get(self) -> u32 {
        match self {
            Self::Small(value) => value.into(),
            Self::Negative(value) => 0_u32.wrapping_sub(value.into()),
            Self::Any(value) => value,
        }
    }
}

#[derive(Debug, Arbitrary)]
struct Request {
    inputs: u8,
    drafts: u8,
    prefix: u8,
    first_page: u8,
    samplers: Vec<(u8, Kind)>,
    masks: Rows,
    logit_mask: Option<Vec<Value>>,
    adapter: Option<i64>,
    spans: Option<(bool, bool)>,
}

#[derive(Debug, Clone, Arbitrary)]
enum Kind {
    Greedy,
    Multinomial(f32, u8),
    TopK(f32, Value),
    TopP(f32, f32),
    MinP(f32, f32),
    TopKTopP(f32, Value, f32),
    Embedding,
    Probe(Vec<u32>),
}

#[derive(Debug, Arbitrary)]
enum Rows {
    Absent,
    Synthesized,
    Spelled,
    Any(Vec<Vec<Value>>),
}

impl Kind {
    fn sampler(&self) -> Sampler {
        match *self {
            Self::Greedy => Sampler::TopP {
                temperature: 0.0,
                p: 1.0,
            },
            Self::Multinomial(temperature, seed) => Sampler::Multinomial {
                temperature,
                seed: seed.into(),
            },
            Self::TopK(temperature, k) => Sampler::TopK {
                temperature,
                k: k.get(),
            },
            Self::TopP(temperature, p) => Sampler::TopP { temperature, p },
            Self::MinP(temperature, p) => Sampler::MinP { temperature, p },
            Self::TopKTopP(temperature, k, p) => Sampler::TopKTopP {
                temperature,
                k: k.get(),
                p,
            },
            Self::Embedding => Sampler::Embedding,
            Self::Probe(ref token_ids) => Sampler::Logprobs {
                token_ids: token_ids.clone(),
            },
        }
    }
}

impl Request {
    fn build(&self, limits: &Limits) -> Req {
        let [inputs, drafts, prefix] =
            [self.inputs % 24, self.drafts % 8, self.prefix].map(u32::from);
        let prefix = prefix.min((limits.max_kv_len() as u32).saturating_sub(inputs + drafts));
        let count = (prefix + inputs + drafts).div_ceil(limits.page_size);
        let page = |column: u32| (u32::from(self.first_page) + column) % limits.total_pages;
        let pages: Vec<u32> = (0..count).map(page).collect();
        let token = |index: u32| (prefix + index) % VOCAB;
        let tokens: Vec<u32> = (0..inputs).map(token).collect();
        let drafts: Vec<u32> = (inputs..inputs + drafts).map(token).collect();
        let mut request = Req::new(limits.page_size, prefix, &tokens, &pages).verify(&drafts);
        let row = |row: u8| u32::from(row) % inputs.max(1);
        request.samplers = self
            .samplers
            .iter()
            .map(|(at, kind)| (row(*at), kind.sampler()))
            .collect();
        request.masks = self.masks.build(prefix, inputs);
        request.logit_masks = self.logit_mask.iter().map(|runs| brle(runs)).collect();
        request.adapter = self.adapter.unwrap_or(-1);
        let (image, audio) = self.spans.unwrap_or_default();
        (request.images, request.audios) = (image.into(), audio.into());
        request
    }
}

impl Rows {
    fn build(&self, prefix: u32, inputs: u32) -> Vec<Brle> {
        let row = |runs: &[u32]| crate::common::builder::brle(runs);
        match self {
            Self::Absent => Vec::new(),
            Self::Synthesized => (0..inputs).map(|at| row(&[0, prefix + at + 1])).collect(),
            Self::Spelled => (0..inputs)
                .map(|at| row(&[0, prefix + at, 0, 1, inputs - at]))
                .collect(),
            Self::Any(rows) => rows.iter().map(|runs| brle(runs)).collect(),
        }
    }
}

fn brle(runs: &[Value]) -> Brle {
    let runs: Vec<u32> = runs.iter().map(|run| run.get()).collect();
    crate::common::builder::brle(&runs)
}

/// Bytes of a [`Case`].
pub(crate) fn frames(data: &[u8]) {
    let Ok(case) = Case::arbitrary(&mut Unstructured::new(data)) else {
        return;
    };
    let mut trial = Trial::new(case.limits, case.lack);
    for batch in &case.frames {
        let requests: Vec<Req> = batch
            .requests
            .iter()
            .map(|request| request.build(&trial.limits))
            .collect();
        let mut request = frame(&requests);
        request.has_user_mask = batch.user_mask;
        if batch.no_draft_positions {
            request.spec_position_ids.clear();
        }
        if batch.elide {
            elide_empty(&mut request);
        }
        batch
            .edits
            .iter()
            .for_each(|&(array, at, value)| edit(&mut request, array, at, value.get()));
        if batch.lose_table {
            trial.lose_table();
        }
        trial.frame(&damaged(&request, &batch.damage));
    }
}

/// Sets, adds or removes an element of one of the arrays of numbers.
fn edit(request: &mut ForwardRequest, array: u8, at: u8, value: u32) {
    let arrays = [
        &mut request.token_ids,
        &mut request.position_ids,
        &mut request.kv_page_indices,
        &mut request.kv_page_indptr,
        &mut request.kv_last_page_lens,
        &mut request.qo_indptr,
        &mut request.mask_indptr,
        &mut request.logit_mask_indptr,
        &mut request.sampling_indices,
        &mut request.sampling_indptr,
        &mut request.sampler_indptr,
        &mut request.spec_token_ids,
        &mut request.spec_position_ids,
        &mut request.spec_indptr,
        &mut request.image_indptr,
        &mut request.image_grids,
        &mut request.image_anchor_rows,
        &mut request.image_anchor_positions,
        &mut request.image_pixel_indptr,
        &mut request.image_mrope_positions,
        &mut request.image_mrope_indptr,
        &mut request.image_patch_positions,
        &mut request.audio_indptr,
        &mut request.audio_anchor_rows,
        &mut request.rs_slot_ids,
    ];
    let count = arrays.len();
    let Some(array) = arrays.into_iter().nth(usize::from(array) % count) else {
        return;
    };
    match (usize::from(at), array.len()) {
        (255, _) => _ = array.pop(),
        (at, len) if at < len => array[at] = value,
        _ => array.push(value),
    }
}

fn damaged(request: &ForwardRequest, damage: &[(u16, Value)]) -> AlignedVec<8> {
    let mut bytes = exact(Encoded::new(DRIVER, request).bytes());
    let words = bytes.len() / 4;
    for (from_end, value) in damage {
        let at = 4 * (words - 1 - usize::from(*from_end) % words);
        bytes[at..at + 4].copy_from_slice(&value.get().to_le_bytes());
    }
    bytes
}
