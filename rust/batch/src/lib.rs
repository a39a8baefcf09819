//! From a Pie forward frame to what a model needs, and back.
//!
//! ```text
//! ArchivedForwardRequest ──Planner::plan──▶ plan (owned copy, faults, passes)
//!                        ──Planner::stage──▶ one staging block per pass ──▶ forward + sampling
//! tokens, probes         ──Planner::put_outputs, Planner::reply──▶ response bytes
//! ```
//!
//! [`Planner::plan`] checks the frame as the Pie driver protocol asks, copies everything that the forward pass and the
//! reply need, and cuts the batch into passes of at most [`Limits::chunk_tokens`] tokens. After it returns nothing
//! refers to the request bytes. [`Planner::stage`] writes one pass into a block of memory that the engine owns (pinned on
//! CUDA) at the offsets of its [`Layout`], so that one copy brings all of it to the device.

mod adapter;
mod drafting;
mod extent;
mod fault;
mod frame;
mod graph;
mod history;
mod image;
mod layout;
mod limits;
mod mask;
mod pairs;
mod plan;
mod prefix;
mod random;
mod reply;
mod request;
mod sampler;
mod slot;
mod stage;
mod state;
mod table;

pub use adapter::REHEARSAL_ADAPTER;
pub use drafting::DraftOptions;
pub use fault::{FrameError, Medium, RequestFault};
pub use graph::{StagedStep, StepMemory, StepSize};
pub use history::PagePool;
pub use image::{ImageError, ImageSpan, PassImages, Vision};
pub use layout::{DType, Field, FieldId, Layout};
pub use limits::{LimitError, Limits};
pub use mask::AttentionMask;
pub use pie_ngram::{Config as NgramConfig, ConfigError as NgramError, Counters as DraftCounters};
pub use plan::Planner;
pub use reply::Probes;
pub use reply::ReplyError;
pub use sampler::{SamplerParams, SlotClass};
pub use slot::{Outputs, SlotGroup};
pub use stage::{Pass, StageError};
