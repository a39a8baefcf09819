//! Peers in Python: one process each, that runs as many operations as it is asked for and hands back their times.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use pie_planner::FieldId;
use serde_json::{Value, json};

use crate::conditions::involuntary_switches;
use crate::report::Summary;
use crate::timing::Samples;
use crate::{Bytes, HostPath, LIMITS, TOKEN};

/// Frames with what the host path makes of them, in a folder of their own.
pub struct Case {
    folder: PathBuf,
}

impl Case {
    /// Runs the frames and writes them down, with the staged arrays and the replies. Each takes one pass and one slot
    /// group, and gives every request one token.
    ///
    /// # Panics
    /// When a frame takes more than that, or the folder cannot be written.
    #[must_use]
    pub fn write(name: &str, frames: &[Bytes]) -> Self {
        let folder = std::env::temp_dir().join(format!(
            "pie_benches_{}_{}",
            std::process::id(),
            name.replace('/', "_")
        ));
        fs::create_dir_all(&folder).expect("the case's folder");
        let mut data = Vec::new();
        let mut path = HostPath::default();
        let frames: Vec<Value> = frames
            .iter()
            .map(|frame| describe(&mut path, frame.as_slice(), &mut data))
            .collect();
        let case = json!({
            "page_size": LIMITS.page_size, "total_pages": LIMITS.total_pages, "vocab_size": LIMITS.vocab_size,
            "max_positions": LIMITS.max_positions, "row_pages": LIMITS.row_pages, "max_requests": LIMITS.max_requests,
            "chunk_tokens": LIMITS.chunk_tokens, "token": TOKEN, "frames": frames,
        });
        fs::write(folder.join("data.bin"), data).expect("the case's data");
        fs::write(folder.join("case.json"), case.to_string()).expect("the case's description");
        Self { folder }
    }
}

impl Case {
    /// The folder that a peer is given.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Where the frame, its reply and its staged arrays lie in `data`: offset and bytes.
fn describe(path: &mut HostPath, frame: &[u8], data: &mut Vec<u8>) -> Value {
    let mut put = |bytes: &[u8]| {
        data.resize(data.len().next_multiple_of(64), 0);
        data.extend_from_slice(bytes);
        json!([data.len() - bytes.len(), bytes.len()])
    };
    let (request, reply) = (put(frame), put(path.run(frame)));
    let (planner, frame) = (path.planner(), path.answered());
    let (requests, tokens) = (frame.request_count(), frame.token_count());
    assert_eq!((frame.pass_count(), frame.request_errors()), (1, &[][..]));
    let mut arrays = serde_json::Map::new();
    for (id, count) in [
        (FieldId::SeqLens, requests),
        (FieldId::ExtendPrefixLens, requests),
        (FieldId::ExtendSeqLens, requests),
        (FieldId::ExtendStartLoc, requests),
        (FieldId::InputIds, tokens),
        (FieldId::Positions, tokens),
        (FieldId::OutCacheLoc, tokens),
        (FieldId::SlotRows, requests),
        (FieldId::Temperatures, requests),
        (FieldId::TopPs, requests),
        (FieldId::MinPs, requests),
        (FieldId::TopKs, requests),
    ] {
        let name = planner.layout().field(id).name;
        arrays.insert(name.to_owned(), put(path.staged(id, count)));
    }
    json!({ "request": request, "reply": reply, "arrays": arrays })
}

/// What starts `benches/peers/<script>`.
fn command(script: &str, variant: &str, folder: &Path) -> Command {
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = std::env::var_os("PIE_BENCH_PYTHON")
        .map_or_else(|| project.join("../.venv/bin/python"), PathBuf::from);
    let mut command = Command::new(python);
    command
        .arg(project.join("peers").join(script))
        .args([variant.as_ref(), folder.as_os_str()]);
    command
}

/// What a peer hands in that needs no turns: a summary as JSON on stdout.
///
/// # Panics
/// When it fails; its own message is on stderr.
#[must_use]
pub fn summary(script: &str, variant: &str, folder: &Path) -> Summary {
    let output = command(script, variant, folder)
        .stderr(Stdio::inherit())
        .output()
        .expect("the peer starts");
    assert!(output.status.success(), "{variant} of {script} failed");
    serde_json::from_slice(&output.stdout).expect("a summary")
}

/// A running peer. It has compared its results with the case's before this value exists.
pub struct PythonPeer {
    child: Child,
    requests: ChildStdin,
    times: BufReader<ChildStdout>,
}

impl PythonPeer {
    /// Starts `benches/peers/<script>` with the interpreter of the project's environment, or `PIE_BENCH_PYTHON`.
    ///
    /// # Panics
    /// When it does not start, or its results differ from the case's; its own message is on stderr.
    #[must_use]
    pub fn start(script: &str, variant: &str, folder: &Path) -> Self {
        let mut child = command(script, variant, folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{error}; set PIE_BENCH_PYTHON to a Python with numpy"));
        let (requests, times) = (child.stdin.take(), child.stdout.take());
        let mut peer = Self {
            child,
            requests: requests.expect("a pipe"),
            times: BufReader::new(times.expect("a pipe")),
        };
        let mut line = String::new();
        let read = peer.times.read_line(&mut line);
        assert!(
            read.is_ok() && line == "ready\n",
            "{variant} of {script} is not ready"
        );
        peer
    }

    /// Runs so many operations and takes their times; returns their sum.
    ///
    /// # Panics
    /// When the peer has ended.
    pub fn turn(&mut self, operations: u64, samples: &mut Samples) -> Duration {
        let pid = self.child.id().to_string();
        let before = involuntary_switches(&pid);
        writeln!(self.requests, "{operations}").expect("the peer lives");
        let mut total = Duration::ZERO;
        for _ in 0..operations {
            let mut nanos = [0; 8];
            self.times.read_exact(&mut nanos).expect("the peer lives");
            let elapsed = Duration::from_nanos(u64::from_le_bytes(nanos));
            samples.record(elapsed);
            total += elapsed;
        }
        samples.add_involuntary_switches(involuntary_switches(&pid) - before);
        total
    }
}

impl Drop for PythonPeer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
