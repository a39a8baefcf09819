//! Steps for graphs that apply adapters have the device slot of each row.

use std::num::NonZeroUsize;

use crate::common::builder::{Encoded, GREEDY, LARGE, Req, frame};
use crate::common::device::DRIVER;
use pie_planner::{Layout, Plan, Planner, StepMemory, StepSize};
use proptest::prelude::*;

/// Loaded adapters.
const ADAPTERS: i64 = 6;
/// Rows beyond those in use.
const PADDING: usize = 3;

fn planner(slots: &[(i64, i32)]) -> Planner {
    let mut planner = Planner::new(LARGE, 9).with_adapters(NonZeroUsize::new(8).unwrap());
    (1..=ADAPTERS).for_each(|id| planner.add_adapter(id));
    planner.set_adapter_slots(slots.iter().copied());
    planner
}

fn plan(planner: &mut Planner, requests: &[(usize, i64)]) -> Plan {
    let request = |(index, &(tokens, adapter)): (usize, &(usize, i64))| Req {
        adapter,
        ..Req::new(16, 0, &vec![1; tokens], &[index as u32]).sample(tokens as u32 - 1, GREEDY)
    };
    let requests: Vec<Req> = requests.iter().enumerate().map(request).collect();
    let encoded = Encoded::new(DRIVER, &frame(&requests));
    planner.plan(DRIVER, encoded.forward()).unwrap()
}

/// The array of adapter slots of a step in memory that held something else.
fn stage(planner: &mut Planner, plan: Plan, layout: &Layout) -> Vec<i32> {
    let mut block = vec![0x5555_5555_5555_5555_u64; layout.bytes().div_ceil(8)];
    let memory = StepMemory {
        block: bytemuck::cast_slice_mut(&mut block),
        mask_words: &mut vec![0; 64 * LARGE.mask_words() + LARGE.extra_update_words()],
    };
    planner.stage_graph(plan, layout, memory, 1).unwrap();
    let found = layout.fields().iter();
    let field = found.clone().find(|field| field.name == "adapter_slots");
    let field = field.expect("a field of every layout");
    let bytes: &[u8] = bytemuck::cast_slice(&block);
    bytemuck::cast_slice(&bytes[field.offset..field.offset + 4 * field.capacity]).to_vec()
}

proptest! {
    #[test]
    fn each_row_has_the_slot_of_its_request(
        requests in prop::collection::vec((1_usize..5, prop_oneof![Just(-1), 1..=ADAPTERS]), 1..9),
        slots in Just((0_i32..8).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let resident: Vec<_> = (1..=ADAPTERS).zip(slots).collect();
        let mut planner = planner(&resident);
        let plan = plan(&mut planner, &requests);
        let size = plan.graph_size(usize::MAX).expect("it is one pass");
        prop_assert!(planner.graphs_apply_adapters(&plan));
        prop_assert_eq!(plan.binds_adapters(), requests.iter().any(|&(_, id)| id > 0));
        let slot = |id: i64| resident.iter().find(|one| one.0 == id).map_or(-1, |one| one.1);
        let mut expected: Vec<i32> = requests
            .iter()
            .flat_map(|&(tokens, id)| std::iter::repeat_n(slot(id), tokens))
            .collect();
        expected.resize(size.rows + PADDING, -1);
        let rows = expected.len();
        let layout = Layout::adapter_graph(StepSize { rows, slots: size.slots });
        prop_assert_eq!(stage(&mut planner, plan, &layout), expected);
    }
}

#[test]
fn adapters_without_a_slot_run_in_no_graph() {
    let mut planner = planner(&[(1, 4), (2, 0)]);
    let applied = |planner: &mut Planner, ids: &[i64]| {
        let requests: Vec<_> = ids.iter().map(|&id| (1, id)).collect();
        let plan = plan(planner, &requests);
        planner.graphs_apply_adapters(&plan)
    };
    assert!(applied(&mut planner, &[1, -1, 2]));
    assert!(!applied(&mut planner, &[1, 3]));
    planner.set_adapter_slots([(3, 4), (2, 0)]);
    assert!(applied(&mut planner, &[2, 3]));
    assert!(!applied(&mut planner, &[1]), "another adapter has its slot");
    planner.set_adapter_slots([]);
    assert!(!applied(&mut planner, &[2]));
    assert!(applied(&mut planner, &[-1]), "none is needed");
}

#[test]
fn extended_graphs_apply_adapters_and_others_have_no_room_for_them() {
    let mut planner = planner(&[(5, 7)]);
    let bound = plan(&mut planner, &[(1, 5), (2, -1)]);
    let layout = Layout::extended_adapter_graph(4);
    let capacity = |layout: &Layout, name: &str| {
        let mut fields = layout.fields().iter();
        fields.find(|field| field.name == name).unwrap().capacity
    };
    assert_eq!(capacity(&layout, "records"), 4 * 8);
    assert_eq!(stage(&mut planner, bound, &layout), [7, -1, -1, -1]);
    for layout in [
        Layout::graph(4),
        Layout::grouped_graph(4),
        Layout::extended_graph(4),
    ] {
        assert_eq!(capacity(&layout, "adapter_slots"), 0);
    }
}

#[test]
#[should_panic(expected = "a graph without adapters runs none")]
fn a_graph_without_adapters_does_not_drop_them() {
    let mut planner = planner(&[(5, 7)]);
    let bound = plan(&mut planner, &[(1, 5)]);
    stage(&mut planner, bound, &Layout::graph(1));
}
