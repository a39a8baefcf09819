//! Rows of figures: one file per row under `target/bench`, merged into `target/bench.json` and a table.
//!
//! A row is written once, whole, by the run that measured all its sides, so a ratio never spans two
//! runs, and a run with a filter leaves the other rows alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{fs, io};

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

use crate::conditions::Disturbance;

/// Share of the time above which the hypervisor has spoilt a row.
const MOST_STOLEN: f64 = 0.01;
/// The same for threads that wait for a core. Peers with threads of their own have some on a machine
/// with two cores.
const MOST_CONTENDED: f64 = 0.5;

/// What the figures of a row count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Nanoseconds.
    Ns,
    /// Microseconds.
    Us,
    /// Milliseconds.
    Ms,
    /// Bytes.
    #[serde(rename = "B")]
    Bytes,
}

impl Unit {
    /// Nanoseconds, or bytes, in one of this unit.
    #[must_use]
    pub fn size(self) -> f64 {
        match self {
            Self::Ns | Self::Bytes => 1.0,
            Self::Us => 1e3,
            Self::Ms => 1e6,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Ns => "ns",
            Self::Us => "us",
            Self::Ms => "ms",
            Self::Bytes => "B",
        }
    }
}

/// One side's figures, in the unit of its row. A peer outside Rust hands in the same as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// How many values the percentiles are of.
    pub samples: u64,
    /// Operations in a value: above one, a value is their mean, and the tail is that of the mean.
    pub batch: u64,
    /// How often the kernel took the core away from a measured thread meanwhile.
    #[serde(default)]
    pub involuntary_switches: u64,
}

impl Summary {
    /// A value without a distribution, such as a size.
    #[must_use]
    pub fn exact(value: f64) -> Self {
        Self {
            p50: value,
            p99: value,
            p999: value,
            samples: 1,
            batch: 1,
            involuntary_switches: 0,
        }
    }

    /// Which percentiles are the scheduler's rather than the code's.
    fn unreliable(&self) -> Option<&'static str> {
        match self.involuntary_switches {
            0 => None,
            switches if switches * 100 >= self.samples => Some("p99 and p99.9"),
            switches if switches * 1000 >= self.samples => Some("p99.9"),
            _ => None,
        }
    }
}

/// Ours and its peers, measured in one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Name of the bench, `group/operation/parameters`.
    pub bench: String,
    /// Unit of every figure.
    pub unit: Unit,
    /// When the row was finished, in seconds since the epoch.
    pub taken: u64,
    /// The driver's own code.
    pub ours: Summary,
    /// What it is compared with.
    pub peers: BTreeMap<String, Summary>,
    /// What happened on the machine meanwhile.
    pub disturbance: Disturbance,
}

impl Row {
    /// A row without peers, taken now.
    #[must_use]
    pub fn new(bench: &str, unit: Unit, ours: Summary) -> Self {
        let taken = now();
        Self {
            bench: bench.to_owned(),
            unit,
            taken,
            ours,
            peers: BTreeMap::new(),
            disturbance: Disturbance::default(),
        }
    }

    /// Adds a peer.
    #[must_use]
    pub fn peer(mut self, name: &str, summary: Summary) -> Self {
        self.peers.insert(name.to_owned(), summary);
        self
    }

    /// Writes the row's file.
    ///
    /// # Errors
    /// As the file system has them.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let name = format!("{}.json", self.bench.replace('/', "."));
        fs::write(
            folder.join(name),
            serde_json::to_string_pretty(self)? + "\n",
        )
    }

    /// Why not to believe the row, if anything disturbed it.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let warnings = self.sides().filter_map(|(side, summary)| {
            let (unreliable, switches) = (summary.unreliable()?, summary.involuntary_switches);
            Some(format!(
                "{unreliable} of {side} ({switches} in {})",
                summary.samples
            ))
        });
        let Disturbance { stolen, contended } = self.disturbance;
        let shares = [
            (stolen, MOST_STOLEN, "stolen by the hypervisor"),
            (
                contended,
                MOST_CONTENDED,
                "spent with more threads than cores",
            ),
        ];
        let shares = shares.into_iter().filter(|(share, most, _)| share > most);
        let shares =
            shares.map(|(share, _, what)| format!("all of it ({:.0} % {what})", share * 100.0));
        let warnings: Vec<_> = shares.chain(warnings).collect();
        (!warnings.is_empty()).then(|| format!("{}: {}", self.bench, warnings.join(", ")))
    }

    fn sides(&self) -> impl Iterator<Item = (&str, &Summary)> {
        let peers = self
            .peers
            .iter()
            .map(|(name, summary)| (name.as_str(), summary));
        std::iter::once(("ours", &self.ours)).chain(peers)
    }

    /// The row as others read it: medians only.
    fn medians(&self) -> serde_json::Value {
        let peers: BTreeMap<_, _> = self
            .peers
            .iter()
            .map(|(name, summary)| (name, summary.p50))
            .collect();
        serde_json::json!({ "bench": self.bench, "unit": self.unit, "ours": self.ours.p50, "peers": peers })
    }
}

/// Where rows go: `target/bench`; a quick run, which measures nothing well, has a folder of its own.
#[must_use]
pub fn folder() -> PathBuf {
    let quick = if is_quick() { "bench-quick" } else { "bench" };
    [env!("CARGO_MANIFEST_DIR"), "..", "target", quick]
        .iter()
        .collect()
}

/// Whether this run only tries the benches out.
#[must_use]
pub fn is_quick() -> bool {
    std::env::args().any(|argument| argument == "--quick")
}

/// All rows of a folder, by name.
///
/// # Errors
/// As the file system has them; a file that is no row.
pub fn read(folder: &Path) -> io::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let row = serde_json::from_slice(&fs::read(&path)?);
        rows.push(row.map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?);
    }
    rows.sort_by(|a: &Row, b| alphanumeric_sort::compare_str(&a.bench, &b.bench));
    Ok(rows)
}

/// Writes the medians next to the folder, as `<folder>.json`.
///
/// # Errors
/// As the file system has them.
pub fn write_medians(folder: &Path, rows: &[Row]) -> io::Result<()> {
    let medians: Vec<_> = rows.iter().map(Row::medians).collect();
    fs::write(
        folder.with_extension("json"),
        serde_json::to_string_pretty(&medians)? + "\n",
    )
}

/// The rows for people.
#[must_use]
pub fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header([
        "bench",
        "age",
        "unit",
        "side",
        "p50",
        "p99",
        "p99.9",
        "batch",
        "samples",
        "peer/ours",
    ]);
    for row in rows {
        for (index, (side, summary)) in row.sides().enumerate() {
            let first = |text: String| if index == 0 { text } else { String::new() };
            let tail = |value| {
                if summary.samples > 1 {
                    figure(value)
                } else {
                    String::new()
                }
            };
            let ratio = summary.p50 / row.ours.p50;
            table.add_row([
                first(row.bench.clone()),
                first(age(now().saturating_sub(row.taken))),
                first(row.unit.name().to_owned()),
                side.to_owned(),
                figure(summary.p50),
                tail(summary.p99),
                tail(summary.p999),
                summary.batch.to_string(),
                summary.samples.to_string(),
                if index == 0 {
                    String::new()
                } else {
                    format!("{ratio:.2}")
                },
            ]);
        }
    }
    for column in table.column_iter_mut().skip(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Four digits at least, no more than the percentiles' precision.
fn figure(value: f64) -> String {
    let decimals = if value < 10.0 {
        2
    } else {
        usize::from(value < 1000.0)
    };
    format!("{value:.decimals$}")
}

fn now() -> u64 {
    SystemTime::UNIX_EPOCH
        .elapsed()
        .as_ref()
        .map_or(0, Duration::as_secs)
}

/// How old a row is, coarsely: rows of one run differ by minutes.
fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(p50: f64, samples: u64, involuntary_switches: u64) -> Summary {
        Summary {
            p50,
            p99: p50 * 2.0,
            p999: p50 * 4.0,
            samples,
            batch: 1,
            involuntary_switches,
        }
    }

    /// A folder of one test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            Self(std::env::temp_dir().join(format!("pie_benches_{}_{name}", std::process::id())))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
            let _ = fs::remove_file(self.0.with_extension("json"));
        }
    }

    #[test]
    fn a_run_replaces_its_rows_and_keeps_the_others() {
        let folder = Folder::new("merge");
        let row = |bench, p50| Row::new(bench, Unit::Ns, summary(p50, 1000, 3));
        let replaced = row("b/2", 1.0);
        let rows = [
            row("a/2", 2.0),
            row("a/16", 4.0),
            row("b/2", 3.0).peer("numpy", summary(6.0, 1000, 7)),
        ];
        for row in std::iter::once(&replaced).chain(&rows) {
            row.write(&folder.0).unwrap();
        }
        assert_eq!(read(&folder.0).unwrap(), rows);
    }

    #[test]
    fn medians_have_exactly_the_agreed_keys() {
        let folder = Folder::new("medians");
        let row =
            Row::new("a/1", Unit::Us, summary(2.0, 1000, 7)).peer("numpy", summary(6.0, 9, 0));
        row.write(&folder.0).unwrap();
        write_medians(&folder.0, &read(&folder.0).unwrap()).unwrap();
        let text = fs::read(folder.0.with_extension("json")).unwrap();
        let expected = serde_json::json!([
            { "bench": "a/1", "unit": "us", "ours": 2.0, "peers": { "numpy": 6.0 } }
        ]);
        let found: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(found, expected);
        assert_eq!(serde_json::to_value(Unit::Bytes).unwrap(), "B");
    }

    #[test]
    fn a_peer_outside_rust_hands_in_json() {
        let json = r#"{"p50": 1.0, "p99": 2.0, "p999": 4.0, "samples": 1000, "batch": 1}"#;
        assert_eq!(
            serde_json::from_str::<Summary>(json).unwrap(),
            summary(1.0, 1000, 0)
        );
    }

    #[test]
    fn disturbance_is_told_by_the_percentile_it_reaches() {
        let warning = |switches, stolen, contended| {
            let mut row = Row::new("a/1", Unit::Ns, summary(1.0, 100_000, 0));
            row.disturbance = Disturbance { stolen, contended };
            let row = row.peer("numpy", summary(1.0, 100_000, switches));
            row.warning().unwrap_or_default()
        };
        assert_eq!(warning(99, 0.01, 0.5), "");
        assert_eq!(
            warning(100, 0.0, 0.0),
            "a/1: p99.9 of numpy (100 in 100000)"
        );
        assert_eq!(
            warning(1000, 0.0, 0.0),
            "a/1: p99 and p99.9 of numpy (1000 in 100000)"
        );
        assert_eq!(
            warning(0, 0.02, 0.0),
            "a/1: all of it (2 % stolen by the hypervisor)"
        );
        assert_eq!(
            warning(0, 0.0, 0.9),
            "a/1: all of it (90 % spent with more threads than cores)"
        );
    }

    #[test]
    fn the_table_shows_tails_and_ratios() {
        let timed = Row::new("a/1", Unit::Ns, summary(200.0, 1000, 0));
        let sized = Row::new("b/1", Unit::Bytes, Summary::exact(64.0));
        let mut rows = [timed.peer("numpy", summary(500.0, 1000, 0)), sized];
        for row in &mut rows {
            row.taken = u64::MAX;
        }
        let text = table(&rows).to_string();
        let cells: Vec<Vec<_>> = text
            .lines()
            .map(|line| line.split(|c: char| c == '│' || c.is_whitespace()))
            .map(|words| words.filter(|word| !word.is_empty()).collect())
            .collect();
        assert!(cells.contains(&vec![
            "a/1", "0", "s", "ns", "ours", "200.0", "400.0", "800.0", "1", "1000"
        ]));
        assert!(cells.contains(&vec!["numpy", "500.0", "1000", "2000", "1", "1000", "2.50"]));
        assert!(cells.contains(&vec!["b/1", "0", "s", "B", "ours", "64.0", "1", "1"]));
    }

    #[test]
    fn ages_are_coarse() {
        let ages = [0, 119, 120, 7200].map(age);
        assert_eq!(ages, ["0 s", "119 s", "2 min", "2 h"]);
    }
}
