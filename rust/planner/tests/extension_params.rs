//! Parameters that the driver keeps: registered once, named by handles.

use crate::common::builder::{LARGE, Req, decode};
use crate::extension::{NEVER, bits, penalized, plan, planned, staged};
use pie_planner::{Plan, Planner};
use pie_wire::{Params, ParamsRef, RequestExtension, StepRow, write_extension};

/// Plans a frame that brings these parameters under handles, and whose requests name some.
fn plan_kept(
    planner: &mut Planner,
    requests: &[Req],
    params: &[(u32, &RequestExtension)],
    rows: &[(u32, ParamsRef)],
) -> Plan {
    let params = params.iter().map(|&(handle, asked)| Params {
        handle: Some(handle),
        asked,
    });
    let rows = rows.iter().map(|&(request, params)| StepRow {
        request,
        params,
        returns_logprobs: true,
        ..StepRow::default()
    });
    planned(planner, requests, |bytes, length| {
        bytes.resize(length + (1 << 16), 0);
        let length = write_extension(params, rows, bytes, length).unwrap();
        bytes.truncate(length);
    })
}

/// What later frames name stages the same as what a frame brings itself.
#[test]
fn kept_parameters_hold_until_they_are_replaced() {
    let bias = |id| RequestExtension {
        biases: vec![(id, 1.5)],
        suppressed: vec![3],
        suppressed_until: 40,
        ..penalized(8)
    };
    let (first, second) = (bias(7), bias(9));
    let requests = [decode(30, 5, &[1, 2]), decode(31, 6, &[3, 4])];
    let kept = [(0, ParamsRef::Kept(5)), (1, ParamsRef::Kept(5))];
    let stage = |planner: &mut Planner, plan: Plan| {
        assert!(
            plan.request_errors().is_empty(),
            "{:?}",
            plan.request_errors()
        );
        let (records, words, _) = staged(planner, plan);
        planner.invalidate_block_table();
        (records, words)
    };
    let mut planner = Planner::new(LARGE, 1);
    let rows = [(0, first.clone()), (1, first.clone())];
    let plan = plan(&mut planner, &requests, &rows);
    let brought = stage(&mut planner, plan);
    for params in [&[(5, &first)][..], &[], &[(4, &second)]] {
        let plan = plan_kept(&mut planner, &requests, params, &kept);
        assert_eq!(stage(&mut planner, plan), brought);
    }
    // The last ones under a handle hold, whatever a row before in the same frame brought.
    let both = [(5, &first), (5, &second)];
    let plan = plan_kept(&mut planner, &requests, &both, &kept);
    let (_, words) = stage(&mut planner, plan);
    assert_eq!(words[..4], [9, bits(1.5), 3, NEVER]);
    // By their number in the frame they are meant as they are there.
    let rows = [(0, ParamsRef::InFrame(0)), (1, ParamsRef::None)];
    let plan = plan_kept(&mut planner, &requests, &both, &rows);
    let (records, words) = stage(&mut planner, plan);
    assert_eq!(words, [7, bits(1.5), 3, NEVER]);
    assert_eq!(records[1][6..], [4, 0]);
}

#[test]
fn a_request_that_names_what_is_not_kept_fails_alone() {
    let mut planner = Planner::new(LARGE, 1);
    let (wrong, none) = (
        RequestExtension {
            biases: vec![(1000, 1.0)],
            ..RequestExtension::default()
        },
        RequestExtension::default(),
    );
    let requests = [31, 31, 31].map(|start| decode(start, 5, &[1, 2]));
    let kept = |handle| ParamsRef::Kept(handle);
    let rows = [(0, kept(1)), (1, kept(2)), (2, kept(3))];
    let params = [(1, &wrong), (3, &none)];
    let errors = |plan: Plan| {
        let errors = plan.request_errors().iter();
        errors
            .map(|(request, error)| (*request, error.to_string()))
            .collect::<Vec<_>>()
    };
    let plan = plan_kept(&mut planner, &requests, &params, &rows);
    let found = errors(plan);
    assert_eq!(found.len(), 2);
    assert!(
        found[0].0 == 0 && found[0].1.contains("logit_bias"),
        "{found:?}"
    );
    assert!(
        found[1].0 == 1 && found[1].1.contains("parameters"),
        "{found:?}"
    );
    planner.invalidate_block_table();
    // What was wrong stays so until it is replaced.
    let plan = plan_kept(&mut planner, &requests[..1], &[], &rows[..1]);
    assert_eq!(errors(plan).len(), 1);
    planner.invalidate_block_table();
    let plan = plan_kept(&mut planner, &requests[..1], &[(1, &none)], &rows[..1]);
    assert!(errors(plan).is_empty());
}
