//! Replays token streams through the drafter: `ngram_replay STREAMS DRAFTS`, for `ngram_replay/replay.py` and
//! `ngram_replay/suffix.py`.
//!
//! All drafts are verified, or as many as the policy chooses on a simulated device: a step takes [`STEP`], and a share of that
//! for each further row.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use std::{env, fs, io};

use pie_speculation::{
    Config, DraftProposal, Drafter, Drafts, Policy, ROOT, Step, SuffixConfig, Tree,
};
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
    /// Time of the drafter.
    seconds: f64,
    /// Time of the simulated device, with drafts and without.
    device: f64,
    plain: f64,
}

/// Seconds of a simulated step with one row.
const STEP: f64 = 1e-3;
/// Rows of its graphs.
const ROWS: [usize; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32];

#[derive(Clone, Copy, Default)]
struct Variant {
    min_n: usize,
    shared: bool,
    tree: bool,
    suffix: Option<SuffixConfig>,
    /// The cost of a row as a share of [`STEP`], if the policy chooses.
    row: Option<f64>,
}

/// The policy and the device that it learns.
struct Device {
    policy: Policy,
    row: f64,
    lengths: Vec<usize>,
}

impl Device {
    fn new(most: usize, row: f64) -> Self {
        Self {
            policy: Policy::new(most, &ROWS),
            row,
            lengths: Vec::new(),
        }
    }

    fn seconds(&self, rows: usize) -> f64 {
        STEP * (1.0 + self.row * (rows - 1) as f64)
    }

    /// Runs a step with as many drafts as the policy chooses; returns how many, and how many are accepted.
    fn step(&mut self, proposal: DraftProposal, right: usize) -> (usize, usize) {
        self.policy.choose(&[proposal], &mut self.lengths);
        let drafted = self.lengths[0];
        let accepted = right.min(drafted);
        let time = Duration::from_secs_f64(self.seconds(1 + drafted));
        self.policy.timed(1 + drafted, drafted > 0, time);
        if drafted > 0 {
            self.policy.verified(&proposal, drafted, accepted);
        }
        self.policy.answered(1 + accepted, time);
        (drafted, accepted)
    }
}

fn replay(streams: &[Stream], variant: Variant, count: usize) -> Outcome {
    let config = Config {
        min_n: variant.min_n,
        capacity: if variant.shared { 1_000_000 } else { 0 },
        suffix: variant.suffix,
        ..Config::default()
    };
    let mut drafter = Drafter::new(config).expect("a valid config");
    let (mut drafts, mut tree) = (Drafts::default(), Tree::default());
    let (mut outcome, mut elapsed) = (Outcome::default(), Duration::ZERO);
    let mut device = variant.row.map(|row| Device::new(count, row));
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
            let (mut tried, mut accepted) = if variant.tree {
                (tree.tokens().len(), walk(&tree, &text[end..]))
            } else {
                let right = drafts.tokens(0).iter().zip(&text[end..]);
                (
                    drafts.tokens(0).len(),
                    right.take_while(|(draft, said)| draft == said).count(),
                )
            };
            if let Some(device) = &mut device {
                let proposal = DraftProposal {
                    context,
                    match_length: drafts.match_length(0),
                    drafts: tried,
                    grades: drafts.grades(0),
                };
                (tried, accepted) = device.step(proposal, accepted);
                outcome.device += device.seconds(1 + tried);
                outcome.plain += (1 + accepted) as f64 * STEP;
            }
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
    let ours = Variant {
        min_n: 1,
        shared: true,
        ..Variant::default()
    };
    let suffix = Variant {
        suffix: Some(SuffixConfig::default()),
        ..ours
    };
    for (name, variant) in [
        ("ours", ours),
        ("ours, min_n 2", Variant { min_n: 2, ..ours }),
        ("ours, min_n 3", Variant { min_n: 3, ..ours }),
        (
            "ours, not shared",
            Variant {
                shared: false,
                ..ours
            },
        ),
        ("ours, tree", Variant { tree: true, ..ours }),
        ("ours, suffix", suffix),
        (
            "ours, rows of 2 %",
            Variant {
                row: Some(0.02),
                ..ours
            },
        ),
        (
            "ours, suffix, rows of 2 %",
            Variant {
                row: Some(0.02),
                ..suffix
            },
        ),
        (
            "ours, rows of 10 %",
            Variant {
                row: Some(0.1),
                ..ours
            },
        ),
        (
            "ours, suffix, rows of 10 %",
            Variant {
                row: Some(0.1),
                ..suffix
            },
        ),
    ] {
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
