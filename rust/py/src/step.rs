//! What the server reports that needs no work.

use pyo3::prelude::*;

/// A batch that the graph path answered.
#[pyclass(frozen, get_all, module = "pie_driver_sglang._core")]
pub(crate) struct Step {
    /// Requests of the batch.
    requests: usize,
    /// Rows that the model computed.
    tokens: usize,
    /// When the request was seen, by `time.perf_counter_ns`.
    received_ns: u64,
    /// Nanoseconds of copying and validating the archive.
    parse_ns: u64,
    /// Nanoseconds of planning and staging.
    plan_ns: u64,
    /// Nanoseconds of the launch.
    launch_ns: u64,
    /// Nanoseconds of waiting for the tokens.
    wait_ns: u64,
    /// Nanoseconds of building the response.
    respond_ns: u64,
}

impl Step {
    pub(crate) fn new(step: &pie_driver::Step) -> Self {
        let nanos = |duration: std::time::Duration| duration.as_nanos() as u64;
        Self {
            requests: step.requests,
            tokens: step.tokens,
            received_ns: step.timing.received_ns,
            parse_ns: nanos(step.timing.parse),
            plan_ns: nanos(step.timing.plan),
            launch_ns: u64::from(step.device.launch_us) * 1000,
            wait_ns: u64::from(step.device.sync_us) * 1000,
            respond_ns: nanos(step.timing.respond),
        }
    }
}

/// Another thread has called `Server.wake`.
#[pyclass(frozen, module = "pie_driver_sglang._core")]
pub(crate) struct Wake;
