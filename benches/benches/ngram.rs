//! The n-gram drafter.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use allocation_counter::measure;
use criterion::{Criterion, criterion_group, criterion_main};
use pie_benches::python::{self, PythonPeer};
use pie_benches::report::{self, Summary, Unit};
use pie_benches::text::text;
use pie_benches::timing::{self, Race, Samples};
use pie_speculation::{Config, Drafter, Drafts, Step, SuffixConfig};
use serde_json::json;

const MILLION: usize = 1_000_000;
/// Tokens that are appended at once; their mean is a value.
const CHUNK: u32 = 128;
const DEPTH: usize = 18;
const REQUESTS: usize = 64;
/// Tokens of each context that drafts.
const CONTEXT: usize = 2048;
const DRAFTS: usize = 4;

/// A text with what peers need to know, in a folder of its own.
struct Case {
    folder: PathBuf,
    text: Vec<u32>,
}

impl Case {
    fn new(name: &str, text: Vec<u32>, held: usize, drafts: usize) -> Self {
        let name = format!(
            "pie_benches_{}_{}",
            std::process::id(),
            name.replace('/', "_")
        );
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).expect("the case's folder");
        fs::write(folder.join("text.bin"), bytemuck::cast_slice(&text)).expect("the text");
        let case = json!({
            "depth": DEPTH, "capacity": MILLION, "requests": REQUESTS, "context": CONTEXT,
            "held": held, "drafts": drafts,
        });
        fs::write(folder.join("case.json"), case.to_string()).expect("the case's description");
        Self { folder, text }
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A peer, started at once if the row will run: one takes half a minute, which criterion would take for warming up.
fn peer<'a>(
    row: &str,
    script: &'a str,
    variant: &'a str,
    folder: &'a Path,
) -> impl FnMut(u64, &mut Samples) -> Duration + 'a {
    let start = move || PythonPeer::start(script, variant, folder);
    let mut filters = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with('-'));
    let mut running = filters.all(|filter| row.contains(&filter)).then(start);
    move |operations, samples| running.get_or_insert_with(start).turn(operations, samples)
}

fn drafter(capacity: usize) -> Drafter {
    let config = Config {
        capacity,
        context_bytes: 1 << 32,
        ..Config::default()
    };
    Drafter::new(config).expect("a valid config")
}

fn step(context: usize, position: usize, tokens: &[u32], drafts: usize) -> Step<'_> {
    Step {
        context: context as u64 + 1,
        position: position as u32,
        tokens,
        drafts,
    }
}

/// A token appended to a context that has so many, in chunks of [`CHUNK`].
fn append(criterion: &mut Criterion) {
    let chunk = CHUNK as usize;
    for (name, held) in [("1k", 1000), ("64k", 64_000), ("1M", MILLION)] {
        let case = Case::new(name, text(held + 200_000.min(16 * held), 1), held, DRAFTS);
        let text = &case.text;
        let (mut drafter, mut drafts, mut at) = (drafter(0), Drafts::default(), held);
        drafter.step(&[step(0, 0, &text[..held], 0)], &mut drafts);
        // Not long enough for the size to change; what was appended is taken back.
        let furthest = held + (held / 4).clamp(chunk, 64 * chunk);
        let mut shift = 0;
        let ours = |operations, samples: &mut Samples| {
            let mut total = Duration::ZERO;
            for _ in 0..operations {
                if at + chunk > furthest {
                    at = held;
                    drafter.step(&[step(0, held, &[], 0)], &mut drafts);
                }
                shift = (shift + chunk) % (text.len() - held - chunk + 1);
                let tokens = &text[held + shift..][..chunk];
                let start = Instant::now();
                drafter.step(&[step(0, at, tokens, 0)], &mut drafts);
                let elapsed = start.elapsed();
                at += chunk;
                samples.record(elapsed / CHUNK);
                total += elapsed;
            }
            total
        };
        let row = format!("ngram/append/{name}");
        let mut peer = peer(&row, "ngram_sglang.py", "append", &case.folder);
        Race::new_turns(row, Unit::Ns, ours)
            .peer_turns("sglang", |operations, samples| {
                CHUNK * peer(operations, samples)
            })
            .run(criterion);
    }
}

/// Eight tokens for one context.
fn draft(criterion: &mut Criterion) {
    let case = Case::new("draft", text(2 * CONTEXT, 2), 0, 8);
    let (mut drafter, mut drafts) = (drafter(MILLION), Drafts::default());
    drafter.step(&[step(0, 0, &case.text[..CONTEXT], 0)], &mut drafts);
    let ours = || {
        drafter.step(&[step(0, CONTEXT, &[], 8)], &mut drafts);
        drafts.tokens(0).len()
    };
    let row = "ngram/draft";
    Race::new(row, Unit::Ns, ours)
        .peer_turns(
            "sglang",
            peer(row, "ngram_sglang.py", "draft", &case.folder),
        )
        .peer_turns(
            "prompt_lookup",
            peer(row, "ngram_lookup.py", "draft", &case.folder),
        )
        .run(criterion);
}

/// The same by suffix decoding, which has no peer here; `ngram/draft` is its measure.
fn draft_by_suffixes(criterion: &mut Criterion) {
    let text = text(2 * CONTEXT, 2);
    let config = Config {
        suffix: Some(SuffixConfig::default()),
        ..Config::default()
    };
    let mut drafter = Drafter::new(config).expect("a valid config");
    let mut drafts = Drafts::default();
    drafter.step(&[step(0, 0, &text[..CONTEXT], 0)], &mut drafts);
    let ours = || {
        drafter.step(&[step(0, CONTEXT, &[], 8)], &mut drafts);
        drafts.tokens(0).len()
    };
    Race::new("suffix/draft", Unit::Ns, ours).run(criterion);
}

/// A decode step: each of 64 contexts with 2,048 tokens gets one more and four drafts.
fn steps(criterion: &mut Criterion) {
    let stretch = 2 * CONTEXT;
    let case = Case::new("step", text(REQUESTS * stretch, 3), 0, DRAFTS);
    let (mut drafter, mut drafts) = (drafter(MILLION), Drafts::default());
    let context = |request: usize| &case.text[request * stretch..][..stretch];
    for request in 0..REQUESTS {
        drafter.step(
            &[step(request, 0, &context(request)[..CONTEXT], 0)],
            &mut drafts,
        );
    }
    drafter.flush_shared();
    let mut end = CONTEXT;
    let ours = || {
        // After the last token the contexts go back to where they were, once in some thousand steps.
        end = if end == stretch { CONTEXT } else { end + 1 };
        let steps: [_; REQUESTS] = std::array::from_fn(|request| {
            step(request, end - 1, &context(request)[end - 1..end], DRAFTS)
        });
        drafter.step(&steps, &mut drafts);
        drafts.len()
    };
    let row = "ngram/step/64";
    Race::new(row, Unit::Us, ours)
        .peer_turns("sglang", peer(row, "ngram_sglang.py", "step", &case.folder))
        .peer_turns(
            "prompt_lookup",
            peer(row, "ngram_lookup.py", "step", &case.folder),
        )
        .run(criterion);
}

/// A context of 2,048 tokens is forgotten.
fn release(criterion: &mut Criterion) {
    let text = text(CONTEXT, 4);
    let (mut drafter, mut drafts) = (drafter(0), Drafts::default());
    let turn = |operations, samples: &mut Samples| {
        let start = Instant::now();
        for _ in 0..operations {
            drafter.step(&[step(0, 0, &text, 0)], &mut drafts);
            samples.time(1, || drafter.release(1));
        }
        // With the appending before each operation, or criterion would ask for too many.
        start.elapsed()
    };
    Race::new_turns("ngram/release", Unit::Ns, turn).run(criterion);
}

/// Bytes for each of a million tokens of one context.
fn memory(criterion: &mut Criterion) {
    let name = "ngram/memory/1M";
    // Criterion's filter, for a row that has nothing to time.
    let mut wanted = false;
    criterion.bench_function(name, |bencher| {
        wanted = true;
        bencher.iter_custom(Duration::from_millis);
    });
    if !wanted {
        return;
    }
    let case = Case::new("memory", text(MILLION, 5), 0, DRAFTS);
    let mut made = None;
    let held = measure(|| {
        let drafter = made.insert(drafter(0));
        drafter.step(&[step(0, 0, &case.text, 0)], &mut Drafts::default());
    });
    let sglang = python::summary("ngram_sglang.py", "memory", &case.folder);
    let ours = Summary::exact(held.bytes_current as f64 / MILLION as f64);
    report::Row::new(name, Unit::Bytes, ours)
        .peer("sglang", sglang)
        .write(&report::folder())
        .expect("the row's file can be written");
}

criterion_group! {
    name = benches;
    config = timing::criterion();
    targets = append, draft, draft_by_suffixes, steps, release, memory
}
criterion_main!(benches);
