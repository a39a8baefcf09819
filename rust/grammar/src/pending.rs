//! A requested grammar and its compilation.

use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::error::GrammarError;
use crate::grammar::Grammar;
use crate::matcher::Matcher;
use crate::threads::lock;

/// Maximum recycled matchers of one grammar.
const USED: usize = 16;

/// Progress of a compilation.
#[derive(Clone, Debug)]
pub enum Progress {
    /// Queued, or being compiled.
    Compiling,
    /// Compiled.
    Ready(Arc<CompiledGrammar>),
    /// Failed.
    Failed(Arc<GrammarError>),
}

/// A compiled grammar.
#[derive(Debug)]
pub struct CompiledGrammar {
    /// Locked for the time of a clone.
    matcher: Mutex<Matcher>,
    /// Recycled matchers, with warm lexer states.
    used: Mutex<Vec<Matcher>>,
    /// The first mask.
    pub(crate) mask: Arc<Vec<u32>>,
    /// Time of the first mask.
    pub(crate) took: Duration,
    relaxed: Vec<String>,
}

impl CompiledGrammar {
    pub(crate) fn new(
        matcher: Matcher,
        mask: Vec<u32>,
        took: Duration,
        relaxed: Vec<String>,
    ) -> Self {
        Self {
            matcher: Mutex::new(matcher),
            used: Mutex::default(),
            mask: Arc::new(mask),
            took,
            relaxed,
        }
    }

    /// JSON pointers to the keywords of its schemas that allow more than they say, because no grammar enforces them.
    pub fn relaxed(&self) -> &[String] {
        &self.relaxed
    }

    /// A matcher in its start state.
    pub fn matcher(&self) -> Matcher {
        let used = lock(&self.used).pop();
        used.unwrap_or_else(|| lock(&self.matcher).clone())
    }

    /// Keeps a matcher for reuse.
    pub(crate) fn recycle(&self, mut matcher: Matcher) {
        if matcher.reset() {
            let mut used = lock(&self.used);
            if used.len() < USED {
                used.push(matcher);
            }
        }
    }
}

/// A requested grammar, shared by its clones.
#[derive(Clone, Debug)]
pub struct PendingGrammar(Arc<State>);

#[derive(Debug)]
struct State {
    kind: &'static str,
    asked: Instant,
    limit: Duration,
    progress: Mutex<Progress>,
    changed: Condvar,
    /// When it turned out that the grammar itself is the reason of a failure.
    refused: OnceLock<Instant>,
}

impl PendingGrammar {
    pub(crate) fn new(grammar: &Grammar, limit: Duration) -> Self {
        Self(Arc::new(State {
            kind: grammar.kind(),
            asked: Instant::now(),
            limit,
            progress: Mutex::new(Progress::Compiling),
            changed: Condvar::new(),
            refused: OnceLock::new(),
        }))
    }

    /// Current progress; fails once the time limit has passed.
    pub fn progress(&self) -> Progress {
        let mut progress = lock(&self.0.progress);
        if matches!(*progress, Progress::Compiling) && self.0.asked.elapsed() > self.0.limit {
            let (kind, limit) = (self.0.kind, self.0.limit);
            *progress = Progress::Failed(Arc::new(GrammarError::TooSlow { kind, limit }));
        }
        progress.clone()
    }

    /// Waits until it is compiled and returns a matcher at the start of a text.
    ///
    /// # Errors
    /// A [`GrammarError`].
    pub fn wait(&self) -> Result<Matcher, Arc<GrammarError>> {
        loop {
            match self.progress() {
                Progress::Ready(ready) => return Ok(ready.matcher()),
                Progress::Failed(error) => return Err(error),
                Progress::Compiling => {}
            }
            let progress = lock(&self.0.progress);
            if matches!(*progress, Progress::Compiling) {
                let left = self.0.limit.saturating_sub(self.0.asked.elapsed());
                let wait = left + Duration::from_millis(1);
                drop(self.0.changed.wait_timeout(progress, wait));
            }
        }
    }

    /// When it fails unless it is compiled by then.
    pub(crate) fn deadline(&self) -> Instant {
        self.0.asked + self.0.limit
    }

    /// Whether a new request has the same answer: it is compiled, will be, or was refused less than `retry_after` ago.
    pub(crate) fn is_valid(&self, retry_after: Duration) -> bool {
        let refused = self.0.refused.get();
        match self.progress() {
            Progress::Failed(_) => refused.is_some_and(|at| at.elapsed() < retry_after),
            Progress::Compiling | Progress::Ready(_) => true,
        }
    }

    /// Whether only `others` references are left.
    pub(crate) fn has_only_references(&self, others: usize) -> bool {
        Arc::strong_count(&self.0) == others
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Sets the result, unless the time limit has passed.
    pub(crate) fn resolve(&self, result: Result<Arc<CompiledGrammar>, GrammarError>) {
        let mut progress = lock(&self.0.progress);
        if result.as_ref().is_err_and(|error| !error.is_temporary()) {
            self.0.refused.get_or_init(Instant::now);
        }
        if matches!(*progress, Progress::Compiling) {
            *progress = match result {
                Ok(ready) => Progress::Ready(ready),
                Err(error) => Progress::Failed(Arc::new(error)),
            };
        }
        self.0.changed.notify_all();
    }
}
