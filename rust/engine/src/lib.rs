//! The engine: driver processes, the step loop between scheduler and driver, and a service of requests over several replicas.
//!
//! | module | what it is |
//! |---|---|
//! | `service`, `shared`, `output_collector` | requests in, tokens out: routing among replicas, merged outputs |
//! | `replica`, `supervise`, `step_loop` | one replica: its thread, restarts of its driver, the loop between scheduler and driver |
//! | `settings`, `group` | settings of a driver, and the id that names its shared memory |
//! | `driver`, `process`, `log`, `handshake` | the driver's process, its log, its capabilities |
//! | `frame`, `reply`, `link` | building frames, reading replies, sending one while the next is built |
//! | `sampling`, `mask`, `logprobs` | sampling parameters, token masks, log-probabilities |
//! | `prompt_images` | the images of a prompt: pixels, M-RoPE positions, pad values |
//! | `constraint`, `grammars`, `logit_processors` | grammars and `SGLang`'s logit processors as the scheduler's constraints |
//! | `metrics`, `histogram` | metrics of a replica, durations |
//! | `timeline`, `trace` | timelines of traced requests, Chrome traces of steps |

#[cfg(test)]
mod allocations;
mod constraint;
mod driver;
mod error;
mod frame;
mod grammars;
mod group;
mod handshake;
mod histogram;
mod link;
mod log;
mod logit_processors;
mod logprobs;
mod mask;
mod metrics;
mod output_collector;
mod process;
mod prompt_images;
mod replica;
mod reply;
mod sampling;
mod service;
mod settings;
mod shared;
mod step_loop;
mod supervise;
mod timeline;
mod trace;

pub use constraint::GrammarConstraint;
pub use driver::{Driver, Exit};
pub use error::{EngineError, ReplyError};
pub use frame::{FrameBuilder, FrameMeta, FrameRow, RowExtension, TokenPatch, patch_tokens};
pub use grammars::{GrammarSettings, GrammarSetupError};
pub use handshake::Capabilities;
pub use link::{FrameBudget, InFlightFrame, Link, PreparedFrame, StepTiming};
pub use log::{LogSink, ServiceLog};
pub use logit_processors::LogitProcessor;
pub use logprobs::LogprobParams;
pub use metrics::{Metric, MetricKind, MetricsReader};
pub use output_collector::{FinishReason, OutputBatch, OutputDelta};
pub use pie_grammar::{
    Compiler, CompilerCommand, Grammar, GrammarError, JsonSpace, Limits as GrammarLimits,
    Settings as CompilerSettings, Vocabulary, compiler_process,
};
pub use pie_scheduler::{
    Config, Eviction, GrammarHandle, KvEvent, KvMedium, MAX_SAMPLES, NewRequest, Policy, Stats,
    StopCriteria, StopRegexError, StopRegexes, StopStringError, StopStrings, TokenBytes,
    ValidationError, WeightVersionEvent,
};
pub use pie_wire::{LogprobShape, Logprobs, Penalties, RequestExtension, Sampler};
pub use prompt_images::{InputEmbedsError, PromptImage, PromptImageError, PromptImages};
pub use replica::Pause;
pub use reply::{ExpectedReply, Probes, StepReply};
pub use sampling::{RowParams, SamplingError, SamplingParams};
pub use service::{Service, SubmitError};
pub use settings::DriverSettings;
pub use shared::{ReplicaStats, ServiceSettings};
pub use timeline::{Timeline, Timelines, TraceParent, TracedRequest};
pub use trace::{TraceSettings, TraceSummary};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
