//! One rank.

use std::sync::Arc;
use std::time::Duration;

use pie_driver::launch::LaunchError;
use pie_driver::{Responder, WarmUpError};
use pie_planner::{DraftOptions, Planner, StepSize};
use pie_ring::Wait;

use crate::devices::{
    Device, LIMITS, ROWS, Shared, bound_frame, converse, counting, drafting_frame, forks, frame,
    graph_path, graph_path_of, responder,
};

#[test]
fn the_smallest_graph_that_holds_the_rows_runs() {
    let (shared, launched) = (Shared::default(), Arc::default());
    let responder = responder(counting(&shared, &launched, Duration::from_micros(200)));
    let taken = |tokens: &[u32]| responder.warm_up_graph_path(&frame(tokens)).unwrap();
    assert!(taken(&[1]));
    assert!(taken(&[2]));
    assert!(taken(&[1, 1, 1]));
    assert!(taken(&[4, 1, 1]));
    assert!(!taken(&[5]), "more rows of one request than allowed");
    assert!(!taken(&[4, 3]), "more rows than any graph has");
    assert!(taken(&[1, 1]), "a batch that was left changes nothing");
    assert_eq!(*launched.lock().unwrap(), [0, 1, 2, 2, 1]);
}

#[test]
fn rows_that_read_the_same_kv_first_run_as_a_graph_that_knows_groups() {
    let (shared, launched) = (Shared::default(), Arc::default());
    // Its graphs have 1, 2, 6, 3 and 6 rows.
    let plain = counting(&shared, &launched, Duration::ZERO);
    let responder = responder(plain.grouped(&[3, 6]));
    let taken = |frame: &[u8]| responder.warm_up_graph_path(frame).unwrap();
    assert!(taken(&forks(3)));
    assert!(taken(&forks(4)));
    assert!(taken(&forks(2)), "two save less than they cost");
    assert!(taken(&frame(&[1; 4])), "nothing in common");
    assert!(taken(&forks(6)));
    assert_eq!(*launched.lock().unwrap(), [3, 4, 1, 2, 4]);
}

#[test]
fn steps_with_adapters_run_as_graphs_that_apply_them_once_all_have_a_slot() {
    let (shared, launched) = (Shared::default(), Arc::default());
    // Its graphs have 1, 2, 6, and with adapters 3 and 6 rows.
    let sizes = [3, 6].map(StepSize::from);
    let graphs = counting(&shared, &launched, Duration::ZERO).adapters(&sizes, &[]);
    let mut planner = Planner::new(LIMITS, 1).with_adapters(4.try_into().unwrap());
    planner.add_adapter(7);
    planner.add_adapter(8);
    let responder = Responder::new(planner, 0, Wait::Park).with_graph_path(graphs);
    let taken = |adapters: &[i64]| {
        let frame = bound_frame(&vec![1; adapters.len()], adapters);
        responder.warm_up_graph_path(&frame).unwrap()
    };
    assert!(!taken(&[7, -1]), "no slot is known");
    responder.set_adapter_slots(vec![(7, 2)]);
    assert!(taken(&[7, -1]));
    assert!(!taken(&[7, 8]));
    responder.set_adapter_slots(vec![(7, 2), (8, 0)]);
    assert!(taken(&[7, 8, -1, 7]));
    assert!(taken(&[-1, -1]), "without adapters it is a plain one");
    assert_eq!(*launched.lock().unwrap(), [3, 4, 1]);
}

#[test]
fn steps_run_the_draft_model_once_plain_ones_are_timed_and_drafts_wanted() {
    let taken = |graphs: &[usize], frames: &[Vec<u8>]| {
        let (shared, launched) = (Shared::default(), Arc::default());
        // Its graphs have 1, 2, 6 rows, and those with a draft model 3 and 6.
        let sizes: Vec<_> = graphs.iter().map(|&rows| StepSize::from(rows)).collect();
        let graphs = counting(&shared, &launched, Duration::ZERO).drafting(&sizes, &[]);
        let mut planner = Planner::new(LIMITS, 1);
        let options = DraftOptions {
            ngram: None,
            num_drafts: 3,
            graph_sizes: ROWS.to_vec(),
            model_sizes: sizes.iter().map(|size| size.rows).collect(),
            host_pages: 0,
        };
        planner.enable_drafts(&options).unwrap();
        let responder = Responder::new(planner, 0, Wait::Park).with_graph_path(graphs);
        let (answers, _) = converse(&responder, frames);
        assert!(answers.iter().all(Option::is_some));
        launched.lock().unwrap().clone()
    };
    let wanting = || vec![drafting_frame(&[1; 2]); 2];
    assert_eq!(taken(&[3, 6], &wanting()), [1, 3]);
    assert_eq!(taken(&[3, 6], &vec![frame(&[1; 2]); 2]), [1, 1]);
    assert_eq!(taken(&[], &wanting()), [1, 1], "no graph drafts");
}

#[test]
fn a_graph_of_fewer_slots_than_rows_answers_by_slot() {
    let shared = Shared::default();
    let device = shared.clone();
    let mut step = 0;
    let launch = move |graph: usize| {
        step += 1;
        // Slots of the second graph; nothing comes for its other rows.
        for slot in 0..2 {
            device.put(slot, step, (50 * graph + slot) as u64);
        }
        Ok(())
    };
    let sizes = [StepSize::from(2), StepSize { rows: 6, slots: 2 }];
    let device = Device(launch, || Ok(true));
    let responder = responder(graph_path_of(&sizes, &shared, device, Wait::Spin));
    let taken = |tokens: &[u32]| responder.warm_up_graph_path(&frame(tokens)).unwrap();
    assert!(taken(&[1, 1]));
    assert!(taken(&[4]));
    assert!(!taken(&[1, 1, 1]), "more samplers than slots");
    let (answers, _) = converse(&responder, &[frame(&[4, 2]), frame(&[2])]);
    let tokens = |tokens: &[u32]| Some(tokens.iter().map(|&token| vec![token]).collect());
    assert_eq!(answers, [tokens(&[50, 51]), tokens(&[1])]);
}

#[test]
fn tokens_reach_the_client_without_a_job_and_steps_are_told_when_asked() {
    let (shared, launched) = (Shared::default(), Arc::default());
    let graph_path = counting(&shared, &launched, Duration::ZERO);
    let quiet = responder(graph_path);
    let frames = [frame(&[1, 1]), frame(&[2, 1]), frame(&[1; 6])];
    let singles = |tokens: &[u32]| Some(tokens.iter().map(|&token| vec![token]).collect());
    let expected = [
        singles(&[0, 10]),
        singles(&[10, 20]),
        singles(&[0, 10, 20, 30, 40, 50]),
    ];
    assert_eq!(converse(&quiet, &frames), (expected.to_vec(), vec![]));
    let graph_path = counting(&shared, &launched, Duration::ZERO);
    let telling = responder(graph_path).with_steps();
    let told = ["2/2", "2/3", "6/6"].map(String::from).to_vec();
    assert_eq!(converse(&telling, &frames), (expected.to_vec(), told));
    let counts = telling.counts();
    assert_eq!((counts.graph_steps, counts.python_steps), (3, 0));
    assert_eq!((counts.requests, counts.computed_tokens), (10, 11));
    assert_eq!((counts.generated_tokens, counts.prompt_tokens), (10, 2));
    assert_eq!(counts.step.count(), 3);
}

#[test]
fn a_device_that_fails_costs_its_batch_and_the_reason_names_the_shape() {
    let shared = Shared::default();
    let device = shared.clone();
    let mut step = 0;
    let launch = move |graph: usize| {
        step += 1;
        if step == 1 {
            let text = "out of order".to_owned();
            return Err(LaunchError::Failed(text));
        }
        for row in 0..ROWS[graph] {
            device.put(row, step, 7);
        }
        Ok(())
    };
    let responder = responder(graph_path(&shared, launch, || Ok(false), Wait::Spin));
    let (answers, told) = converse(&responder, &[frame(&[1, 2]), frame(&[1])]);
    assert_eq!(answers, [None, Some(vec![vec![7]])]);
    let [told] = &told[..] else {
        panic!("{told:?}")
    };
    assert!(
        told.contains("6 rows") && told.contains("3 in use"),
        "{told}"
    );
    assert!(told.contains("out of order"), "{told}");
}

#[test]
fn a_device_that_can_run_nothing_any_more_ends_serving_and_one_without_memory_does_not() {
    let cuda = |code, text: &str| LaunchError::Cuda {
        call: "cuStreamQuery",
        code,
        text: text.to_owned(),
    };
    for (at_launch, error, is_lost) in [
        (false, cuda(700, "an illegal memory access"), true),
        (false, cuda(719, "unspecified launch failure"), true),
        (false, cuda(214, "uncorrectable ECC error"), true),
        (true, cuda(710, "device-side assert triggered"), true),
        (true, cuda(2, "out of memory"), false),
        (true, cuda(701, "too many resources requested"), false),
    ] {
        let (shared, failure) = (Shared::default(), error.clone());
        let device = shared.clone();
        let mut step = 0;
        let launch = move |_| {
            step += 1;
            if step > 1 {
                device.put(0, step, 7);
            } else if at_launch {
                return Err(failure.clone());
            }
            Ok(())
        };
        let ended = move || Err(error.clone());
        let responder = responder(graph_path(&shared, launch, ended.clone(), Wait::Spin));
        let (answers, told) = converse(&responder, &[frame(&[1]), frame(&[1])]);
        assert_eq!(answers, [None, Some(vec![vec![7]])]);
        let [told] = &told[..] else {
            panic!("{told:?}")
        };
        assert_eq!(told.starts_with("lost: "), is_lost, "{told}");
        let reason = ended().unwrap_err().to_string();
        assert!(told.contains(&reason), "{told} lacks {reason}");
    }
}

#[test]
fn a_device_that_dies_or_forgets_results_ends_the_wait() {
    for (ended, expected) in [
        (Ok(true), "without a result in slot 1"),
        (Err(LaunchError::Failed("dead".into())), "dead"),
    ] {
        for wait in [Wait::Spin, Wait::Park] {
            let (shared, ended) = (Shared::default(), ended.clone());
            let device = shared.clone();
            let launch = move |_| {
                device.put(0, 1, 7);
                // Of another step: not this one's.
                device.put(1, 9, 7);
                Ok(())
            };
            let graph_path = graph_path(&shared, launch, move || ended.clone(), wait);
            let error = responder(graph_path)
                .warm_up_graph_path(&frame(&[1, 1]))
                .unwrap_err();
            assert!(matches!(error, WarmUpError::GraphPath(_)));
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}

#[test]
fn a_token_outside_the_vocabulary_empties_its_request_alone() {
    let shared = Shared::default();
    let device = shared.clone();
    let launch = move |_| {
        for (row, token) in [5, 100, 6].into_iter().enumerate() {
            device.put(row, 1, token);
        }
        Ok(())
    };
    let responder = responder(graph_path(&shared, launch, || Ok(false), Wait::Spin));
    let (answers, told) = converse(&responder, &[frame(&[1, 1, 1])]);
    assert_eq!(answers, [Some(vec![vec![5], vec![], vec![6]])]);
    let [told] = &told[..] else {
        panic!("{told:?}")
    };
    assert!(told.contains("request 1 rejected"), "{told}");
}
