//! Timings of a batch.

use std::time::Duration;

use pie_planner::ForwardTimings;
use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock, which is also Python's `time.perf_counter_ns`.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Host timings of a batch.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timing {
    /// When the request was seen, by [`monotonic_ns`].
    pub received_ns: u64,
    /// Copying and validating the archive.
    pub parse: Duration,
    /// Planning and staging.
    pub plan: Duration,
    /// Building the response, up to its publication.
    pub respond: Duration,
}

/// Device timings of a batch, in µs; 0 = not measured.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceTimes {
    /// Host-to-device copies.
    pub h2d_us: u32,
    /// Issuing the forward pass and sampling.
    pub launch_us: u32,
    /// Waiting for the sampled tokens.
    pub sync_us: u32,
}

impl DeviceTimes {
    /// Device time of the batch.
    pub(crate) fn busy(self) -> Duration {
        Duration::from_micros(u64::from(self.launch_us) + u64::from(self.sync_us))
    }
}

impl Timing {
    /// Host time while the device was idle.
    pub(crate) fn host(&self) -> Duration {
        self.parse + self.plan + self.respond
    }

    pub(crate) fn forward_timings(&self, device: DeviceTimes) -> ForwardTimings {
        ForwardTimings {
            wire_parse: micros(self.parse),
            plan: micros(self.plan),
            h2d: device.h2d_us,
            kernel_launch: device.launch_us,
            sync: device.sync_us,
        }
    }
}

/// Rounded and saturating.
pub(crate) fn micros(duration: Duration) -> u32 {
    u32::try_from((duration.as_nanos() + 500) / 1000).unwrap_or(u32::MAX)
}
