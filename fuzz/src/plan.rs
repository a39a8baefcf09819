//! Frames from bytes to reply: staged values in range, replies well-formed, memory in proportion, and all of it equal
//! to what a naive planner says.

use arbitrary::{Arbitrary, Unstructured};
use bytemuck::Pod;
use pie_batch::{
    FieldId, Layout, Limits, Outputs, Pass, Planner, Probes, SlotClass, SlotGroup, Vision,
};
use pie_wire::{
    ArchivedForwardRequest, ArchivedPayload, Brle, ForwardRequest, Payload, RESPONSE_ROOT_LEN,
    Sampler,
};
use rkyv::util::AlignedVec;

use crate::common::builder::{Encoded, Req, frame};
use crate::common::device::{Answer, DRIVER, Device, answer, check_archive};
use crate::common::generate::{POSITIONS, VOCAB, elide_empty};
use crate::common::naive::{Plan, Slot};
use crate::memory;
use crate::wire::exact;

const fn limits(pages: [u32; 3], pass: [u32; 3]) -> Limits {
    let ([page_size, total_pages, row_pages], [max_requests, chunk_tokens, max_slots]) =
        (pages, pass);
    Limits {
        page_size,
        total_pages,
        vocab_size: VOCAB,
        max_positions: POSITIONS,
        row_pages,
        max_requests,
        chunk_tokens,
        max_slots,
        reply_bytes: ROOM as u32,
    }
}

/// From room for everything to one of everything.
const LIMITS: [Limits; 6] = [
    limits([16, 64, 16], [16, 256, 64]),
    limits([16, 8, 3], [3, 7, 2]),
    limits([1, 40, 25], [2, 5, 3]),
    limits([3, 20, 9], [4, 1, 1]),
    limits([16, 8, 4], [1, 64, 64]),
    limits([1, 1, 1], [1, 1, 1]),
];

/// Room for the reply to any frame that the targets bring.
const ROOM: usize = 1 << 16;

/// The limits, by number; how much less room a reply has; then frames as they come, each behind its length in 16 bits.
pub(crate) fn bytes(data: &[u8]) {
    let Some((&[limits, lack], mut rest)) = data.split_first_chunk() else {
        return;
    };
    let mut trial = Trial::new(limits, lack);
    while let Some((length, tail)) = rest.split_first_chunk() {
        let (bytes, tail) = tail.split_at(tail.len().min(u16::from_le_bytes(*length).into()));
        trial.frame(&exact(bytes));
        rest = tail;
    }
}

/// An input of [`bytes`], with limits of the same page size.
pub(crate) fn join(limits: &Limits, frames: &[Vec<u8>]) -> Vec<u8> {
    let number = LIMITS
        .iter()
        .rposition(|known| known.page_size == limits.page_size)
        .unwrap_or(0);
    let behind_length =
        |frame: &Vec<u8>| [&(frame.len() as u16).to_le_bytes(), &frame[..]].concat();
    [
        vec![number as u8, 40],
        frames.iter().flat_map(behind_length).collect(),
    ]
    .concat()
}

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

/// Planners that see the same frames: one gets the bytes as they are, others the same values encoded anew and compared
/// with the naive planner at every step.
struct Trial {
    limits: Limits,
    planner: Planner,
    block: Vec<u64>,
    /// Bytes that the planner has taken since it was made.
    grown: isize,
    /// Bytes of the largest frame.
    largest: usize,
    device: Device,
    /// The same with a drafter, for which every request asks.
    drafting: Device,
    /// A planner for a model that takes images.
    sighted: Planner,
    turns: u32,
}

/// Patches of 4 bytes, four to a row.
const VISION: Vision = Vision {
    patch_values: 1,
    merge_size: 2,
    max_side: 64,
};

impl Trial {
    fn new(limits: u8, lack: u8) -> Self {
        let mut limits = LIMITS[usize::from(limits) % LIMITS.len()];
        limits.reply_bytes -= u32::from(lack) * 256;
        let device = Device::new(limits);
        let planner = Planner::new(limits, 1);
        Self {
            limits,
            block: vec![u64::MAX; planner.layout().bytes().div_ceil(8)],
            planner,
            grown: 0,
            largest: 0,
            device,
            drafting: Device::with_drafts(limits),
            sighted: Planner::new(limits, 1).with_vision(VISION),
            turns: 0,
        }
    }

    fn lose_table(&mut self) {
        self.planner.forget_table();
        self.device.lose_table();
    }

    /// Plans a frame with its images: every pass has pixels for what it says.
    fn look(&mut self, request: &ArchivedForwardRequest) {
        if self.sighted.plan(DRIVER, request).is_err() {
            return;
        }
        let block: &mut [u8] = bytemuck::cast_slice_mut(&mut self.block);
        while let Some(pass) = self.sighted.stage(block).expect("the block fits") {
            let Some(images) = self.sighted.pass_images() else {
                continue;
            };
            assert_eq!(images.positions.len(), 3 * pass.tokens);
            for span in images.spans {
                let [time, height, width] = span.grid;
                assert!(time == 1 && span.request < pass.requests);
                assert_eq!(span.kv.len() as u32, height / 2 * (width / 2));
                let pixels = request.image_pixels.get(span.pixels);
                assert!(pixels.is_some_and(|pixels| pixels.len() as u32 == 4 * height * width));
            }
        }
    }

    /// Takes one frame, whatever it is.
    fn frame(&mut self, bytes: &AlignedVec<8>) {
        let Ok(frame) = pie_wire::access_request(bytes) else {
            return;
        };
        let ArchivedPayload::Forward(request) = &frame.payload else {
            return;
        };
        self.largest = self.largest.max(bytes.len());
        self.look(request);
        if !self.plan(request) {
            return;
        }
        if self.reply(self.limits.reply_bytes as usize).is_none() {
            return;
        }
        self.reply(0);
        let owned = pie_wire::decode_request(bytes)
            .expect("it is valid")
            .payload;
        let Payload::Forward(owned) = owned else {
            panic!("the copy is another payload");
        };
        self.turns += 1;
        self.device.run(&owned, pick(self.turns));
        let mut asking = owned;
        asking.output_spec_flags.fill(true);
        self.drafting.run(&asking, pick(self.turns));
    }

    /// Plans and stages every pass; `false` when the frame is refused.
    fn plan(&mut self, request: &ArchivedForwardRequest) -> bool {
        let (planned, info) = memory::measured(|| {
            self.planner
                .plan(DRIVER, request)
                .map(|()| self.stage_all())
        });
        self.check_memory(info.bytes_max as usize);
        self.grown += info.bytes_current as isize;
        match planned {
            Ok(rows) => assert_eq!(rows, self.planner.token_count()),
            Err(ref error) => assert!(!error.to_string().is_empty()),
        }
        for (index, fault) in self.planner.faults() {
            assert!(*index < self.planner.request_count() && !fault.to_string().is_empty());
        }
        planned.is_ok()
    }

    /// A draft of 4 bytes becomes a row, a slot, a segment and a pass, some 100 bytes, in arrays that grow by
    /// doubling. The mirror of the block table is bounded by the limits.
    fn check_memory(&self, peak: usize) {
        let mirror = 8 * self.limits.max_requests as usize * self.limits.row_pages as usize;
        let grown = self.grown + peak as isize;
        let bound = 64 * self.largest + mirror + (1 << 12);
        assert!(
            grown <= bound as isize,
            "{grown} bytes for frames of {}",
            self.largest
        );
    }

    /// Stages every pass and group; returns the rows.
    fn stage_all(&mut self) -> usize {
        let mut rows = 0;
        while let Some(pass) = self
            .planner
            .stage(bytemuck::cast_slice_mut(&mut self.block))
            .expect("the block fits")
        {
            self.staged().check_pass(&pass);
            rows += pass.tokens;
            let mut slots = 0;
            while let Some(group) = self
                .planner
                .stage_slots(bytemuck::cast_slice_mut(&mut self.block))
                .expect("the block fits")
            {
                self.staged().check_group(&pass, &group);
                slots += group.len();
                let labels = self.planner.group_labels().len();
                let outputs = Blank::of(&self.staged(), &group, labels);
                let taken = outputs.with(|outputs| self.planner.put_outputs(outputs));
                taken.expect("as many as asked for");
            }
            assert_eq!(slots, pass.slots);
        }
        rows
    }

    fn staged(&self) -> Staged<'_> {
        Staged {
            limits: &self.limits,
            layout: self.planner.layout(),
            block: &self.block,
        }
    }

    /// Replies into a buffer of exactly `capacity` bytes; the length, if there is room.
    fn reply(&mut self, capacity: usize) -> Option<usize> {
        let mut buffer = exact::<4>(&vec![0xEE; capacity]);
        let reply = self.planner.reply(Probes::default(), &mut buffer);
        let requests = self.planner.request_count();
        let Ok(length) = reply else {
            // Four kinds of probes at most, each with offsets for the requests and for its entries.
            let empty = RESPONSE_ROOT_LEN + 5 * 4 * (requests + 2);
            assert!(capacity < empty, "{capacity} bytes hold the empty answer");
            return None;
        };
        if let Answer::Archive(response) = answer(&buffer[..length]) {
            check_archive(&response, requests);
        }
        Some(length)
    }
}

/// Outputs of the right lengths.
pub(crate) struct Blank {
    tokens: Vec<i64>,
    dist_ids: Vec<i64>,
    /// Probabilities, logits, log-probabilities, entropies.
    values: [Vec<f32>; 4],
}

impl Blank {
    pub(crate) fn of(staged: &Staged<'_>, group: &SlotGroup, labels: usize) -> Self {
        let count = |class| group.count(class);
        let classes = [SlotClass::Greedy, SlotClass::Plain, SlotClass::Filtered];
        let tokens: usize = classes.into_iter().map(count).sum();
        let listed = staged.array::<i32>(FieldId::TopKs, group.len());
        let listed = &listed[tokens..tokens + count(SlotClass::Dist)];
        let listed: usize = listed.iter().map(|&count| count as usize).sum();
        let logits = count(SlotClass::Logits) * staged.limits.vocab_size as usize;
        let lengths = [listed, logits, labels, count(SlotClass::Entropy)];
        Self {
            tokens: (0..tokens as i64)
                .map(|slot| slot % i64::from(VOCAB))
                .collect(),
            dist_ids: vec![3; listed],
            values: lengths.map(|length| vec![0.25; length]),
        }
    }

    pub(crate) fn with<T>(&self, take: impl FnOnce(&Outputs<'_>) -> T) -> T {
        let [dist_probs, logits, logprobs, entropies] = &self.values;
        take(&Outputs {
            tokens: &self.tokens,
            dist_ids: &self.dist_ids,
            dist_probs,
            logits,
            logprobs,
            entropies,
        })
    }
}

/// A staging block: every index that the engine follows is one that it has.
pub(crate) struct Staged<'a> {
    pub(crate) limits: &'a Limits,
    pub(crate) layout: &'a Layout,
    pub(crate) block: &'a [u64],
}

impl Staged<'_> {
    pub(crate) fn check_pass(&self, pass: &Pass) {
        let limits = self.limits;
        assert!((1..=limits.chunk_tokens as usize).contains(&pass.tokens));
        assert!((1..=limits.max_requests as usize).contains(&pass.requests));
        self.check(FieldId::InputIds, pass.tokens, limits.vocab_size as usize);
        self.check(
            FieldId::Positions,
            pass.tokens,
            limits.max_positions as usize,
        );
        self.check(FieldId::OutCacheLoc, pass.tokens, limits.storage_slots());
        self.check(
            FieldId::SeqLens,
            pass.requests,
            limits.max_kv_len() as usize + 1,
        );
        let row_pages = limits.row_pages as usize;
        for update in self
            .array::<i64>(FieldId::TableUpdates, 2 * pass.updates)
            .chunks(2)
        {
            assert!(
                update[0] >= row_pages as i64
                    && below(update[0], row_pages * (limits.max_requests as usize + 1))
            );
            assert!(
                below(update[1], limits.storage_slots())
                    && update[1] % i64::from(limits.page_size) == 0
            );
        }
    }

    pub(crate) fn check_group(&self, pass: &Pass, group: &SlotGroup) {
        assert!(!group.is_empty() && group.len() <= self.limits.max_slots as usize);
        self.check(FieldId::SlotRows, group.len(), pass.tokens);
        let words = self.array::<i32>(FieldId::MaskWords, group.mask_words);
        let masks = self.array::<i32>(FieldId::SlotMasks, 2 * group.len());
        for &[first, edges] in masks.as_chunks().0 {
            let width = usize::try_from(edges).unwrap_or(self.limits.mask_words());
            let words = &words[first as usize..][..width];
            let end = self.limits.vocab_size as i32;
            assert!(
                edges < 0
                    || (edges % 2 == 0
                        && words.is_sorted_by(|a, b| a < b)
                        && words.iter().all(|edge| (0..=end).contains(edge))),
                "{words:?}"
            );
        }
    }

    /// The first `count` elements lie in `0..end`.
    fn check(&self, id: FieldId, count: usize, end: usize) {
        let values = self.array::<i64>(id, count);
        assert!(
            values.iter().all(|&value| below(value, end)),
            "{id:?} {values:?}, must be below {end}"
        );
    }

    fn array<T: Pod>(&self, id: FieldId, count: usize) -> &[T] {
        let field = self.layout.field(id);
        assert!(count <= field.capacity, "{} overflows", field.name);
        let bytes: &[u8] = bytemuck::cast_slice(self.block);
        bytemuck::cast_slice(&bytes[field.offset..][..count * size_of::<T>()])
    }
}

fn below(value: i64, end: usize) -> bool {
    usize::try_from(value).is_ok_and(|value| value < end)
}

/// Tokens for slots: drafts are accepted more often than not.
fn pick(salt: u32) -> impl FnMut(&Plan, &Slot) -> u32 {
    let mut calls = salt;
    move |plan, slot| {
        calls = calls.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        match plan.requests[slot.request].drafts.get(slot.number) {
            Some(&draft) if calls >> 30 != 0 => draft,
            _ => (calls >> 8) % VOCAB,
        }
    }
}
