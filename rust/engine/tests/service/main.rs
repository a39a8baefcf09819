//! The service against a driver that keeps account of every KV slot, and against drivers that fail.

mod bench;
mod driver;
mod ends;
mod failures;
mod features;

use bench::{Bench, GREEDY, WATCHDOG, expected, is_running, prompts, serve};
use pie_engine::{NewRequest, SubmitError};

/// Runs as the driver when a test's script says so; for the test runner it is a test that passes.
#[test]
fn stand_in() {
    if let Ok(config) = std::env::var("PIE_TEST_CONFIG") {
        driver::main(&config);
    }
}

/// No step is laid out between requests that are handed in together.
#[test]
fn requests_of_one_call_begin_in_one_step() {
    let bench = Bench::ready("serve");
    let prompts: Vec<Vec<u32>> = (0..4).map(|at| vec![at, at + 1, at * 3, 7, 8]).collect();
    let arrivals = prompts.iter().map(|prompt| NewRequest {
        streams: false,
        ..NewRequest::new(0, prompt.clone(), GREEDY, 3)
    });
    let ids = bench
        .service
        .submit_all(arrivals.map(|arrival| (arrival, None)))
        .unwrap();
    let stories = bench.collect(4);
    for (id, prompt) in ids.iter().zip(&prompts) {
        assert_eq!(stories[&(*id, 0)].tokens, expected(prompt, 3));
    }
    assert_eq!(bench.service.stats()[0].scheduler.steps, 3);
    bench.service.shutdown();
    let late = bench
        .service
        .submit_all([(NewRequest::new(0, vec![1], GREEDY, 1), None)]);
    assert!(matches!(late, Err(SubmitError::Stopped)));
}

/// A step is laid out shortly before the answer to the one in front of it, so that it has what came meanwhile.
#[test]
fn a_request_is_in_the_step_after_the_one_that_runs() {
    let bench = Bench::ready("slow=100");
    bench.submit(&[1, 2, 3], 60);
    let mut running = 0;
    while running < 6 {
        running += bench
            .service
            .poll(WATCHDOG)
            .iter()
            .map(|delta| delta.tokens.len())
            .sum::<usize>();
    }
    // The machine may be too slow for once.
    let found = (0..5).any(|_| {
        let late = bench.submit(&[4, 5], 1);
        let mut others = 0;
        loop {
            let deltas = bench.service.poll(WATCHDOG);
            let of = |late_one| {
                deltas
                    .iter()
                    .filter(move |delta| (delta.request == late) == late_one)
            };
            others += of(false).map(|delta| delta.tokens.len()).sum::<usize>();
            if of(true).next().is_some() {
                return others <= 2;
            }
        }
    });
    assert!(found);
}

#[test]
fn requests_get_the_tokens_of_the_rule() {
    let bench = Bench::ready("serve");
    let stories = serve(&bench, &prompts(60));
    assert!(stories.values().any(|story| story.cached > 0));
    let stats = bench.service.stats()[0].scheduler;
    assert_eq!(stats.finished, 60);
    // A second time they begin with what is cached.
    let again = serve(&bench, &prompts(6));
    assert!(again.values().all(|story| story.cached > 0));
    assert!(bench.service.flush(WATCHDOG));
    let flushed = serve(&bench, &prompts(1));
    assert!(flushed.values().all(|story| story.cached == 0));
    let pid = bench.starts()[0];
    assert!(is_running(pid));
    bench.service.shutdown();
    assert!(!is_running(pid));
    assert!(bench.service.poll(WATCHDOG).is_empty());
    let late = bench
        .service
        .submit(NewRequest::new(0, vec![1], GREEDY, 1), None);
    assert!(matches!(late, Err(SubmitError::Stopped)));
}

#[test]
fn replicas_share_the_requests() {
    let bench = Bench::start("serve", |settings| {
        let driver = settings.drivers[0].clone();
        settings.drivers.push(driver);
    });
    bench.wait_ready();
    let stories = serve(&bench, &prompts(30));
    let of = |replica: u64| stories.keys().filter(|(id, _)| id % 2 == replica).count();
    assert!(of(0) > 5 && of(1) > 5, "{} and {}", of(0), of(1));
    let keyed = |key: &str| {
        let arrival = NewRequest {
            routing_key: Some(key.into()),
            ..NewRequest::new(0, vec![1, 2], GREEDY, 2)
        };
        bench.service.submit(arrival, None).unwrap() % 2
    };
    for key in ["a", "b", "c"] {
        let first = keyed(key);
        assert!((0..4).all(|_| keyed(key) == first));
    }
    let log = bench.log();
    assert!(
        log.contains("0: ready") && log.contains("1: ready"),
        "{log}"
    );
}
