//! The driver: answers requests of the ring, and runs batches on captured CUDA graphs or hands them to Python.
//!
//! [`Responder::next`] waits for a request. It responds to those that need no model (malformed frames, health checks,
//! unsupported operations, batches without tokens) and to batches that the [`GraphPath`] can run. The rest is returned as a
//! [`Job`]: a [`Batch`] to stage, run and commit, a [copy](struct@Copy) of pages, or an adapter to [`Load`]. A job that is dropped
//! aborts its request. With tensor parallelism rank 0 has the responder, and every other rank a [`Worker`].
//!
//! | module | contents |
//! |---|---|
//! | `responder`, `parse` | the loop over requests; their validation and planning |
//! | `batch`, `copy`, `load` | the jobs; `copy_batches` splits a copy into parts without dependences |
//! | [`launch`] | launch of captured CUDA graphs by raw handle |
//! | `graph_path` | a batch as one launch of a captured graph |
//! | `leader`, `worker` | tensor parallelism: what rank 0 broadcasts, and what the other ranks run |
//! | `shared_planner` | the planner, owned by one batch at a time, and other shared state |
//! | [`status`] | status codes and status responses |
//! | `media` | pixels of a request |
//! | `log_line`, `timing`, `counters`, `histogram` | log lines, timings, metrics |

mod batch;
mod copy;
mod copy_batches;
mod counters;
mod graph_path;
mod histogram;
pub mod launch;
mod leader;
mod load;
mod log_line;
mod media;
mod parse;
mod responder;
mod shared_planner;
pub mod status;
mod timing;
mod worker;

pub use batch::{Batch, BatchError};
pub use copy::Copy;
pub use counters::{Counts, DIRECTIONS};
pub use graph_path::{GraphPath, GraphPathError, Memory};
pub use histogram::Histogram;
pub use leader::Leader;
pub use load::Load;
pub use log_line::LogLine;
pub use media::Media;
pub use responder::{Event, Job, Responder, Step, WarmUpError};
pub use timing::{DeviceTimes, Timing, monotonic_ns};
pub use worker::{Worker, WorkerError};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
