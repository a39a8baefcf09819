//! Grammars that bind what a language model may say.
//!
//! A [`Compiler`] turns the text of a grammar into a [`Matcher`], on threads of its own and once for each text. A matcher stands
//! after the tokens of one sequence: it says which tokens may come next, as a mask of bits, and goes on by the token that came.
//! The work is done by the [`llguidance`] crate; this one adds the formats, the background, the cache, limits and errors.
//!
//! | type | what it is |
//! |---|---|
//! | [`Vocabulary`] | the bytes of a model's tokens, and the tokens that end a text |
//! | [`Grammar`] | a JSON schema, a regular expression, a Lark or GBNF grammar, or structural tags |
//! | [`Compiler`], [`Limits`], [`Pending`] | compiled in the background, kept by text, bounded in size and time |
//! | [`Matcher`] | one sequence: masks, commits, rollbacks, forced tokens |
//! | [`Follower`] | a matcher whose next mask is computed by the compiler's threads as soon as a token is known |
//!
//! # Modules
//!
//! | module | what it is |
//! |---|---|
//! | `compiler`, `shared`, `limits`, `pending` | compiles in the background, keeps what was compiled, computes masks ahead |
//! | `worker`, `process` | the threads that compile, and the processes in which a grammar is compiled first |
//! | `model`, `parser`, `budget` | one vocabulary with its compiler; a parser of a sequence, and what all of them take |
//! | `threads` | threads that survive panics |
//! | `grammar`, `gbnf`, `tags`, `json` | the forms of grammars |
//! | `matcher`, `follower` | one sequence and its grammar |
//! | [`patterns`] | the layer patterns of a PEFT adapter, as automata |
//! | `vocabulary`, `tokenizer` | the tokens of a model, and how it writes a text |

mod budget;
mod compiler;
mod error;
mod follower;
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
mod shared;
mod tags;
mod threads;
mod tokenizer;
mod vocabulary;
mod worker;

pub use compiler::Compiler;
pub use error::GrammarError;
pub use follower::{Follower, Next};
pub use grammar::{Grammar, JsonSpace};
pub use limits::{CompilerCommand, Limits, Settings};
pub use matcher::Matcher;
pub use pending::{Pending, Progress, Ready};
pub use process::compiler_process;
pub use tokenizer::Tokenizer;
pub use vocabulary::Vocabulary;

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
