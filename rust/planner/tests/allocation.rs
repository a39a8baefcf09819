//! The steady state does not touch the heap, and no frame makes the planner grow beyond its own size.

mod common;

use allocation_counter::measure;
use common::builder::{Encoded, GREEDY, LARGE, Req, decode, frame};
use common::device::DRIVER;
use common::engine::{Engine, memory};
use pie_planner::{DraftOptions, ForwardTimings, Layout, Limits, NgramConfig, Planner, StepMemory};
use pie_wire::{ForwardRequest, Sampler};
use std::time::Duration;

/// Rows of the graph.
const ROWS: usize = 64;

/// A planner with all the memory that one frame needs.
struct Driver {
    planner: Planner,
    engine: Engine,
    block: Vec<u64>,
    graphs: [Layout; 2],
    masks: Vec<i32>,
    buffer: Vec<u64>,
    /// Of the last frame.
    errors: usize,
    tokens: usize,
}

impl Driver {
    fn new(limits: Limits) -> Self {
        let planner = Planner::new(limits, 0);
        Self {
            block: vec![0; planner.layout().bytes() / 8],
            graphs: [Layout::graph(ROWS), Layout::grouped_graph(ROWS)],
            masks: vec![0; ROWS * limits.mask_words()],
            buffer: vec![0; 1 << 13],
            engine: Engine::default(),
            errors: 0,
            tokens: 0,
            planner,
        }
    }

    /// Plan, a step for a graph of one kind, reply; `false` when no graph takes the frame. `took` says how long the device
    /// worked.
    fn graph_step(&mut self, graph: usize, encoded: &Encoded, took: Option<Duration>) -> bool {
        let planned = self.planner.plan(DRIVER, encoded.forward());
        let mut plan = planned.expect("a sound frame");
        let size = plan.graph_size(ROWS);
        self.planner.find_prefix_groups(&mut plan, 0);
        if size.is_none_or(|size| size.rows > ROWS) {
            let block = bytemuck::cast_slice_mut(&mut self.block);
            let computed = self.engine.run(&mut self.planner, plan, block);
            self.planner.recycle(computed);
            return false;
        }
        let memory = StepMemory {
            block: bytemuck::cast_slice_mut(&mut self.block),
            mask_words: &mut self.masks,
        };
        let staged = self
            .planner
            .stage_graph(plan, &self.graphs[graph], memory, 1);
        let mut computed = staged
            .expect("the memory fits")
            .put_tokens(|row| row as u32, |_| 0);
        let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut self.buffer);
        let reply = self
            .planner
            .reply(&mut computed, ForwardTimings::default(), buffer);
        if let Some(time) = took {
            self.planner.record_step_time(&mut computed, time, time);
        }
        self.planner.recycle(computed);
        reply.is_ok()
    }

    /// Plan, every pass, every group, reply; `false` when the frame is refused.
    fn step(&mut self, encoded: &Encoded, capacity: usize) -> bool {
        let Some(request) = encoded.try_forward() else {
            return false;
        };
        let Ok(plan) = self.planner.plan(DRIVER, request) else {
            return false;
        };
        let block = bytemuck::cast_slice_mut(&mut self.block);
        let mut computed = self.engine.run(&mut self.planner, plan, block);
        let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut self.buffer);
        let buffer = &mut buffer[..capacity];
        let reply = self
            .planner
            .reply(&mut computed, ForwardTimings::default(), buffer);
        self.errors = computed.request_errors().len();
        self.tokens = computed.token_count();
        self.planner.recycle(computed);
        reply.is_ok()
    }
}

/// Allocations made by a closure.
fn allocations(action: impl FnOnce()) -> u64 {
    measure(action).count_total
}

fn random(temperature: f32) -> Sampler {
    Sampler::TopKTopP {
        temperature,
        k: 5,
        p: 0.9,
    }
}

/// A request with every kind of probe and a logit mask.
fn probed(page: u32, allowed: &[u32]) -> Req {
    let labels = Sampler::Logprobs {
        token_ids: vec![1, 2000, 3],
    };
    let dist = Sampler::Dist {
        temperature: 0.5,
        num_tokens: 20,
    };
    Req::new(16, 0, &[1, 2, 3], &[page])
        .sample(2, random(0.9))
        .sample(0, Sampler::RawLogits)
        .sample(1, labels)
        .sample(2, dist)
        .sample(2, Sampler::Entropy)
        .allow(allowed)
}

/// Decode, forked, mixed and verify frames, probes and masks of both kinds, a replay and one whose requests fail.
fn frames() -> Vec<ForwardRequest> {
    let steps: Vec<_> = (0..16).map(|r| decode(20 + r, 1, &[r, r + 20])).collect();
    let scored = Req::new(16, 16, &[1; 40], &[1, 2, 3, 4])
        .sample(39, random(0.8))
        .sample(3, GREEDY)
        .sample(3, random(1.0));
    let replay = Req::new(16, 0, &[1, 2], &[9]).masked([&[0, 1], &[0, 2]]);
    let mut mixed = frame(&[steps[0].clone(), scored, replay, steps[3].clone()]);
    mixed.has_user_mask = true;
    let verify: Vec<_> = steps
        .iter()
        .map(|step| step.clone().verify(&[3, 3, 4]))
        .collect();
    let behind = Req::new(16, 0, &[1; 9], &[10]).masked([&[1]; 9]);
    let ahead = Req::new(16, 16, &[1; 5], &[1, 11]).masked([&[3, 6, 4, 6]; 5]);
    let mut masked = frame(&[behind, steps[4].clone(), ahead]);
    masked.has_user_mask = true;
    let mut outside = decode(3, 1, &[64]);
    outside.samplers.push((0, Sampler::Entropy));
    let masks: [&[u32]; 4] = [&[3, 40, 2, 7], &[3, 40, 2, 7], &[5000], &[0, 999]];
    let scored: Vec<_> = masks
        .iter()
        .zip(0..)
        .map(|(mask, page)| probed(page, mask))
        .collect();
    let both = probed(5, &[9, 9]).verify(&[3, 3]);
    let two_masks = probed(6, &[9, 9]).allow(&[9, 9]);
    // 24 pages of 16 tokens are enough to be read once for all.
    let forks = (0..4).map(|own| {
        let pages: Vec<u32> = (0..24).chain([40 + own]).collect();
        decode(390, 1, &pages)
    });
    let forks: Vec<_> = forks.collect();
    vec![
        frame(&scored),
        frame(&[both, steps[2].clone().allow(&[0, 9])]),
        frame(&steps),
        frame(&forks),
        mixed,
        masked,
        frame(&verify),
        frame(&[outside, two_masks, steps[1].clone()]),
        frame(&[]),
    ]
}

#[test]
fn the_counter_counts() {
    let counted = measure(|| drop(std::hint::black_box(vec![1_u8; 9])));
    let numbers = (
        counted.count_total,
        counted.bytes_max,
        counted.bytes_current,
    );
    assert_eq!(numbers, (1, 9, 0));
}

#[test]
fn the_steady_state_allocates_nothing() {
    let tight = Limits {
        max_requests: 3,
        chunk_tokens: 7,
        max_slots: 2,
        ..LARGE
    };
    let encoded: Vec<_> = frames()
        .iter()
        .map(|frame| Encoded::new(DRIVER, frame))
        .collect();
    for limits in [LARGE, tight] {
        let mut driver = Driver::new(limits);
        for encoded in encoded.iter().chain(&encoded) {
            assert!(driver.step(encoded, 1 << 15));
        }
        for _ in 0..3 {
            for (number, encoded) in encoded.iter().enumerate() {
                let count = allocations(|| assert!(driver.step(encoded, 1 << 15)));
                assert_eq!(count, 0, "frame {number}");
                // A reply that fails is no exception.
                let count = allocations(|| assert!(!driver.step(encoded, 0)));
                assert_eq!(count, 0, "frame {number}, without room");
            }
        }
    }
}

#[test]
fn steps_for_graphs_allocate_nothing() {
    let encoded: Vec<_> = frames()
        .iter()
        .map(|frame| Encoded::new(DRIVER, frame))
        .collect();
    let mut driver = Driver::new(LARGE);
    let taken = |driver: &mut Driver| {
        let taken = encoded.iter().filter(|encoded| {
            let taken = [0, 1].map(|graph| driver.graph_step(graph, encoded, None));
            assert_eq!(taken[0], taken[1]);
            taken[0]
        });
        taken.count()
    };
    taken(&mut driver);
    let mut count = 0;
    assert_eq!(allocations(|| count = taken(&mut driver)), 0);
    assert_eq!(
        count, 4,
        "decodes, forks, drafts, and what is left of a bad frame"
    );
}

#[test]
fn recurrent_state_is_planned_without_allocations() {
    let requests: Vec<_> = (0..8).map(|page| decode(3, 1, &[page])).collect();
    let encoded = Encoded::new(
        DRIVER,
        &ForwardRequest {
            // Some name one slot.
            rs_slot_ids: vec![0, 1, 2, 1, 3, 3, 4, 5],
            rs_slot_flags: vec![0; 8],
            ..frame(&requests)
        },
    );
    let mut planner = Planner::new(LARGE, 0).with_states(6);
    let (mut engine, mut block) = (Engine::default(), memory(planner.layout()));
    let mut plan = || {
        let plan = planner.plan(DRIVER, encoded.forward()).unwrap();
        let memory = bytemuck::cast_slice_mut(&mut block);
        let computed = engine.run(&mut planner, plan, memory);
        let errors = computed.request_errors().len();
        planner.recycle(computed);
        errors
    };
    assert_eq!((plan(), plan()), (0, 0));
    assert_eq!(allocations(|| assert_eq!(plan(), 0)), 0);
}

#[test]
fn drafting_allocates_nothing_in_the_steady_state() {
    const REQUESTS: u32 = 8;
    let limits = Limits {
        reply_bytes: 1 << 15,
        ..LARGE
    };
    let mut driver = Driver::new(limits);
    let options = DraftOptions {
        ngram: Some(NgramConfig::default()),
        num_drafts: 60,
        graph_sizes: vec![8, 1024],
        model_sizes: Vec::new(),
        host_pages: 0,
    };
    driver
        .planner
        .enable_drafts(&options)
        .expect("the options are right");
    // The answer of row `r` is `r`, which makes the text of request `r` continue.
    let prompt = |r: u32| Req::new(16, 0, &[r, 500, r, 500, r, 500, r], &[r]).sample(6, GREEDY);
    let next = |r: u32| Req::new(16, 7, &[500], &[r]).sample(0, GREEDY);
    let encoded = |requests: Vec<Req>, asks: bool| {
        let mut frame = frame(&requests);
        frame.context_ids = (1..=u64::from(REQUESTS)).collect();
        frame.output_spec_flags = vec![asks; requests.len()];
        Encoded::new(DRIVER, &frame)
    };
    let prompts = encoded((0..REQUESTS).map(prompt).collect(), false);
    let steps = encoded((0..REQUESTS).map(next).collect(), true);
    // Most words of a reply: those with drafts are long.
    let mut longest = 0;
    let mut round = || {
        assert!(driver.graph_step(0, &prompts, None));
        // All rows cost the same, so drafts pay.
        for _ in 0..4 {
            driver.buffer.fill(0);
            let time = Duration::from_millis(1);
            assert!(driver.graph_step(0, &steps, Some(time)));
            let words = driver.buffer.iter().filter(|&&word| word != 0).count();
            longest = longest.max(words);
            driver.planner.draft_report();
        }
    };
    (0..200).for_each(|_| round());
    let count = allocations(|| (0..200).for_each(|_| round()));
    assert_eq!(count, 0);
    assert!(longest > 60, "no reply has more than {longest} words");
}

#[test]
fn a_lost_block_table_costs_no_memory() {
    let mut driver = Driver::new(LARGE);
    let encoded = Encoded::new(DRIVER, &frames()[0]);
    assert!(driver.step(&encoded, 1 << 15));
    let count = allocations(|| {
        driver.planner.invalidate_block_table();
        assert!(driver.step(&encoded, 1 << 15));
    });
    assert_eq!(count, 0);
}

/// The most memory that planning, staging and answering a frame adds to what was there.
fn peak(limits: Limits, request: &ForwardRequest) -> (u64, Driver) {
    let encoded = Encoded::new(DRIVER, request);
    let mut driver = Driver::new(limits);
    let taken = measure(|| _ = driver.step(&encoded, 1 << 16));
    (taken.bytes_max, driver)
}

#[test]
fn outputs_that_do_not_fit_take_no_memory() {
    let limits = Limits {
        vocab_size: 150_000,
        ..LARGE
    };
    let dist = Sampler::Dist {
        temperature: 1.0,
        num_tokens: 0,
    };
    for probe in [Sampler::RawLogits, dist] {
        // Alone they would take 60 GB, or 120.
        let one = Req {
            samplers: vec![(0, probe.clone()); 100_000],
            ..decode(3, 1, &[0])
        };
        let many: Vec<_> = (0..100_000_u32)
            .map(|r| Req::new(16, 3, &[1], &[r % 64]).sample(0, probe.clone()))
            .collect();
        for (requests, errors) in [(vec![one], 1), (many, 100_000)] {
            let (peak, driver) = peak(limits, &frame(&requests));
            assert_eq!(driver.errors, errors);
            assert_eq!(driver.tokens, requests.len());
            // A slot and a request are records of some hundred bytes.
            assert!(peak < 1000 * 100_000, "{peak} bytes");
        }
    }
}

#[test]
fn requests_that_do_not_fit_do_not_accumulate() {
    let limits = Limits {
        reply_bytes: 5000,
        ..LARGE
    };
    let mut driver = Driver::new(limits);
    let encoded = Encoded::new(DRIVER, &frames()[0]);
    assert!(driver.step(&encoded, 5000));
    assert!(driver.errors > 0);
    let again = measure(|| {
        for _ in 0..100 {
            assert!(driver.step(&encoded, 5000));
        }
    });
    assert_eq!(again.bytes_current, 0);
}

/// A small generator of damage.
struct Damage(u64);

impl Damage {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }

    fn apply(&mut self, encoded: &mut Encoded) {
        for _ in 0..=self.next(3) {
            let words = encoded.bytes().len() / 4;
            let at = 4 * self.next(words);
            let word = match self.next(4) {
                0 => u32::MAX - self.next(40) as u32,
                1 => self.next(1 << 20) as u32,
                _ => self.next(40) as u32,
            };
            encoded.bytes_mut()[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
    }
}

#[test]
fn hostile_frames_do_not_accumulate() {
    let originals: Vec<_> = frames()
        .iter()
        .map(|frame| Encoded::new(DRIVER, frame))
        .collect();
    let largest = originals
        .iter()
        .map(|encoded| encoded.bytes().len())
        .max()
        .unwrap_or(0);
    let mut damage = Damage(1);
    let limits = Limits {
        vocab_size: 100,
        ..LARGE
    };
    let mut driver = Driver::new(limits);
    let (mut planned, mut grown) = (0, 0);
    for round in 0..4000 {
        let mut encoded = originals[round % originals.len()].clone();
        damage.apply(&mut encoded);
        let stepped = measure(|| planned += usize::from(driver.step(&encoded, 1 << 15)));
        grown += stepped.bytes_current;
        // Every buffer is at most twice a small multiple of the largest frame or of the longest reply.
        let bound = 32 * largest + 8 * limits.reply_bytes as usize;
        assert!(
            grown < bound as i64,
            "{grown} bytes after frame {round} of at most {largest}"
        );
    }
    assert!(planned > 400, "only {planned} frames got through");
}
