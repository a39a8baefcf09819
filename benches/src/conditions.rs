//! What the machine was like while it measured.

use std::time::{Duration, Instant};
use std::{fmt, fs};

/// Involuntary context switches of a thread so far: `self`, `thread-self` or a pid, which stands for
/// the main thread of that process. 0 if the kernel does not tell.
#[must_use]
pub fn involuntary_switches(thread: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}

/// The machine's time since boot, in clock ticks.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuTime {
    total: u64,
    stolen: u64,
}

impl CpuTime {
    /// Up to now.
    #[must_use]
    pub fn now() -> Self {
        Self::parse(&fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    /// The first line: `cpu user nice system idle iowait irq softirq steal guest guest_nice`.
    fn parse(stat: &str) -> Self {
        let ticks: Vec<u64> = stat
            .lines()
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .skip(1)
            .map_while(|field| field.parse().ok())
            .collect();
        // The guest's time is part of the user's.
        Self {
            total: ticks.iter().take(8).sum(),
            stolen: ticks.get(7).copied().unwrap_or(0),
        }
    }

    /// Share of the time since then that the hypervisor gave to others.
    #[must_use]
    pub fn stolen_since(self, earlier: Self) -> f64 {
        let total = self.total.saturating_sub(earlier.total);
        if total == 0 {
            0.0
        } else {
            self.stolen.saturating_sub(earlier.stolen) as f64 / total as f64
        }
    }
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
        let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
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

fn line(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_else(|_| "unknown".to_owned());
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stolen_time_is_a_share_of_all() {
        let earlier = CpuTime::parse("cpu  10 0 10 80 0 0 0 0 5 0\ncpu0 1 1 1 1 1 1 1 1\n");
        let later = CpuTime::parse("cpu  40 0 20 110 0 0 0 30 9 0\n");
        assert!((later.stolen_since(earlier) - 0.3).abs() < 1e-9);
        assert!(earlier.stolen_since(earlier).abs() < 1e-9);
        assert!(CpuTime::parse("").stolen_since(later).abs() < 1e-9);
    }

    #[test]
    fn the_kernel_counts_switches() {
        assert_eq!(involuntary_switches("no such thread"), 0);
        assert!(
            fs::read_to_string("/proc/thread-self/status")
                .unwrap()
                .contains("\nnonvoluntary_ctxt_switches:")
        );
    }
}
