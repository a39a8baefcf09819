//! A device that knows only what the staging block tells it, and compares all of it with the naive plan.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::time::Duration;

use bytemuck::Pod;
use pie_planner::{
    Computed, DraftOptions, FieldId, Limits, NgramConfig, Outputs, Planner, Probes, ReplyError,
    RequestFault, SlotClass, SlotGroup, StagedGroup, StagedPass,
};
use pie_wire::{
    ForwardRequest, ForwardResponse, Reply, ResponsePayload, Sampler, decode_reply, split_answer,
    split_request,
};

use crate::common::builder::{Encoded, GREEDY, Req, frame};
use crate::common::engine::{next_group, next_pass, put};
use crate::common::naive::{self, Adapters, Plan, Segment, Slot};
use crate::common::places::{self, Answered, Places};

/// The driver that all test frames address.
pub(crate) const DRIVER: u32 = 7;

/// A reply as the runtime reads it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Answer {
    /// The fast token reply.
    Fast(Vec<u32>),
    /// An archive.
    Archive(Box<ForwardResponse>),
}

/// What one request gets back: each kind in the order of its samplers, floats as their bits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Returned {
    pub(crate) tokens: Vec<u32>,
    /// Ids and probabilities.
    pub(crate) dists: Vec<(Vec<u32>, Vec<u32>)>,
    pub(crate) logits: Vec<Vec<u32>>,
    pub(crate) logprobs: Vec<Vec<u32>>,
    pub(crate) entropies: Vec<u32>,
}

impl Returned {
    fn is_one_token(&self) -> bool {
        let tokens = vec![self.tokens.first().copied().unwrap_or(0)];
        *self
            == Self {
                tokens,
                ..Self::default()
            }
    }
}

impl Answer {
    /// The outputs of each request.
    pub(crate) fn outputs(&self) -> Vec<Returned> {
        match self {
            Self::Fast(tokens) => tokens
                .iter()
                .map(|&token| Returned {
                    tokens: vec![token],
                    ..Returned::default()
                })
                .collect(),
            Self::Archive(response) => (0..response.num_requests as usize)
                .map(|request| read(response, request))
                .collect(),
        }
    }

    /// The tokens of each request.
    pub(crate) fn tokens(&self) -> Vec<Vec<u32>> {
        let outputs = self.outputs().into_iter();
        outputs.map(|returned| returned.tokens).collect()
    }

    /// How many drafts there are.
    pub(crate) fn drafts(&self) -> usize {
        match self {
            Self::Fast(_) => 0,
            Self::Archive(response) => response.spec_tokens.len(),
        }
    }

    pub(crate) fn is_fast(&self) -> bool {
        matches!(self, Self::Fast(_))
    }

    pub(crate) fn archive(&self) -> &ForwardResponse {
        match self {
            Self::Archive(response) => response,
            Self::Fast(_) => panic!("a fast reply"),
        }
    }
}

/// Reads the outputs of one request as the runtime walks them: offsets per request lead to entries, offsets per entry to
/// values.
fn read(response: &ForwardResponse, request: usize) -> Returned {
    fn part(offsets: &[u32], index: usize) -> Range<usize> {
        if offsets.is_empty() {
            return 0..0;
        }
        offsets[index] as usize..offsets[index + 1] as usize
    }
    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }
    let r = response;
    let entries = |requests: &[u32], entries: &[u32]| -> Vec<Range<usize>> {
        let own = part(requests, request);
        own.map(|entry| part(entries, entry)).collect()
    };
    let dists = entries(&r.dists_req_indptr, &r.dists_kv_indptr).into_iter();
    let logits = entries(&r.logits_req_indptr, &r.logits_byte_indptr).into_iter();
    let logprobs = entries(&r.logprobs_req_indptr, &r.logprobs_val_indptr).into_iter();
    let words = |bytes: &[u8]| {
        let (words, rest) = bytes.as_chunks();
        assert!(rest.is_empty(), "logits are whole words");
        words.iter().map(|&word| u32::from_le_bytes(word)).collect()
    };
    Returned {
        tokens: r.tokens[part(&r.tokens_indptr, request)].to_vec(),
        dists: dists
            .map(|own| (r.dists_ids[own.clone()].to_vec(), bits(&r.dists_probs[own])))
            .collect(),
        logits: logits.map(|own| words(&r.logits_bytes[own])).collect(),
        logprobs: logprobs.map(|own| bits(&r.logprobs_values[own])).collect(),
        entropies: bits(&r.entropies[part(&r.entropies_indptr, request)]),
    }
}

/// The output of one slot.
#[derive(Debug, Clone)]
enum Given {
    Token(u32),
    /// Ids, of a distribution, and the bits of floats.
    Probe(Vec<u32>, Vec<u32>),
}

/// Numbers that look random.
#[derive(Debug, Default)]
pub(crate) struct Noise(u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }
}

/// One planner and the memory that an engine would own.
pub(crate) struct Device {
    pub(crate) planner: Planner,
    limits: Limits,
    adapters: Adapters,
    block: Vec<u64>,
    /// Block-table entries as received so far: entry → first storage slot of the page.
    table: HashMap<i64, i64>,
    /// Uniforms of seeded slots as seen so far.
    seeded: HashMap<(u32, u32, usize), u32>,
    /// Uniforms of the last frame's slots, in the order of requests and slots.
    pub(crate) uniforms: HashMap<(usize, usize), f32>,
    /// Block-table updates of each pass of the last frame.
    pub(crate) last_updates: Vec<usize>,
    /// What the last frame's slots were given, by request, kind and number.
    given: BTreeMap<(usize, Option<SlotClass>, usize), Given>,
    noise: Noise,
    /// Log-probabilities that the next frame asks for, and what the last one was given.
    pub(crate) places: Places,
    /// Those of the last reply, by request.
    pub(crate) answered_places: BTreeMap<u32, Answered>,
    expected: Option<Plan>,
    /// The last frame.
    pub(crate) computed: Option<Computed>,
    /// The last reply's bytes.
    pub(crate) reply_len: usize,
}

impl Device {
    pub(crate) fn new(limits: Limits) -> Self {
        Self::with_seed(limits, 99)
    }

    pub(crate) fn with_seed(limits: Limits, random_seed: u64) -> Self {
        limits.check().expect("the limits are sound");
        let planner = Planner::new(limits, random_seed);
        let block = vec![u64::MAX; planner.layout().bytes().div_ceil(8)];
        Self {
            planner,
            limits,
            adapters: Adapters::default(),
            block,
            table: HashMap::new(),
            seeded: HashMap::new(),
            uniforms: HashMap::new(),
            last_updates: Vec::new(),
            given: BTreeMap::new(),
            noise: Noise(random_seed),
            places: Places::default(),
            answered_places: BTreeMap::new(),
            expected: None,
            computed: None,
            reply_len: 0,
        }
    }

    /// A device with adapters of the ids `1..=count`, now and then one of which is lost when it is needed.
    pub(crate) fn with_adapters(limits: Limits, slots: usize, count: i64) -> Self {
        let mut device = Self::new(limits);
        let slots = slots.try_into().expect("a slot");
        device.planner = device.planner.with_adapters(slots);
        device.adapters.slots = slots.get();
        for id in 1..=count {
            device.planner.add_adapter(id);
            device.adapters.loaded.insert(id);
        }
        device
    }

    /// A device that drafts.
    pub(crate) fn with_drafts(limits: Limits) -> Self {
        let mut device = Self::new(limits);
        let options = DraftOptions {
            ngram: NgramConfig::default(),
            num_drafts: 3,
            rungs: vec![1, 4, 16, 64, 256],
            host_pages: 1,
        };
        device.planner.draft(&options).expect("right options");
        // What a step costs is known from here on.
        let decode = Req::new(limits.page_size, 0, &[1], &[0]).sample(0, GREEDY);
        let probed = decode.clone().sample(0, Sampler::Entropy);
        for request in [decode, probed] {
            device.try_run(&frame(&[request]), |_, _| 0);
        }
        device
    }

    /// Plans a frame and runs all its passes; `choose` gives the token of a request's slot, one outside the vocabulary
    /// for logits with NaN. Everything staged is compared with the naive plan, which is returned.
    pub(crate) fn compute(
        &mut self,
        frame: &ForwardRequest,
        mut choose: impl FnMut(&Plan, &Slot) -> u32,
    ) -> Plan {
        if let Some(last) = self.computed.take() {
            self.planner.recycle(last);
        }
        let bytes = places::encode(frame, &self.places.asked);
        let (archive, extension) = split_request(&bytes).expect("it was just written");
        let encoded = Encoded::from_bytes(archive);
        let forward = encoded.forward();
        let planned = self.planner.plan_extended(DRIVER, forward, &extension);
        let mut planned = planned.expect("the frame's arrays agree");
        drop(encoded);
        let mut plan = naive::plan(&self.limits, &self.adapters, frame, &self.places.asked);
        check_faults(&planned, &plan);
        self.uniforms.clear();
        self.last_updates.clear();
        self.given.clear();
        self.places.clear();
        for pass in 0..plan.passes.len() {
            self.lose_adapters(&mut planned, &mut plan, pass);
            let mut staged = self.stage(planned).expect("a pass is left");
            self.check_pass(&staged, &plan, pass);
            for group in plan.pass_groups(pass, &self.limits) {
                let open = self.stage_group(staged).expect("a group is left");
                self.check_group(&open, &plan, &group);
                let mut spoilt = BTreeSet::new();
                let place_words = self.places.give(&open, &plan, &group);
                for (_, slot) in &group {
                    let given = if slot.class.is_token() {
                        Given::Token(choose(&plan, slot))
                    } else {
                        self.invent(slot)
                    };
                    if matches!(given, Given::Token(token) if token >= self.limits.vocab_size) {
                        spoilt.insert(slot.request);
                    }
                    self.given.insert(key(slot), given);
                }
                staged = self.put(open, &group, &place_words);
                // Later passes know of it.
                plan.spoil(&self.limits, &spoilt);
            }
            planned = self.stage_group(staged).expect_err("no group is left");
        }
        let computed = self.stage(planned).expect_err("no pass is left");
        check_faults(&computed, &plan);
        self.computed = Some(computed);
        self.expected = Some(plan.clone());
        plan
    }

    fn stage(&mut self, plan: pie_planner::Plan) -> Result<StagedPass, Computed> {
        let block = bytemuck::cast_slice_mut(&mut self.block);
        next_pass(&mut self.planner, plan, block)
    }

    fn stage_group(&mut self, pass: StagedPass) -> Result<StagedGroup, pie_planner::Plan> {
        let block = bytemuck::cast_slice_mut(&mut self.block);
        next_group(&self.planner, pass, block)
    }

    /// The last frame that was computed.
    pub(crate) fn last(&self) -> &Computed {
        self.computed.as_ref().expect("a frame was computed")
    }

    /// The faults of the last frame.
    pub(crate) fn faults(&self) -> &[(usize, RequestFault)] {
        self.last().faults()
    }

    /// Checks which adapters the next pass needs, and may lose some of them.
    fn lose_adapters(&mut self, planned: &mut pie_planner::Plan, plan: &mut Plan, pass: usize) {
        let expected = plan.pass_adapters(pass);
        let needed = planned.next_adapters();
        assert_eq!(needed.len(), expected.len(), "each once");
        assert_eq!(BTreeSet::from_iter(needed), expected);
        for id in expected {
            if self.noise.next().is_multiple_of(8) {
                planned.drop_adapter(id, "it is gone");
                plan.drop_adapter(id, pass);
            }
        }
    }

    /// Any bits in the place of a probe's floats.
    fn invent(&mut self, slot: &Slot) -> Given {
        let vocab_size = self.limits.vocab_size;
        let count = slot.values(vocab_size);
        let ids = match slot.class {
            SlotClass::Dist => (0..count).map(|_| self.noise.next() % vocab_size).collect(),
            _ => Vec::new(),
        };
        Given::Probe(ids, (0..count).map(|_| self.noise.next()).collect())
    }

    /// Hands over what the slots of a group were given.
    fn put(&self, open: StagedGroup, group: &[(usize, Slot)], place_words: &[i32]) -> StagedPass {
        let given = |class: SlotClass| -> (Vec<i64>, Vec<f32>) {
            let (mut ids, mut floats) = (Vec::new(), Vec::new());
            for (_, slot) in group.iter().filter(|(_, slot)| slot.class == class) {
                match &self.given[&key(slot)] {
                    Given::Token(token) => ids.push(i64::from(*token)),
                    Given::Probe(own_ids, bits) => {
                        ids.extend(own_ids.iter().copied().map(i64::from));
                        floats.extend(bits.iter().copied().map(f32::from_bits));
                    }
                }
            }
            (ids, floats)
        };
        let token_classes = [SlotClass::Greedy, SlotClass::Plain, SlotClass::Filtered];
        let tokens = token_classes.map(|class| given(class).0).concat();
        let (dist_ids, dist_probs) = given(SlotClass::Dist);
        let outputs = Outputs {
            tokens: &tokens,
            dist_ids: &dist_ids,
            dist_probs: &dist_probs,
            logits: &given(SlotClass::Logits).1,
            logprobs: &given(SlotClass::Logprobs).1,
            entropies: &given(SlotClass::Entropy).1,
            place_words,
        };
        put(open, &outputs)
    }

    /// The reply to the last frame, in a buffer of the length that it was planned for.
    pub(crate) fn reply(&mut self, probes: Probes) -> Result<Answer, ReplyError> {
        let capacity = self.limits.reply_bytes as usize;
        let mut words = vec![u64::MAX; capacity.div_ceil(8)];
        let buffer = &mut bytemuck::cast_slice_mut(&mut words)[..capacity];
        let computed = self.computed.as_mut().expect("a frame was computed");
        self.reply_len = self.planner.reply(computed, probes, buffer)?;
        let (reply, extension) = split_answer(&buffer[..self.reply_len]).expect("it is whole");
        let plan = self.expected.as_ref().expect("a frame was computed");
        self.answered_places = places::read(&extension, plan);
        Ok(answer(reply))
    }

    /// Runs a frame from bytes to reply and compares the reply with what the protocol asks for.
    pub(crate) fn run(
        &mut self,
        frame: &ForwardRequest,
        choose: impl FnMut(&Plan, &Slot) -> u32,
    ) -> Answer {
        self.try_run(frame, choose).expect("the reply fits")
    }

    /// Like [`Device::run`]; `None` when not even an empty reply fits.
    pub(crate) fn try_run(
        &mut self,
        frame: &ForwardRequest,
        choose: impl FnMut(&Plan, &Slot) -> u32,
    ) -> Option<Answer> {
        let plan = self.compute(frame, choose);
        let answer = match self.reply(Probes::default()) {
            Ok(answer) => answer,
            Err(error) => {
                assert!(!plan.fits, "{error}");
                return None;
            }
        };
        let expected = self.expected();
        assert!(plan.fits);
        assert_eq!(answer.outputs(), expected);
        let places = self.places.expected(&plan, &answer.tokens());
        assert_eq!(self.answered_places, places);
        let fast = !expected.is_empty() && expected.iter().all(Returned::is_one_token);
        let drafts = answer.drafts();
        assert_eq!(answer.is_fast(), fast && drafts == 0, "{expected:?}");
        assert!(drafts == 0 || self.planner.draft_counters().is_some());
        if let Answer::Archive(response) = &answer {
            check_archive(response, expected.len());
        }
        let computed = self.computed.as_mut().expect("a frame was computed");
        let time = Duration::from_micros(100 + computed.token_count() as u64);
        self.planner.step_took(computed, time, time);
        Some(answer)
    }

    /// What the last frame's requests must return.
    pub(crate) fn expected(&self) -> Vec<Returned> {
        let plan = self.expected.as_ref().expect("a frame was computed");
        let expected = plan.requests.iter().map(|request| {
            let mut returned = Returned::default();
            for slot in &request.slots {
                match (self.given[&key(slot)].clone(), slot.class) {
                    (Given::Token(token), _) => returned.tokens.push(token),
                    (Given::Probe(ids, bits), SlotClass::Dist) => returned.dists.push((ids, bits)),
                    (Given::Probe(_, bits), SlotClass::Logits) => returned.logits.push(bits),
                    (Given::Probe(_, bits), SlotClass::Logprobs) => returned.logprobs.push(bits),
                    (_, SlotClass::Prompt) => {}
                    (Given::Probe(_, bits), _) => returned.entropies.extend(bits),
                }
            }
            if !request.drafts.is_empty() {
                let accepted = returned.tokens.iter().zip(&request.drafts);
                let accepted = accepted.take_while(|(token, draft)| token == draft).count();
                returned.tokens.truncate(accepted + 1);
            }
            returned
        });
        expected.collect()
    }

    /// The tokens that the last frame's requests must return.
    pub(crate) fn expected_tokens(&self) -> Vec<Vec<u32>> {
        let expected = self.expected().into_iter();
        expected.map(|returned| returned.tokens).collect()
    }

    /// Forgets the block table, as after a failed pass.
    pub(crate) fn lose_table(&mut self) {
        self.planner.forget_table();
        self.table.clear();
    }

    fn check_pass(&mut self, pass: &StagedPass, plan: &Plan, number: usize) {
        let staged = pass.pass();
        let segments = &plan.passes[number];
        let rows = plan.pass_rows(number);
        assert_eq!(
            (staged.tokens, staged.requests),
            (rows.len(), segments.len())
        );
        let masked = plan.requests[segments[0].request].sees.is_some();
        let single = segments.iter().all(|segment| segment.rows.len() == 1);
        assert_eq!((staged.masked, staged.decode), (masked, single && !masked));
        self.check_attention_mask(pass, plan, segments);
        let adapters = segments.iter();
        let adapters: Vec<_> = adapters
            .map(|segment| plan.requests[segment.request].adapter.unwrap_or(-1))
            .collect();
        let bound = adapters.iter().any(|&id| id != -1);
        assert_eq!(pass.adapters(), bound.then_some(adapters));

        let tokens: Vec<_> = rows.iter().map(|(row, _)| i64::from(row.token)).collect();
        assert_eq!(self.array::<i64>(FieldId::InputIds, rows.len()), tokens);
        let positions: Vec<_> = rows
            .iter()
            .map(|(row, _)| i64::from(row.position))
            .collect();
        assert_eq!(self.array::<i64>(FieldId::Positions, rows.len()), positions);
        let storage: Vec<_> = rows.iter().map(|(_, storage)| *storage).collect();
        assert_eq!(self.array::<i64>(FieldId::OutCacheLoc, rows.len()), storage);

        self.last_updates.push(staged.updates);
        let updates = self.array::<i64>(FieldId::TableUpdates, 2 * staged.updates);
        let changes = updates.chunks(2).map(|update| (update[0], update[1]));
        self.table.extend(changes);
        let row_pages = self.limits.row_pages as usize;
        let (mut start, mut sum) = (0, 0);
        let mut table_rows = HashSet::new();
        for (row, segment) in segments.iter().enumerate() {
            let request = &plan.requests[segment.request];
            let prefix = request.rows[segment.rows.start].index;
            let length = segment.rows.len();
            let all = row + 1;
            let last_i64 = |id| self.array::<i64>(id, all)[row];
            let last_i32 = |id| self.array::<i32>(id, all)[row];
            let table_row = last_i64(FieldId::ReqPoolIndices) as usize;
            assert!((1..=self.limits.max_requests as usize).contains(&table_row));
            assert!(
                table_rows.insert(table_row),
                "two requests share row {table_row}"
            );
            assert_eq!(last_i64(FieldId::SeqLens), prefix as i64 + length as i64);
            assert_eq!(last_i32(FieldId::ExtendPrefixLens), prefix as i32);
            assert_eq!(last_i32(FieldId::ExtendSeqLens), length as i32);
            assert_eq!(last_i32(FieldId::ExtendStartLoc), start);
            for (column, &page) in request.pages.iter().enumerate() {
                let entry = (table_row * row_pages + column) as i64;
                let slot = i64::from(page + 1) * i64::from(self.limits.page_size);
                assert_eq!(
                    self.table.get(&entry),
                    Some(&slot),
                    "row {row}, column {column}"
                );
            }
            start += length as i32;
            sum += prefix + length as u64;
        }
        assert_eq!(staged.seq_lens_sum, sum);
        let slots: usize = plan
            .pass_groups(number, &self.limits)
            .iter()
            .map(Vec::len)
            .sum();
        assert_eq!(staged.slots, slots);
    }

    /// Each row of the pass sees what its request's mask says of the KV that is stored by then.
    fn check_attention_mask(&self, pass: &StagedPass, plan: &Plan, segments: &[Segment]) {
        let mask = pass.attention_mask().map(|mask| {
            let offsets: Vec<usize> = mask.offsets().collect();
            // In memory that held something else.
            let mut words = vec![0x5555_5555; offsets[segments.len()]];
            mask.write(&mut words);
            (offsets, words)
        });
        let mut expected = Vec::new();
        let mut found = Vec::new();
        for (entry, segment) in segments.iter().enumerate() {
            let request = &plan.requests[segment.request];
            let Some(sees) = &request.sees else {
                assert_eq!(mask, None);
                return;
            };
            let (offsets, words) = mask.as_ref().expect("a masked pass");
            assert_eq!(offsets.len(), segments.len() + 1);
            let kv_len = request.rows[segment.rows.end - 1].index as usize + 1;
            let width = kv_len.div_ceil(32);
            for (number, row) in segment.rows.clone().enumerate() {
                let start = offsets[entry] + number * width;
                let words = &words[start..start + width];
                let bit = |index: usize| words[index / 32].cast_unsigned() >> (index % 32) & 1 == 1;
                found.push((0..32 * width).map(bit).collect::<Vec<_>>());
                let mut bits = sees[row].clone();
                assert!(!bits[kv_len..].contains(&true), "sees what is not stored");
                bits.resize(32 * width, false);
                expected.push(bits);
            }
        }
        assert_eq!(found, expected);
        let words: usize = found.iter().map(|bits| bits.len() / 32).sum();
        assert_eq!(mask.map(|(_, words)| words.len()), Some(words));
        assert!(words <= self.limits.attention_words());
    }

    fn check_group(&mut self, open: &StagedGroup, plan: &Plan, group: &[(usize, Slot)]) {
        let staged = *open.group();
        let count = |class| group.iter().filter(|(_, slot)| slot.class == class).count();
        assert_eq!(staged.len(), group.len());
        for class in CLASSES {
            assert_eq!(staged.count(class), count(class), "{class:?}");
        }
        let rows = self.array::<i64>(FieldId::SlotRows, group.len());
        let [temperatures, top_ps, min_ps, uniforms] = [
            FieldId::Temperatures,
            FieldId::TopPs,
            FieldId::MinPs,
            FieldId::Uniforms,
        ]
        .map(|id| self.array::<f32>(id, group.len()));
        let top_ks = self.array::<i32>(FieldId::TopKs, group.len());
        for (entry, (row, slot)) in group.iter().enumerate() {
            assert_eq!(rows[entry], *row as i64, "{slot:?}");
            if slot.class <= SlotClass::Dist {
                let (staged, expected) = (temperatures[entry], slot.temperature);
                assert_eq!(staged.to_bits(), expected.to_bits(), "{slot:?}");
            }
            if matches!(
                slot.class,
                SlotClass::Filtered | SlotClass::Plain | SlotClass::Dist
            ) {
                let parameters = (top_ps[entry], min_ps[entry], top_ks[entry]);
                let expected = (slot.top_p, slot.min_p, slot.top_k as i32);
                assert_eq!(parameters, expected, "{slot:?}");
            }
            let uniform = uniforms[entry];
            assert!((0.0..1.0).contains(&uniform), "{uniform}");
            if !matches!(slot.class, SlotClass::Plain | SlotClass::Filtered) {
                assert_eq!(uniform.to_bits(), 0, "{slot:?} draws nothing");
                continue;
            }
            self.uniforms.insert((slot.request, slot.number), uniform);
            if let Some(key) = slot.key {
                let known = *self.seeded.entry(key).or_insert(uniform.to_bits());
                assert_eq!(known, uniform.to_bits(), "{key:?}");
            }
        }
        check_labels(open, group);
        self.check_masks(plan, group, staged);
    }

    /// Each slot leads to its request's mask, and a request's mask is staged once.
    fn check_masks(&self, plan: &Plan, group: &[(usize, Slot)], staged: SlotGroup) {
        let vocab_size = self.limits.vocab_size as usize;
        let width = vocab_size.div_ceil(32);
        let words = self.array::<i32>(FieldId::MaskWords, staged.mask_words);
        let slot_masks = self.array::<i32>(FieldId::SlotMasks, 2 * group.len());
        let mut of_request = HashMap::new();
        let mut used = HashSet::new();
        for ((_, slot), place) in group.iter().zip(slot_masks.as_chunks().0) {
            // What comes next in a prompt is known, whatever may be drawn.
            let mask = plan.requests[slot.request].mask.as_ref();
            let Some(mask) = mask.filter(|_| slot.class != SlotClass::Prompt) else {
                assert_eq!(*place, [0, 0], "{slot:?}");
                continue;
            };
            let [first, edges] = *place;
            used.insert(first);
            assert_eq!(*of_request.entry(slot.request).or_insert(first), first);
            let words = &words[usize::try_from(first).expect("a word")..];
            let allows = |token: usize| match usize::try_from(edges) {
                // After an odd number of edges.
                Ok(edges) => {
                    let before = words[..edges].partition_point(|&edge| edge as usize <= token);
                    before % 2 == 1
                }
                Err(_) => words[token / 32].cast_unsigned() >> (token % 32) & 1 == 1,
            };
            for token in 0..32 * width {
                let allowed = mask.get(token).copied().unwrap_or(false);
                assert_eq!(allows(token), allowed, "token {token} of {slot:?}");
            }
        }
        assert_eq!(used.len(), staged.masks, "masks without a slot");
    }

    /// The first entries of a staged array.
    fn array<T: Pod>(&self, id: FieldId, count: usize) -> Vec<T> {
        let field = self.planner.layout().field(id);
        assert!(count <= field.capacity, "{} overflows", field.name);
        let bytes: &[u8] = bytemuck::cast_slice(&self.block);
        bytemuck::cast_slice(&bytes[field.offset..][..count * size_of::<T>()]).to_vec()
    }
}

fn check_faults(planned: &pie_planner::Plan, plan: &Plan) {
    assert_eq!(planned.request_count(), plan.requests.len());
    assert_eq!(planned.pass_count(), plan.passes.len());
    let rows: usize = plan.requests.iter().map(|request| request.rows.len()).sum();
    assert_eq!(planned.token_count(), rows);
    let mut faults = planned.faults().iter().peekable();
    for (index, request) in plan.requests.iter().enumerate() {
        let fault = faults
            .next_if(|(at, _)| *at == index)
            .map(|(_, fault)| fault);
        let kinds = if request.refused.is_empty() {
            &request.muted
        } else {
            &request.refused
        };
        match fault {
            None => assert!(kinds.is_empty(), "request {index} lacks {kinds:?}"),
            Some(fault) => {
                assert!(
                    kinds.contains(fault.kind()),
                    "request {index}: {fault}, not {kinds:?}"
                );
                assert_eq!(fault.keeps_kv(), request.refused.is_empty(), "{fault}");
            }
        }
    }
    assert_eq!(faults.next(), None, "out of order or out of range");
}

/// Numbers and tokens of the group's log-probability slots.
fn check_labels(open: &StagedGroup, group: &[(usize, Slot)]) {
    let asking = group
        .iter()
        .filter(|(_, slot)| slot.class == SlotClass::Logprobs);
    let mut expected = Vec::new();
    for (number, (_, slot)) in asking.enumerate() {
        expected.extend(
            slot.labels
                .iter()
                .map(|&label| [number as i64, i64::from(label)]),
        );
    }
    assert_eq!(open.labels(), expected);
}

/// Reads a reply; `bytes` must be aligned.
pub(crate) fn answer(bytes: &[u8]) -> Answer {
    match decode_reply(bytes).expect("the reply is valid") {
        Reply::Tokens(tokens) => {
            assert_eq!(tokens.driver_id(), DRIVER);
            Answer::Fast(tokens.iter().collect())
        }
        Reply::Frame(_) => {
            let frame = pie_wire::decode_response(bytes).expect("the archive is valid");
            assert_eq!(frame.driver_id, DRIVER);
            assert!(!frame.aborted);
            match frame.payload {
                ResponsePayload::Forward(response) => Answer::Archive(Box::new(response)),
                ResponsePayload::Status(status) => panic!("{status:?} instead of a forward"),
            }
        }
    }
}

/// Where the output of a slot is noted: tokens are numbered whatever their class.
fn key(slot: &Slot) -> (usize, Option<SlotClass>, usize) {
    let probe = Some(slot.class).filter(|class| !class.is_token());
    (slot.request, probe, slot.number)
}

/// All classes in order.
const CLASSES: [SlotClass; SlotClass::COUNT] = [
    SlotClass::Greedy,
    SlotClass::Plain,
    SlotClass::Filtered,
    SlotClass::Dist,
    SlotClass::Logits,
    SlotClass::Logprobs,
    SlotClass::Entropy,
    SlotClass::Prompt,
];

/// The rules that the runtime relies on without checking.
pub(crate) fn check_archive(response: &ForwardResponse, requests: usize) {
    assert_eq!(response.num_requests as usize, requests);
    response.check().expect("a response that keeps the rules");
    if requests > 0 {
        assert_eq!(response.tokens_indptr.len(), requests + 1);
    }
    if !response.spec_indptr.is_empty() {
        assert_eq!(response.spec_indptr.len(), requests + 1);
        assert!(!response.spec_tokens.is_empty());
        // Drafts continue tokens.
        let ends = response.spec_indptr.windows(2);
        for (drafts, tokens) in ends.zip(response.tokens_indptr.windows(2)) {
            assert!(drafts[0] == drafts[1] || tokens[0] < tokens[1]);
        }
    }
}
