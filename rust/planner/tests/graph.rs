//! Steps for graphs hold what the staged pass holds, row by row, and the tokens of their rows make the same reply.

use std::collections::HashSet;

use crate::common::builder::{Encoded, GREEDY, LARGE, Req, decode, frame};
use crate::common::device::DRIVER;
use crate::common::engine::{self, Engine, memory};
use crate::common::generate;
use pie_planner::{
    ComputedPlan, FieldId, ForwardTimings, Layout, Limits, Pass, Plan, Planner, SlotClass,
    StageError, StagedGroup, StagedPass, StagedStep, StepMemory, StepSize,
};
use pie_wire::{ForwardRequest, Sampler};
use proptest::prelude::*;

/// Rows beyond those in use.
const PADDING: usize = 3;
/// Block-table changes that a step's block has room for.
const BLOCK_UPDATES: usize = 512;

struct GraphPath {
    planner: Planner,
    block: Vec<u64>,
    masks: Vec<i32>,
}

/// One array of a block.
fn array<T: bytemuck::Pod>(layout: &Layout, block: &[u64], name: &str) -> Vec<T> {
    let field = layout.fields().iter().find(|field| field.name == name);
    let field = field.expect("a field of the layout");
    let bytes: &[u8] = bytemuck::cast_slice(block);
    let end = field.offset + field.capacity * field.dtype.size();
    bytemuck::cast_slice(&bytes[field.offset..end]).to_vec()
}

impl GraphPath {
    fn new(limits: Limits) -> Self {
        Self {
            planner: Planner::new(limits, 9),
            block: Vec::new(),
            masks: Vec::new(),
        }
    }

    /// Stages step number 5 into memory that held something else.
    fn stage(&mut self, plan: Plan, size: StepSize) -> (Layout, StagedStep) {
        let layout = Layout::graph(size);
        self.block = vec![0x5555_5555_5555_5555; layout.bytes().div_ceil(8)];
        let limits = self.planner.limits();
        let words = size.slots * limits.mask_words() + limits.extra_update_words();
        self.masks = vec![0x5555_5555; words];
        let memory = StepMemory {
            block: bytemuck::cast_slice_mut(&mut self.block),
            mask_words: &mut self.masks,
        };
        let staged = self.planner.stage_graph(plan, &layout, memory, 5);
        (layout, staged.expect("the memory fits"))
    }

    fn get<T: bytemuck::Pod>(&self, layout: &Layout, name: &str) -> Vec<T> {
        array(layout, &self.block, name)
    }

    fn reply(&mut self, computed: &mut ComputedPlan) -> Vec<u8> {
        let mut buffer = vec![0_u64; self.planner.limits().reply_bytes as usize / 8 + 1];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
        let length = self
            .planner
            .reply(computed, ForwardTimings::default(), bytes)
            .expect("the reply fits");
        bytes[..length].to_vec()
    }
}

/// A token for a row; few are none.
fn token(salt: u32, row: usize) -> u32 {
    let hash = (salt ^ row as u32).wrapping_mul(2_654_435_761) >> 8;
    if hash.is_multiple_of(37) {
        u32::MAX
    } else {
        hash % generate::VOCAB
    }
}

/// Runs all passes on the general path. Returns the frame, the first pass, and each slot's row and class, group by group.
fn run(
    planner: &mut Planner,
    plan: Plan,
    block: &mut [u64],
    salt: u32,
) -> (ComputedPlan, Option<Pass>, Vec<Slot>) {
    let layout = planner.layout().clone();
    let top_ks = layout.field(FieldId::TopKs).offset;
    let limits = *planner.limits();
    let mut first = None;
    let mut slots = Vec::new();
    let see = |pass: &StagedPass, _: &[u8]| {
        first.get_or_insert(*pass.pass());
    };
    let answer = |open: StagedGroup, bytes: &[u8]| {
        let (group, block) = (open.group(), bytemuck::cast_slice(bytes));
        let token_classes = [SlotClass::Greedy, SlotClass::Plain, SlotClass::Filtered];
        let tokens: usize = token_classes.iter().map(|&class| group.count(class)).sum();
        let rows: Vec<i64> = array(&layout, block, "slot_rows");
        let params: Vec<Vec<u32>> = ["temperatures", "top_ps", "min_ps", "uniforms", "top_ks"]
            .iter()
            .map(|name| array(&layout, block, name))
            .collect();
        let masks: Vec<i32> = array(&layout, block, "slot_masks");
        let words: Vec<i32> = array(&layout, block, "mask_words");
        for slot in 0..group.len() {
            slots.push(Slot {
                row: rows[slot] as usize,
                greedy: slot < group.count(SlotClass::Greedy),
                probe: slot >= tokens,
                params: params.iter().map(|values| values[slot]).collect(),
                mask: mask_of(&limits, &masks[2 * slot..], &words),
            });
        }
        let own = &slots[slots.len() - group.len()..];
        let tokens: Vec<i64> = own[..tokens]
            .iter()
            .map(|slot| i64::from(token(salt, slot.row)))
            .collect();
        Engine::default().answer_with(&limits, top_ks, open, bytes, &tokens)
    };
    let computed = engine::run(planner, plan, bytemuck::cast_slice_mut(block), see, answer);
    (computed, first, slots)
}

/// How many edges a slot's mask has, and its words; `None` without a mask.
fn mask_of(limits: &Limits, entry: &[i32], words: &[i32]) -> Option<(i32, Vec<i32>)> {
    let (first, edges) = (entry[0] as usize, entry[1]);
    let width = usize::try_from(edges).unwrap_or_else(|_| limits.mask_words());
    (edges != 0).then(|| (edges, words[first..][..width].to_vec()))
}

#[derive(Debug)]
struct Slot {
    row: usize,
    greedy: bool,
    probe: bool,
    /// Bits of temperature, top-p, min-p, uniform number, top-k.
    params: Vec<u32>,
    mask: Option<(i32, Vec<i32>)>,
}

/// Compares a step with the pass that the general path staged.
fn compare(
    graph_path: &GraphPath,
    layout: &Layout,
    general: &Planner,
    block: &[u64],
    pass: &Pass,
    slots: &[Slot],
) {
    let rows = pass.tokens;
    let staged = |name: &str| array::<i64>(general.layout(), block, name);
    assert_eq!(
        graph_path.get::<i32>(layout, "header")[..3],
        [5, pass.updates as i32, rows as i32]
    );
    assert_eq!(graph_path.get::<i32>(layout, "header")[4..], [0; 4]);
    for name in ["input_ids", "positions", "out_cache_loc"] {
        let got: Vec<i64> = graph_path.get(layout, name);
        assert_eq!(got[..rows], staged(name)[..rows], "{name}");
        assert_eq!(got[rows..], [0; PADDING], "{name} of padding");
    }
    let further = pass.updates.saturating_sub(BLOCK_UPDATES);
    let mut updates: Vec<i64> = graph_path.get(layout, "table_updates");
    updates.truncate(2 * pass.updates);
    updates.extend(
        graph_path.masks[..2 * further]
            .iter()
            .map(|&word| i64::from(word)),
    );
    assert_eq!(updates, staged("table_updates")[..2 * pass.updates]);
    let lengths: Vec<i32> = array(general.layout(), block, "extend_seq_lens");
    let prefixes: Vec<i32> = array(general.layout(), block, "extend_prefix_lens");
    let mut table_rows = Vec::new();
    let mut seen = Vec::new();
    for request in 0..pass.requests {
        for row in 0..lengths[request] {
            table_rows.push(staged("req_pool_indices")[request]);
            seen.push(i64::from(prefixes[request] + row + 1));
        }
    }
    table_rows.extend([0; PADDING]);
    seen.extend([1; PADDING]);
    assert_eq!(
        graph_path.get::<i64>(layout, "req_pool_indices"),
        table_rows
    );
    assert_eq!(graph_path.get::<i64>(layout, "seq_lens"), seen);
    compare_slots(graph_path, layout, slots);
}

/// The row of each slot: what the block says, for as many as are sampled, or the row of the same number.
fn rows_of(graph_path: &GraphPath, layout: &Layout, sampled: usize) -> Vec<Option<usize>> {
    let told: Vec<i64> = graph_path.get(layout, "slot_rows");
    if told.is_empty() {
        let rows = graph_path.get::<i64>(layout, "input_ids").len();
        return (0..rows).map(Some).collect();
    }
    assert!(told[..sampled].is_sorted());
    // The model gathers these, too.
    assert!(told[sampled..].iter().all(|&row| row == 0));
    let row = |(slot, row): (usize, i64)| (slot < sampled).then_some(row as usize);
    told.into_iter().enumerate().map(row).collect()
}

fn compare_slots(graph_path: &GraphPath, layout: &Layout, slots: &[Slot]) {
    let temperatures: Vec<f32> = graph_path.get(layout, "temperatures");
    let masks: Vec<i32> = graph_path.get(layout, "slot_masks");
    let used = graph_path.get::<i32>(layout, "header")[3] as usize;
    let rows = rows_of(graph_path, layout, slots.len());
    assert_eq!(temperatures.len(), rows.len());
    for slot in slots {
        assert!(rows.contains(&Some(slot.row)), "no row for {slot:?}");
    }
    for (index, own) in rows.into_iter().enumerate() {
        let Some(slot) = slots.iter().find(|slot| Some(slot.row) == own) else {
            assert!(temperatures[index] < 0.0);
            assert_eq!(masks[2 * index..][..2], [0; 2]);
            continue;
        };
        let temperature = f32::from_bits(slot.params[0]);
        let expected = if slot.greedy { 0.0 } else { temperature };
        assert_eq!(temperatures[index].to_bits(), expected.to_bits());
        for (name, bits) in ["top_ps", "min_ps", "uniforms", "top_ks"]
            .iter()
            .zip(&slot.params[1..])
        {
            assert_eq!(graph_path.get::<u32>(layout, name)[index], *bits, "{name}");
        }
        let mask = mask_of(
            graph_path.planner.limits(),
            &masks[2 * index..],
            &graph_path.masks[..used],
        );
        assert_eq!(mask, slot.mask);
    }
}

/// One frame on both paths; `None` if the graph does not take it.
fn differ(
    limits: Limits,
    general: &mut Planner,
    graph_path: &mut GraphPath,
    frame: &ForwardRequest,
    salt: u32,
) -> Option<usize> {
    let encoded = Encoded::new(DRIVER, frame);
    let plan = general.plan(DRIVER, encoded.forward()).unwrap();
    let step = graph_path.planner.plan(DRIVER, encoded.forward()).unwrap();
    let mut block = memory(general.layout());
    let (mut computed, pass, slots) = run(general, plan, &mut block, salt);
    let size = step.graph_size(usize::MAX);
    let Some(pass) = pass else {
        assert_eq!(size, None, "nothing to run");
        return None;
    };
    let sampled: HashSet<usize> = slots.iter().map(|slot| slot.row).collect();
    let takes = computed.pass_count() == 1
        && !pass.masked
        && pass.updates <= BLOCK_UPDATES + limits.row_pages as usize
        && sampled.len() == slots.len()
        && slots.iter().all(|slot| !slot.probe);
    let Some(size) = size else {
        // Slots of one request in another order than its rows are left to the general path too.
        let ordered = frame
            .sampling_indptr
            .windows(2)
            .all(|ends| frame.sampling_indices[ends[0] as usize..ends[1] as usize].is_sorted());
        assert!(
            !takes || !ordered,
            "left without a reason: {pass:?} {slots:?}"
        );
        let mut other = vec![0_u64; block.len()];
        run(&mut graph_path.planner, step, &mut other, salt);
        return None;
    };
    assert!(takes, "{pass:?}");
    let needed = StepSize {
        rows: pass.tokens,
        slots: slots.len(),
    };
    assert_eq!(size, needed);
    let size = step_size(needed, salt);
    assert!(size.runs(needed));
    let (layout, step) = graph_path.stage(step, size);
    compare(graph_path, &layout, general, &block, &pass, &slots);
    let rows = rows_of(graph_path, &layout, slots.len());
    let numbered = size.slots < size.rows;
    let awaited = if numbered {
        slots.len().max(1)
    } else {
        pass.tokens
    };
    assert_eq!(step.results(), awaited);
    assert_eq!(step.logprob_words(), 0);
    let sampled = |slot: usize| {
        assert!(slot < awaited);
        token(salt, rows[slot].expect("a sampled slot"))
    };
    let mut answered = step.put_tokens(sampled, |_| 0);
    let mut buffer = vec![0_u64; limits.reply_bytes as usize / 8 + 1];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
    if let Ok(length) = general.reply(&mut computed, ForwardTimings::default(), bytes) {
        let reply = graph_path.reply(&mut answered);
        assert_eq!(tokens_of(&reply), tokens_of(&bytes[..length]));
    }
    assert_eq!(answered.request_errors(), computed.request_errors());
    graph_path.planner.recycle(answered);
    general.recycle(computed);
    Some(pass.tokens)
}

/// A graph with more rows than needed, and with fewer slots than rows if there may be.
fn step_size(needed: StepSize, salt: u32) -> StepSize {
    let rows = needed.rows + PADDING;
    let slots = needed.slots.max(1) + salt as usize % 3;
    if salt.is_multiple_of(2) || slots >= rows {
        rows.into()
    } else {
        StepSize { rows, slots }
    }
}

/// All but the time that the reply took to build.
fn tokens_of(reply: &[u8]) -> Vec<Vec<u32>> {
    crate::common::answer::answer(reply).tokens()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn a_step_holds_what_the_pass_holds(
        (limits, frames) in generate::sequence(),
        salt in any::<u32>(),
    ) {
        let mut general = Planner::new(limits, 9);
        let mut graph_path = GraphPath::new(limits);
        for frame in &frames {
            differ(limits, &mut general, &mut graph_path, frame, salt);
        }
    }
}

#[test]
fn decodes_drafts_and_short_prompts_are_taken_and_others_left() {
    let sampler = Sampler::TopKTopP {
        temperature: 0.7,
        k: 3,
        p: 0.8,
    };
    let prompt = Req::new(16, 0, &[1, 2, 3, 4, 5], &[7]).sample(4, sampler.clone());
    let silent = Req::new(16, 16, &[1, 2], &[3, 4]);
    let drafted = decode(20, 5, &[1, 2]).verify(&[8, 9]);
    let constrained = decode(3, 6, &[5]).allow(&[4, 10]);
    let twice = decode(3, 6, &[5]).sample(0, GREEDY);
    let probed = decode(3, 6, &[5]).sample(0, Sampler::Entropy);
    let run = |requests: &[Req]| {
        let (mut general, mut graph_path) = (Planner::new(LARGE, 9), GraphPath::new(LARGE));
        differ(LARGE, &mut general, &mut graph_path, &frame(requests), 3)
    };
    assert_eq!(
        run(&[prompt.clone(), silent, drafted, constrained]),
        Some(5 + 2 + 3 + 1)
    );
    assert_eq!(run(&[twice]), None);
    assert_eq!(run(&[probed]), None);
    assert_eq!(run(&[]), None);
    let mut planner = Planner::new(LARGE, 9);
    let encoded = Encoded::new(DRIVER, &frame(&[prompt]));
    let plan = planner.plan(DRIVER, encoded.forward()).unwrap();
    let size = StepSize { rows: 5, slots: 1 };
    assert_eq!(plan.graph_size(5), Some(size));
    assert_eq!(
        plan.graph_size(4),
        None,
        "more rows of one request than allowed"
    );
}

#[test]
fn a_joiner_with_a_whole_cached_context_runs_as_a_graph_and_many_do_not() {
    // Contexts of up to 131,072 tokens.
    const CONTEXT: u32 = 131_072;
    let pages = CONTEXT / 16;
    let limits = Limits {
        page_size: 16,
        total_pages: 4 * pages,
        max_positions: CONTEXT,
        row_pages: pages,
        max_requests: 64,
        ..LARGE
    };
    let (mut general, mut graph_path) = (Planner::new(limits, 9), GraphPath::new(limits));
    let own = |number: u32| (number * pages..(number + 1) * pages).collect::<Vec<u32>>();
    let joiner = |number: u32, tokens: u32| {
        let listed = &own(number)[..tokens.div_ceil(16) as usize];
        decode(tokens - 1, 5, listed)
    };
    let others =
        |count: u32| (0..count).map(|number| decode(3, 6, &[3 * pages + number]).allow(&[4, 10]));
    let mut run =
        |requests: Vec<Req>| differ(limits, &mut general, &mut graph_path, &frame(&requests), 2);
    // Next to those of 40 more rows, and logit masks, there is room for all changes of one context.
    let full: Vec<Req> = others(40).chain([joiner(0, CONTEXT)]).collect();
    assert_eq!(run(full.clone()), Some(41));
    // All of them are known by now.
    assert_eq!(run(full), Some(41));
    let half = CONTEXT / 2;
    assert_eq!(run(vec![joiner(1, half), joiner(2, half)]), Some(2));
    // Two whole contexts do not fit. Their changes are made on the other path, once.
    let two = vec![joiner(2, CONTEXT), joiner(0, CONTEXT)];
    assert_eq!(run(two.clone()), None);
    assert_eq!(run(two), Some(2));
}

#[test]
fn a_graph_runs_steps_that_it_has_room_for() {
    let size = |rows, slots| StepSize { rows, slots };
    assert!(size(8, 8).runs(size(8, 8)));
    assert!(size(8, 2).runs(size(8, 2)));
    assert!(size(8, 2).runs(size(1, 0)));
    assert!(!size(8, 8).runs(size(9, 1)));
    assert!(!size(8, 2).runs(size(8, 3)));
}

#[test]
fn memory_that_does_not_fit_is_an_error() {
    let mut planner = Planner::new(LARGE, 9);
    let encoded = Encoded::new(DRIVER, &frame(&[decode(3, 6, &[5]).allow(&[4, 10])]));
    let layout = Layout::graph(1);
    let mut block = vec![0_u64; layout.bytes() / 8];
    for (length, masks) in [(layout.bytes() - 8, 32), (layout.bytes(), 31)] {
        let memory = StepMemory {
            block: &mut bytemuck::cast_slice_mut(&mut block)[..length],
            mask_words: &mut vec![0; masks],
        };
        let plan = planner.plan(DRIVER, encoded.forward()).unwrap();
        let staged = planner.stage_graph(plan, &layout, memory, 1);
        assert!(matches!(staged, Err(StageError::BlockSize { .. })));
    }
    // The field exists in the staging block too, with a mask for each slot.
    assert!(planner.layout().field(FieldId::MaskWords).capacity >= LARGE.mask_words());
}
