//! Drafts in replies: who gets them, what they say, where they stand, and that they pay.

use std::cell::Cell;
use std::time::Duration;

use crate::common::builder::{Encoded, GREEDY, LARGE, Req, frame};
use crate::common::draft_server::{Context, NUM_DRAFTS, Server, cycle, decode, noise};
use crate::common::engine::{Engine, memory};
use pie_planner::{Limits, NgramConfig, PagePool, SuffixConfig};

#[test]
fn drafts_pay_where_text_repeats_itself() {
    for suffix in [None, Some(SuffixConfig::default())] {
        let drafter = NgramConfig {
            suffix,
            ..NgramConfig::default()
        };
        let mut server = Server::with_drafter(LARGE, cycle, drafter);
        let mut contexts = [
            Context::new(1, 0..24, cycle(0)),
            Context::new(2, 24..48, cycle(0)),
        ];
        let steps = decode(&mut server, &mut contexts, true, 350);
        assert!(steps < 350 / 4, "{steps} steps");
        let counters = server.planner.draft_counters().expect("it drafts");
        assert!(counters.accepted * 10 > counters.drafted * 9, "{counters}");
    }
}

#[test]
fn drafts_of_a_model_follow_the_last_accepted_token() {
    // Wrong every fifth token, so that requests verify drafts which are accepted in part.
    let model = |position: u32| cycle(position) + u32::from(position.is_multiple_of(5));
    let mut server = Server::with_model(LARGE, cycle, model);
    let mut contexts = [
        Context::new(1, 0..24, cycle(0)),
        Context::new(2, 24..48, cycle(0)),
    ];
    let mut drafted = 0;
    while contexts[0].stored < 350 {
        let requests: Vec<_> = contexts.iter().map(|c| (c.request(), c.id, true)).collect();
        let (answers, _) = server.run(&requests);
        for (context, answered) in contexts.iter_mut().zip(&answers) {
            let expected: Vec<u32> = answered.positions.iter().map(|&at| model(at)).collect();
            assert_eq!(answered.drafts, expected);
            drafted += expected.len();
            context.take(answered);
        }
    }
    assert!(drafted > 300, "{drafted}");
    let counters = server.planner.draft_counters().expect("it drafts");
    assert!(counters.accepted * 2 > counters.drafted, "{counters}");
    assert!(counters.accepted < counters.drafted, "{counters}");
}

#[test]
fn a_model_that_is_wrong_drafts_little() {
    let mut server = Server::with_model(LARGE, cycle, |position| cycle(position) + 1);
    server.cost = |rows| Duration::from_millis(rows as u64);
    let mut contexts = [Context::new(1, 0..24, cycle(0))];
    let steps = decode(&mut server, &mut contexts, true, 350);
    assert_eq!(steps, 350);
    assert!(contexts[0].drafted < 50, "{}", contexts[0].drafted);
}

#[test]
fn a_step_whose_graph_does_not_draft_has_none() {
    let mut server = Server::with_model(LARGE, cycle, |_| u32::MAX);
    let mut contexts = [Context::new(1, 0..24, cycle(0))];
    assert_eq!(decode(&mut server, &mut contexts, true, 100), 100);
    assert_eq!(contexts[0].drafted, 0);
    // Nor one without drafts of a model, as passes of the Python path.
    server.model = None;
    assert_eq!(decode(&mut server, &mut contexts, true, 200), 100);
    assert_eq!(contexts[0].drafted, 0);
}

#[test]
fn reports_come_soon_and_then_more_and_more_rarely() {
    // As much as a short conversation of eight programs.
    let mut server = Server::new(LARGE, cycle);
    let mut contexts: Vec<_> = (0..8)
        .map(|id| Context::new(u64::from(id) + 1, 8 * id..8 * id + 8, cycle(0)))
        .collect();
    let steps = decode(&mut server, &mut contexts, true, 120);
    let first = server.reports.first().expect("a report");
    assert!(first.drafted < 2 * 256, "{first}");
    let counters = server.planner.draft_counters().expect("it drafts");
    assert!(server.reports.len() <= 3, "{steps} steps, {counters}");
    // Where nothing is drafted, because nothing is accepted, steps count.
    let mut server = Server::new(LARGE, noise);
    server.cost = |rows| Duration::from_millis(rows as u64);
    let steps = decode(
        &mut server,
        &mut [Context::new(1, 0..24, noise(0))],
        true,
        350,
    );
    assert!(steps >= 256);
    assert_eq!(server.reports.len(), 1);
    assert_eq!(server.reports[0].steps, 256);
}

#[test]
fn it_does_not_matter_when_drafts_are_prepared() {
    let text = |position: u32| {
        if position % 40 < 25 {
            cycle(position)
        } else {
            noise(position)
        }
    };
    let [mut early, mut late] = [true, false].map(|early| {
        let mut server = Server::new(LARGE, text);
        server.early = early;
        (server, Context::new(1, 0..24, text(0)))
    });
    let mut drafted = 0;
    while early.1.stored < 300 {
        let [a, b] = [&mut early, &mut late].map(|(server, context)| {
            let (answers, _) = server.run(&[(context.request(), context.id, true)]);
            context.take(&answers[0]);
            answers
        });
        assert_eq!(a, b);
        drafted += a[0].drafts.len();
    }
    assert!(drafted > 50);
}

#[test]
fn drafts_that_fail_are_left() {
    let mut server = Server::new(LARGE, noise);
    // A row more costs as much as a step.
    server.cost = |rows| Duration::from_millis(rows as u64);
    let mut contexts = [
        Context::new(1, 0..24, noise(0)),
        Context::new(2, 24..48, noise(0)),
    ];
    let steps = decode(&mut server, &mut contexts, true, 350);
    let drafted = contexts[0].drafted + contexts[1].drafted;
    assert!(drafted < steps / 10, "{drafted} drafts in {steps} steps");
}

#[test]
fn batches_that_no_graph_runs_say_nothing_of_graphs() {
    let drafted = |eager: bool| {
        let mut server = Server::new(LARGE, noise);
        server.cost = |rows| Duration::from_millis(rows as u64);
        let mut context = Context::new(1, 0..24, noise(0));
        while context.stored < 350 {
            let (answers, _) = server.run(&[(context.request(), context.id, true)]);
            context.take(&answers[0]);
            if eager {
                let other = Encoded::new(
                    crate::common::device::DRIVER,
                    &frame(&[Req::new(16, 0, &[1], &[40])]),
                );
                let planned = server
                    .planner
                    .plan(crate::common::device::DRIVER, other.forward());
                let plan = planned.expect("a right frame");
                let mut memory = memory(server.planner.layout());
                let memory = bytemuck::cast_slice_mut(&mut memory);
                let mut computed = Engine::default().run(&mut server.planner, plan, memory);
                let time = Duration::from_millis(100);
                server.planner.record_step_time(&mut computed, time, time);
            }
        }
        context.drafted
    };
    assert_eq!(drafted(true), drafted(false));
}

#[test]
fn only_who_asks_and_is_somebody_gets_drafts() {
    let mut server = Server::new(LARGE, cycle);
    let mut contexts = [
        Context::new(1, 0..24, cycle(0)),
        Context::new(0, 24..48, cycle(0)),
    ];
    assert_eq!(decode(&mut server, &mut contexts, false, 100), 100);
    let quiet = contexts.map(|context| (context.request(), context.id, context.id == 0));
    let (answers, fast) = server.run(&quiet);
    assert!(fast && answers.iter().all(|answered| answered.drafts.is_empty()));
}

#[test]
fn a_context_is_known_from_its_pages() {
    let mut server = Server::new(LARGE, cycle);
    let mut contexts = [Context::new(1, 0..24, cycle(0))];
    decode(&mut server, &mut contexts, false, 40);
    let [parent] = contexts;
    // Swapped out and in elsewhere, under another id.
    for page in 0..3 {
        let host = (PagePool::Host, 2 * page);
        server.planner.page_copied((PagePool::Device, page), host);
        server
            .planner
            .page_copied(host, (PagePool::Device, 40 + page));
    }
    let mut child = Context::new(9, 40..64, parent.input);
    child.stored = parent.stored;
    let (answers, fast) = server.run(&[(child.request(), child.id, true)]);
    assert!(!fast);
    child.take(&answers[0]);
    let expected: Vec<u32> = (child.stored + 1..).take(NUM_DRAFTS).map(cycle).collect();
    assert!(!child.drafts.is_empty());
    assert_eq!(child.drafts, expected[..child.drafts.len()]);
}

#[test]
fn a_long_past_comes_by_and_by() {
    let limits = Limits {
        max_positions: 4096,
        row_pages: 256,
        total_pages: 256,
        ..LARGE
    };
    for costs_are_known in [true, false] {
        let mut server = Server::new(limits, cycle);
        // Steps so short that little can be read again in one.
        server.cost = |_| Duration::from_micros(10);
        let mut context = Context::new(3, 0..256, cycle(1500));
        if costs_are_known {
            decode(&mut server, &mut [Context::new(0, 100..124, 0)], false, 2);
        }
        for start in (0..1500).step_by(60) {
            let tokens: Vec<u32> = (start..start + 60).map(cycle).collect();
            let pages = &context.pages[..(start + 60).div_ceil(16) as usize];
            let part = Req::new(16, start, &tokens, pages).sample(59, GREEDY);
            server.run(&[(part, 0, false)]);
        }
        context.stored = 1500;
        let drafted: Vec<usize> = (0..10)
            .map(|_| {
                let (answers, _) = server.run(&[(context.request(), 3, true)]);
                context.take(&answers[0]);
                context.drafts.len()
            })
            .collect();
        let first = drafted.iter().position(|&drafts| drafts > 0);
        assert_eq!(first, Some(1500 / 256), "{drafted:?}");
    }
}

#[test]
fn going_far_back_is_spread_over_frames() {
    let limits = Limits {
        max_positions: 16_384,
        row_pages: 1024,
        total_pages: 1024,
        ..LARGE
    };
    let first_drafts = |back: u32| {
        let mut server = Server::new(limits, cycle);
        server.cost = |_| Duration::from_millis(1);
        let mut context = Context::new(3, 0..1000, cycle(0));
        decode(&mut server, &mut [Context::new(0, 1000..1010, 0)], false, 2);
        for start in (0..12_000).step_by(60) {
            let tokens: Vec<u32> = (start..start + 60).map(cycle).collect();
            let pages = &context.pages[..(start + 60).div_ceil(16) as usize];
            let part = Req::new(16, start, &tokens, pages).sample(59, GREEDY);
            server.run(&[(part, 3, true)]);
        }
        context.stored = 12_000 - back;
        context.input = cycle(context.stored);
        let drafted: Vec<usize> = (0..20)
            .map(|_| {
                let (answers, _) = server.run(&[(context.request(), 3, true)]);
                context.take(&answers[0]);
                let next = (context.stored + 1..).map(cycle);
                assert!(
                    context
                        .drafts
                        .iter()
                        .copied()
                        .eq(next.take(context.drafts.len()))
                );
                context.drafts.len()
            })
            .collect();
        drafted.iter().position(|&drafts| drafts > 0)
    };
    assert_eq!(first_drafts(4000), Some(0), "that is undone at once");
    // It is read again from its pages, 500 tokens in each step of a millisecond.
    assert_eq!(first_drafts(5000), Some(7000 / 500));
}

#[test]
fn of_a_context_that_stands_twice_the_last_request_counts() {
    let mut server = Server::new(LARGE, cycle);
    // What a step costs is known from here on.
    decode(&mut server, &mut [Context::new(0, 40..64, 0)], false, 2);
    let context = Context::new(1, 0..24, cycle(0));
    let part = |start: u32| {
        let tokens: Vec<u32> = (start..start + 20).map(cycle).collect();
        let pages = &context.pages[..(start + 20).div_ceil(16) as usize];
        Req::new(16, start, &tokens, pages).sample(19, GREEDY)
    };
    // Both parts of a prompt in one frame.
    let (answers, _) = server.run(&[(part(0), 1, true), (part(20), 1, true)]);
    assert!(answers[0].drafts.is_empty());
    let expected: Vec<u32> = (41..).take(answers[1].drafts.len()).map(cycle).collect();
    assert!(!expected.is_empty());
    assert_eq!(answers[1].drafts, expected);
}

#[test]
fn an_id_that_changed_hands_is_noticed() {
    let other = Cell::new(false);
    let text = |position| {
        if other.get() {
            500 + position % 3
        } else {
            cycle(position)
        }
    };
    let mut server = Server::new(LARGE, text);
    let mut contexts = [Context::new(1, 0..24, cycle(0))];
    decode(&mut server, &mut contexts, true, 30);
    let [former] = contexts;
    // Another text, stored by a context that asks for nothing, continues under the same id at the same length.
    other.set(true);
    let mut contexts = [Context::new(0, 24..48, 500)];
    decode(&mut server, &mut contexts, false, former.stored);
    let [mut heir] = contexts;
    heir.id = former.id;
    let (answers, _) = server.run(&[(heir.request(), heir.id, true)]);
    heir.take(&answers[0]);
    let expected: Vec<u32> = (heir.stored + 1..).take(NUM_DRAFTS).map(text).collect();
    assert!(!heir.drafts.is_empty());
    assert_eq!(heir.drafts, expected[..heir.drafts.len()]);
}

#[test]
fn drafts_are_left_out_of_a_reply_without_room_for_them() {
    let limits = Limits {
        reply_bytes: 180,
        ..LARGE
    };
    let mut server = Server::new(limits, cycle);
    let mut contexts = [Context::new(1, 0..24, cycle(0))];
    assert_eq!(decode(&mut server, &mut contexts, true, 60), 60);
    let mut roomy = Server::new(LARGE, cycle);
    let mut contexts = [Context::new(1, 0..24, cycle(0))];
    assert!(decode(&mut roomy, &mut contexts, true, 60) < 60);
}

#[test]
fn drafts_end_with_the_positions() {
    let limits = Limits {
        max_positions: 64,
        ..LARGE
    };
    let mut server = Server::new(limits, cycle);
    let mut contexts = [Context::new(1, 0..24, cycle(0))];
    // A draft beyond the last position would be refused, and so would its request.
    decode(&mut server, &mut contexts, true, 63);
    assert!(contexts[0].drafts.is_empty());
}
