//! Grammars compiled in the background, once for each text.

use std::fmt;
use std::io;
use std::sync::mpsc::{Sender, TrySendError};
use std::sync::{Arc, Mutex, mpsc};

use crate::error::GrammarError;
use crate::grammar::Grammar;
use crate::limits::{Limits, Settings};
use crate::pending::PendingGrammar;
use crate::shared::{Job, Shared};
use crate::threads::{self, Task, lock};
use crate::vocabulary::Vocabulary;
use crate::worker;

/// Compiles grammars for one vocabulary. Clones share threads and cache; the threads end with the last of them.
#[derive(Clone)]
pub struct Compiler(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    jobs: mpsc::SyncSender<Job>,
    ahead: Mutex<Sender<Task>>,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler")
            .field("vocabulary", self.vocabulary())
            .field("settings", &self.0.shared.settings)
            .finish_non_exhaustive()
    }
}

impl Compiler {
    /// Starts the threads. Grammars are compiled in this process: for [trusted](Settings::process) ones.
    ///
    /// # Errors
    /// An I/O error if a thread cannot be started.
    pub fn new(vocabulary: Vocabulary, limits: Limits) -> io::Result<Self> {
        let settings = Settings {
            limits,
            ..Settings::default()
        };
        Self::with_settings(vocabulary, settings)
    }

    /// The same with all settings.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_settings(vocabulary: Vocabulary, settings: Settings) -> io::Result<Self> {
        let limits = settings.limits;
        let shared = Arc::new(Shared::new(vocabulary, settings));
        let jobs = worker::start(&shared)?;
        let (ahead, tasks) = mpsc::channel();
        threads::start("pie-masks", limits.mask_threads, limits.own_stack(), tasks)?;
        Ok(Self(Arc::new(Inner {
            shared,
            jobs,
            ahead: Mutex::new(ahead),
        })))
    }

    /// The vocabulary that it compiles for.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.0.shared.vocabulary
    }

    /// Requests a grammar and returns at once. One that was requested before is not compiled again; one that was refused is only
    /// after [a while](Limits::retry_after).
    pub fn compile(&self, grammar: &Grammar) -> PendingGrammar {
        let shared = &self.0.shared;
        let limits = shared.settings.limits;
        let mut kept = lock(&shared.kept);
        if let Some(pending) = kept.get(grammar)
            && pending.is_valid(limits.retry_after)
        {
            return pending.clone();
        }
        if !shared.budget.has_space() {
            // The matchers of sequences are theirs, those of grammars may go.
            kept.pop_lru();
        }
        let pending = PendingGrammar::new(grammar, limits.time);
        let (kind, bytes) = (grammar.kind(), grammar.bytes());
        if bytes > limits.bytes {
            let limit = limits.bytes;
            pending.resolve(Err(GrammarError::TooLong { kind, bytes, limit }));
            return pending;
        }
        if !shared.has_model() {
            // While a compiler process does the same.
            let shared = Arc::clone(shared);
            self.ahead(move || {
                let _ = shared.model();
            });
        }
        let job = Job {
            grammar: grammar.clone(),
            pending: pending.clone(),
        };
        match self.0.jobs.try_send(job) {
            Ok(()) => {
                kept.put(grammar.clone(), pending.clone());
            }
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                pending.resolve(Err(limits.busy()));
            }
        }
        pending
    }

    /// Has a thread do something that will be needed soon.
    pub(crate) fn ahead(&self, task: impl FnOnce() + Send + 'static) {
        // Threads that are gone leave the work to the one that needs it.
        let _ = lock(&self.0.ahead).send(Box::new(task));
    }
}
