//! One error for the program. A message says what happened and, after a blank line, what to do.

use std::io;
use std::path::PathBuf;

use pie_engine::EngineError;

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    #[error("{action} {}: {source}", path.display())]
    File {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(
        "--option {fragment:?} is not a line of TOML: {problem}\n\nhint: write key=value; strings need quotes, as in 'attention_backend=\"triton\"'"
    )]
    Option { fragment: String, problem: String },
    #[error("{} is not a list of prompts, lists of token ids: {problem}", path.display())]
    Prompts { path: PathBuf, problem: String },
    #[error("the lengths are not usable: {0}")]
    Lengths(String),
    #[error(transparent)]
    Runtime(#[from] EngineError),
    #[error("no page is free, of {0}")]
    NoPage(u32),
    #[error("a prompt of {prompt} and {output} tokens of output never fit: {why}")]
    NeverFits {
        prompt: u32,
        output: u32,
        why: String,
    },
}
