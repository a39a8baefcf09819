//! Counts the instructions of the hot paths with callgrind and compares them with `counts.json`.
//!
//! Counts are the same on a busy machine as on an idle one, so a check can hold them. `--update` writes the file anew; what
//! got longer is then explained by the commit.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::{env, fs, io};

use pie_benches::sched::Decodes;
use pie_benches::text::text;
use pie_benches::{
    Asked, Bytes, HostPath, asking_frame, decode_frame, forked_frame, mixed_frame, prefill_frame,
};
use pie_kv_cache::radix::{EvictResult, InsertParams, Key, RadixIndex};
use pie_speculation::{Config, Drafter, Drafts, Step};
use pie_wire::{
    ForwardResponse, Frame, Penalties, RequestExtension, ResponseFrame, ResponsePayload,
};

/// `memcmp` and `memcpy` pick their code by the processor, which moves the counts a little.
const TOLERANCE: f64 = 0.03;
const CONTEXT: u32 = 2048;

type Counts = BTreeMap<String, u64>;

/// A case prepares itself, then calls [`counted`] once.
const CASES: [(&str, fn()); 21] = [
    ("wire/access", access),
    ("wire/encode_reply", || encode_reply(2)),
    ("wire/encode_reply/fast", || encode_reply(1)),
    ("plan/decode/1x2048", || decode(1)),
    ("plan/decode/64x2048", || decode(64)),
    ("plan/decode/256x2048", || decode(256)),
    ("plan/probes/256x2048", || asking(true, false)),
    ("plan/masks/256x2048", || asking(false, true)),
    ("plan/probes_masks/256x2048", || asking(true, true)),
    ("plan/penalties/kept/256x2048", || params(0, true)),
    ("plan/penalties/sent/256x2048", || params(0, false)),
    ("plan/biases/kept/256x2048", || params(300, true)),
    ("plan/biases/sent/256x2048", || params(300, false)),
    ("plan/groups/256x32768", groups),
    ("plan/mixed", || plan(&mixed_frame(4), &mixed_frame(5))),
    ("ngram/step/64", drafts),
    ("radix/evict/16x1000", evict),
    ("radix/turn/16", turn),
    ("sched/step/256x2048", || {
        let mut decodes = Decodes::new(256, CONTEXT);
        counted(|| decodes.step());
    }),
    ("sched/answer/256x2048", || {
        let mut decodes = Decodes::new(256, CONTEXT);
        decodes.step();
        counted(|| decodes.answer());
    }),
    ("plan/prefill/8192", || {
        plan(&decode_frame(1, CONTEXT, 0), &prefill_frame(8192));
    }),
];

/// What callgrind counts.
#[inline(never)]
fn counted<T>(operation: impl FnOnce() -> T) {
    black_box(operation());
}

fn access() {
    let frame = Bytes::of(&decode_frame(256, CONTEXT, 0));
    counted(|| pie_wire::access_request(frame.as_slice()).is_ok());
}

fn encode_reply(tokens_each: u32) {
    let tokens = vec![7; 256 * tokens_each as usize];
    let mut buffer = vec![0; 8192];
    if tokens_each == 1 {
        return counted(|| pie_wire::encode_fast_tokens(0, &tokens, &mut buffer).is_ok());
    }
    let response = ForwardResponse {
        num_requests: 256,
        tokens_indptr: (0..=256).map(|request| tokens_each * request).collect(),
        tokens,
        ..ForwardResponse::default()
    };
    let frame = ResponseFrame {
        driver_id: 0,
        aborted: false,
        payload: ResponsePayload::Forward(response),
    };
    counted(|| pie_wire::encode_response(&frame, &mut buffer).is_ok());
}

/// A step within a page.
fn decode(requests: u32) {
    plan(
        &decode_frame(requests, CONTEXT, 1),
        &decode_frame(requests, CONTEXT, 2),
    );
}

fn asking(probes: bool, masks: bool) {
    let asked = Asked { probes, masks };
    plan(
        &asking_frame(256, CONTEXT, 1, asked),
        &asking_frame(256, CONTEXT, 2, asked),
    );
}

/// A step of requests with penalties and so many biases each. The driver keeps them, or they are sent with each step.
fn params(biases: u32, kept: bool) {
    let asked = RequestExtension {
        penalties: Penalties {
            frequency: 0.5,
            ..Penalties::NONE
        },
        biases: (0..biases).map(|token| (token * 501, 0.5)).collect(),
        ..RequestExtension::default()
    };
    let bytes =
        |step: u32, kept: bool| Bytes::asking(&decode_frame(256, CONTEXT, step), 256, &asked, kept);
    let (before, after) = (bytes(1, false), bytes(2, kept));
    eprintln!("{} bytes", after.as_slice().len());
    let mut path = HostPath::default();
    path.run(before.as_slice());
    path.run(before.as_slice());
    counted(|| path.run(after.as_slice()).len());
}

/// A decode step of 64 contexts, with four drafts each.
fn drafts() {
    let text = text(64 * 2 * CONTEXT as usize, 3);
    let (mut drafter, mut drafts) = (
        Drafter::new(Config::default()).expect("a valid config"),
        Drafts::default(),
    );
    let mut step = |from: u32, to: u32| {
        let contexts = text.chunks(2 * CONTEXT as usize).zip(1..);
        let steps = contexts.map(|(text, context)| Step {
            context,
            position: from,
            tokens: &text[from as usize..to as usize],
            drafts: 4,
        });
        let steps: Vec<_> = steps.collect();
        if to - from > 1 {
            drafter.step(&steps, &mut drafts);
            drafter.flush_shared();
        } else {
            counted(|| drafter.step(&steps, &mut drafts));
        }
    };
    step(0, CONTEXT);
    step(CONTEXT, CONTEXT + 1);
}

/// 1,000 pages evicted from each of 16 indexes. Each hashes by a seed of its own, and how long its evictions take depends on
/// it: one alone would be up to 4 % off.
fn evict() {
    let mut indexes: Vec<_> = (0..16).map(|_| leaves()).collect();
    let mut evicted = EvictResult::default();
    counted(|| {
        for index in &mut indexes {
            assert_eq!(index.evict(1000, &mut evicted), 1000);
        }
    });
}

/// 20,000 leaves of one page each, used in another order than they were inserted in.
fn leaves() -> RadixIndex {
    const LEAVES: u32 = 20_000;
    let mut index =
        RadixIndex::new(pie_kv_cache::radix::Config::default()).expect("a valid config");
    let key = |leaf| [leaf / 100, leaf];
    for leaf in 0..LEAVES {
        let pages = [2 * leaf, 2 * leaf + 1];
        index
            .insert(Key::new(&key(leaf)), &pages, InsertParams::default())
            .expect("a page for each token");
    }
    let mut pages = Vec::new();
    for step in 0..LEAVES {
        let used = key(step * 7919 % LEAVES);
        index.match_prefix(Key::new(&used), 0, &mut pages);
    }
    index
}

/// The eighth turn of a conversation, one of 100: 300 tokens more, with pages of 16.
fn turn() {
    let config = pie_kv_cache::radix::Config {
        page_size: 16,
        ..Default::default()
    };
    let mut index = RadixIndex::new(config).expect("a valid config");
    let system = text(1000, 4);
    let texts = (0..100).map(|number| [&system[..], &text(8 * 300, 5 + number)].concat());
    // Tokens that take three bytes, as those of a large vocabulary.
    let texts: Vec<Vec<u32>> = texts
        .map(|text| text.iter().map(|token| token * 5).collect())
        .collect();
    let (mut pages, mut next) = (Vec::with_capacity(1000), 0);
    let mut take = |text: &[u32]| {
        let prompt = Key::new(&text[..text.len() - 200]);
        let node = index.match_and_lock(prompt, 0, &mut pages).node;
        let fresh = (text.len() / 16 - pages.len()) as u32;
        pages.extend(next..next + fresh);
        next += fresh;
        index
            .insert_after(node, Key::new(text), &pages, InsertParams::default())
            .expect("a page for each 16 tokens");
        index.unlock(node).expect("it is locked");
    };
    for turn in 1..=8 {
        for text in &texts[usize::from(turn == 8)..] {
            take(&text[..1000 + turn * 300]);
        }
    }
    counted(|| take(&texts[0]));
}

/// The grouping of a step that shares a long prefix, after a step that did.
fn groups() {
    let [before, after] = [1, 2].map(|step| Bytes::of(&forked_frame(256, 16 * CONTEXT, step)));
    let mut path = HostPath::default();
    path.run(before.as_slice());
    path.plan(before.as_slice());
    assert!(path.find_prefix_groups());
    path.answer();
    path.plan(after.as_slice());
    counted(|| assert!(path.find_prefix_groups()));
}

/// Counts `frame` after `before` was served.
fn plan(before: &Frame, frame: &Frame) {
    let (before, frame) = (Bytes::of(before), Bytes::of(frame));
    let mut path = HostPath::default();
    // Twice, so that every buffer has its size.
    path.run(before.as_slice());
    path.run(before.as_slice());
    counted(|| path.run(frame.as_slice()).len());
}

fn main() -> ExitCode {
    let argument = env::args().nth(1);
    if let Some((_, case)) = CASES
        .iter()
        .find(|(name, _)| Some(*name) == argument.as_deref())
    {
        case();
        return ExitCode::SUCCESS;
    }
    match compare(argument.as_deref() == Some("--update")) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Counts every case and prints it with its limit; `false` if one is over it.
fn compare(update: bool) -> io::Result<bool> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("counts.json");
    let limits: Counts = match fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text)?,
        Err(_) if update => Counts::new(),
        Err(error) => return Err(error),
    };
    let mut counts = Counts::new();
    let mut within = true;
    for (name, _) in CASES {
        let count = count(name)?;
        let limit = limits.get(name).copied().unwrap_or(0);
        let change = count as f64 / limit.max(1) as f64 - 1.0;
        let verdict = match change {
            _ if limit == 0 => "no limit",
            change if change > TOLERANCE => "TOO MANY",
            change if change < -TOLERANCE => "fewer: lower the limit with --update",
            _ => "",
        };
        within &= limit > 0 && change <= TOLERANCE;
        println!(
            "{name:27} {count:9} instructions, limit {limit:9} ({:+.1} %) {verdict}",
            change * 100.0
        );
        counts.insert(name.to_owned(), count);
    }
    if update {
        fs::write(path, serde_json::to_string_pretty(&counts)? + "\n")?;
    }
    Ok(within || update)
}

/// Runs one case of this program under callgrind.
fn count(case: &str) -> io::Result<u64> {
    let output = Command::new("valgrind")
        .args([
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            "--collect-atstart=no",
        ])
        .arg("--toggle-collect=counts::counted*")
        .arg(env::current_exe()?)
        .arg(case)
        .output()
        .map_err(|error| {
            io::Error::other(format!("valgrind: {error}; apt-get install valgrind"))
        })?;
    let report = String::from_utf8_lossy(&output.stderr).into_owned();
    let count = report
        .lines()
        .find_map(|line| line.split("Collected : ").nth(1)?.trim().parse().ok());
    count
        .filter(|&count| output.status.success() && count > 0)
        .ok_or_else(|| io::Error::other(format!("{case} was not counted:\n{report}")))
}
