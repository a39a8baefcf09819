//! Drafts in replies: who gets them, what they say, where they stand, and that they pay.

use std::cell::Cell;
use std::time::Duration;

use crate::common::answer::{Answer, answer};
use crate::common::builder::{Encoded, GREEDY, LARGE, Req, frame};
use crate::common::engine::{Engine, memory};
use pie_planner::{
    ComputedPlan, DraftCounters, DraftOptions, ForwardTimings, Layout, Limits, NgramConfig,
    PagePool, Plan, Planner, StepMemory,
};

const NUM_DRAFTS: usize = 4;
const ROWS: usize = 64;

/// A planner that drafts, and a model that says `text[position]` at every position.
struct Server<F> {
    planner: Planner,
    text: F,
    /// How long a step takes by its rows.
    cost: fn(usize) -> Duration,
    /// Whether it prepares drafts before the tokens are known.
    early: bool,
    /// What it reported of drafts.
    reports: Vec<DraftCounters>,
}

/// What a request was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TokenCounts {
    tokens: Vec<u32>,
    drafts: Vec<u32>,
    positions: Vec<u32>,
}

impl<F: Fn(u32) -> u32> Server<F> {
    fn new(limits: Limits, text: F) -> Self {
        let mut planner = Planner::new(limits, 9);
        let options = DraftOptions {
            ngram: NgramConfig::default(),
            num_drafts: NUM_DRAFTS,
            graph_sizes: vec![1, 2, 4, 8, 16, 32, ROWS],
            host_pages: 8,
        };
        planner
            .enable_drafts(&options)
            .expect("the options are right");
        Self {
            planner,
            text,
            cost: |_| Duration::from_millis(1),
            early: true,
            reports: Vec::new(),
        }
    }

    /// Requests with their context, and whether they ask for drafts.
    fn run(&mut self, requests: &[(Req, u64, bool)]) -> (Vec<TokenCounts>, bool) {
        let parts: Vec<Req> = requests
            .iter()
            .map(|(request, ..)| request.clone())
            .collect();
        let mut frame = frame(&parts);
        frame.context_ids = requests.iter().map(|&(_, context, _)| context).collect();
        frame.output_spec_flags = requests.iter().map(|&(.., asks)| asks).collect();
        let encoded = Encoded::new(crate::common::device::DRIVER, &frame);
        let planned = self
            .planner
            .plan(crate::common::device::DRIVER, encoded.forward());
        let plan = planned.expect("a right frame");
        assert_eq!(plan.request_errors(), []);
        let positions: Vec<u32> = parts
            .iter()
            .flat_map(|request| request.positions.iter().chain(&request.draft_positions))
            .copied()
            .collect();
        let mut computed = self.compute(plan, &positions);
        let capacity = self.planner.limits().reply_bytes as usize;
        let mut words = vec![0_u64; capacity.div_ceil(8)];
        let bytes = &mut bytemuck::cast_slice_mut(&mut words)[..capacity];
        let length = self
            .planner
            .reply(&mut computed, ForwardTimings::default(), bytes);
        let length = length.expect("the reply fits");
        let time = (self.cost)(positions.len());
        self.planner.record_step_time(&mut computed, time, time);
        self.planner.recycle(computed);
        self.reports.extend(self.planner.draft_report());
        match answer(&bytes[..length]) {
            Answer::Fast(tokens) => {
                let alone = |token| TokenCounts {
                    tokens: vec![token],
                    drafts: Vec::new(),
                    positions: Vec::new(),
                };
                (tokens.into_iter().map(alone).collect(), true)
            }
            Answer::Archive(response) => {
                response.check().expect("a response that keeps the rules");
                let part = |indptr: &[u32], values: &[u32], index: usize| match indptr {
                    [] => Vec::new(),
                    ends => values[ends[index] as usize..ends[index + 1] as usize].to_vec(),
                };
                let r = &response;
                let answered = |index| TokenCounts {
                    tokens: part(&r.tokens_indptr, &r.tokens, index),
                    drafts: part(&r.spec_indptr, &r.spec_tokens, index),
                    positions: part(&r.spec_indptr, &r.spec_positions, index),
                };
                ((0..requests.len()).map(answered).collect(), false)
            }
        }
    }

    fn compute(&mut self, plan: Plan, positions: &[u32]) -> ComputedPlan {
        let size = plan.graph_size(ROWS);
        let rows = size.expect("a graph takes it").rows;
        let layout = Layout::graph(rows);
        let mut block = vec![0_u64; layout.bytes().div_ceil(8)];
        let mut masks = vec![0; rows * self.planner.limits().mask_words()];
        let memory = StepMemory {
            block: bytemuck::cast_slice_mut(&mut block),
            mask_words: &mut masks,
        };
        let staged = self.planner.stage_graph(plan, &layout, memory, 1);
        let mut staged = staged.expect("the memory fits");
        if self.early {
            self.planner.prepare_drafts(&mut staged);
        }
        let text = &self.text;
        staged.put_tokens(|row| text(positions[row] + 1), |_| 0)
    }
}

/// A context that is decoded as an inferlet does.
struct Context {
    id: u64,
    pages: Vec<u32>,
    stored: u32,
    input: u32,
    drafts: Vec<u32>,
    drafted: usize,
}

impl Context {
    fn new(id: u64, pages: std::ops::Range<u32>, input: u32) -> Self {
        Self {
            id,
            pages: pages.collect(),
            stored: 0,
            input,
            drafts: Vec::new(),
            drafted: 0,
        }
    }

    fn request(&self) -> Req {
        let end = self.stored + 1 + self.drafts.len() as u32;
        let pages = &self.pages[..end.div_ceil(16) as usize];
        Req::new(16, self.stored, &[self.input], pages)
            .sample(0, GREEDY)
            .verify(&self.drafts)
    }

    fn take(&mut self, answered: &TokenCounts) {
        let TokenCounts {
            tokens,
            drafts,
            positions,
        } = answered;
        let first = self.stored + tokens.len() as u32 + 1;
        assert_eq!(positions, &(first..).take(drafts.len()).collect::<Vec<_>>());
        assert!(drafts.len() <= NUM_DRAFTS);
        self.drafted += self.drafts.len();
        self.stored += tokens.len() as u32;
        self.input = tokens[tokens.len() - 1];
        self.drafts.clone_from(drafts);
    }
}

/// Decodes contexts together until the first one has stored `length` tokens; returns the steps.
fn decode<F: Fn(u32) -> u32>(
    server: &mut Server<F>,
    contexts: &mut [Context],
    asks: bool,
    length: u32,
) -> usize {
    let mut steps = 0;
    while contexts[0].stored < length {
        let requests: Vec<_> = contexts.iter().map(|c| (c.request(), c.id, asks)).collect();
        let (answers, _) = server.run(&requests);
        for (context, answered) in contexts.iter_mut().zip(&answers) {
            let from = context.stored + 1;
            let expected: Vec<u32> = (from..)
                .take(answered.tokens.len())
                .map(&server.text)
                .collect();
            assert_eq!(answered.tokens, expected);
            context.take(answered);
        }
        steps += 1;
    }
    steps
}

fn cycle(position: u32) -> u32 {
    100 + position % 7
}

/// Short words in an order that nothing foretells.
fn noise(position: u32) -> u32 {
    (position.wrapping_mul(2_654_435_761) >> 13) % 5
}

#[test]
fn drafts_pay_where_text_repeats_itself() {
    let mut server = Server::new(LARGE, cycle);
    let mut contexts = [
        Context::new(1, 0..24, cycle(0)),
        Context::new(2, 24..48, cycle(0)),
    ];
    let steps = decode(&mut server, &mut contexts, true, 350);
    assert!(steps < 350 / 4, "{steps} steps");
    let counters = server.planner.draft_counters().expect("it drafts");
    assert!(counters.accepted * 10 > counters.drafted * 9, "{counters}");
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
    // Where nothing is drafted, because nothing comes true, steps count.
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
    // Another text, stored by a context that asks for nothing, goes on under the same id at the same length.
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
