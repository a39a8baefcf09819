//! Errors of grammars and matchers.

use std::time::Duration;

use thiserror::Error;

/// Why a grammar cannot be used, or why a matcher cannot continue.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// The text is longer than the limit.
    #[error("the {kind} has {bytes} bytes, {limit} is the most: shorten it")]
    TooLong {
        /// The format, in words.
        kind: &'static str,
        /// Bytes of the text.
        bytes: usize,
        /// Most that are taken.
        limit: usize,
    },
    /// The text is invalid in its format.
    #[error("the {kind} is wrong: {reason}")]
    Wrong {
        /// The format, in words.
        kind: &'static str,
        /// What the compiler says.
        reason: String,
    },
    /// It does not fit the stack of a compiler process.
    #[error("the {kind} is nested too deep to be compiled with {} KiB of stack: shorten its chains of references and rules", limit / 1024)]
    TooDeep {
        /// The format, in words.
        kind: &'static str,
        /// Bytes of stack.
        limit: usize,
    },
    /// It does not fit the memory of a compiler process.
    #[error("the {kind} takes more than {} MiB of memory to compile: simplify it", limit >> 20)]
    TooLarge {
        /// The format, in words.
        kind: &'static str,
        /// Bytes that it may take.
        limit: u64,
    },
    /// The compiler process ended while it compiled the grammar.
    #[error("the {kind} ended its compiler process ({status}): simplify it")]
    Crashed {
        /// The format, in words.
        kind: &'static str,
        /// How the process ended.
        status: String,
    },
    /// The compiler panicked: a bug, which this grammar alone meets.
    #[error("the {kind} cannot be compiled, because the compiler failed on it: simplify it")]
    Panicked {
        /// The format, in words.
        kind: &'static str,
    },
    /// No compiler process can be started.
    #[error("no compiler for the {kind} can be started ({reason}): try again later")]
    NoCompiler {
        /// The format, in words.
        kind: &'static str,
        /// Why not.
        reason: String,
    },
    /// No result within the limit of time.
    #[error("the {kind} was not compiled within {} s: simplify it", limit.as_secs_f32())]
    TooSlow {
        /// The format, in words.
        kind: &'static str,
        /// Time that it may take.
        limit: Duration,
    },
    /// Too many grammars wait to be compiled.
    #[error("{waiting} grammars wait to be compiled, {limit} may: try again later")]
    Busy {
        /// Grammars that wait.
        waiting: usize,
        /// Most that may.
        limit: usize,
    },
    /// Tokens, but none that ends a text.
    #[error("the vocabulary has no token that ends a text: name at least one")]
    NoEnd,
    /// An end or special token that the vocabulary does not have.
    #[error("token {token} is not below the vocabulary's {size}: check the tokenizer")]
    Token {
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        size: usize,
    },
    /// An unusable `tokenizer.json`.
    #[error("the tokenizer cannot be used: {reason}")]
    Tokenizer {
        /// Why not.
        reason: String,
    },
    /// A token that the mask forbids.
    #[error("token {token} is not allowed here: sample by the mask")]
    Forbidden {
        /// The token.
        token: u32,
    },
    /// The matcher failed, for the reason of llguidance.
    #[error("the grammar cannot be followed any further: {0}")]
    Matcher(String),
    /// A panic of the matcher: a bug.
    #[error("the grammar cannot be followed any further: its matcher is broken")]
    Broken,
    /// A rollback over more tokens than were committed.
    #[error("{wanted} tokens cannot be taken back, {accepted} were accepted")]
    Rollback {
        /// Tokens to take back.
        wanted: usize,
        /// Tokens since the start.
        accepted: usize,
    },
    /// A mask in a buffer of another length.
    #[error("a mask takes {needed} words of 32 bits, the buffer has {given}")]
    Buffer {
        /// Words of a mask.
        needed: usize,
        /// Words of the buffer.
        given: usize,
    },
}

impl GrammarError {
    /// An invalid text, with the reason of the compiler.
    pub(crate) fn wrong(kind: &'static str, reason: &str) -> Self {
        let reason = one_line(reason);
        Self::Wrong { kind, reason }
    }

    /// Whether the same grammar may succeed at once, because something else was the reason: there is no room for it, or no compiler.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Busy { .. } | Self::NoCompiler { .. })
    }
}

/// The reason that a compiler gives, in one line of bounded length: without the state, the backtrace or the note that it adds, and
/// without the middle of a long text that it quotes.
pub(crate) fn one_line(text: &str) -> String {
    const SIDE: usize = 200;
    let text = text.trim();
    let ends = ["\n<state>", "\n<backtrace>", "\n<non-verbose/>"].map(|mark| text.find(mark));
    let end = ends.into_iter().flatten().min().unwrap_or(text.len());
    let words: Vec<&str> = text[..end].split_whitespace().collect();
    let line = words.join(" ");
    let length = line.chars().count();
    if length <= 2 * SIDE {
        return line;
    }
    let first = line.chars().take(SIDE);
    let last = line.chars().skip(length - SIDE);
    first.chain(" … ".chars()).chain(last).collect()
}
