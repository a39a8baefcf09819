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

    /// What makes the percentiles those of the scheduler.
    fn doubt(&self) -> Option<String> {
        let (switches, samples) = (self.involuntary_switches, self.samples);
        let spoilt = match samples {
            _ if switches * 1000 < samples || switches == 0 => return None,
            _ if switches * 100 < samples => "p99.9",
            _ => "p99 and p99.9",
        };
        Some(format!(
            "{switches} involuntary context switches in {samples} samples: do not trust {spoilt}"
        ))
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
    /// Share of the machine's time that the hypervisor gave to others meanwhile.
    pub steal: f64,
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
            steal: 0.0,
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

    /// Why not to believe the row; empty if the run was undisturbed.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let steal = (self.steal > 0.01)
            .then(|| format!("{:.1} % of the time was stolen", self.steal * 100.0));
        let doubts = self
            .sides()
            .filter_map(|(side, summary)| Some(format!("{side}: {}", summary.doubt()?)));
        doubts
            .chain(steal)
            .map(|text| format!("{}: {text}", self.bench))
            .collect()
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

/// Writes the medians beside the folder, as `<folder>.json`.
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
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
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
        let row = |bench, p50| Row::new(bench, Unit::Ns, summary(p50, 1000, 0));
        row("a/16", 4.0).write(&folder.0).unwrap();
        row("b/1", 1.0).write(&folder.0).unwrap();
        row("a/2", 2.0).write(&folder.0).unwrap();
        row("b/1", 3.0)
            .peer("numpy", summary(6.0, 1000, 0))
            .write(&folder.0)
            .unwrap();
        let rows = read(&folder.0).unwrap();
        let found: Vec<_> = rows
            .iter()
            .map(|row| (row.bench.as_str(), row.ours.p50, row.peers.len()))
            .collect();
        assert_eq!(found, [("a/2", 2.0, 0), ("a/16", 4.0, 0), ("b/1", 3.0, 1)]);
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
        let warnings = |switches, steal| {
            let mut row = Row::new("a/1", Unit::Ns, summary(1.0, 100_000, 0));
            row.steal = steal;
            row.peer("numpy", summary(1.0, 100_000, switches))
                .warnings()
        };
        assert!(warnings(99, 0.01).is_empty());
        assert!(warnings(100, 0.0)[0].ends_with("do not trust p99.9"));
        assert!(warnings(1000, 0.0)[0].starts_with("a/1: numpy: 1000 involuntary"));
        assert!(warnings(1000, 0.0)[0].ends_with("do not trust p99 and p99.9"));
        assert_eq!(warnings(0, 0.02), ["a/1: 2.0 % of the time was stolen"]);
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
            .map(|line| line.split_whitespace().collect())
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
