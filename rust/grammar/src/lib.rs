//! Constrained decoding: token masks from grammars.
//!
//! A [`Compiler`] compiles each grammar once, on threads of its own, into a [`Matcher`]. A matcher follows the tokens of one
//! sequence: it fills the bit mask of allowed next tokens, and accepts the sampled token. Parsing and masks are by the
//! [`llguidance`] crate; this one adds formats, background compilation, a cache, limits and errors.
//!
//! | type | purpose |
//! |---|---|
//! | [`Vocabulary`] | the bytes of a model's tokens, and its EOS tokens |
//! | [`Grammar`] | a JSON schema, a regular expression, a Lark or GBNF grammar, or structural tags |
//! | [`Compiler`], [`Limits`], [`PendingGrammar`] | background compilation with a cache and limits of size and time |
//! | [`Matcher`] | one sequence: masks, accepted tokens, rollback, jump-forward tokens |
//! | [`AsyncMatcher`] | a matcher whose next mask is computed in the background as soon as a token is known |
//!
//! # Modules
//!
//! | module | contents |
//! |---|---|
//! | `compiler`, `shared`, `limits`, `pending` | background compilation, cache, limits |
//! | `worker`, `process` | the threads that compile, and sandbox processes that compile each grammar first |
//! | `model`, `parser`, `budget` | the llguidance factory of a vocabulary; the parser of a sequence; the memory budget of all parsers |
//! | `threads` | threads that survive panics |
//! | `grammar`, `gbnf`, `tags`, `json` | the grammar formats |
//! | `schema` | JSON schemas that llguidance refuses, rewritten in its keywords |
//! | `matcher`, `async_matcher` | the grammar matcher of one sequence, and its background version |
//! | [`patterns`] | the layer patterns of a PEFT adapter, as automata |
//! | `vocabulary`, `tokenizer` | the tokens of a model, and how it writes a text |

mod async_matcher;
mod budget;
mod compiler;
mod error;
mod gbnf;
mod grammar;
mod json;
mod limits;
mod matcher;
mod model;
mod parser;
pub mod patterns;
mod pending;
mod process;
mod schema;
mod shared;
mod tags;
mod threads;
mod tokenizer;
mod vocabulary;
mod worker;

pub use async_matcher::{AsyncMatcher, NextMask};
pub use compiler::Compiler;
pub use error::GrammarError;
pub use grammar::{Grammar, JsonSpace};
pub use limits::{CompilerCommand, Limits, Notice, Settings};
pub use matcher::Matcher;
pub use pending::{CompiledGrammar, PendingGrammar, Progress};
pub use process::compiler_process;
pub use tokenizer::Tokenizer;
pub use vocabulary::Vocabulary;

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
