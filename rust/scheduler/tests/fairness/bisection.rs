//! The search for the request that makes steps fail.

use pie_scheduler::{Config, Finish};

use super::sim::{Event, Poison, TestRequest};
use super::{LARGE, LIMITS, sim, step};

#[test]
fn a_request_alone_ends_after_three_failed_steps_in_a_row() {
    let mut sim = sim(Config::default(), LIMITS);
    sim.submit(&TestRequest::plain(0, 6, 9));
    for _ in 0..2 {
        sim.happen(&Event::Schedule);
        sim.happen(&Event::StepFailed(false));
    }
    step(&mut sim);
    for _ in 0..3 {
        sim.happen(&Event::Schedule);
        sim.happen(&Event::StepFailed(false));
    }
    let finishes: Vec<Finish> = sim.ended.iter().map(|ended| ended.finish).collect();
    assert_eq!(finishes, [Finish::Failed]);
}

/// 64 requests, some of which make every step fail from their fourth output token on. Plays until all have ended; returns the
/// failures that this took, and most of them without an answer in between.
fn poisoned(guilty: &[u64], kills: bool) -> (u32, u32) {
    let mut sim = sim(Config::default(), LARGE);
    let from = 6 + 4;
    let ids: Vec<u64> = (0..64)
        .map(|id| {
            let poison = guilty.contains(&id).then_some(Poison { from, kills });
            sim.submit(&TestRequest {
                poison,
                // All prompts are in the first step.
                whole: true,
                ..TestRequest::plain(0, 6, 9)
            })
        })
        .collect();
    let mut most = 0;
    while !sim.scheduler.is_idle() {
        step(&mut sim);
        most = most.max(sim.failures.1);
    }
    sim.drain();
    assert_eq!(sim.ended.len(), ids.len());
    for ended in &sim.ended {
        let expected = if guilty.contains(&ended.id) {
            Finish::Failed
        } else {
            Finish::Length
        };
        assert_eq!(ended.finish, expected, "{ended:?}");
    }
    (sim.failures.0, most)
}

#[test]
fn the_request_that_makes_steps_fail_is_found_by_bisection() {
    for guilty in [0, 1, 37, 63] {
        // 64 rows, 32, …, 1.
        assert_eq!(poisoned(&[guilty], false).0, 7);
    }
    let (failures, _) = poisoned(&[3, 40, 41, 62], false);
    assert!(failures <= 4 * 7, "{failures}");
}

#[test]
fn the_request_that_kills_drivers_is_found_by_bisection() {
    for guilty in [0, 1, 37, 63] {
        let (failures, most) = poisoned(&[guilty], true);
        assert_eq!(failures, 7);
        // Others are answered by each driver but one at most.
        assert!(most <= 2, "{most}");
    }
}
