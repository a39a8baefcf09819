//! Drivers that die, hang, refuse or fail to start.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::bench::{Bench, GREEDY, Stories, WATCHDOG, expected, is_running, kill, prompts, serve};
use crate::driver;
use pie_engine::{DriverSettings, FinishReason, NewRequest, SubmitError, TraceSettings};
use tempfile::TempDir;

#[test]
fn a_driver_that_dies_is_replaced_and_no_token_is_lost_or_repeated() {
    let bench = Bench::ready("die-at=9");
    serve(&bench, &prompts(32));
    assert_eq!((bench.restarts(), bench.starts().len()), (1, 2));
    let log = bench.log();
    assert!(log.contains("while it served; its log ends so"), "{log}");
    assert!(log.contains("the device is lost"), "{log}");
    assert!(
        log.contains("0: pie-engine: starting the driver again, 1 of 3 times"),
        "{log}"
    );
}

#[test]
fn a_driver_that_is_killed_from_outside_is_replaced() {
    let bench = Bench::ready("slow=4");
    let all = prompts(32);
    let ids: Vec<u64> = all
        .iter()
        .map(|(prompt, output)| bench.submit(prompt, *output))
        .collect();
    let mut stories = Stories::new();
    // In the middle: some have ended, and some have not.
    bench.collect_into(&mut stories, 6);
    assert!(stories.values().any(|story| story.end.is_none()));
    kill(bench.starts()[0]);
    bench.collect_into(&mut stories, ids.len());
    for (id, (prompt, output)) in ids.iter().zip(&all) {
        assert_eq!(
            stories[&(*id, 0)].tokens,
            expected(prompt, *output),
            "of {prompt:?}"
        );
    }
    // One that dies while nothing is asked of it is replaced, too.
    kill(bench.starts()[1]);
    wait_until(&bench, |bench| bench.starts().len() == 3);
    serve(&bench, &all[..4]);
    assert_eq!(bench.restarts(), 2);
}

fn wait_until(bench: &Bench, done: impl Fn(&Bench) -> bool) {
    let started = Instant::now();
    while !done(bench) {
        assert!(started.elapsed() < WATCHDOG, "{}", bench.log());
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn deadlines_pass_while_a_driver_is_being_started_again() {
    let bench = Bench::ready("die-at=2 waits");
    let arrival = NewRequest::new(0, vec![1, 2, 3], GREEDY, 60);
    let late = bench
        .service
        .submit(arrival, Some(Duration::from_secs(1)))
        .unwrap();
    let patient = bench.submit(&[4, 5, 6], 9);
    let stories = bench.collect(1);
    let story = &stories[&(late, 0)];
    assert_eq!(story.end, Some(FinishReason::Deadline), "{}", bench.log());
    assert!(expected(&[1, 2, 3], 60).starts_with(&story.tokens));
    // There still is no driver, or on a busy machine it has died after the deadline.
    wait_until(&bench, |bench| bench.restarts() == 1);
    let mut rest = stories;
    let waits = rest
        .get(&(patient, 0))
        .is_none_or(|story| story.end.is_none());
    assert!(waits, "{}", bench.log());
    fs::write(bench.folder.path().join("ready"), "").unwrap();
    bench.collect_into(&mut rest, 2);
    assert_eq!(rest[&(patient, 0)].tokens, expected(&[4, 5, 6], 9));
}

#[test]
fn a_driver_that_is_stuck_is_killed_and_replaced() {
    let bench = Bench::start("stuck-at=5", |settings| {
        settings.drivers[0].answer_timeout = Duration::from_secs(3);
    });
    bench.wait_ready();
    serve(&bench, &prompts(20));
    assert_eq!(bench.restarts(), 1);
    assert!(!is_running(bench.starts()[0]));
    let log = bench.log();
    assert!(
        log.contains("alive but did not answer a frame within 3s"),
        "{log}"
    );
}

#[test]
fn a_refused_frame_is_computed_again() {
    let bench = Bench::ready("refuse-at=4");
    serve(&bench, &prompts(20));
    assert_eq!((bench.restarts(), bench.starts().len()), (0, 1));
    let log = bench.log();
    assert!(
        log.contains("a step failed: the driver answered a forward with status 3"),
        "{log}"
    );
}

#[test]
fn a_request_that_the_driver_cannot_serve_fails_alone() {
    let bench = Bench::ready("empty=91");
    let bad = bench.submit(&[91, 1, 2], 9);
    let good = bench.submit(&[3, 1, 2], 9);
    let stories = bench.collect(2);
    assert!(
        matches!(&stories[&(bad, 0)].end, Some(FinishReason::Failed(why)) if why.contains("no token"))
    );
    assert_eq!(stories[&(good, 0)].tokens, expected(&[3, 1, 2], 9));
}

/// Whether, of requests of one call, one fails and the others are served.
fn fails_alone(bench: &Bench) {
    let texts: Vec<Vec<u32>> = (0..8).map(|first| vec![90 - first, 1, 2]).collect();
    let arrivals = texts
        .iter()
        .map(|text| (NewRequest::new(0, text.clone(), GREEDY, 9), None));
    let ids = bench.service.submit_all(arrivals).unwrap();
    let stories = bench.collect(texts.len());
    for (id, text) in ids.iter().zip(&texts) {
        let story = &stories[&(*id, 0)];
        if text[0] == 88 {
            let Some(FinishReason::Failed(why)) = &story.end else {
                panic!("{:?}", story.end);
            };
            assert!(why.contains("the one that had it alone"), "{why}");
        } else {
            assert_eq!(story.end, Some(FinishReason::Length), "{}", bench.log());
            assert_eq!(story.tokens, expected(text, 9));
        }
    }
    // The service continues.
    serve(bench, &prompts(4));
}

#[test]
fn a_request_that_makes_its_frames_fail_ends_alone() {
    let bench = Bench::ready("refuse=88");
    fails_alone(&bench);
    assert_eq!(bench.restarts(), 0);
}

#[test]
fn a_request_that_drivers_die_of_ends_alone() {
    let bench = Bench::ready("die-of=88");
    fails_alone(&bench);
    // Eight rows, four, two, one.
    assert!((3..=4).contains(&bench.restarts()), "{}", bench.log());
}

#[test]
fn a_request_that_drivers_die_of_ends_when_nothing_else_is_there() {
    let bench = Bench::ready("die-of=88");
    let request = bench.submit(&[88, 1], 4);
    let stories = bench.collect(1);
    let why = format!("{:?}", stories[&(request, 0)].end);
    assert!(why.contains("the one that had it alone"), "{why}");
    serve(&bench, &prompts(4));
    assert_eq!(bench.restarts(), 3);
}

#[test]
fn a_driver_that_keeps_dying_is_given_up_with_its_reason() {
    let bench = Bench::start("die-at=1 die-always", |settings| settings.max_restarts = 2);
    bench.wait_ready();
    let request = bench.submit(&[5, 6], 4);
    let stories = bench.collect(1);
    let Some(FinishReason::Failed(why)) = &stories[&(request, 0)].end else {
        panic!("{:?}", stories[&(request, 0)].end);
    };
    assert!(why.contains("the device is lost"), "{why}");
    assert_eq!(bench.starts().len(), 3);
    let late = bench
        .service
        .submit(NewRequest::new(0, vec![1], GREEDY, 1), None);
    assert!(matches!(late, Err(SubmitError::Gone(_))));
}

#[test]
fn deaths_with_answers_in_between_are_survived_for_ever() {
    let bench = Bench::start("die-at=4 die-always", |settings| settings.max_restarts = 1);
    bench.wait_ready();
    serve(&bench, &prompts(4));
    assert!(bench.restarts() > 2, "{}", bench.restarts());
}

#[test]
fn a_start_that_fails_is_not_repeated() {
    let bench = Bench::start("die-early-from=1", |_| ());
    let error = bench.service.wait_ready(WATCHDOG).unwrap_err().to_string();
    assert!(
        error.contains("before it was ready") && error.ends_with("no GPU here"),
        "{error}"
    );
    assert_eq!(bench.starts().len(), 1);
    let late = bench
        .service
        .submit(NewRequest::new(0, vec![1], GREEDY, 1), None);
    assert!(matches!(late, Err(SubmitError::Gone(_))));
}

#[test]
fn a_replica_that_has_failed_holds_up_neither_flushes_nor_traces() {
    let folder = TempDir::new().unwrap();
    let bench = Bench::start("serve", |settings| {
        let python = driver::script(folder.path(), "die-early-from=2");
        settings.drivers.push(DriverSettings {
            python,
            ..settings.drivers[0].clone()
        });
        settings.max_restarts = 1;
    });
    bench.wait_ready();
    let first = fs::read_to_string(folder.path().join("starts")).unwrap();
    kill(first.trim().parse().unwrap());
    wait_until(&bench, |bench| bench.log().contains("before it was ready"));
    wait_until(&bench, |bench| bench.service.flush(WATCHDOG));
    let settings = TraceSettings {
        path: folder.path().join("trace"),
        skip: 0,
        steps: None,
    };
    for _ in 0..2 {
        wait_until(&bench, |bench| bench.service.start_trace(&settings).is_ok());
        let ended = bench.service.end_trace(WATCHDOG);
        assert_eq!(ended.len(), 1);
    }
    let missing = TraceSettings {
        path: folder.path().join("none/trace"),
        ..settings.clone()
    };
    assert!(bench.service.start_trace(&missing).is_err());
    assert!(bench.service.start_trace(&settings).is_ok());
}

#[test]
fn a_bug_leaves_no_request_without_an_end() {
    let bench = Bench::start("refuse-at=2", |settings| {
        let log = Arc::clone(&settings.log);
        settings.log = Arc::new(move |replica, line| {
            assert!(!line.contains("a step failed"), "fails as a bug would");
            log(replica, line);
        });
    });
    bench.wait_ready();
    let arrival = NewRequest {
        samples: 3,
        ..NewRequest::new(0, vec![9, 8, 7], GREEDY, 40)
    };
    bench.service.submit(arrival, None).unwrap();
    bench.submit(&[5, 6], 20);
    for story in bench.collect(4).values() {
        let why = format!("{:?}", story.end);
        assert!(why.contains("a thread of the runtime has failed"), "{why}");
    }
    let pid = bench.starts()[0];
    assert!(!is_running(pid));
    let late = bench
        .service
        .submit(NewRequest::new(0, vec![1], GREEDY, 1), None);
    assert!(matches!(late, Err(SubmitError::Gone(_))));
}

#[test]
fn a_driver_that_comes_back_smaller_is_not_served_with() {
    let bench = Bench::start("die-at=2 shrink", |settings| settings.max_restarts = 1);
    bench.wait_ready();
    let request = bench.submit(&[5, 6], 4);
    let stories = bench.collect(1);
    let why = format!("{:?}", stories[&(request, 0)].end);
    assert!(why.contains("came back with 47 pages"), "{why}");
}

/// Whatever memory is free by then.
#[test]
fn a_driver_is_started_again_with_the_pages_that_it_had() {
    let bench = Bench::ready("die-at=2 short");
    let request = bench.submit(&[5, 6], 4);
    let stories = bench.collect(1);
    assert_eq!(stories[&(request, 0)].end, Some(FinishReason::Length));
    assert_eq!(bench.service.stats()[0].restarts, 1);
}

#[test]
fn an_interpreter_or_model_that_is_not_there_is_named() {
    let bench = Bench::start("serve", |settings| {
        settings.drivers[0].python = Path::new("/no/python").to_owned();
    });
    let error = bench.service.wait_ready(WATCHDOG).unwrap_err().to_string();
    assert!(
        error.contains("cannot spawn /no/python") && error.contains("hint:"),
        "{error}"
    );
    let bench = Bench::start("serve", |settings| {
        settings.drivers[0].model = Path::new("/no/model").to_owned();
    });
    let error = bench.service.wait_ready(WATCHDOG).unwrap_err().to_string();
    assert!(error.contains("cannot find the model /no/model"), "{error}");
}
