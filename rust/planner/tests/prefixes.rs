//! Steps for graphs say which rows begin with the same KV.

use crate::common::builder::{Encoded, GREEDY, LARGE, Req, decode, frame};
use crate::common::device::DRIVER;
use crate::common::engine::{Engine, memory};
use pie_planner::{Layout, Limits, Plan, Planner, StepMemory};
use pie_wire::ForwardRequest;

const LIMITS: Limits = Limits {
    total_pages: 800,
    max_positions: 4096,
    row_pages: 256,
    ..LARGE
};

/// What a step says of groups.
#[derive(Debug, PartialEq, Eq)]
struct Prefixes {
    lens: Vec<i32>,
    order: Vec<i32>,
    starts: Vec<i32>,
}

/// Plans a frame whose pages a pass before it has brought to the device: a step has room for few.
fn plan(planner: &mut Planner, request: &ForwardRequest) -> Plan {
    let encoded = Encoded::new(DRIVER, request);
    let plan = planner.plan(DRIVER, encoded.forward()).unwrap();
    let mut block = memory(planner.layout());
    let block = bytemuck::cast_slice_mut(&mut block);
    let computed = Engine::default().run(planner, plan, block);
    planner.recycle(computed);
    let plan = planner.plan(DRIVER, encoded.forward()).unwrap();
    assert!(
        plan.request_errors().is_empty(),
        "{:?}",
        plan.request_errors()
    );
    plan
}

/// Plans a frame and stages it for a graph of `rows` rows, in memory that held something else.
fn stage(planner: &mut Planner, rows: usize, request: &ForwardRequest) -> Prefixes {
    let mut plan = plan(planner, request);
    let layout = Layout::grouped_graph(rows);
    planner.find_prefix_groups(&mut plan, 0);
    let mut block = vec![0x5555_5555_5555_5555_u64; layout.bytes() / 8];
    let memory = StepMemory {
        block: bytemuck::cast_slice_mut(&mut block),
        mask_words: &mut vec![0; rows * LIMITS.mask_words()],
    };
    let step = planner.stage_graph(plan, &layout, memory, 1).unwrap();
    planner.recycle(step.put_tokens(|_| 0, |_| 0));
    let array = |name: &str| {
        let field = layout.fields().iter().find(|field| field.name == name);
        let field = field.expect("a field of the layout");
        let ints: &[i32] = bytemuck::cast_slice(&block);
        ints[field.offset / 4..][..field.capacity].to_vec()
    };
    let header = array("header");
    assert_eq!(header[5..], [0; 3]);
    let used = |name| array(name)[..header[4] as usize].to_vec();
    let (order, indices) = (used("prefix_order"), array("prefix_indices"));
    let found: Vec<i32> = order.iter().map(|&row| indices[row as usize]).collect();
    assert_eq!(found, (0..header[4]).collect::<Vec<_>>());
    Prefixes {
        lens: array("prefix_lens"),
        order,
        starts: used("prefix_starts"),
    }
}

/// The pages of a context that shares `shared` of them, from `first` on, and has one of its own.
fn fork(first: u32, shared: u32, own: u32) -> Vec<u32> {
    (first..first + shared).chain([own]).collect()
}

fn nothing(rows: usize) -> Prefixes {
    Prefixes {
        lens: vec![0; rows],
        order: Vec::new(),
        starts: Vec::new(),
    }
}

#[test]
fn forked_contexts_are_groups() {
    let a = |own| decode(96 * 16 + 5, 1, &fork(0, 96, own));
    let b = |own| decode(192 * 16, 1, &fork(300, 192, own));
    // Of a row's pages only those before the request's first row may be shared: here 160 of 192.
    let replay =
        Req::new(16, 160 * 16 + 3, &[1, 2, 3], &fork(300, 192, 0)[..161]).sample(2, GREEDY);
    let prompt = Req::new(16, 0, &[1, 2], &fork(0, 0, 693)).sample(1, GREEDY);
    let requests = [a(690), b(691), a(692), prompt, replay, a(694)];
    let mut forked = frame(&requests);
    let groups = Prefixes {
        lens: vec![1536, 2560, 1536, 0, 0, 2560, 2560, 2560, 1536, 0, 0, 0],
        order: vec![0, 2, 8, 1, 5, 6, 7],
        starts: vec![0, 0, 0, 3, 3, 3, 3],
    };
    let mut planner = Planner::new(LIMITS, 9);
    assert_eq!(stage(&mut planner, 12, &forked), groups);
    // The next step of other contexts shares nothing, and the first ones come back.
    let alone = frame(&[a(690), b(691)]);
    assert_eq!(stage(&mut planner, 4, &alone), nothing(4));
    assert_eq!(stage(&mut planner, 12, &forked), groups);
    // Pages count, not who names them.
    forked.context_ids.fill(0);
    assert_eq!(stage(&mut planner, 12, &forked), groups);
    forked.context_ids.fill(7);
    assert_eq!(stage(&mut planner, 12, &forked), groups);
}

#[test]
fn too_little_in_common_makes_no_group() {
    let mut planner = Planner::new(LIMITS, 9);
    let mut lens = |pages: u32, requests: u32| {
        let forks = (0..requests).map(|own| decode(pages * 16, 1, &fork(0, pages, 600 + own)));
        let forks: Vec<Req> = forks.collect();
        stage(&mut planner, 4, &frame(&forks)).lens
    };
    assert_eq!(lens(64, 2), [0; 4], "two rows that read 1,024 tokens");
    assert_eq!(lens(64, 3), [1024, 1024, 1024, 0]);
    assert_eq!(lens(71, 2), [0; 4], "whole steps of 128 tokens alone");
    assert_eq!(lens(72, 2), [1152, 1152, 0, 0]);
}

#[test]
fn rows_of_one_request_are_no_group() {
    let drafted = |own| decode(2560, 1, &fork(0, 160, own)).verify(&[2, 3]);
    let mut planner = Planner::new(LIMITS, 9);
    let alone = frame(&[drafted(690)]);
    assert_eq!(stage(&mut planner, 3, &alone), nothing(3));
    // Their KV is read once as it is: a group of two would save less than six rows cost.
    let two = frame(&[drafted(690), drafted(691)]);
    assert_eq!(stage(&mut planner, 6, &two), nothing(6));
    // The same context three times is a group, like any three.
    let group = Prefixes {
        lens: vec![2560; 9],
        order: (0..9).collect(),
        starts: vec![0; 9],
    };
    let thrice = frame(&[drafted(690), drafted(690), drafted(690)]);
    assert_eq!(stage(&mut planner, 9, &thrice), group);
}

#[test]
fn requests_that_fail_are_in_no_group() {
    let fork = |own| decode(2560, 1, &fork(0, 160, own));
    let mut failing = fork(691);
    failing.tokens[0] = LIMITS.vocab_size;
    let encoded = Encoded::new(DRIVER, &frame(&[failing, fork(692)]));
    let mut planner = Planner::new(LIMITS, 9);
    let mut plan = planner.plan(DRIVER, encoded.forward()).unwrap();
    assert_eq!((plan.request_errors().len(), plan.token_count()), (1, 1));
    let layout = Layout::grouped_graph(1);
    assert!(!planner.find_prefix_groups(&mut plan, 0));
    let mut block = vec![0_u64; layout.bytes() / 8];
    let memory = StepMemory {
        block: bytemuck::cast_slice_mut(&mut block),
        mask_words: &mut vec![0; LIMITS.mask_words()],
    };
    planner.stage_graph(plan, &layout, memory, 1).unwrap();
    assert_eq!(
        bytemuck::cast_slice::<u64, i32>(&block)[..5],
        [1, 161, 1, 0, 0]
    );
}

#[test]
fn groups_are_staged_for_graphs_that_know_them() {
    let forks: Vec<Req> = (0..4)
        .map(|own| decode(2560, 1, &fork(0, 160, 690 + own)))
        .collect();
    let mut planner = Planner::new(LIMITS, 9);
    let found = stage(&mut planner, 6, &frame(&forks));
    assert_eq!(found.lens, [2560, 2560, 2560, 2560, 0, 0]);
    let plain = Layout::graph(6);
    let prefixes = plain
        .fields()
        .iter()
        .filter(|field| field.name.starts_with("prefix"));
    assert!(prefixes.map(|field| field.capacity).eq([0; 4]));
    // The groups of one plan are not those of the next.
    let fresh = plan(&mut planner, &frame(&forks));
    let grouped = Layout::grouped_graph(6);
    let mut block = vec![0_u64; grouped.bytes() / 8];
    let memory = StepMemory {
        block: bytemuck::cast_slice_mut(&mut block),
        mask_words: &mut vec![0; 6 * LIMITS.mask_words()],
    };
    planner.stage_graph(fresh, &grouped, memory, 1).unwrap();
    assert_eq!(bytemuck::cast_slice::<u64, i32>(&block)[4], 0);
    // Three times 2,560 tokens less four times 512 are saved, as much as eleven rows cost.
    let mut fresh = plan(&mut planner, &frame(&forks));
    assert!(planner.find_prefix_groups(&mut fresh, 10));
    assert!(!planner.find_prefix_groups(&mut fresh, 11));
}
