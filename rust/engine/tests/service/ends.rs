//! Pauses, aborts, deadlines and the shutdown.

use std::thread;
use std::time::{Duration, Instant};

use crate::bench::{Bench, GREEDY, Stories, WATCHDOG, add, expected, prompts, serve};
use pie_engine::{FinishReason, NewRequest, Pause};

#[test]
fn a_pause_holds_requests_up_and_loses_nothing() {
    for pause in [Pause::InPlace, Pause::Retract] {
        let bench = Bench::ready("");
        assert!(bench.service.pause(Some(pause), WATCHDOG));
        let request = bench.submit(&[3, 1, 2], 40);
        let aborted = bench.submit(&[4], 40);
        assert!(bench.service.poll(Duration::from_millis(100)).is_empty());
        bench.service.abort(aborted);
        let mut stories = Stories::new();
        bench.collect_into(&mut stories, 1);
        assert_eq!(stories[&(aborted, 0)].end, Some(FinishReason::Aborted));
        bench.service.pause(None, WATCHDOG);
        bench.service.pause(Some(pause), WATCHDOG);
        bench.service.pause(None, WATCHDOG);
        bench.collect_into(&mut stories, 2);
        assert_eq!(stories[&(request, 0)].tokens, expected(&[3, 1, 2], 40));
    }
}

#[test]
fn deadlines_pass_during_a_pause() {
    for pause in [Pause::InPlace, Pause::Retract] {
        let bench = Bench::ready("");
        bench.service.pause(Some(pause), WATCHDOG);
        let arrival = NewRequest::new(0, vec![3, 1, 2], GREEDY, 40);
        let late = Some(Duration::from_millis(1));
        let request = bench.service.submit(arrival, late).unwrap();
        assert_eq!(
            bench.collect(1)[&(request, 0)].end,
            Some(FinishReason::Deadline)
        );
        bench.service.pause(None, WATCHDOG);
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
fn requests_end_by_abort_deadline_and_shutdown() {
    let bench = Bench::ready("slow=20");
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
