//! Replays token streams through the drafter: `ngram_replay STREAMS DRAFTS`, for `ngram_replay/replay.py`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use std::{env, fs, io};

use pie_speculation::{Config, Drafter, Drafts, ROOT, Step, Tree};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Stream {
    given: Vec<u32>,
    said: Vec<u32>,
}

/// What came of all streams of a kind.
#[derive(Default, Serialize)]
struct Outcome {
    steps: usize,
    drafted: usize,
    accepted: usize,
    seconds: f64,
}

#[derive(Clone, Copy)]
struct Variant {
    min_n: usize,
    shared: bool,
    tree: bool,
}

fn replay(streams: &[Stream], variant: Variant, count: usize) -> Outcome {
    let config = Config {
        min_n: variant.min_n,
        capacity: if variant.shared { 1_000_000 } else { 0 },
        ..Config::default()
    };
    let mut drafter = Drafter::new(config).expect("a valid config");
    let (mut drafts, mut tree) = (Drafts::default(), Tree::default());
    let (mut outcome, mut elapsed) = (Outcome::default(), Duration::ZERO);
    for (stream, context) in streams.iter().zip(1..) {
        let text = [&stream.given[..], &stream.said].concat();
        let (mut known, mut end) = (0, stream.given.len());
        while end < text.len() {
            let start = Instant::now();
            let drafts_wanted = if variant.tree { 0 } else { count };
            let step = Step {
                context,
                position: known as u32,
                tokens: &text[known..end],
                drafts: drafts_wanted,
            };
            drafter.step(&[step], &mut drafts);
            if variant.tree {
                drafter.tree(context, count, &mut tree);
            }
            elapsed += start.elapsed();
            let (tried, accepted) = if variant.tree {
                (tree.tokens().len(), walk(&tree, &text[end..]))
            } else {
                let right = drafts.tokens(0).iter().zip(&text[end..]);
                (
                    drafts.tokens(0).len(),
                    right.take_while(|(draft, said)| draft == said).count(),
                )
            };
            outcome.steps += 1;
            outcome.drafted += tried;
            outcome.accepted += accepted;
            (known, end) = (end, (end + accepted + 1).min(text.len()));
        }
        drafter.release(context);
    }
    outcome.seconds = elapsed.as_secs_f64();
    outcome
}

/// How many tokens of `said` a path of the tree has from the root.
fn walk(tree: &Tree, said: &[u32]) -> usize {
    let mut at = ROOT;
    let next = |at: u32, token: u32| {
        let mut nodes = tree.tokens().iter().zip(tree.parents());
        nodes.position(|(&found, &parent)| found == token && parent == at)
    };
    let path = said.iter().map_while(|&token| {
        at = next(at, token)? as u32;
        Some(at)
    });
    path.count()
}

fn main() -> io::Result<()> {
    let mut arguments = env::args().skip(1);
    let path = arguments.next().unwrap_or_default();
    let count = arguments.next().and_then(|count| count.parse().ok());
    let count = count.ok_or_else(|| io::Error::other("ngram_replay STREAMS DRAFTS"))?;
    let streams: BTreeMap<String, Vec<Stream>> = serde_json::from_slice(&fs::read(path)?)?;
    let mut outcomes = BTreeMap::new();
    for (name, min_n, shared, tree) in [
        ("ours", 1, true, false),
        ("ours, min_n 2", 2, true, false),
        ("ours, min_n 3", 3, true, false),
        ("ours, not shared", 1, false, false),
        ("ours, tree", 1, true, true),
    ] {
        let variant = Variant {
            min_n,
            shared,
            tree,
        };
        let of_kind = |(kind, streams): (&String, &Vec<Stream>)| {
            (kind.clone(), replay(streams, variant, count))
        };
        outcomes.insert(
            name,
            streams.iter().map(of_kind).collect::<BTreeMap<_, _>>(),
        );
    }
    println!("{}", serde_json::to_string(&outcomes)?);
    Ok(())
}
