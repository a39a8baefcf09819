//! The client side of the driver, as a library.
//!
//! | module | what it is |
//! |---|---|
//! | `settings`, `group` | what a driver is started with, and the number that names its region |
//! | `driver`, `process`, `log`, `handshake` | the process: spawned, watched, stopped; what it logs and announces |
//! | `frame`, `answer`, `link` | one frame there, the next one laid out meanwhile, one answer back |
//! | `mask`, `logprobs` | which tokens may be drawn, as a frame says it; which log-probabilities are wanted |
//! | `picture` | the images of a prompt: their names, positions, pixels |
//! | `constraint`, `grammars` | grammars as the scheduler's constraints |
//! | `sampling` | from the parameters that users know to the samplers that the driver has |
//! | `timeline` | what happened when to requests that are traced |
//! | `trace` | steps as a file for a trace viewer, on request |
//! | `figures`, `times` | how a replica stands, as named metrics; durations |
//! | `service`, `shared`, `outbox` | requests in, tokens out: a scheduler and a driver, or several of both |
//! | `replica`, `supervise`, `relay` | one of them: its thread, its drivers one after the other, the loop between scheduler and driver |

mod answer;
mod constraint;
mod driver;
mod error;
mod figures;
mod frame;
mod grammars;
mod group;
mod handshake;
mod link;
mod log;
mod logprobs;
mod mask;
mod outbox;
mod picture;
mod process;
mod relay;
mod replica;
mod sampling;
mod service;
mod settings;
mod shared;
#[cfg(test)]
mod steady;
mod supervise;
mod timeline;
mod times;
mod trace;

pub use answer::{Answer, Asked, Probes};
pub use constraint::GrammarConstraint;
pub use driver::{Driver, Exit};
pub use error::{AnswerError, RuntimeError};
pub use figures::{Figure, FigureKind, FigureReader};
pub use frame::{Extended, FrameBuilder, FrameMeta, FrameRow, TokenPatch, fill};
pub use grammars::{GrammarSettings, Unbindable};
pub use handshake::Capabilities;
pub use link::{Exchange, Flight, Link, Prepared, Room};
pub use log::LogSink;
pub use logprobs::LogprobParams;
pub use outbox::{Batch, Delta, End};
pub use picture::{Picture, PictureError, Pictures};
pub use pie_grammar::{
    Compiler, CompilerCommand, Grammar, GrammarError, JsonSpace, Limits as GrammarLimits,
    Settings as CompilerSettings, Vocabulary, compiler_process,
};
pub use pie_scheduler::{
    Config, Eviction, GrammarHandle, KvEvent, KvMedium, MAX_SAMPLES, NewRequest, Policy, Stats,
    StopCriteria, StopRegexError, StopRegexes, StopStringError, StopStrings, TokenBytes,
    ValidationError,
};
pub use pie_wire::{LogprobShape, Logprobs, Penalties, RequestExtension, Sampler};
pub use replica::Pause;
pub use sampling::{Draw, Sampling, SamplingError};
pub use service::{Rejected, Service};
pub use settings::DriverSettings;
pub use shared::{ReplicaStats, ServiceLog, ServiceSettings};
pub use timeline::{Timeline, Timelines, TraceParent, TracedRequest};
pub use trace::{TraceEnd, TraceSettings};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
