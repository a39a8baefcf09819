//! A device that knows only what the staging block tells it, and compares all of it with the naive plan.

mod checks;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use bytemuck::Pod;
use pie_planner::{
    ComputedPlan, DraftOptions, FieldId, ForwardTimings, Limits, NgramConfig, Outputs, Planner,
    ReplyError, RequestError, SlotClass, StagedGroup, StagedPass,
};
use pie_wire::{ForwardRequest, Sampler, split_request, split_response};

use crate::common::answer::{Answer, Returned, answer, check_archive};
use crate::common::builder::{Encoded, GREEDY, Req, frame};
use crate::common::engine::{next_group, next_pass, put};
use crate::common::logprobs::{Logprobs, TokenCounts};
use crate::common::naive::{Adapters, Plan, Slot};
use crate::common::{logprobs, naive};

/// The driver that all test frames address.
pub(crate) const DRIVER: u32 = 7;

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
    /// Block-table entries as received so far: entry → first KV slot of the page.
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
    pub(crate) logprobs: Logprobs,
    /// Those of the last reply, by request.
    pub(crate) answered_logprobs: BTreeMap<u32, TokenCounts>,
    expected: Option<Plan>,
    /// The last frame.
    pub(crate) computed: Option<ComputedPlan>,
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
            logprobs: Logprobs::default(),
            answered_logprobs: BTreeMap::new(),
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
            ngram: Some(NgramConfig::default()),
            num_drafts: 3,
            graph_sizes: vec![1, 4, 16, 64, 256],
            model_sizes: Vec::new(),
            host_pages: 1,
        };
        device
            .planner
            .enable_drafts(&options)
            .expect("right options");
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
        let bytes = logprobs::encode(frame, &self.logprobs.asked);
        let (archive, extension) = split_request(&bytes).expect("it was just written");
        let encoded = Encoded::from_bytes(archive);
        let forward = encoded.forward();
        let planned = self.planner.plan_extended(DRIVER, forward, &extension);
        let mut planned = planned.expect("the frame's arrays agree");
        drop(encoded);
        let mut plan = naive::plan(&self.limits, &self.adapters, frame, &self.logprobs.asked);
        check_faults(&planned, &plan);
        self.uniforms.clear();
        self.last_updates.clear();
        self.given.clear();
        self.logprobs.clear();
        for pass in 0..plan.passes.len() {
            self.lose_adapters(&mut planned, &mut plan, pass);
            let mut staged = self.stage(planned).expect("a pass is left");
            self.check_pass(&staged, &plan, pass);
            for group in plan.pass_groups(pass, &self.limits) {
                let open = self.stage_group(staged).expect("a group is left");
                self.check_group(&open, &plan, &group);
                let mut spoilt = BTreeSet::new();
                let logprob_words = self.logprobs.give(&open, &plan, &group);
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
                staged = self.put(open, &group, &logprob_words);
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

    fn stage(&mut self, plan: pie_planner::Plan) -> Result<StagedPass, ComputedPlan> {
        let block = bytemuck::cast_slice_mut(&mut self.block);
        next_pass(&mut self.planner, plan, block)
    }

    fn stage_group(&mut self, pass: StagedPass) -> Result<StagedGroup, pie_planner::Plan> {
        let block = bytemuck::cast_slice_mut(&mut self.block);
        next_group(&self.planner, pass, block)
    }

    /// The last frame that was computed.
    pub(crate) fn last(&self) -> &ComputedPlan {
        self.computed.as_ref().expect("a frame was computed")
    }

    /// The errors of the last frame.
    pub(crate) fn request_errors(&self) -> &[(usize, RequestError)] {
        self.last().request_errors()
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

    /// Any bits in place of a probe's floats.
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
    fn put(&self, open: StagedGroup, group: &[(usize, Slot)], logprob_words: &[i32]) -> StagedPass {
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
            logprob_words,
        };
        put(open, &outputs)
    }

    /// The reply to the last frame, in a buffer of the length that it was planned for.
    pub(crate) fn reply(&mut self, probes: ForwardTimings) -> Result<Answer, ReplyError> {
        let capacity = self.limits.reply_bytes as usize;
        let mut words = vec![u64::MAX; capacity.div_ceil(8)];
        let buffer = &mut bytemuck::cast_slice_mut(&mut words)[..capacity];
        let computed = self.computed.as_mut().expect("a frame was computed");
        self.reply_len = self.planner.reply(computed, probes, buffer)?;
        let (reply, extension) = split_response(&buffer[..self.reply_len]).expect("it is whole");
        let plan = self.expected.as_ref().expect("a frame was computed");
        self.answered_logprobs = logprobs::read(&extension, plan);
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
        let answer = match self.reply(ForwardTimings::default()) {
            Ok(answer) => answer,
            Err(error) => {
                assert!(!plan.fits, "{error}");
                return None;
            }
        };
        let expected = self.expected();
        assert!(plan.fits);
        assert_eq!(answer.outputs(), expected);
        let positions = self.logprobs.expected(&plan, &answer.tokens());
        assert_eq!(self.answered_logprobs, positions);
        let fast = !expected.is_empty() && expected.iter().all(Returned::is_one_token);
        let drafts = answer.drafts();
        assert_eq!(answer.is_fast(), fast && drafts == 0, "{expected:?}");
        assert!(drafts == 0 || self.planner.draft_counters().is_some());
        if let Answer::Archive(response) = &answer {
            check_archive(response, expected.len());
        }
        let computed = self.computed.as_mut().expect("a frame was computed");
        let time = Duration::from_micros(100 + computed.token_count() as u64);
        self.planner.record_step_time(computed, time, time);
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
        self.planner.invalidate_block_table();
        self.table.clear();
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
    let mut errors = planned.request_errors().iter().peekable();
    for (index, request) in plan.requests.iter().enumerate() {
        let error = errors
            .next_if(|(at, _)| *at == index)
            .map(|(_, error)| error);
        let kinds = if request.refused.is_empty() {
            &request.rejected
        } else {
            &request.refused
        };
        match error {
            None => assert!(kinds.is_empty(), "request {index} lacks {kinds:?}"),
            Some(error) => {
                assert!(
                    kinds.contains(error.kind()),
                    "request {index}: {error}, not {kinds:?}"
                );
                assert_eq!(error.keeps_kv(), request.refused.is_empty(), "{error}");
            }
        }
    }
    assert_eq!(errors.next(), None, "out of order or out of range");
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
