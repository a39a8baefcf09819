//! Replays the corpus and damaged copies of it, so that plain `cargo test` runs every target.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use pie_fuzz::TARGETS;

/// Damaged inputs of each target: 60,000, or as many as `PIE_FUZZ_DAMAGED` says.
fn damaged() -> usize {
    std::env::var("PIE_FUZZ_DAMAGED").map_or(60_000, |count| count.parse().expect("a number"))
}

/// Targets whose inputs take ten times as long as those of the others.
const SLOW: [&str; 4] = ["front", "answer", "gateway", "grammar"];

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target);
    let entries = directory.read_dir().expect("every target has a corpus");
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.expect("it is readable").path())
        .collect();
    files.sort();
    files
        .iter()
        .map(|file| std::fs::read(file).expect("it is readable"))
        .collect()
}

/// A small generator of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end.max(1)
    }

    /// Flips bits, sets words, cuts and copies.
    fn damage(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(6) {
                0 => bytes.truncate(at),
                1 => bytes.extend_from_within(at..),
                2 | 3 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                _ if at + 4 <= bytes.len() => {
                    let word = [
                        self.below(40) as u32,
                        u32::MAX - self.below(400) as u32,
                        self.below(1 << 31) as u32,
                    ];
                    let at = at / 4 * 4;
                    bytes[at..at + 4].copy_from_slice(&word[self.below(3)].to_le_bytes());
                }
                _ => {}
            }
        }
    }
}

/// Runs an input; when it fails, keeps it in a file that libFuzzer can be given.
fn run(target: &str, check: fn(&[u8]), input: &[u8]) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(input))) {
        let mut hasher = DefaultHasher::new();
        input.hash(&mut hasher);
        let file = std::env::temp_dir().join(format!("{target}-{:016x}", hasher.finish()));
        std::fs::write(&file, input).expect("there is room for it");
        eprintln!("target {target} failed with {}", file.display());
        resume_unwind(panic);
    }
}

fn replay(target: &str) {
    let (_, check) = TARGETS
        .into_iter()
        .find(|(name, _)| *name == target)
        .expect("a known target");
    let corpus = corpus(target);
    assert!(!corpus.is_empty());
    for input in &corpus {
        run(target, check, input);
    }
    let mut random = Random(1);
    let share = if SLOW.contains(&target) { 10 } else { 1 };
    for _ in 0..damaged() / share {
        let mut input = corpus[random.below(corpus.len())].clone();
        random.damage(&mut input);
        run(target, check, &input);
    }
}

macro_rules! replay {
    ($($target:ident)*) => {
        $(#[test] fn $target() { replay(stringify!($target)); })*

        #[test]
        fn every_target_is_replayed() {
            assert_eq!(TARGETS.map(|(name, _)| name), [$(stringify!($target)),*]);
        }
    };
}

replay! { wire_request wire_response extension front answer gateway grammar brle plan_bytes plan_frames region_header serve radix pages }
