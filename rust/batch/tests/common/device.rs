//! A device that knows only what the staging block tells it, and compares all of it with the naive plan.

use std::collections::{HashMap, HashSet};

use bytemuck::Pod;
use pie_batch::{FieldId, Limits, Planner, Probes, SamplerClass};
use pie_wire::{ForwardRequest, ForwardResponse, Reply, ResponsePayload, WireError, decode_reply};

use crate::common::builder::Encoded;
use crate::common::naive::{self, Plan, Slot};

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

impl Answer {
    /// The tokens of each request.
    pub(crate) fn tokens(&self) -> Vec<Vec<u32>> {
        match self {
            Self::Fast(tokens) => tokens.iter().map(|&token| vec![token]).collect(),
            Self::Archive(response) => response
                .tokens_indptr
                .windows(2)
                .map(|ends| response.tokens[ends[0] as usize..ends[1] as usize].to_vec())
                .collect(),
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

/// One planner and the memory that an engine would own.
pub(crate) struct Device {
    pub(crate) planner: Planner,
    limits: Limits,
    block: Vec<u64>,
    /// Block-table entries as told so far: entry → first storage slot of the page.
    table: HashMap<i64, i64>,
    /// Uniforms of seeded slots as seen so far.
    seeded: HashMap<(u32, u32, usize), u32>,
    /// Uniforms of the last frame's slots, in the order of requests and slots.
    pub(crate) uniforms: HashMap<(usize, usize), f32>,
    /// Block-table updates of each pass of the last frame.
    pub(crate) last_updates: Vec<usize>,
    /// The tokens that the last frame's slots were given.
    given: Vec<Vec<u32>>,
    expected: Option<Plan>,
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
            block,
            table: HashMap::new(),
            seeded: HashMap::new(),
            uniforms: HashMap::new(),
            last_updates: Vec::new(),
            given: Vec::new(),
            expected: None,
        }
    }

    /// Plans a frame and runs all its passes; `choose` gives the token of a request's slot. Everything staged is
    /// compared with the naive plan, which is returned.
    pub(crate) fn compute(
        &mut self,
        frame: &ForwardRequest,
        mut choose: impl FnMut(&Plan, &Slot) -> u32,
    ) -> Plan {
        let encoded = Encoded::new(DRIVER, frame);
        self.planner
            .plan(DRIVER, encoded.forward())
            .expect("the frame's arrays agree");
        drop(encoded);
        let plan = naive::plan(&self.limits, frame);
        self.check_faults(&plan);
        self.uniforms.clear();
        self.last_updates.clear();
        self.given = plan
            .requests
            .iter()
            .map(|r| vec![u32::MAX; r.slots.len()])
            .collect();
        for pass in 0..plan.passes.len() {
            self.check_pass(&plan, pass);
            for group in plan.pass_groups(pass, &self.limits) {
                self.check_group(&group);
                let tokens: Vec<i64> = group
                    .iter()
                    .map(|(_, slot)| {
                        let token = choose(&plan, slot);
                        self.given[slot.request][slot.number] = token;
                        i64::from(token)
                    })
                    .collect();
                self.planner
                    .put_tokens(&tokens)
                    .expect("one token per slot");
            }
            let block = bytemuck::cast_slice_mut(&mut self.block);
            assert_eq!(self.planner.stage_slots(block), Ok(None));
        }
        let block = bytemuck::cast_slice_mut(&mut self.block);
        assert_eq!(self.planner.stage(block), Ok(None));
        self.expected = Some(plan.clone());
        plan
    }

    /// The reply to the last frame in `capacity` bytes, and the requests that were dropped to make it fit.
    pub(crate) fn reply(
        &mut self,
        probes: Probes,
        capacity: usize,
    ) -> (Result<Answer, WireError>, Vec<usize>) {
        let mut words = vec![u64::MAX; capacity.div_ceil(8)];
        let buffer = &mut bytemuck::cast_slice_mut(&mut words)[..capacity];
        let mut dropped = Vec::new();
        let answer = self
            .planner
            .reply(probes, buffer, &mut dropped)
            .map(|length| answer(&buffer[..length]));
        (answer, dropped)
    }

    /// Runs a frame from bytes to reply and compares the reply with what the protocol asks for.
    pub(crate) fn run(
        &mut self,
        frame: &ForwardRequest,
        choose: impl FnMut(&Plan, &Slot) -> u32,
    ) -> Answer {
        self.compute(frame, choose);
        let (answer, dropped) = self.reply(Probes::default(), 1 << 16);
        let answer = answer.expect("the reply fits");
        assert!(dropped.is_empty());
        let tokens = self.expected_tokens();
        assert_eq!(answer.tokens(), tokens);
        let one_each = !tokens.is_empty() && tokens.iter().all(|tokens| tokens.len() == 1);
        assert_eq!(answer.is_fast(), one_each, "{tokens:?}");
        if let Answer::Archive(response) = &answer {
            check_archive(response, tokens.len());
        }
        answer
    }

    /// The tokens that the last frame's requests must return.
    pub(crate) fn expected_tokens(&self) -> Vec<Vec<u32>> {
        let plan = self.expected.as_ref().expect("a frame was computed");
        let tokens = plan.requests.iter().zip(&self.given);
        tokens
            .map(|(request, given)| {
                if request.drafts.is_empty() || given.is_empty() {
                    return given.clone();
                }
                let mut tokens = Vec::new();
                for (number, &token) in given.iter().enumerate() {
                    tokens.push(token);
                    if request.drafts.get(number) != Some(&token) {
                        break;
                    }
                }
                tokens
            })
            .collect()
    }

    /// Forgets the block table, as after a failed pass.
    pub(crate) fn lose_table(&mut self) {
        self.planner.forget_table();
        self.table.clear();
    }

    fn check_faults(&self, plan: &Plan) {
        assert_eq!(self.planner.request_count(), plan.requests.len());
        assert_eq!(self.planner.pass_count(), plan.passes.len());
        let rows: usize = plan.requests.iter().map(|request| request.rows.len()).sum();
        assert_eq!(self.planner.token_count(), rows);
        let mut faults = self.planner.faults().iter().peekable();
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

    fn check_pass(&mut self, plan: &Plan, number: usize) {
        let block = bytemuck::cast_slice_mut(&mut self.block);
        let staged = self
            .planner
            .stage(block)
            .expect("the block fits")
            .expect("a pass is left");
        let segments = &plan.passes[number];
        let rows = plan.pass_rows(number);
        assert_eq!(
            (staged.tokens, staged.requests),
            (rows.len(), segments.len())
        );
        assert_eq!(
            staged.decode,
            segments.iter().all(|segment| segment.rows.len() == 1)
        );

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

    fn check_group(&mut self, group: &[(usize, Slot)]) {
        let block = bytemuck::cast_slice_mut(&mut self.block);
        let staged = self
            .planner
            .stage_slots(block)
            .expect("the block fits")
            .expect("a group is left");
        let count = |class| group.iter().filter(|(_, slot)| slot.class == class).count();
        assert_eq!(staged.len(), group.len());
        assert_eq!(staged.greedy, count(SamplerClass::Greedy));
        assert_eq!(staged.plain, count(SamplerClass::Plain));
        assert_eq!(staged.filtered, count(SamplerClass::Filtered));
        let rows = self.array::<i64>(FieldId::SlotRows, group.len());
        let floats = [FieldId::Temperatures, FieldId::TopPs, FieldId::MinPs]
            .map(|id| self.array::<f32>(id, group.len()));
        let top_ks = self.array::<i32>(FieldId::TopKs, group.len());
        let uniforms = self.array::<f32>(FieldId::Uniforms, group.len());
        for (entry, &(row, slot)) in group.iter().enumerate() {
            assert_eq!(rows[entry], row as i64, "{slot:?}");
            assert_eq!(
                floats[0][entry].to_bits(),
                slot.temperature.to_bits(),
                "{slot:?}"
            );
            if slot.class != SamplerClass::Greedy {
                let parameters = (floats[1][entry], floats[2][entry], top_ks[entry]);
                assert_eq!(
                    parameters,
                    (slot.top_p, slot.min_p, slot.top_k as i32),
                    "{slot:?}"
                );
            }
            let uniform = uniforms[entry];
            assert!((0.0..1.0).contains(&uniform), "{uniform}");
            self.uniforms.insert((slot.request, slot.number), uniform);
            if slot.class == SamplerClass::Greedy {
                assert_eq!(uniform.to_bits(), 0, "a greedy slot draws nothing");
            } else if let Some(key) = slot.key {
                let known = *self.seeded.entry(key).or_insert(uniform.to_bits());
                assert_eq!(known, uniform.to_bits(), "{key:?}");
            }
        }
    }

    /// The first entries of a staged array.
    fn array<T: Pod>(&self, id: FieldId, count: usize) -> Vec<T> {
        let field = self.planner.layout().field(id);
        assert!(count <= field.capacity, "{} overflows", field.name);
        let bytes: &[u8] = bytemuck::cast_slice(&self.block);
        bytemuck::cast_slice(&bytes[field.offset..][..count * size_of::<T>()]).to_vec()
    }
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

/// The rules that the runtime relies on without checking.
pub(crate) fn check_archive(response: &ForwardResponse, requests: usize) {
    assert_eq!(response.num_requests as usize, requests);
    if requests > 0 {
        assert_eq!(response.tokens_indptr.len(), requests + 1);
    }
    assert_eq!(response.tokens_indptr.first().copied().unwrap_or(0), 0);
    assert!(response.tokens_indptr.is_sorted());
    let end = response.tokens_indptr.last().copied().unwrap_or(0);
    assert_eq!(end as usize, response.tokens.len());
    let empty = ForwardResponse {
        num_requests: response.num_requests,
        tokens_indptr: response.tokens_indptr.clone(),
        tokens: response.tokens.clone(),
        probe_wire_parse_us: response.probe_wire_parse_us,
        probe_plan_us: response.probe_plan_us,
        probe_h2d_us: response.probe_h2d_us,
        probe_kernel_launch_us: response.probe_kernel_launch_us,
        probe_sync_us: response.probe_sync_us,
        probe_response_build_us: response.probe_response_build_us,
        ..ForwardResponse::default()
    };
    assert_eq!(*response, empty, "only tokens are returned");
}
