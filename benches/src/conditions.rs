//! What the machine was like while it measured.

use std::time::{Duration, Instant};
use std::{fmt, fs};

use serde::{Deserialize, Serialize};

/// Involuntary context switches of a thread so far: `self`, `thread-self` or a pid, which stands for
/// the main thread of that process. 0 if the kernel does not tell.
#[must_use]
pub fn involuntary_switches(thread: &str) -> u64 {
    switches_in(&text(&format!("/proc/{thread}/status")))
}

fn switches_in(status: &str) -> u64 {
    let mut lines = status.lines();
    let count = lines.find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    count
        .and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}

/// What others took from the machine while it measured, as shares of the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Disturbance {
    /// The hypervisor gave the cores to other virtual machines.
    pub stolen: f64,
    /// Some thread of the machine was ready and had no core.
    pub contended: f64,
}

/// Watches for a disturbance.
#[derive(Debug)]
pub struct Watch {
    begin: Instant,
    ticks: Ticks,
    contended: Duration,
}

impl Watch {
    /// Watches from now on.
    #[must_use]
    pub fn start() -> Self {
        let (ticks, contended) = (Ticks::parse(&text(STAT)), contended(&text(PRESSURE)));
        let begin = Instant::now();
        Self {
            begin,
            ticks,
            contended,
        }
    }

    /// What happened since the start.
    #[must_use]
    pub fn disturbance(&self) -> Disturbance {
        let contended = contended(&text(PRESSURE)).saturating_sub(self.contended);
        Disturbance {
            stolen: Ticks::parse(&text(STAT)).stolen_since(self.ticks),
            contended: contended.as_secs_f64() / self.begin.elapsed().as_secs_f64(),
        }
    }
}

const STAT: &str = "/proc/stat";
const PRESSURE: &str = "/proc/pressure/cpu";

/// The machine's time since boot, in clock ticks.
#[derive(Clone, Copy, Debug)]
struct Ticks {
    total: u64,
    stolen: u64,
}

impl Ticks {
    /// The first line: `cpu user nice system idle iowait irq softirq steal guest guest_nice`.
    fn parse(stat: &str) -> Self {
        let fields = stat.lines().next().unwrap_or_default().split_whitespace();
        let ticks: Vec<u64> = fields
            .skip(1)
            .map_while(|field| field.parse().ok())
            .collect();
        // A virtual machine's time is part of the user's.
        let total = ticks.iter().take(8).sum();
        Self {
            total,
            stolen: ticks.get(7).copied().unwrap_or(0),
        }
    }

    fn stolen_since(self, earlier: Self) -> f64 {
        let total = self.total.saturating_sub(earlier.total).max(1);
        self.stolen.saturating_sub(earlier.stolen) as f64 / total as f64
    }
}

/// How long some thread was ready without a core: `some avg10=… total=<microseconds>`. Zero where
/// the kernel does not tell.
fn contended(pressure: &str) -> Duration {
    let line = pressure.lines().find(|line| line.starts_with("some "));
    let total = line.and_then(|line| line.rsplit_once("total=")?.1.trim().parse().ok());
    Duration::from_micros(total.unwrap_or(0))
}

/// What one reading of the clock takes. Every value of a percentile contains one.
#[must_use]
pub fn clock_read() -> Duration {
    const READS: u32 = 10_000;
    let start = Instant::now();
    for _ in 0..READS {
        std::hint::black_box(Instant::now());
    }
    start.elapsed() / READS
}

/// The machine in a few lines.
#[derive(Debug)]
pub struct Machine {
    cpu: String,
    cores: usize,
    kernel: String,
    governor: String,
    siblings: String,
    load: String,
    clock_read: Duration,
}

impl Machine {
    /// This machine, now.
    #[must_use]
    pub fn now() -> Self {
        let cpu_info = text("/proc/cpuinfo");
        let model = cpu_info
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        let cpu0 = "/sys/devices/system/cpu/cpu0";
        Self {
            cpu: model.map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned()),
            cores: std::thread::available_parallelism().map_or(1, Into::into),
            kernel: line("/proc/sys/kernel/osrelease"),
            governor: line(&format!("{cpu0}/cpufreq/scaling_governor")),
            siblings: line(&format!("{cpu0}/topology/thread_siblings_list")),
            load: line("/proc/loadavg"),
            clock_read: clock_read(),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            cpu,
            cores,
            kernel,
            governor,
            siblings,
            load,
            clock_read,
        } = self;
        writeln!(
            f,
            "{cpu}, {cores} cores (cpu 0 shares its core with: {siblings}), Linux {kernel}"
        )?;
        write!(
            f,
            "governor {governor}; load now {load}; a clock reading takes {clock_read:?}"
        )
    }
}

/// A file's text; empty if there is none.
fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn line(path: &str) -> String {
    match text(path).trim() {
        "" => "unknown".to_owned(),
        line => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stolen_time_is_a_share_of_all() {
        let earlier = Ticks::parse("cpu  10 0 10 80 0 0 0 0 5 0\ncpu0 1 1 1 1 1 1 1 1\n");
        let later = Ticks::parse("cpu  40 0 20 110 0 0 0 30 9 0\n");
        assert!((later.stolen_since(earlier) - 0.3).abs() < 1e-9);
        assert!(earlier.stolen_since(earlier).abs() < 1e-9);
        assert!(Ticks::parse("").stolen_since(later).abs() < 1e-9);
    }

    #[test]
    fn contention_is_what_some_thread_waited() {
        let pressure =
            "some avg10=9.70 avg60=9.66 avg300=9.44 total=3755371904\nfull avg10=0.00 total=7\n";
        assert_eq!(contended(pressure), Duration::from_micros(3_755_371_904));
        assert_eq!(contended(""), Duration::ZERO);
    }

    #[test]
    fn switches_are_the_involuntary_ones() {
        let status = "voluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t4\n";
        assert_eq!(switches_in(status), 4);
        assert_eq!(involuntary_switches("no such thread"), 0);
        let own = text("/proc/thread-self/status");
        assert!(own.contains("\nnonvoluntary_ctxt_switches:"));
    }
}
