//! The life of a request on an engine with paged KV: from the queue over prompts and decodes to its end.
//!
//! A [`Scheduler`] decides what each forward step of a driver computes. It is pure and deterministic: it has no clock, no
//! thread and no I/O, and knows neither where requests come from nor what computes them. Times come in as arguments, in microseconds of any
//! clock that does not go back; requests come in as [`NewRequest`]s, and [`Outputs`] come out.
//!
//! # API
//!
//! | call | when | what |
//! |---|---|---|
//! | [`Scheduler::new`] | once | from a [`Config`] (what the operator wants) and [`Limits`] (what the driver said) |
//! | [`Scheduler::submit`] | any time | a request enters the queue, or is refused with the reason ([`Refusal`]) |
//! | [`Scheduler::abort`], [`Scheduler::abort_all`] | any time | it ends, wherever it is; nothing of it is answered afterwards |
//! | [`Scheduler::step`] | while fewer than two steps are out | the next frame: a [`Step`] of [`Row`]s, and the page [`Copies`] that come before it; `None`: nothing to do before the next call |
//! | [`Scheduler::answer`] | when the older step is answered | its tokens, as [`Answer`] |
//! | [`Scheduler::step_failed`] | instead | the driver answered with an error and lives; the steps that are out are void, and computed again |
//! | [`Scheduler::driver_died`] | instead | the driver ended with the older step, and its KV is gone; every request is computed again from its tokens |
//! | [`Scheduler::driver_lost`] | instead | the same, where the step is not to blame |
//! | [`Scheduler::outputs`] | after any of these | tokens and ends since the last call |
//! | [`Scheduler::next_deadline`] | before waiting | when `step` wants to be called although nothing else happened |
//! | [`Scheduler::expire`] | while there is no driver | ends what is too late, as `step` does |
//! | [`Scheduler::end_session`], [`Scheduler::flush`] | any time | lets kept pages go |
//! | [`Scheduler::awaits_constraint`] | before waiting | whether `step` wants to be called soon |
//! | [`Scheduler::stats`], [`Scheduler::audit`] | any time | counts; whether all books are right |
//!
//! ## One step ahead
//!
//! `step` may be called once more while a step is being computed, so that the next frame is laid out meanwhile. What such a
//! row computes is the token that the step in flight will give. [`Row::awaits`] names the row of that step, and the
//! caller writes the token into the frame when the answer is there. The order of calls is then
//!
//! ```text
//! step → A, send A;  step → B;  A is answered: patch B, send B;  answer(A), outputs;  step → C;  B is answered: …
//! ```
//!
//! A request that comes after B was laid out is in C. A caller that has time left before A is answered may lay B out later.
//!
//! `answer` takes the steps in the order in which `step` gave them. A request that ends by A's tokens is still in B; what B
//! says of it is ignored, so B is sent as it is. While drafts are out, whose number of tokens is not known before the
//! answer, `step` gives nothing.
//!
//! ## Constraints
//!
//! A [`NewRequest`] may have a [`Constrain`], which binds what its sequences say. Before each row that draws a token the scheduler asks
//! the sequence's [`Constraint`] which tokens may come, and hands the answer on as [`Row::mask`]. Tokens without alternative are
//! added to the input at once, and are given out. A constraint must know a token before it can say what comes after it: while a step
//! that draws for a bound sequence is out, `step` gives nothing. A request whose constraint is not ready stays in the queue, and all
//! others go past it.
//!
//! ## Log-probabilities
//!
//! A [`NewRequest`] may want those of its tokens, and of its prompt's. They come with the [`Answer`], as many words for each token as the
//! request says, and go out with the tokens. [`Row::prompt_logprobs`] says of which tokens of the prompt a row is to bring them: each
//! once, whatever is computed again. What must be computed for them is not taken from the cache.
//!
//! ## What the driver must do
//!
//! Steps and copies are executed in the order in which they were given, each after the former has taken effect: pages that a step
//! still uses are given to the one after it. [`Copies`] of a step come before it, `to_host` first.
//!
//! # Modules
//!
//! | module | what it is |
//! |---|---|
//! | `scheduler`, `config` | what comes in, what is known, and how it is set up |
//! | `new_request`, `check`, `entry` | a request: what it asks, whether it can be served at all, its place in the queue |
//! | `order`, `admit`, `ratio` | the order of those that wait, which of them begin, and how much output is expected |
//! | `layout`, `step`, `pace` | the next step, from what steps cost |
//! | `constraint`, `follow` | what binds the tokens of a sequence, asked before a row is laid out |
//! | `sequence`, `ends`, `stop_strings`, `regex`, `text` | one sequence, and when it ends by what it says |
//! | `flight`, `answer`, `settle` | steps that are out, and their answers |
//! | `bisection` | the search for the request that makes steps fail |
//! | `suspects` | which sequences may make steps fail |
//! | `output`, `leave`, `logprobs` | what goes out: tokens, ends, pages, log-probabilities |
//! | `memory`, `copies`, `sessions` | pages of both tiers and the prefix index, copies between them, what sessions keep |
//! | `stats` | counts |

mod admit;
mod answer;
mod bisection;
mod check;
mod config;
mod constraint;
mod copies;
mod ends;
mod entry;
mod error;
mod flight;
mod follow;
mod layout;
mod leave;
mod logprobs;
mod memory;
mod new_request;
mod order;
mod output;
mod pace;
mod ratio;
mod regex;
mod scheduler;
mod sequence;
mod sessions;
mod settle;
mod stats;
mod step;
mod stop_strings;
mod suspects;
mod text;

pub use answer::Answer;
pub use check::MAX_SAMPLES;
pub use config::{Config, FrameBytes, Limits, Policy};
pub use constraint::{Begun, Constrain, Constraint, Mask, is_shorter_as_bits};
pub use copies::Copies;
pub use error::{Refusal, SchedError};
pub use logprobs::Logprobs;
pub use new_request::{Image, NewRequest, StopCriteria};
pub use output::{Finish, Output, Outputs};
pub use pie_kv_cache::radix::{Event as KvEvent, Medium as KvMedium, Move, Policy as Eviction};
pub use regex::{StopRegexError, StopRegexes};
pub use scheduler::Scheduler;
pub use stats::Stats;
pub use step::{Row, Step};
pub use stop_strings::{StopStringError, StopStrings};
pub use text::TokenBytes;

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
