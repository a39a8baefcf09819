//! Limits and settings of compilation.

use std::ffi::OsString;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::error::GrammarError;
use crate::grammar::JsonSpace;

/// Stack of the threads that compile and match in this process: as many times that of a trial, so that what passed one fits.
const STACK_FACTOR: usize = 4;

/// Limits of compilation and matchers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Threads that compile, each with a compiler process of its own where [`Settings::process`] is given.
    pub threads: NonZeroUsize,
    /// Threads that compute masks in the background.
    pub mask_threads: NonZeroUsize,
    /// Size of the LRU cache of grammars.
    pub kept: NonZeroUsize,
    /// Maximum queued grammars.
    pub waiting: usize,
    /// Bytes of one grammar's text.
    pub bytes: usize,
    /// Timeout of one grammar, queueing included.
    pub time: Duration,
    /// Timeout of compiling one grammar.
    pub compile_time: Duration,
    /// Grammars that take longer than this move to a separate thread, so that they do not block others.
    pub slow: Duration,
    /// Bytes of memory that a compiler process may allocate for one grammar.
    pub memory: u64,
    /// Bytes that the matchers of all sequences may take together. Beyond it a matcher fails that takes more than 1/256 of it.
    pub matchers: usize,
    /// Bytes of stack of a compiler process.
    pub stack: usize,
    /// How long a grammar that failed is refused without compiling it again.
    pub retry_after: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let cores = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let four = NonZeroUsize::MIN.saturating_add(3);
        let eight = NonZeroUsize::MIN.saturating_add(7);
        Self {
            threads: cores.min(four),
            mask_threads: cores.min(eight),
            kept: NonZeroUsize::MIN.saturating_add(255),
            waiting: 1024,
            bytes: 1 << 20,
            time: Duration::from_secs(30),
            compile_time: Duration::from_secs(10),
            slow: Duration::from_secs(1),
            memory: 512 << 20,
            matchers: 2 << 30,
            stack: 16 << 20,
            retry_after: Duration::from_mins(1),
        }
    }
}

impl Limits {
    /// Bytes of stack of the threads of this process that compile grammars or follow them.
    pub(crate) fn own_stack(&self) -> usize {
        self.stack.saturating_mul(STACK_FACTOR)
    }

    /// One grammar too many waits.
    pub(crate) fn busy(&self) -> GrammarError {
        let limit = self.waiting;
        let waiting = limit;
        GrammarError::Busy { waiting, limit }
    }
}

/// How a compiler process is started: a program that calls [`compiler_process`](crate::compiler_process).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompilerCommand {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// Receives messages of the compiler's threads.
#[derive(Clone)]
pub struct Notice(pub Arc<dyn Fn(&str) + Send + Sync>);

impl fmt::Debug for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notice").finish_non_exhaustive()
    }
}

/// How a [`Compiler`](crate::Compiler) does its work.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Limits of compilation and matchers.
    pub limits: Limits,
    /// White space of JSON.
    pub space: JsonSpace,
    /// Receives a line about schemas that are [relaxed](crate::CompiledGrammar::relaxed), at most every ten seconds.
    pub notice: Option<Notice>,
    /// Whether JSON schemas with keywords that no grammar enforces are refused. Else these keywords are
    /// [relaxed](crate::CompiledGrammar::relaxed).
    pub strict_schemas: bool,
    /// The model's `tokenizer.json`. It is read in the background, before the first grammar is compiled. One that
    /// [cannot be used](crate::Tokenizer::from_json) is as none: then only single tokens without alternative are jumped over.
    pub tokenizer: Option<PathBuf>,
    /// How compiler processes are started. Each grammar is compiled by one first, so that a grammar that overflows the stack, uses up
    /// the memory, or does not end within the time fails alone. Without a command grammars are compiled in this process only, and
    /// one that overflows the stack or uses up the memory ends it: for trusted grammars.
    pub process: Option<CompilerCommand>,
}
