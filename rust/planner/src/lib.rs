//! From a Pie forward frame to what a model needs, and back.
//!
//! ```text
//! ArchivedForwardRequest ──Planner::plan──▶ Plan (owned copy, faults, passes)
//!                        ──Planner::stage──▶ StagedPass: one staging block per pass ──▶ forward
//!                        ──StagedPass::stage_slots──▶ StagedGroup ──▶ sampling ──StagedGroup::put_outputs──▶ …
//! all outputs            ──▶ Computed ──Planner::reply──▶ response bytes
//! ```
//!
//! [`Planner::plan`] checks the frame as the Pie driver protocol asks, copies everything that the forward pass and the
//! reply need, and cuts the batch into passes of at most [`Limits::chunk_tokens`] tokens. After it returns nothing
//! refers to the request bytes. [`Planner::stage`] writes one pass into a block of memory that the engine owns (pinned on
//! CUDA) at the offsets of its [`Layout`], so that one copy brings all of it to the device.
//!
//! A [`Planner`] keeps what lasts, a [`Plan`] what is of one frame; each stage of a plan is a type of its own.
//!
//! | module | what it is |
//! |---|---|
//! | `planner` | what lasts from frame to frame, and the calls that take a frame to its reply |
//! | `limits`, `fault`, `extent` | sizes that a driver serves; what refuses a frame or a request; ranges in half the room |
//! | `frame` | the arrays of a frame. `check`: what is checked of each request. `rows`, `request`: what requests bring, copied |
//! | `sampler` | parameters of samplers. `extra`: what an extension adds. `random`: uniform numbers |
//! | `mask` | attention masks of requests. `attention`: the mask of a pass. `logit`: logit masks of slots |
//! | `image` | images: checked, and the rows that they are. `error`: what is wrong with them |
//! | `state`, `adapter` | recurrent state; which adapters may be bound, and how many a pass can hold |
//! | `table` | the mirror of the block table. `changes`: what changes there. `storage`: where rows store their KV. `pairs`: how far rows begin with the same pages |
//! | `prefix` | groups of rows whose KV begins with the same pages |
//! | `plan` | the plan of a frame. `contents`: what its requests bring, taken one by one. `passes`: its cuts. `bindings`: adapters and recurrent state of each request |
//! | `slot` | sampling slots and their answers. `plan`: slots of a request. `group`: those of one class in a pass. `outputs`: what was computed for them |
//! | `block` | which arrays a block has. `layout`: where they lie |
//! | `stages` | the order of these calls, as types. `pass`, `graph`: what is written of a pass, and for a step of a captured graph. `error`: calls that do not fit |
//! | `drafting` | drafts for the next step. `history`: the tokens that pages hold. `verify`: which drafts came true |
//! | `reply` | the response. `fit`: what of it a response has room for |

mod adapter;
mod block;
mod drafting;
mod extent;
mod fault;
mod frame;
mod image;
mod limits;
mod mask;
mod plan;
mod planner;
mod prefix;
mod reply;
mod sampler;
mod slot;
mod stages;
mod state;
mod table;

pub use adapter::WARM_UP_ADAPTER;
pub use block::layout::{DType, Field, Layout};
pub use block::{FieldId, PassBlock, StepBlock, StepFieldId, StepSize};
pub use drafting::DraftOptions;
pub use drafting::history::PagePool;
pub use fault::{FrameError, Medium, RequestFault};
pub use image::error::ImageError;
pub use image::{ImageSpan, PassImages, Vision};
pub use limits::{LimitError, Limits};
pub use mask::attention::AttentionMask;
pub use pie_speculation::{
    Config as NgramConfig, ConfigError as NgramError, Counters as DraftCounters,
};
pub use plan::Plan;
pub use planner::Planner;
pub use reply::{Answered, Probes, ReplyError};
pub use sampler::extra::{RECORD_WORDS, STEP_EXTRA_WORDS};
pub use sampler::{SamplerParams, SlotClass};
pub use slot::group::{PLACE_WORDS, Place, SlotGroup};
pub use slot::outputs::Outputs;
pub use stages::error::StageError;
pub use stages::graph::{STEP_PLACE_WORDS, STEP_TOP, StepMemory};
pub use stages::pass::Pass;
pub use stages::{Computed, Staged, StagedGroup, StagedPass, StagedSlots, StagedStep};
