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
//! | `graph_path` | a batch as one launch of a captured graph |
//! | `lead`, `follow` | the same on several devices: what the leader sends, and what a worker does |
//! | `planner_slot` | where the planner is while no batch is open |
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
mod lead;
mod load;
mod media;
mod note;
mod planner_slot;
mod responder;
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
pub use responder::{Event, Job, RehearsalError, Responder, Step};
pub use timing::{DeviceTimes, Timing, monotonic_ns};

/// Status codes of the Pie driver protocol.
pub mod status {
    /// Done.
    pub const OK: i32 = 0;
    /// The frame or its arrays are malformed.
    pub const MALFORMED: i32 = 2;
    /// A page id is out of range.
    pub const OUT_OF_RANGE: i32 = 3;
    /// The operation is not supported.
    pub const UNSUPPORTED: i32 = 4;
    /// The engine failed.
    pub const FAILED: i32 = 5;
    /// `GenerateAudio` counts frames with positive numbers; its errors are negative.
    pub const NO_AUDIO: i32 = -1;
}
