//! The responder between ring and engine.
//!
//! [`Responder::next`] waits for a request. What needs no model is answered at once: malformed
//! frames, health checks, operations that are not supported, batches without tokens. So are batches
//! that a captured graph can run, by the [`GraphPath`]. The rest comes out as a [`Job`]: an open [`Batch`] to
//! stage, run and commit, a [copy](struct@Copy) of pages, or an adapter to [`Load`]. A job that is
//! dropped without an answer aborts its request, so nothing is ever left waiting. Of a model on several devices the leader
//! has a responder, and the others [`Follow`].
//!
//! | module | what it is |
//! |---|---|
//! | `responder`, `decide` | waits for requests, and decides what each asks for |
//! | `batch`, `copy`, `load` | the jobs; `groups` cuts a copy into parts that can be made at once |
//! | [`launch`] | starting captured CUDA graphs by their raw handles |
//! | `graph_path` | a batch as one launch of a captured graph |
//! | `lead`, `follow` | the same on several devices: what the leader sends, and what a worker does |
//! | `shared_planner` | the planner, which one batch at a time has, and what batches share besides it |
//! | [`status`] | the codes of answers that are nothing else |
//! | `media` | the pixels that a batch keeps of its request |
//! | `note`, `timing`, `counters`, `histogram` | lines for the log, where time goes, what was served |

mod batch;
mod copy;
mod counters;
mod decide;
mod follow;
mod graph_path;
mod groups;
mod histogram;
pub mod launch;
mod lead;
mod load;
mod media;
mod note;
mod responder;
mod shared_planner;
pub mod status;
mod timing;

pub use batch::{Batch, BatchError};
pub use copy::Copy;
pub use counters::{Counts, DIRECTIONS};
pub use follow::{Follow, FollowError};
pub use graph_path::{GraphPath, GraphPathError, Memory};
pub use histogram::Histogram;
pub use lead::Lead;
pub use load::Load;
pub use media::Media;
pub use note::Note;
pub use responder::{Event, Job, Responder, Step, WarmUpError};
pub use timing::{DeviceTimes, Timing, monotonic_ns};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
