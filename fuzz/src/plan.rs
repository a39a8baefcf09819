//! Frames from bytes to reply: staged values in range, replies well-formed, memory in proportion, and all of it equal
//! to what a naive planner says.

use pie_planner::{ComputedPlan, ForwardTimings, Limits, Planner, StagedPass, VisionConfig};
use pie_wire::{ArchivedForwardRequest, ArchivedPayload, Payload, RESPONSE_ROOT_LEN};
use rkyv::util::AlignedVec;

use crate::common::answer::{Answer, answer, check_archive};
use crate::common::device::{DRIVER, Device};
use crate::common::engine::{Engine, next_group, next_pass, put};
use crate::common::generate::{POSITIONS, VOCAB};
use crate::common::naive::{Plan, Slot};
use crate::memory;
use crate::staged::{Blank, Staged};
use crate::step::Steps;
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
        reply_bytes: REPLY_BYTES as u32,
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
const REPLY_BYTES: usize = 1 << 16;

/// The limits, by number; how much less room a reply has; then frames as they come, each after its length in 16 bits.
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

/// Planners that see the same frames: one gets the bytes as they are, others the same values encoded anew and compared
/// with the naive planner at every step.
pub(crate) struct Trial {
    pub(crate) limits: Limits,
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
    /// A planner whose batches run as graphs.
    steps: Steps,
    turns: u32,
}

/// Patches of 4 bytes, four to a row.
const VISION: VisionConfig = VisionConfig {
    patch_values: 1,
    merge_size: 2,
    max_side: 64,
};

impl Trial {
    pub(crate) fn new(limits: u8, lack: u8) -> Self {
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
            steps: Steps::new(limits),
            turns: 0,
        }
    }

    pub(crate) fn lose_table(&mut self) {
        self.planner.invalidate_block_table();
        self.device.lose_table();
    }

    /// Plans a frame with its images: every pass has pixels for what it says.
    fn look(&mut self, request: &ArchivedForwardRequest) {
        let Ok(plan) = self.sighted.plan(DRIVER, request) else {
            return;
        };
        let block: &mut [u8] = bytemuck::cast_slice_mut(&mut self.block);
        let see = |staged: &StagedPass, _: &[u8]| {
            let pass = staged.pass();
            let Some(images) = staged.images() else {
                return;
            };
            assert_eq!(images.positions.len(), 3 * pass.tokens);
            for span in images.spans {
                let [time, height, width] = span.grid;
                assert!(time == 1 && span.request < pass.requests);
                assert_eq!(span.kv.len() as u32, height / 2 * (width / 2));
                let pixels = request.image_pixels.get(span.pixels);
                assert!(pixels.is_some_and(|pixels| pixels.len() as u32 == 4 * height * width));
            }
        };
        let computed = Engine::default().run_seeing(&mut self.sighted, plan, block, see);
        self.sighted.recycle(computed);
    }

    /// Takes one frame, whatever it is.
    pub(crate) fn frame(&mut self, bytes: &AlignedVec<8>) {
        let Ok(frame) = pie_wire::access_request(bytes) else {
            return;
        };
        let ArchivedPayload::Forward(request) = &frame.payload else {
            return;
        };
        self.largest = self.largest.max(bytes.len());
        self.look(request);
        self.steps.frame(request);
        let Some(mut computed) = self.plan(request) else {
            return;
        };
        let limit = self.limits.reply_bytes as usize;
        let replied = self.reply(&mut computed, limit).is_some();
        if replied {
            self.reply(&mut computed, 0);
        }
        self.planner.recycle(computed);
        if !replied {
            return;
        }
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

    /// Plans and stages every pass; `None` when the frame is refused.
    fn plan(&mut self, request: &ArchivedForwardRequest) -> Option<ComputedPlan> {
        let (planned, info) = memory::measured(|| {
            let planned = self.planner.plan(DRIVER, request);
            planned.map(|plan| self.stage_all(plan))
        });
        self.check_memory(info.bytes_max as usize);
        self.grown += info.bytes_current as isize;
        let (rows, computed) = match planned {
            Ok(planned) => planned,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                return None;
            }
        };
        assert_eq!(rows, computed.token_count());
        for (index, error) in computed.request_errors() {
            assert!(*index < computed.request_count() && !error.to_string().is_empty());
        }
        Some(computed)
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
    fn stage_all(&mut self, mut plan: pie_planner::Plan) -> (usize, ComputedPlan) {
        let mut rows = 0;
        loop {
            let memory = bytemuck::cast_slice_mut(&mut self.block);
            let mut staged = match next_pass(&mut self.planner, plan, memory) {
                Ok(staged) => staged,
                Err(computed) => return (rows, computed),
            };
            let pass = *staged.pass();
            self.staged().check_pass(&pass);
            rows += pass.tokens;
            let mut slots = 0;
            plan = loop {
                let memory = bytemuck::cast_slice_mut(&mut self.block);
                let open = match next_group(&self.planner, staged, memory) {
                    Ok(open) => open,
                    Err(plan) => break plan,
                };
                let group = *open.group();
                self.staged().check_group(&pass, &group);
                slots += group.len();
                let labels = open.labels().len();
                let outputs = Blank::of(&self.staged(), &group, labels, open.logprob_positions());
                staged = outputs.with(|outputs| put(open, outputs));
            };
            assert_eq!(slots, pass.slots);
        }
    }

    fn staged(&self) -> Staged<'_> {
        Staged {
            limits: &self.limits,
            layout: self.planner.layout(),
            block: &self.block,
        }
    }

    /// Replies into a buffer of exactly `capacity` bytes; the length, if there is room.
    fn reply(&mut self, computed: &mut ComputedPlan, capacity: usize) -> Option<usize> {
        let mut buffer = exact::<4>(&vec![0xEE; capacity]);
        let reply = self
            .planner
            .reply(computed, ForwardTimings::default(), &mut buffer);
        let requests = computed.request_count();
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
