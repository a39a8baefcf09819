//! The batch planner: turns a Pie forward frame into a model batch, and sampled tokens into the response.
//!
//! ```text
//! ArchivedForwardRequest ──Planner::plan──▶ Plan (owned copy, request errors, passes)
//!                        ──Planner::stage──▶ StagedPass: one staging block per pass ──▶ forward
//!                        ──StagedPass::stage_slots──▶ StagedGroup ──▶ sampling ──StagedGroup::put_outputs──▶ …
//! all outputs            ──▶ ComputedPlan ──Planner::reply──▶ response bytes
//! ```
//!
//! [`Planner::plan`] validates the frame, copies what the forward pass and the reply need, and splits the batch into passes
//! of at most [`Limits::chunk_tokens`] tokens (chunked prefill). It keeps no reference to the request bytes.
//! [`Planner::stage`] writes one pass into a staging block (pinned host memory of the engine on CUDA) at the offsets of its
//! [`Layout`], so that one host-to-device copy transfers all arrays.
//!
//! A [`Planner`] holds the state across frames, a [`Plan`] that of one frame. Each stage of a plan has its own type.
//!
//! | module | contents |
//! |---|---|
//! | `planner` | state across frames, and the calls from a frame to its reply |
//! | `limits`, `error`, `range32` | sizes of model and pools; errors of frames and of single requests; ranges of 32-bit indices |
//! | `frame` | the arrays of a frame. `check`: validation of each request. `query_tokens`, `request`: their copies in the plan |
//! | `sampler` | sampler parameters. `params`: parameters registered per context. `logits_processors`: penalties, logit biases, log-probabilities. `random`: uniform numbers |
//! | `mask` | custom attention masks. `attention`: the mask of a pass. `logit`: allowed-token masks of sampling slots |
//! | `image` | images: validation, placeholder tokens, M-RoPE positions. `error`: why one is rejected |
//! | `state`, `adapter` | recurrent state slots; `LoRA` adapters: which are loaded, how many fit a pass |
//! | `table` | mirror of the device's block table. `updates`: changed entries. `slot_mapping`: KV slot of each token. `common_lengths`: common prefixes of table rows |
//! | `prefix` | shared-prefix groups: sequences whose KV begins with the same pages |
//! | `plan` | the plan of a frame. `batch_arrays`: its arrays, request by request. `passes`: chunked prefill. `pass_inputs`: adapters, recurrent state and images of a pass |
//! | `slot` | sampling slots and their outputs. `plan`: the slots of a request. `group`: sampling groups of a pass. `outputs`: what the engine computed |
//! | `block` | the arrays of the staging blocks. `layout`: their offsets |
//! | `staging` | the call order as types. `pass`, `graph`: arrays of a pass, and of a step of a CUDA graph. `error`: wrong calls |
//! | `drafting` | n-gram drafts for the next step. `history`: tokens of each KV page. `verify`: accepted drafts |
//! | `reply` | the response. `capacity`: which outputs fit it |

mod adapter;
mod block;
mod drafting;
mod error;
mod frame;
mod image;
mod limits;
mod mask;
mod plan;
mod planner;
mod prefix;
mod range32;
mod reply;
mod sampler;
mod slot;
mod staging;
mod state;
mod table;

pub use adapter::WARM_UP_ADAPTER;
pub use block::layout::{DType, Field, Layout};
pub use block::{FieldId, PassBlock, StepBlock, StepFieldId, StepSize};
pub use drafting::DraftOptions;
pub use drafting::history::PagePool;
pub use error::{FrameError, Modality, RequestError};
pub use image::error::ImageError;
pub use image::{ImageSpan, PassImages, VisionConfig};
pub use limits::{LimitError, Limits};
pub use mask::attention::AttentionMask;
pub use pie_speculation::{
    Config as NgramConfig, ConfigError as NgramError, Counters as DraftCounters, SuffixConfig,
};
pub use plan::Plan;
pub use planner::Planner;
pub use reply::{ForwardTimings, ReplyError, TokenCounts};
pub use sampler::logits_processors::{CustomSlot, RECORD_WORDS, STEP_EXTRA_WORDS};
pub use sampler::{SamplerParams, SlotClass};
pub use slot::group::{LOGPROB_POSITION_WORDS, LogprobPosition, SlotGroup};
pub use slot::outputs::Outputs;
pub use staging::error::StageError;
pub use staging::graph::{STEP_LOGPROB_WORDS, STEP_TOP, StepMemory};
pub use staging::pass::Pass;
pub use staging::{ComputedPlan, Staged, StagedGroup, StagedPass, StagedSlots, StagedStep};
