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
//! | `frame`, `check`, `limits`, `fault` | the arrays of a frame; what is checked of it and of each request; what refuses them |
//! | `contents`, `rows`, `request` | what the requests of a frame bring, copied |
//! | `sampler`, `extra`, `random` | parameters of samplers, what an extension adds, uniform numbers |
//! | `plan`, `passes`, `slot`, `bindings` | the plan of a frame: passes, sampling slots, adapters and recurrent state of each request |
//! | `table`, `changes`, `storage` | the mirror of the block table, what changes there, where rows store their KV |
//! | `layout`, `block` | where arrays lie in a block, and which arrays there are |
//! | `stage`, `slot_group`, `graph` | what is written there: a pass, a group of its slots, a step of a captured graph |
//! | `stages`, `stage_error` | the order of these calls, as types; calls that do not fit |
//! | `mask`, `attention_mask`, `logit_mask` | attention masks of requests and of a pass; logit masks of slots |
//! | `image`, `image_error` | images: checked, and the rows that they are |
//! | `state`, `adapter` | recurrent state; which adapters may be bound, and how many a pass can hold |
//! | `prefix`, `pairs` | groups of rows whose KV begins with the same pages |
//! | `drafting`, `history`, `verify` | drafts for the next step, the tokens that pages hold, which drafts came true |
//! | `outputs`, `fit`, `reply` | what was computed, what of it a response has room for, and the response |
//! | `extent` | ranges in half the room |

mod adapter;
mod attention_mask;
mod bindings;
mod block;
mod changes;
mod check;
mod contents;
mod drafting;
mod extent;
mod extra;
mod fault;
mod fit;
mod frame;
mod graph;
mod history;
mod image;
mod image_error;
mod layout;
mod limits;
mod logit_mask;
mod mask;
mod outputs;
mod pairs;
mod passes;
mod plan;
mod planner;
mod prefix;
mod random;
mod reply;
mod request;
mod rows;
mod sampler;
mod slot;
mod slot_group;
mod stage;
mod stage_error;
mod stages;
mod state;
mod storage;
mod table;
mod verify;

pub use adapter::REHEARSAL_ADAPTER;
pub use attention_mask::AttentionMask;
pub use block::{FieldId, PassBlock, StepBlock, StepFieldId, StepSize};
pub use drafting::DraftOptions;
pub use extra::{RECORD_WORDS, STEP_EXTRA_WORDS};
pub use fault::{FrameError, Medium, RequestFault};
pub use graph::{STEP_PLACE_WORDS, STEP_TOP, StepMemory};
pub use history::PagePool;
pub use image::{ImageSpan, PassImages, Vision};
pub use image_error::ImageError;
pub use layout::{DType, Field, Layout};
pub use limits::{LimitError, Limits};
pub use outputs::Outputs;
pub use pie_ngram::{Config as NgramConfig, ConfigError as NgramError, Counters as DraftCounters};
pub use plan::Plan;
pub use planner::Planner;
pub use reply::{Answered, Probes, ReplyError};
pub use sampler::{SamplerParams, SlotClass};
pub use slot_group::{PLACE_WORDS, Place, SlotGroup};
pub use stage::Pass;
pub use stage_error::StageError;
pub use stages::{Computed, Staged, StagedGroup, StagedPass, StagedSlots, StagedStep};
