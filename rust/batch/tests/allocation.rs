//! The steady state does not touch the heap, and no frame makes the planner grow beyond its own size.

#![expect(unsafe_code, reason = "a global allocator is an unsafe trait")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::builder::{Encoded, GREEDY, ROOMY, Req, decode, frame};
use common::device::DRIVER;
use pie_batch::{Limits, Planner, Probes};
use pie_wire::{ForwardRequest, Sampler};

thread_local! {
    /// Allocations of this thread; tests run in parallel.
    static COUNT: Cell<u64> = const { Cell::new(0) };
    /// Bytes that this thread has allocated and not freed.
    static LIVE: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, counting.
struct Counting;

fn count(grown: isize) {
    COUNT.set(COUNT.get() + u64::from(grown > 0));
    LIVE.set(LIVE.get() + grown);
}

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A planner with all the memory that one frame needs.
struct Engine {
    planner: Planner,
    block: Vec<u64>,
    buffer: Vec<u64>,
    tokens: Vec<i64>,
    dropped: Vec<usize>,
}

impl Engine {
    fn new(limits: Limits) -> Self {
        let planner = Planner::new(limits, 0);
        Self {
            block: vec![0; planner.layout().bytes() / 8],
            buffer: vec![0; 1 << 13],
            tokens: vec![3; limits.max_slots as usize],
            dropped: Vec::with_capacity(64),
            planner,
        }
    }

    /// Plan, every pass, every group, reply; `false` when the frame is refused.
    fn step(&mut self, encoded: &Encoded, capacity: usize) -> bool {
        let Some(request) = encoded.try_forward() else {
            return false;
        };
        if self.planner.plan(DRIVER, request).is_err() {
            return false;
        }
        let block = bytemuck::cast_slice_mut(&mut self.block);
        while self.planner.stage(block).expect("it fits").is_some() {
            while let Some(group) = self.planner.stage_slots(block).expect("it fits") {
                self.planner
                    .put_tokens(&self.tokens[..group.len()])
                    .expect("one each");
            }
        }
        let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut self.buffer);
        self.dropped.clear();
        self.planner
            .reply(
                Probes::default(),
                &mut buffer[..capacity],
                &mut self.dropped,
            )
            .is_ok()
    }
}

/// Allocations made by a closure.
fn allocations(action: impl FnOnce()) -> u64 {
    let before = COUNT.get();
    action();
    COUNT.get() - before
}

fn random(temperature: f32) -> Sampler {
    Sampler::TopKTopP {
        temperature,
        k: 5,
        p: 0.9,
    }
}

/// Decode, mixed and verify frames, a replay and one whose requests fail.
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
    let mut outside = decode(3, 1, &[64]);
    outside.samplers.push((0, Sampler::Entropy));
    let probed = decode(3, 1, &[4]).sample(0, Sampler::RawLogits);
    vec![
        frame(&steps),
        mixed,
        frame(&verify),
        frame(&[outside, probed, steps[1].clone()]),
        frame(&[]),
    ]
}

#[test]
fn the_counter_counts() {
    let live = LIVE.get();
    let count = allocations(|| drop(std::hint::black_box(vec![1_u8; 9])));
    assert_eq!((count, LIVE.get()), (1, live));
}

#[test]
fn the_steady_state_allocates_nothing() {
    let tight = Limits {
        max_requests: 3,
        chunk_tokens: 7,
        max_slots: 2,
        ..ROOMY
    };
    let encoded: Vec<_> = frames()
        .iter()
        .map(|frame| Encoded::new(DRIVER, frame))
        .collect();
    for limits in [ROOMY, tight] {
        let mut engine = Engine::new(limits);
        for encoded in encoded.iter().chain(&encoded) {
            assert!(engine.step(encoded, 1 << 15));
        }
        for _ in 0..3 {
            for (number, encoded) in encoded.iter().enumerate() {
                let count = allocations(|| assert!(engine.step(encoded, 1 << 15)));
                assert_eq!(count, 0, "frame {number}");
                // Requests that the reply has no room for are no exception, nor is a reply that fails.
                engine.step(encoded, 256);
                let count = allocations(|| _ = engine.step(encoded, 256));
                assert_eq!(count, 0, "frame {number}, short of room");
                let count = allocations(|| assert!(!engine.step(encoded, 0)));
                assert_eq!(count, 0, "frame {number}, without room");
            }
        }
    }
}

#[test]
fn a_lost_block_table_costs_no_memory() {
    let mut engine = Engine::new(ROOMY);
    let encoded = Encoded::new(DRIVER, &frames()[0]);
    assert!(engine.step(&encoded, 1 << 15));
    let count = allocations(|| {
        engine.planner.forget_table();
        assert!(engine.step(&encoded, 1 << 15));
    });
    assert_eq!(count, 0);
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
    let start = LIVE.get();
    let mut engine = Engine::new(ROOMY);
    let empty = LIVE.get() - start;
    let mut planned = 0;
    for round in 0..4000 {
        let mut encoded = originals[round % originals.len()].clone();
        damage.apply(&mut encoded);
        planned += usize::from(engine.step(&encoded, 1 << 15));
        drop(encoded);
        // Every buffer is at most twice a small multiple of the largest frame.
        let grown = LIVE.get() - start - empty;
        assert!(
            grown < 32 * largest as isize,
            "{grown} bytes after frame {round} of at most {largest}"
        );
    }
    assert!(planned > 400, "only {planned} frames got through");
}
