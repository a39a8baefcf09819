//! The prefix index from Python, and `SGLang`'s tree, which is in Python.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use criterion::Criterion;
use pie_benches::python::PythonPeer;
use pie_benches::report::Unit;
use pie_benches::timing::{Race, Samples};
use serde_json::json;

use super::{HIT, OTHERS, Random, Workload, is_wanted};

const SCRIPT: &str = "radix_python.py";
/// Fewest operations of a turn: the first few after a process has woken find cold caches.
const SHORTEST_TURN: u64 = 64;

/// Texts with what is done with them, in a folder of their own.
pub(super) struct Case {
    folder: PathBuf,
}

impl Case {
    fn new<'a>(
        name: &str,
        texts: impl Iterator<Item = &'a [u32]>,
        mut case: serde_json::Value,
    ) -> Self {
        let name = format!("pie_benches_{}_radix_{name}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let (mut tokens, mut lengths) = (Vec::<u32>::new(), Vec::new());
        for text in texts {
            tokens.extend(text);
            lengths.push(text.len());
        }
        case["lengths"] = json!(lengths);
        fs::create_dir_all(&folder).expect("the case's folder");
        fs::write(folder.join("text.bin"), bytemuck::cast_slice(&tokens)).expect("the texts");
        fs::write(folder.join("case.json"), case.to_string()).expect("the case's description");
        Self { folder }
    }

    /// The conversations, for indexes with pages of this size.
    pub(super) fn conversations(workload: &Workload, page: usize) -> Self {
        let turns: Vec<_> = workload
            .turns
            .iter()
            .map(|turn| (turn.conversation, turn.prompt, turn.end))
            .collect();
        Self::new(
            &format!("conversations_{page}"),
            workload.texts.iter().map(Vec::as_slice),
            json!({ "page": page, "hit": 0, "turns": turns }),
        )
    }

    /// One side. It is started at once: within the race its imports would count as warming up, and leave a hundred turns to time.
    pub(super) fn side<'a>(
        &'a self,
        variant: &'a str,
    ) -> impl FnMut(u64, &mut Samples) -> Duration + 'a {
        let mut running = PythonPeer::start(SCRIPT, variant, &self.folder);
        move |operations, samples| {
            let turn = operations.max(SHORTEST_TURN);
            let elapsed = running.turn(turn, samples);
            elapsed.mul_f64(operations as f64 / turn as f64)
        }
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Lookups of one sequence among others, with a lock: one call, an array in and an array out.
pub(super) fn lookups(criterion: &mut Criterion) {
    let mut random = Random(2);
    let mut texts: Vec<Vec<u32>> = (0..OTHERS).map(|_| random.tokens(HIT / 4)).collect();
    texts.push(random.tokens(HIT));
    for (row, name, hit) in [("match_lock/2048", "match_lock", HIT), ("miss", "miss", 0)] {
        let row = format!("radix/python/{row}");
        if !is_wanted(&row) {
            continue;
        }
        let case = json!({ "page": 1, "hit": hit });
        let case = Case::new(name, texts.iter().map(Vec::as_slice), case);
        let [ours, sglang] = [format!("ours:{name}"), format!("sglang:{name}")];
        Race::new_turns(row, Unit::Ns, case.side(&ours))
            .peer_turns("sglang", case.side(&sglang))
            .run(criterion);
    }
}
