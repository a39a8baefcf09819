//! The service against a driver that keeps account of every KV slot, and against drivers that fail.

mod driver;

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use pie_engine::{
    DriverSettings, FinishReason, LogprobParams, NewRequest, OutputDelta, Pause, Policy,
    PromptImage, PromptImages, RowParams, Sampler, SamplingParams, Service, ServiceSettings,
    StopCriteria, SubmitError,
};
use tempfile::TempDir;

/// No test takes nearly as long.
const WATCHDOG: Duration = Duration::from_mins(2);

const GREEDY: Sampler = Sampler::TopP {
    temperature: 0.0,
    p: 1.0,
};

/// Runs as the driver when a test's script says so; for the test runner it is a test that passes.
#[test]
fn stand_in() {
    if let Ok(config) = std::env::var("PIE_TEST_CONFIG") {
        driver::main(&config);
    }
}

/// A service over drivers of one behaviour.
struct Bench {
    service: Service,
    folder: TempDir,
    lines: Arc<Mutex<Vec<String>>>,
}

/// What came of one sequence.
#[derive(Default)]
struct Story {
    tokens: Vec<u32>,
    end: Option<FinishReason>,
    cached: u32,
    prompt_logprobs: Vec<u32>,
    logprobs: Vec<u32>,
}

type Stories = HashMap<(u64, u32), Story>;

impl Bench {
    fn start(behaviour: &str, change: impl FnOnce(&mut ServiceSettings)) -> Self {
        let folder = TempDir::new().unwrap();
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let mut driver =
            DriverSettings::new(driver::script(folder.path(), behaviour), folder.path());
        driver.devices = vec!["cpu".to_owned()];
        driver.ready_timeout = WATCHDOG;
        let log = Arc::clone(&lines);
        let mut settings = ServiceSettings {
            log: Arc::new(move |replica, line| {
                log.lock().unwrap().push(format!("{replica}: {line}"));
            }),
            ..ServiceSettings::new(driver)
        };
        settings.scheduler.policy = Policy::Lpm;
        settings.scheduler.chunk_tokens = 24;
        change(&mut settings);
        let service = Service::start(&settings).unwrap();
        Self {
            service,
            folder,
            lines,
        }
    }

    fn ready(behaviour: &str) -> Self {
        let bench = Self::start(behaviour, |_| ());
        bench.wait_ready();
        bench
    }

    fn wait_ready(&self) {
        assert!(self.service.wait_ready(WATCHDOG).unwrap(), "{}", self.log());
    }

    fn submit(&self, prompt: &[u32], output: u32) -> u64 {
        let arrival = NewRequest::new(0, prompt.to_vec(), GREEDY, output);
        self.service.submit(arrival, None).unwrap()
    }

    /// Everything of these requests' sequences, of which there are so many.
    fn collect(&self, sequences: usize) -> Stories {
        let mut stories = Stories::new();
        self.collect_into(&mut stories, sequences);
        stories
    }

    fn collect_into(&self, stories: &mut Stories, sequences: usize) {
        let started = Instant::now();
        let ended = |stories: &Stories| stories.values().filter(|s| s.end.is_some()).count();
        while ended(stories) < sequences {
            assert!(started.elapsed() < WATCHDOG, "hangs; {}", self.log());
            for delta in self.service.poll(Duration::from_secs(1)) {
                add(stories, delta);
            }
        }
    }

    fn log(&self) -> String {
        self.lines.lock().unwrap().join("\n")
    }

    /// Process ids of all drivers so far.
    fn starts(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.folder.path().join("starts")).unwrap_or_default();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }

    fn restarts(&self) -> u64 {
        self.service
            .stats()
            .iter()
            .map(|stats| stats.restarts)
            .sum()
    }
}

fn add(stories: &mut Stories, delta: OutputDelta) {
    let story = stories.entry((delta.request, delta.sample)).or_default();
    assert_eq!(story.end, None, "an output comes after the end");
    story.tokens.extend(delta.tokens);
    story.prompt_logprobs.extend(delta.prompt_logprobs);
    story.logprobs.extend(delta.logprobs);
    story.end = delta.finish;
    story.cached = delta.cached_tokens;
}

/// What a request must bring.
fn expected(prompt: &[u32], output: u32) -> Vec<u32> {
    expected_by(-1, prompt, output)
}

/// What a request with an adapter must bring.
fn expected_by(adapter: i64, prompt: &[u32], output: u32) -> Vec<u32> {
    let mut text = prompt.to_vec();
    for _ in 0..output {
        text.push(driver::next_by(adapter, &text));
    }
    text.split_off(prompt.len())
}

/// Prompts that begin like others, of different lengths.
fn prompts(count: u32) -> Vec<(Vec<u32>, u32)> {
    let prompt = |index: u32| {
        let shared = (0..8 + 4 * (index % 3)).map(|at| (at * 7 + index % 2) % 90);
        let own = (0..index * 5 % 17).map(|at| (at * 3 + index) % 90);
        (shared.chain(own).collect(), 3 + index * 7 % 23)
    };
    (0..count).map(prompt).collect()
}

/// Has the prompts served, and compares every token with the rule.
fn serve(bench: &Bench, prompts: &[(Vec<u32>, u32)]) -> Stories {
    let ids: Vec<u64> = prompts
        .iter()
        .map(|(prompt, output)| bench.submit(prompt, *output))
        .collect();
    let stories = bench.collect(ids.len());
    for (id, (prompt, output)) in ids.iter().zip(prompts) {
        let story = &stories[&(*id, 0)];
        assert_eq!(story.end, Some(FinishReason::Length), "{}", bench.log());
        assert_eq!(story.tokens, expected(prompt, *output), "of {prompt:?}");
    }
    stories
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

fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A zombie is waited for by who started it.
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

fn kill(pid: u32) {
    let killed = Command::new("kill")
        .args(["-9", &pid.to_string()])
        .status()
        .unwrap();
    assert!(killed.success());
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
    let started = Instant::now();
    while bench.starts().len() < 3 {
        assert!(started.elapsed() < WATCHDOG, "{}", bench.log());
        thread::sleep(Duration::from_millis(10));
    }
    serve(&bench, &all[..4]);
    assert_eq!(bench.restarts(), 2);
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
    // There still is no driver.
    assert_eq!(bench.restarts(), 1);
    assert!(bench.service.poll(Duration::ZERO).is_empty());
    fs::write(bench.folder.path().join("ready"), "").unwrap();
    let mut rest = stories;
    bench.collect_into(&mut rest, 2);
    assert_eq!(rest[&(patient, 0)].tokens, expected(&[4, 5, 6], 9));
}

/// Rows wait for a step with room for them; no frame is larger than a slot.
#[test]
fn frames_of_small_slots_have_few_rows() {
    let bench = Bench::ready("slot-bytes=2048");
    let all: Vec<_> = (0..8).flat_map(|_| prompts(23)).collect();
    let submit = |(index, (prompt, output)): (usize, &(Vec<u32>, u32))| {
        let mut arrival = NewRequest::new(0, prompt.clone(), GREEDY, *output);
        if index % 8 == 7 {
            arrival.stop.min_tokens = *output;
            arrival.stop.stop_tokens = (200..600).rev().collect();
        }
        bench.service.submit(arrival, None).unwrap()
    };
    let ids: Vec<u64> = all.iter().enumerate().map(submit).collect();
    let stories = bench.collect(ids.len());
    let log = bench.log();
    assert!(!log.contains("a step failed"), "{log}");
    assert!(!log.contains("is wrong") && bench.restarts() == 0, "{log}");
    for (id, (prompt, output)) in ids.iter().zip(&all) {
        let story = &stories[&(*id, 0)];
        assert_eq!(story.tokens, expected(prompt, *output), "of {prompt:?}");
        assert_eq!(story.end, Some(FinishReason::Length));
    }
    // More biases than a slot has bytes.
    let sampling = SamplingParams {
        logit_bias: (0..300).map(|token| (token % 97, 1.0)).collect(),
        ..SamplingParams::default()
    };
    let arrival = NewRequest::new(0, vec![1, 2], sampling.row_params().unwrap(), 3);
    let id = bench.service.submit(arrival, None).unwrap();
    let end = format!("{:?}", bench.collect(1)[&(id, 0)].end);
    assert!(end.contains("RowBytes"), "{end}");
}

/// An image that brings more bytes than was said of it, which only a caller's mistake does.
#[test]
fn a_frame_that_does_not_fit_its_slot_fails_the_request_that_is_too_large() {
    let bench = Bench::start("slot-bytes=8192", |settings| {
        settings.max_image_bytes = 1000;
    });
    bench.wait_ready();
    let pixels = vec![1; 9000].into();
    let picture = PromptImage::new(1, 4, [1, 2, 2], pixels, [].into()).unwrap();
    let mut arrival = NewRequest::new(0, vec![1; 6], GREEDY.into(), 5);
    RowParams::attach(PromptImages::new(vec![picture]).unwrap(), &mut arrival);
    arrival.images[0].bytes = 1;
    let others = prompts(8);
    let ids: Vec<u64> = others
        .iter()
        .map(|(prompt, output)| bench.submit(prompt, *output))
        .collect();
    let large = bench.service.submit(arrival, None).unwrap();
    let stories = bench.collect(ids.len() + 1);
    let log = bench.log();
    assert!(
        matches!(stories[&(large, 0)].end, Some(FinishReason::Failed(_))),
        "{log}"
    );
    assert!(
        log.contains("a step failed") && log.contains("bytes"),
        "{log}"
    );
    for (id, (prompt, output)) in ids.iter().zip(&others) {
        let story = &stories[&(*id, 0)];
        assert_eq!(story.end, Some(FinishReason::Length), "{log}");
        assert_eq!(story.tokens, expected(prompt, *output), "of {prompt:?}");
    }
    assert_eq!(bench.restarts(), 0);
}

#[test]
fn a_driver_that_is_stuck_is_killed_and_replaced() {
    let bench = Bench::start("stuck-at=5", |settings| {
        settings.drivers[0].answer_timeout = Duration::from_millis(700);
    });
    bench.wait_ready();
    serve(&bench, &prompts(20));
    assert_eq!(bench.restarts(), 1);
    assert!(!is_running(bench.starts()[0]));
    let log = bench.log();
    assert!(
        log.contains("alive but did not answer a frame within 700ms"),
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
    // The service goes on.
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
fn a_pause_holds_requests_up_and_loses_nothing() {
    for pause in [Pause::InPlace, Pause::Retract] {
        let bench = Bench::ready("");
        bench.service.pause(Some(pause));
        let request = bench.submit(&[3, 1, 2], 40);
        let aborted = bench.submit(&[4], 40);
        assert!(bench.service.poll(Duration::from_millis(100)).is_empty());
        bench.service.abort(aborted);
        let mut stories = Stories::new();
        bench.collect_into(&mut stories, 1);
        assert_eq!(stories[&(aborted, 0)].end, Some(FinishReason::Aborted));
        bench.service.pause(None);
        bench.service.pause(Some(pause));
        bench.service.pause(None);
        bench.collect_into(&mut stories, 2);
        assert_eq!(stories[&(request, 0)].tokens, expected(&[3, 1, 2], 40));
    }
}

#[test]
fn deadlines_pass_during_a_pause() {
    for pause in [Pause::InPlace, Pause::Retract] {
        let bench = Bench::ready("");
        bench.service.pause(Some(pause));
        let arrival = NewRequest::new(0, vec![3, 1, 2], GREEDY, 40);
        let late = Some(Duration::from_millis(1));
        let request = bench.service.submit(arrival, late).unwrap();
        assert_eq!(
            bench.collect(1)[&(request, 0)].end,
            Some(FinishReason::Deadline)
        );
        bench.service.pause(None);
        serve(&bench, &prompts(3));
    }
}

/// Each of them is refused at once, or answered.
#[test]
fn requests_that_meet_the_shutdown_are_answered() {
    for _ in 0..20 {
        let bench = Bench::ready("");
        let submit = || {
            let arrival = || NewRequest::new(0, vec![3, 1, 2], GREEDY, 1);
            let submitted = std::iter::from_fn(|| bench.service.submit(arrival(), None).ok());
            submitted.collect::<Vec<u64>>()
        };
        let ids = thread::scope(|scope| {
            let threads = [(); 3].map(|()| scope.spawn(submit));
            bench.service.shutdown();
            threads.map(|thread| thread.join().unwrap()).concat()
        });
        let mut stories = Stories::new();
        for delta in bench.service.poll(Duration::ZERO) {
            add(&mut stories, delta);
        }
        for id in ids {
            let end = stories.get(&(id, 0)).and_then(|story| story.end.as_ref());
            assert!(end.is_some(), "request {id} has no answer");
        }
    }
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

#[test]
fn requests_end_by_abort_deadline_and_shutdown() {
    let bench = Bench::ready("slow=5");
    let aborted = bench.submit(&[1, 2, 3], 120);
    let arrival = NewRequest::new(0, vec![4, 5, 6], GREEDY, 120);
    let late = bench
        .service
        .submit(arrival, Some(Duration::from_millis(40)))
        .unwrap();
    let long = bench.submit(&vec![1; 129], 4);
    let foreign = bench.submit(&[1, 97], 4);
    let mut stories = Stories::new();
    bench.collect_into(&mut stories, 3);
    bench.service.abort(aborted);
    bench.service.abort(4711);
    bench.collect_into(&mut stories, 4);
    assert_eq!(stories[&(aborted, 0)].end, Some(FinishReason::Aborted));
    assert_eq!(stories[&(late, 0)].end, Some(FinishReason::Deadline));
    for (id, text) in [(long, "129 tokens"), (foreign, "token 97 at 1")] {
        let Some(FinishReason::Refused(refusal)) = &stories[&(id, 0)].end else {
            panic!("{:?}", stories[&(id, 0)].end);
        };
        assert!(refusal.to_string().contains(text), "{refusal}");
    }
    for (id, prompt) in [(aborted, [1, 2, 3]), (late, [4, 5, 6])] {
        let tokens = &stories[&(id, 0)].tokens;
        assert!(expected(&prompt, 120).starts_with(tokens) && tokens.len() < 120);
    }
    let open = bench.submit(&[7, 8], 100);
    bench.service.shutdown();
    let rest = bench.service.poll(Duration::ZERO);
    assert_eq!((rest.len(), rest[0].request), (1, open));
    assert_eq!(rest[0].finish, Some(FinishReason::Aborted));
}

#[test]
fn a_shutdown_need_not_wait_for_a_start_or_an_answer() {
    let bench = Bench::ready("stuck-at=1");
    bench.submit(&[7, 8], 100);
    thread::sleep(Duration::from_millis(50));
    let started = Instant::now();
    bench.service.shutdown();
    // The stand-in ends on SIGTERM.
    assert!(started.elapsed() < Duration::from_secs(20));
    let bench = Bench::start("serve", |_| ());
    bench.service.shutdown();
    assert!(matches!(bench.service.wait_ready(WATCHDOG), Ok(false)));
}

#[test]
fn stop_tokens_minimum_lengths_and_samples() {
    let bench = Bench::ready("serve");
    let whole = expected(&[9, 8, 7], 40);
    let stop = whole[12];
    let first = whole.iter().position(|&token| token == stop).unwrap();
    let arrival = |min_tokens, samples| NewRequest {
        stop: StopCriteria {
            max_tokens: 40,
            min_tokens,
            stop_tokens: vec![stop],
            ..StopCriteria::default()
        },
        samples,
        ..NewRequest::new(0, vec![9, 8, 7], GREEDY, 40)
    };
    let plain = bench.service.submit(arrival(0, 1), None).unwrap();
    let several = bench.service.submit(arrival(0, 3), None).unwrap();
    let long = bench.service.submit(arrival(30, 1), None).unwrap();
    let stories = bench.collect(5);
    for key in [(plain, 0), (several, 0), (several, 1), (several, 2)] {
        assert_eq!(stories[&key].tokens, whole[..=first]);
        assert_eq!(stories[&key].end, Some(FinishReason::StopToken(stop)));
    }
    // As long as the stop token may not come, the driver draws the one after it.
    let tokens = &stories[&(long, 0)].tokens;
    let mut text = vec![9, 8, 7];
    for (count, &token) in tokens.iter().enumerate() {
        let free = driver::next(&text);
        let forbidden = free == stop && count < 30;
        let wanted = if forbidden {
            (stop + 1) % driver::VOCABULARY
        } else {
            free
        };
        assert_eq!(token, wanted, "token {count}");
        text.push(token);
    }
    assert!(tokens.len() >= 30);
}

#[test]
fn drafts_change_no_token() {
    let bench = Bench::ready("serve");
    let all = prompts(12);
    let arrival = |prompt: &[u32], output| NewRequest {
        drafts: true,
        ..NewRequest::new(0, prompt.to_vec(), GREEDY, output)
    };
    let submit = |(prompt, output): &(Vec<u32>, u32)| {
        bench
            .service
            .submit(arrival(prompt, *output), None)
            .unwrap()
    };
    let ids: Vec<u64> = all.iter().map(submit).collect();
    let stories = bench.collect(ids.len());
    for (id, (prompt, output)) in ids.iter().zip(&all) {
        assert_eq!(
            stories[&(*id, 0)].tokens,
            expected(prompt, *output),
            "of {prompt:?}"
        );
    }
    bench.service.shutdown();
    let stats = bench.service.stats()[0].scheduler;
    assert!(
        stats.accepted > 0 && stats.accepted < stats.drafts,
        "{stats:?}"
    );
}

/// Every token has its log-probabilities, and every one of the prompt that is asked for, each once: with prompts in parts, drafts,
/// prefixes that are cached, and when drivers die.
#[test]
fn log_probabilities_belong_to_their_tokens() {
    for behaviour in ["serve", "die-at=9"] {
        let bench = Bench::ready(behaviour);
        let given = [3, 40];
        let submit = |(index, (prompt, output)): (usize, &(Vec<u32>, u32))| {
            let mut arrival = NewRequest {
                drafts: index.is_multiple_of(3),
                streams: !index.is_multiple_of(2),
                ..NewRequest::new(0, prompt.clone(), GREEDY.into(), *output)
            };
            if index.is_multiple_of(5) {
                arrival.stop.max_tokens = 0;
            }
            let params = LogprobParams {
                top_logprobs_num: index as u32 % 3,
                token_ids_logprob: given[..index % 2].to_vec(),
                logprob_start_len: (!index.is_multiple_of(4)).then_some(index as u32 % 7),
                original: false,
            };
            params.apply(&mut arrival);
            bench.service.submit(arrival, None).unwrap()
        };
        let all = prompts(40);
        let ids: Vec<u64> = all.iter().enumerate().map(submit).collect();
        let stories = bench.collect(ids.len());
        for (index, (id, (prompt, output))) in ids.iter().zip(&all).enumerate() {
            let story = &stories[&(*id, 0)];
            assert_eq!(story.end, Some(FinishReason::Length), "{}", bench.log());
            let text = [&prompt[..], &expected(prompt, *output)].concat();
            let words = |range: std::ops::Range<usize>| {
                let (top, given) = (index as u32 % 3, &given[..index % 2]);
                let of = |at: usize| driver::position_words(&text[..at], text[at], top, given);
                range.flat_map(of).collect::<Vec<u32>>()
            };
            let only_scores = index.is_multiple_of(5);
            let produced = if only_scores { 0 } else { *output as usize };
            assert_eq!(story.tokens, text[prompt.len()..][..produced]);
            let scored = produced.max(1);
            assert_eq!(story.logprobs, words(prompt.len()..prompt.len() + scored));
            let from = match index % 4 {
                0 => prompt.len(),
                _ => (index % 7 + 1).min(prompt.len()),
            };
            assert_eq!(story.prompt_logprobs, words(from..prompt.len()), "{index}");
        }
        let stats = bench.service.stats()[0].scheduler;
        assert!(stats.accepted > 0 && stats.cached_tokens > 0, "{stats:?}");
    }
}

#[test]
fn adapters_share_no_prefix_and_survive_a_driver() {
    let bench = Bench::ready("die-at=12");
    bench.service.load_adapter(3, "/adapters/three").unwrap();
    bench.service.load_adapter(5, "/adapters/five").unwrap();
    let why = bench.service.load_adapter(6, "/adapters/broken");
    let why = why.unwrap_err().to_string();
    assert!(
        why == "the adapter /adapters/broken cannot be loaded: it is broken\n\nhint: mend it",
        "{why}"
    );
    bench.service.load_adapter(7, "/adapters/seven").unwrap();
    bench.service.unload_adapter(7);
    // A name that a caller may give is no adapter's.
    let named = |adapter: i64, index: usize| match (adapter, index % 3) {
        (_, 0) => None,
        (-1, 1) => Some("\0adapter 3".into()),
        (-1, _) => Some("\0adapter 3:x".into()),
        (..) => Some("x".into()),
    };
    let all = prompts(12);
    let mut asked = Vec::new();
    for adapter in [-1, 3, 5] {
        for (index, (prompt, output)) in all.iter().enumerate() {
            let arrival = NewRequest {
                adapter: u64::try_from(adapter).ok(),
                namespace: named(adapter, index),
                drafts: index % 2 == 0,
                ..NewRequest::new(0, prompt.clone(), GREEDY, *output)
            };
            let id = bench.service.submit(arrival, None).unwrap();
            asked.push((id, expected_by(adapter, prompt, *output)));
        }
    }
    let lost = NewRequest {
        adapter: Some(6),
        ..NewRequest::new(0, vec![1, 2], GREEDY, 4)
    };
    let lost = bench.service.submit(lost, None).unwrap();
    let stories = bench.collect(asked.len() + 1);
    for (id, tokens) in asked {
        let story = &stories[&(id, 0)];
        assert_eq!(story.end, Some(FinishReason::Length), "{}", bench.log());
        assert_eq!(story.tokens, tokens);
    }
    assert!(matches!(
        stories[&(lost, 0)].end,
        Some(FinishReason::Failed(_))
    ));
    assert_eq!(bench.restarts(), 1);
    let log = bench.log();
    for line in [
        "adapter 3 of /adapters/three: 0",
        "adapter 5 of /adapters/five: 0",
    ] {
        // Once for each start; the log of the first ends with it, too.
        assert!(log.matches(line).count() >= 2, "{log}");
    }
    assert!(!log.contains("is wrong"), "{log}");
    let ready = log.rfind("ready, start 2").unwrap();
    for gone in ["adapter 6 of", "adapter 7 of"] {
        assert!(!log[ready..].contains(gone), "{log}");
    }
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
