//! Copies of pages and of recurrent state.

use std::cell::RefCell;
use std::sync::Arc;

use pie_driver::{DIRECTIONS, Event, Job, Responder, status};
use pie_planner::Planner;
use pie_ring::{Client, ClientConfig, ExitGuard, RegionLayout, Server, Wait};
use pie_wire::{CopyDirection, CopyResource};

use crate::common::{Answer, HOST_PAGES, LIMITS, call, config, converse_with, copy};

#[test]
fn recurrent_state_is_copied_on_the_device_alone() {
    const STATES: u32 = 40;
    fn serve(job: Job) {
        let Job::Copy(mut copy) = job else {
            panic!("a copy")
        };
        let groups: Vec<_> = copy.batches().collect();
        let expected = [(&[39][..], &[3][..]), (&[3][..], &[4][..])];
        assert_eq!((copy.states(), groups), (true, expected.to_vec()));
        assert_eq!(copy.commit(status::OK), None);
    }
    // There are fewer pages than slots, of the host too.
    const { assert!(LIMITS.total_pages < STATES && HOST_PAGES < STATES) };
    let requests = [
        copy(CopyDirection::D2D, &[39, 3], &[3, 4], CopyResource::Rs),
        copy(CopyDirection::D2D, &[40], &[3], CopyResource::Rs),
        copy(CopyDirection::D2D, &[3], &[40], CopyResource::Rs),
        copy(CopyDirection::D2H, &[1], &[1], CopyResource::Rs),
        copy(CopyDirection::D2D, &[39], &[3], CopyResource::Kv),
    ];
    let (answers, _) = converse_with((HOST_PAGES, STATES), &requests, serve);
    assert_eq!(answers, [0, 3, 3, 4, 3].map(Answer::Status));
}

/// What each direction reads and writes: the size of its source pool and of its target pool.
const POOLS: [(CopyDirection, u32, u32); 4] = [
    (CopyDirection::D2H, LIMITS.total_pages, HOST_PAGES),
    (CopyDirection::H2D, HOST_PAGES, LIMITS.total_pages),
    (CopyDirection::D2D, LIMITS.total_pages, LIMITS.total_pages),
    (CopyDirection::H2H, HOST_PAGES, HOST_PAGES),
];

/// A direction, and the sources and targets of each part.
type Seen = (CopyDirection, Vec<(Vec<u32>, Vec<u32>)>);

/// Sends copies; every one that reaches the engine is done. Returns what the engine saw, too.
fn converse_copies(host_pages: u32, requests: &[Vec<u8>]) -> (Vec<Seen>, Vec<Answer>, Vec<String>) {
    let seen = RefCell::new(Vec::new());
    let (answers, log_lines) = converse_with((host_pages, 0), requests, |job| {
        let Job::Copy(mut copy) = job else { return };
        let groups = copy.batches();
        let groups: Vec<_> = groups
            .map(|(from, to)| (from.to_vec(), to.to_vec()))
            .collect();
        let pairs = groups.iter().map(|(sources, _)| sources.len()).sum();
        if copy.len() == pairs {
            seen.borrow_mut().push((copy.direction(), groups));
            copy.commit(status::OK);
        }
    });
    let texts = log_lines
        .into_iter()
        .map(|log_line| log_line.text)
        .collect();
    (seen.into_inner(), answers, texts)
}

#[test]
fn every_direction_has_its_own_bounds() {
    for (direction, source_limit, target_limit) in POOLS {
        let send =
            |sources: &[u32], targets: &[u32]| copy(direction, sources, targets, CopyResource::Kv);
        let (last_source, last_target) = (source_limit - 1, target_limit - 1);
        let requests = [
            send(&[last_source, 0], &[last_target, 1]),
            send(&[], &[]),
            send(&[0, source_limit], &[1, 2]),
            send(&[0, 1], &[target_limit, u32::MAX]),
            send(&[0, 1], &[2]),
            send(&[], &[u32::MAX]),
        ];
        let (seen, answers, texts) = converse_copies(HOST_PAGES, &requests);
        let group = (vec![last_source, 0], vec![last_target, 1]);
        assert_eq!(seen, [(direction, vec![group])]);
        let codes = [0, 0, 3, 3, 2, 2].map(Answer::Status);
        assert_eq!(answers, codes, "{direction:?}");
        let outside = |role, limit| {
            let noun = if limit == HOST_PAGES {
                "host slot"
            } else {
                "device page"
            };
            format!("names {role} {noun} {limit}, but there are only {limit}; answered status 3")
        };
        let expected = [
            outside("source", source_limit),
            outside("target", target_limit),
            "names 2 sources and 1 targets; answered status 2".to_owned(),
            "names 0 sources and 1 targets; answered status 2".to_owned(),
        ];
        assert_eq!(
            texts,
            expected.map(|text| format!("{direction:?} copy of Kv {text}"))
        );
    }
}

#[test]
fn without_a_host_pool_only_the_device_copies() {
    let kv = |direction, pages: &[u32]| copy(direction, pages, pages, CopyResource::Kv);
    let requests = [
        kv(CopyDirection::D2H, &[0]),
        kv(CopyDirection::H2D, &[0]),
        kv(CopyDirection::H2H, &[0]),
        kv(CopyDirection::D2H, &[]),
        kv(CopyDirection::D2D, &[1]),
    ];
    let (seen, answers, texts) = converse_copies(0, &requests);
    assert_eq!(answers, [4, 4, 4, 4, 0].map(Answer::Status));
    assert_eq!(seen.len(), 1);
    assert_eq!(texts.len(), 4);
    assert!(
        texts
            .iter()
            .all(|text| text.contains("cpu_mem_budget_in_gb"))
    );
}

#[test]
fn overlapping_lists_come_in_parts() {
    let group = |sources: &[u32], targets: &[u32]| (sources.to_vec(), targets.to_vec());
    for (direction, _, _) in POOLS {
        let request = copy(direction, &[0, 1, 2, 3], &[1, 2, 0, 2], CopyResource::Kv);
        let (seen, answers, _) = converse_copies(HOST_PAGES, &[request]);
        let groups = match direction {
            // Pages 1 and 2 are read after they were written.
            CopyDirection::D2D | CopyDirection::H2H => vec![
                group(&[0], &[1]),
                group(&[1], &[2]),
                group(&[2, 3], &[0, 2]),
            ],
            // The target 2 is written twice.
            CopyDirection::D2H | CopyDirection::H2D => {
                vec![group(&[0, 1, 2], &[1, 2, 0]), group(&[3], &[2])]
            }
        };
        assert_eq!(seen, [(direction, groups)]);
        assert_eq!(answers, [Answer::Status(status::OK)]);
    }
}

#[test]
fn copies_are_counted_by_direction() {
    let mut config = config();
    config.layout = RegionLayout::new(2, 1 << 16, 1 << 16).unwrap();
    let mut ring = Server::create(&config, &ExitGuard::inert()).unwrap();
    let client = Client::open(&config.name, pie_wire::SCHEMA_HASH, ClientConfig::default());
    let client = Arc::new(client.unwrap());
    let responder = Responder::new(Planner::new(LIMITS, 1), HOST_PAGES, Wait::Park);
    for (direction, code) in [
        (CopyDirection::D2H, status::OK),
        (CopyDirection::D2H, status::OK),
        (CopyDirection::H2D, status::OK),
        (CopyDirection::H2D, status::FAILED),
    ] {
        let answer = call(&client, copy(direction, &[1, 2], &[3, 0], CopyResource::Kv));
        let Event::Job(Job::Copy(mut job)) = responder.next(&mut ring).unwrap() else {
            panic!("a copy")
        };
        job.commit(code);
        assert_eq!(answer.join().unwrap(), Answer::Status(code));
    }
    let found = responder.counts().copied_pages;
    let named: Vec<_> = DIRECTIONS.into_iter().zip(found).collect();
    assert_eq!(
        named,
        [
            (CopyDirection::D2H, 4),
            (CopyDirection::H2D, 2),
            (CopyDirection::D2D, 0),
            (CopyDirection::H2H, 0),
        ]
    );
}
