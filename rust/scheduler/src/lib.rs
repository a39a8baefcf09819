//! The request scheduler of an engine with a paged KV cache: queue, admission, chunked prefill, decodes, retraction, stop criteria.
//!
//! A [`Scheduler`] decides what each forward step of a driver computes. It is pure and deterministic: no clock, no thread, no I/O.
//! Times are arguments, in microseconds of any monotonic clock.
//!
//! # API
//!
//! | call | when | what |
//! |---|---|---|
//! | [`Scheduler::new`] | once | from a [`Config`] (the operator's) and [`Limits`] (the driver's) |
//! | [`Scheduler::submit`] | any time | queues a request, or rejects it ([`ValidationError`]) |
//! | [`Scheduler::abort`], [`Scheduler::abort_all`] | any time | ends requests |
//! | [`Scheduler::schedule`] | while fewer than two steps are in flight | the next [`Step`]: its [`Row`]s, and the page [`Copies`] before it; `None` if there is nothing to compute before the next call |
//! | [`Scheduler::process_output`] | when the oldest step is answered | its tokens, as [`StepOutput`] |
//! | [`Scheduler::step_failed`] | instead | the driver answered with an error; the steps in flight are void and computed again |
//! | [`Scheduler::driver_died`] | instead | the driver died in the oldest step; all KV is lost, and every request is recomputed |
//! | [`Scheduler::driver_lost`] | instead | the same, where the step is not suspected |
//! | [`Scheduler::outputs`] | after any of these | tokens and finish reasons since the last call |
//! | [`Scheduler::next_deadline`] | before waiting | the latest time of the next call of `schedule` |
//! | [`Scheduler::expire`] | while there is no driver | ends requests whose deadline has passed, as `schedule` does |
//! | [`Scheduler::end_session`], [`Scheduler::flush`] | any time | unlocks or drops cached pages |
//! | [`Scheduler::awaits_grammar`] | before waiting | whether a queued request waits for its grammar |
//! | [`Scheduler::stats`], [`Scheduler::check_invariants`] | any time | counts; whether all page counts agree |
//!
//! ## Overlapped scheduling
//!
//! `schedule` may be called once more while a step runs. The input of a decode in that second step is the token that the step in
//! flight will sample: [`Row::awaits`] names its row there, and the caller patches the token into the frame.
//!
//! ```text
//! schedule → A, send A;  schedule → B;  A is answered: patch B, send B;  process_output(A), outputs;  schedule → C;  …
//! ```
//!
//! `process_output` takes steps in the order of `schedule`. A request that ends by A's tokens is still in B; B's output for it is ignored.
//! While drafts are in flight, `schedule` returns `None`: the number of accepted tokens is not known.
//!
//! ## Grammars
//!
//! A [`NewRequest`] may have a [`GrammarHandle`] (structured output). Before each row that samples a token, the sequence's
//! [`GrammarMatcher`] returns the token mask, [`Row::mask`], and jump-forward tokens, which are appended without sampling. A matcher must
//! accept a token before it has the next mask, so while a constrained sequence has a sampled token in flight, `schedule` returns
//! `None`. A request whose grammar is still compiling stays in the queue, and others overtake it.
//!
//! ## Log-probabilities
//!
//! [`NewRequest::logprobs`] asks for those of output tokens and of prompt tokens. They come with the [`StepOutput`] as a fixed number of
//! words for each token. [`Row::prompt_logprobs`] is the range of prompt tokens whose log-probabilities the row returns, each once;
//! tokens that are needed for them are not taken from the prefix cache.
//!
//! ## What the driver must do
//!
//! Execute steps and copies in order, each after the previous one has taken effect: a page may be reused by the next step.
//! [`Copies`] come before their step, `to_host` first.
//!
//! # Modules
//!
//! | module | what it is |
//! |---|---|
//! | `scheduler`, `config` | the public API; settings and limits |
//! | `new_request`, `validate`, `queue` | a request, its validation, its place in the queue |
//! | `policy`, `admit`, `new_token_ratio` | queue order, admission, expected output |
//! | `schedule`, `step_plan`, `step`, `prefill_budget` | the next step, from decodes, prefill chunks and measured step times |
//! | `retract` | retraction and preemption |
//! | `grammar`, `advance_grammar` | structured output |
//! | `sequence`, `stop_criteria`, `stop_strings`, `stop_regex` | one sequence, and what ends it |
//! | `in_flight`, `step_output`, `process_output` | steps in flight and their output |
//! | `bisection`, `suspects` | the search for the request that makes steps fail |
//! | `output`, `finish`, `logprobs` | outputs: tokens, finish reasons, log-probabilities |
//! | `kv_cache_manager`, `copies`, `sessions` | pages of both tiers, the prefix index, swaps, sessions |
//! | `stats` | counts |

mod admit;
mod advance_grammar;
mod bisection;
mod config;
mod copies;
mod error;
mod finish;
mod grammar;
mod in_flight;
mod kv_cache_manager;
mod logprobs;
mod new_request;
mod new_token_ratio;
mod output;
mod policy;
mod prefill_budget;
mod process_output;
mod queue;
mod retract;
mod schedule;
mod scheduler;
mod sequence;
mod sessions;
mod stats;
mod step;
mod step_output;
mod step_plan;
mod stop_criteria;
mod stop_regex;
mod stop_strings;
mod suspects;
mod validate;

pub use config::{Config, FrameBytes, Limits, Policy};
pub use copies::Copies;
pub use error::{SchedulerError, ValidationError};
pub use grammar::{GrammarHandle, GrammarMatcher, GrammarStatus, Mask, is_shorter_as_bits};
pub use logprobs::Logprobs;
pub use new_request::{Image, NewRequest};
pub use output::{Finish, Output, Outputs, WeightVersionEvent};
pub use pie_kv_cache::radix::{Event as KvEvent, Medium as KvMedium, PageCopy, Policy as Eviction};
pub use scheduler::Scheduler;
pub use stats::Stats;
pub use step::{Row, Step};
pub use step_output::StepOutput;
pub use stop_criteria::{StopCriteria, TokenBytes};
pub use stop_regex::{StopRegexError, StopRegexes};
pub use stop_strings::{StopStringError, StopStrings};
pub use validate::MAX_SAMPLES;

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
