//! Recurrent state: which slot each request of each pass gets, and which requests get none.

use std::slice;

use crate::common::builder::{Encoded, LARGE, Req, decode, frame};
use crate::common::engine::{Engine, memory, next_pass};
use pie_planner::{ComputedPlan, Limits, Planner, RequestError, StagedPass};
use pie_wire::ForwardRequest;
use proptest::prelude::*;

const SLOTS: u32 = 6;
const CHUNK: u32 = 8;

fn planner() -> Planner {
    let limits = Limits {
        chunk_tokens: CHUNK,
        ..LARGE
    };
    Planner::new(limits, 1).with_states(SLOTS)
}

/// Plans a frame and stages all of it: the states of each pass.
fn run(planner: &mut Planner, request: &ForwardRequest) -> (Vec<Vec<[i64; 2]>>, ComputedPlan) {
    let encoded = Encoded::new(0, request);
    let plan = planner.plan(0, encoded.forward());
    let plan = plan.expect("the frame is consistent");
    let mut block = memory(planner.layout());
    let block = bytemuck::cast_slice_mut(&mut block);
    let mut passes = Vec::new();
    let see = |pass: &StagedPass, _: &[u8]| {
        passes.push(pass.states().expect("the engine has states"));
    };
    let computed = Engine::default().run_seeing(planner, plan, block, see);
    (passes, computed)
}

fn with_states(requests: &[Req], states: &[(u32, u8)]) -> ForwardRequest {
    ForwardRequest {
        rs_slot_ids: states.iter().map(|state| state.0).collect(),
        rs_slot_flags: states.iter().map(|state| state.1).collect(),
        ..frame(requests)
    }
}

/// `tokens` from KV index 0 on, in pages of their own.
fn prefill(number: u32, tokens: u32) -> Req {
    let tokens: Vec<u32> = (0..tokens).collect();
    Req::new(16, 0, &tokens, &[2 * number, 2 * number + 1])
}

#[test]
fn only_the_first_pass_of_a_request_resets() {
    let request = with_states(&[prefill(0, 20), decode(3, 1, &[9])], &[(4, 1), (0, 0)]);
    let passes = run(&mut planner(), &request).0;
    assert_eq!(passes, [vec![[5, 1]], vec![[5, 0]], vec![[5, 0], [1, 0]]]);
}

#[test]
fn other_flags_mean_nothing() {
    let request = with_states(
        &[decode(3, 1, &[9]), decode(3, 1, &[8])],
        &[(1, 0xfe), (2, 0xff)],
    );
    assert_eq!(run(&mut planner(), &request).0, [vec![[2, 0], [3, 1]]]);
}

#[test]
fn the_later_of_two_requests_keeps_the_slot() {
    let requests = [decode(3, 1, &[9]), decode(3, 2, &[9]), decode(3, 1, &[8])];
    let request = with_states(&requests, &[(1, 0), (1, 0), (2, 0)]);
    assert_eq!(
        run(&mut planner(), &request).0,
        [vec![[0, 1], [2, 0], [3, 0]]]
    );
}

/// A request that is rejected must not take the slot from an earlier one that is served.
#[test]
fn a_request_that_is_not_computed_keeps_nothing() {
    let requests = [decode(3, 1, &[9]), decode(3, 2, &[64])];
    let request = with_states(&requests, &[(1, 0), (1, 0)]);
    assert_eq!(run(&mut planner(), &request).0, [vec![[2, 0]]]);
}

#[test]
fn an_engine_without_states_ignores_them() {
    let request = with_states(&[decode(3, 1, &[9])], &[(1, 0)]);
    let mut planner = Planner::new(LARGE, 1);
    let encoded = Encoded::new(0, &request);
    let plan = planner.plan(0, encoded.forward());
    let plan = plan.expect("the frame is consistent");
    let mut block = memory(planner.layout());
    let block = bytemuck::cast_slice_mut(&mut block);
    let pass = next_pass(&mut planner, plan, block).expect("a pass");
    assert_eq!((pass.states(), pass.request_errors()), (None, &[][..]));
}

#[test]
fn what_states_do_not_allow() {
    let error = |request: Req, states: &[(u32, u8)]| {
        let request = with_states(slice::from_ref(&request), states);
        let mut planner = planner();
        let (passes, computed) = run(&mut planner, &request);
        assert!(passes.is_empty());
        let [(0, error)] = computed.request_errors() else {
            panic!("one error")
        };
        assert!(!error.keeps_kv());
        error.clone()
    };
    assert_eq!(error(decode(3, 1, &[9]), &[]), RequestError::NoStateSlot);
    for slot in [SLOTS, u32::MAX] {
        let expected = RequestError::StateSlot { slot, slots: SLOTS };
        assert_eq!(error(decode(3, 1, &[9]), &[(slot, 0)]), expected);
    }
    assert_eq!(
        error(decode(3, 1, &[9]).verify(&[4, 5]), &[(1, 0)]),
        RequestError::StateDrafts { drafts: 2 }
    );
}

proptest! {
    #[test]
    fn passes_have_the_states_of_their_requests(
        requests in prop::collection::vec((1..20_u32, 0..SLOTS, any::<u8>()), 1..8)
    ) {
        let bodies: Vec<Req> = (0..).zip(&requests).map(|(n, r)| prefill(n, r.0)).collect();
        let states: Vec<(u32, u8)> = requests.iter().map(|&(_, slot, flags)| (slot, flags)).collect();
        let passes = run(&mut planner(), &with_states(&bodies, &states)).0;
        // Token by token: the pass is full every CHUNK tokens.
        let mut expected = Vec::new();
        let mut tokens = 0;
        for (index, &(length, slot, flags)) in requests.iter().enumerate() {
            let last = requests[index + 1..].iter().all(|other| other.1 != slot);
            for token in 0..length {
                if tokens % CHUNK == 0 {
                    expected.push(Vec::new());
                }
                if token == 0 || tokens % CHUNK == 0 {
                    let first = token == 0;
                    expected.last_mut().unwrap().push(if last {
                        [i64::from(slot) + 1, i64::from(flags & 1 == 1 && first)]
                    } else {
                        [0, i64::from(first)]
                    });
                }
                tokens += 1;
            }
        }
        prop_assert_eq!(passes, expected);
    }
}
