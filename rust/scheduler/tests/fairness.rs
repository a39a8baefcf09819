//! No request waits for ever: turns, bounds, preemption, and what sessions and samples share.

#[path = "fairness/bisection.rs"]
mod bisection;
#[allow(dead_code, unreachable_pub, reason = "other tests use all of it")]
mod sim;

use pie_scheduler::{Config, Finish, FrameBytes, Limits, Policy};
use sim::{Event, STEP_US, Sim, TOKEN_US, TestRequest};

const LIMITS: Limits = Limits {
    total_pages: 400,
    host_pages: 0,
    page_size: 4,
    max_forward_tokens: 4096,
    max_forward_requests: 64,
    max_page_refs: 4096,
    max_image_bytes: 0,
    max_model_len: 4096,
    vocab_size: sim::rule::VOCAB,
    max_logprob_words: 1 << 16,
    frame: FrameBytes::UNLIMITED,
};

/// Pages never lack.
const LARGE: Limits = Limits {
    total_pages: 100_000,
    max_page_refs: 100_000,
    ..LIMITS
};

fn sim(config: Config, limits: Limits) -> Sim {
    Sim::new(config, limits, 1)
}

/// One step without another one out. Returns its rows.
fn step(sim: &mut Sim) -> Vec<(u64, usize)> {
    sim.happen(&Event::Schedule);
    sim.happen(&Event::Answer);
    sim.scheduled.clone()
}

#[test]
fn more_requests_than_rows_take_turns() {
    let limits = Limits {
        max_forward_requests: 4,
        ..LIMITS
    };
    let mut sim = sim(Config::default(), limits);
    for _ in 0..10 {
        sim.submit(&TestRequest::plain(0, 5, 60));
    }
    let mut last = [0; 10];
    for number in 1..=100 {
        for (id, _) in step(&mut sim) {
            // Ten requests, four rows, and one step in between for prompts.
            assert!(
                last[id as usize] == 0 || number - last[id as usize] <= 4,
                "{id} at {number}"
            );
            last[id as usize] = number;
        }
    }
    assert!(last.iter().all(|&last| last > 95), "{last:?}");
    sim.drain();
}

#[test]
fn prefills_progress_next_to_decodes_that_fill_every_row() {
    let limits = Limits {
        max_forward_requests: 3,
        ..LIMITS
    };
    let mut sim = sim(Config::default(), limits);
    for _ in 0..3 {
        sim.submit(&TestRequest::plain(0, 5, 200));
    }
    for _ in 0..5 {
        step(&mut sim);
    }
    let late = sim.submit(&TestRequest::plain(0, 9, 3));
    let waited = (0..20).position(|_| step(&mut sim).iter().any(|(id, _)| *id == late));
    assert!(waited.is_some_and(|waited| waited <= 2), "{waited:?}");
    sim.drain();
}

#[test]
fn decodes_progress_next_to_a_long_prefill() {
    let config = Config {
        chunk_tokens: 70,
        ..Config::default()
    };
    let mut sim = sim(config, LIMITS);
    for _ in 0..8 {
        sim.submit(&TestRequest::plain(0, 5, 100));
    }
    for _ in 0..3 {
        step(&mut sim);
    }
    let long = sim.submit(&TestRequest::plain(250, 250, 2));
    let mut parts = Vec::new();
    while sim.ended.iter().all(|ended| ended.id != long) {
        let rows = step(&mut sim);
        for id in 0..8 {
            assert!(rows.contains(&(id, 1)), "{rows:?}");
        }
        parts.extend(
            rows.iter()
                .filter(|(id, _)| *id == long)
                .map(|(_, tokens)| *tokens),
        );
    }
    // At least 64 tokens each, though decodes take 8 of 70: whole pages.
    assert_eq!(parts, [64, 64, 64, 64, 64, 64, 64, 52, 1]);
    sim.drain();
}

/// With a rule for what a step takes, the share of prompts comes to what the limit allows, and decodes wait no longer.
#[test]
fn inter_token_latency_is_limited() {
    let gap_us = STEP_US + 8 * TOKEN_US + 300 * TOKEN_US;
    let config = Config {
        gap_us,
        gap_growth: 0,
        prefix_cache: false,
        ..Config::default()
    };
    let mut sim = sim(config, LARGE);
    for _ in 0..8 {
        sim.submit(&TestRequest::plain(0, 5, 255));
    }
    for _ in 0..5 {
        step(&mut sim);
    }
    let mut parts = Vec::new();
    for id in 8..200 {
        if sim.scheduler.stats().waiting < 20 {
            sim.submit(&TestRequest::plain(0, 255, 1));
        }
        let rows = step(&mut sim);
        let prompts: usize = rows.iter().filter(|row| row.0 >= 8).map(|row| row.1).sum();
        if id > 40 {
            parts.push(prompts);
        }
    }
    let (least, most) = (parts.iter().min(), parts.iter().max());
    assert!(most <= Some(&(300 * 5 / 4)), "{parts:?}");
    assert!(least >= Some(&180), "{parts:?}");
    sim.drain();
}

/// Two bursts of streams, the first of which shows what steps take: while most of the second wait, larger parts of prompts bring their
/// first tokens sooner, and all of them end sooner.
#[test]
fn larger_chunks_shorten_time_to_first_token_in_a_burst() {
    const REQUESTS: u64 = 64;
    let bursts = |gap_growth| {
        let config = Config {
            gap_us: 100,
            gap_growth,
            prefix_cache: false,
            ..Config::default()
        };
        let mut sim = sim(config, LARGE);
        let mut found = (0, 0, 0);
        for burst in 0..2 {
            let begin = sim.now;
            for _ in 0..REQUESTS {
                sim.submit(&TestRequest::plain(0, 255, 100));
            }
            let mut computed = vec![0; REQUESTS as usize];
            let (mut first_us, mut longest_us) = (0, 0);
            while sim.scheduler.stats().waiting + sim.scheduler.stats().running > 0 {
                let before = sim.now;
                for (id, tokens) in step(&mut sim) {
                    let had = &mut computed[(id - burst * REQUESTS) as usize];
                    if *had < 255 && *had + tokens >= 255 {
                        first_us += (sim.now - begin) / REQUESTS;
                    } else if *had >= 255 {
                        longest_us = longest_us.max(sim.now - before);
                    }
                    *had += tokens;
                }
            }
            assert!(computed.iter().all(|&tokens| tokens >= 255));
            found = (first_us, sim.now - begin, longest_us);
        }
        found
    };
    let (usual, grown) = (bursts(0), bursts(8));
    assert!(grown.0 < usual.0 * 85 / 100, "{grown:?} {usual:?}");
    assert!(grown.1 < usual.1 * 95 / 100, "{grown:?} {usual:?}");
    // 64 decodes take 242 µs, and prompts up to eight times as long.
    assert!(grown.2 < 9 * 242 * 5 / 4, "{grown:?}");
}

/// Without streams a step has as many prompts as its time allows; as soon as one streams, a chunk, and less next to decodes.
#[test]
fn steps_without_streams_fill_their_target_time() {
    let config = Config {
        chunk_tokens: 100,
        step_us: 1000 * TOKEN_US,
        prefix_cache: false,
        ..Config::default()
    };
    let mut sim = sim(config, LARGE);
    let whole = TestRequest {
        whole: true,
        ..TestRequest::plain(0, 200, 1)
    };
    let fill = |sim: &mut Sim| {
        for _ in 0..20 {
            sim.submit(&whole);
        }
    };
    let prompts = |sim: &mut Sim| step(sim).iter().map(|row| row.1).sum::<usize>();
    fill(&mut sim);
    assert_eq!(prompts(&mut sim), 100);
    let learnt = prompts(&mut sim);
    assert!((600..=1000).contains(&learnt), "{learnt}");
    let more = prompts(&mut sim);
    assert!((learnt..=1000).contains(&more), "{more}");
    fill(&mut sim);
    let stream = sim.submit(&TestRequest::plain(0, 5, 9));
    while sim.ended.iter().all(|ended| ended.id != stream) {
        let tokens = prompts(&mut sim);
        assert!(tokens <= 100, "{tokens}");
    }
    fill(&mut sim);
    assert!(prompts(&mut sim) >= 600);
    sim.drain();
}

#[test]
fn overtakes_are_limited() {
    let config = Config {
        policy: Policy::Lpm,
        max_running: 1,
        max_overtakes: 5,
        ..Config::default()
    };
    let mut sim = sim(config, LIMITS);
    sim.submit(&TestRequest::plain(40, 4, 1));
    step(&mut sim);
    let other = TestRequest {
        family: 1,
        ..TestRequest::plain(40, 4, 1)
    };
    let victim = sim.submit(&other);
    for _ in 0..20 {
        sim.submit(&TestRequest::plain(40, 4, 1));
        sim.submit(&TestRequest::plain(40, 4, 1));
        step(&mut sim);
    }
    let index = sim.ended.iter().position(|ended| ended.id == victim);
    assert_eq!(index, Some(6));
    sim.drain();
}

#[test]
fn a_request_with_many_parameters_does_not_starve() {
    let limits = Limits {
        frame: FrameBytes {
            params: 100,
            ..FrameBytes::UNLIMITED
        },
        ..LARGE
    };
    let mut sim = sim(Config::default(), limits);
    let with = |params_bytes, length| TestRequest {
        params_bytes,
        ..TestRequest::plain(0, 5, length)
    };
    let few: Vec<u64> = (0..9).map(|_| sim.submit(&with(10, 10))).collect();
    step(&mut sim);
    // All its samples share them.
    let many = sim.submit(&TestRequest {
        samples: 3,
        ..with(90, 5)
    });
    let mut waited = 0;
    while step(&mut sim).iter().all(|(id, _)| *id != many) {
        waited += 1;
        assert!(waited < 20, "it waits behind those that came later");
        // There is room for this one, but not before it.
        sim.submit(&with(10, 10));
    }
    assert!(
        few.iter()
            .all(|id| sim.ended.iter().any(|ended| ended.id == *id))
    );
    sim.drain();
}

#[test]
fn a_better_priority_preempts_others() {
    let limits = Limits {
        total_pages: 30,
        ..LIMITS
    };
    let config = |preemption_threshold| Config {
        priority: true,
        preemption_threshold,
        ..Config::default()
    };
    let play = |config| {
        let mut sim = sim(config, limits);
        let low = TestRequest {
            priority: Some(1),
            ..TestRequest::plain(0, 40, 18)
        };
        for _ in 0..2 {
            sim.submit(&low);
        }
        for _ in 0..10 {
            step(&mut sim);
        }
        assert_eq!(sim.scheduler.stats().running, 2);
        let high = TestRequest {
            priority: Some(2),
            ..TestRequest::plain(0, 60, 4)
        };
        let high = sim.submit(&high);
        sim.drain();
        (
            sim.ended.iter().position(|ended| ended.id == high),
            sim.ended,
        )
    };
    let (index, ended) = play(config(Some(0)));
    assert_eq!(index, Some(0));
    assert!(ended.iter().any(|ended| ended.retractions > 0));
    // By less than the threshold, or without preemption, it waits for its turn.
    for threshold in [Some(1), None] {
        assert_eq!(play(config(threshold)).0, Some(2));
    }
}

#[test]
fn no_preemption_for_a_request_whose_parameters_do_not_fit() {
    let limits = Limits {
        total_pages: 30,
        frame: FrameBytes {
            params: 100,
            ..FrameBytes::UNLIMITED
        },
        ..LIMITS
    };
    let config = Config {
        priority: true,
        preemption_threshold: Some(0),
        ..Config::default()
    };
    let mut sim = sim(config, limits);
    let request = |priority, params_bytes, length, tokens| TestRequest {
        priority: Some(priority),
        params_bytes,
        ..TestRequest::plain(0, length, tokens)
    };
    for _ in 0..2 {
        sim.submit(&request(1, 30, 40, 18));
    }
    for _ in 0..10 {
        step(&mut sim);
    }
    sim.submit(&request(2, 90, 60, 4));
    sim.drain();
    assert!(sim.ended.iter().all(|ended| ended.retractions == 0));
}

#[test]
fn a_session_keeps_its_prefix_for_its_next_request() {
    let limits = Limits {
        total_pages: 60,
        ..LIMITS
    };
    let play = |session| {
        let mut sim = sim(Config::default(), limits);
        let turn = TestRequest {
            session,
            ..TestRequest::plain(40, 0, 9)
        };
        sim.submit(&turn);
        sim.drain();
        // Others need most of the pages.
        for _ in 0..3 {
            let other = TestRequest {
                family: 2,
                ..TestRequest::plain(0, 120, 4)
            };
            sim.submit(&other);
            sim.drain();
        }
        sim.submit(&turn);
        sim.drain();
        sim.ended.last().map(|ended| ended.cached_tokens)
    };
    assert_eq!(play(Some(5)), Some(36));
    assert_eq!(play(None), Some(0));
}

#[test]
fn a_session_that_is_ended_keeps_no_pages_of_a_request_that_runs() {
    let limits = Limits {
        total_pages: 60,
        ..LIMITS
    };
    let mut sim = sim(Config::default(), limits);
    let turn = TestRequest {
        session: Some(5),
        ..TestRequest::plain(40, 0, 9)
    };
    sim.submit(&turn);
    sim.happen(&Event::Schedule);
    sim.scheduler.end_session(5);
    sim.drain();
    assert!(!sim.scheduler.end_session(5));
    // A later request of that number begins a session.
    sim.submit(&turn);
    sim.drain();
    assert!(sim.scheduler.end_session(5));
}

#[test]
fn sessions_end_when_pages_run_out() {
    let limits = Limits {
        total_pages: 40,
        ..LIMITS
    };
    let mut sim = sim(Config::default(), limits);
    for session in 0..3 {
        let turn = TestRequest {
            family: session,
            session: Some(session),
            ..TestRequest::plain(40, 0, 5)
        };
        sim.submit(&turn);
        sim.drain();
    }
    sim.submit(&TestRequest::plain(0, 150, 6));
    sim.drain();
    assert!(sim.ended.iter().all(|ended| ended.finish == Finish::Length));
}

#[test]
fn samples_share_the_pages_of_their_prompt() {
    let mut sim = sim(Config::default(), LIMITS);
    let request = TestRequest {
        samples: 4,
        ..TestRequest::plain(43, 0, 8)
    };
    sim.submit(&request);
    sim.drain();
    let mut cached: Vec<u32> = sim.ended.iter().map(|ended| ended.cached_tokens).collect();
    cached.sort_unstable();
    assert_eq!(cached, [0, 40, 40, 40]);
}

#[test]
fn requests_wait_for_a_shared_prefix() {
    let mut sim = sim(Config::default(), LIMITS);
    for _ in 0..5 {
        sim.submit(&TestRequest::plain(80, 4, 4));
    }
    assert_eq!(step(&mut sim), [(0, 84)]);
    let rows = step(&mut sim);
    assert_eq!(rows, [(0, 1), (1, 4), (2, 4), (3, 4), (4, 4)]);
    sim.drain();
}

#[test]
fn a_retracted_request_resumes_from_host_pages() {
    let limits = Limits {
        total_pages: 24,
        host_pages: 64,
        ..LIMITS
    };
    let config = Config {
        conservativeness: 0.0,
        ..Config::default()
    };
    let mut sim = sim(config, limits);
    for _ in 0..3 {
        sim.submit(&TestRequest::plain(0, 20, 40));
    }
    sim.drain();
    let retractions: u32 = sim.ended.iter().map(|ended| ended.retractions).sum();
    assert!(retractions > 0);
    assert!(sim.tally.0["pages to the device"] > 0, "{:?}", sim.tally);
}
