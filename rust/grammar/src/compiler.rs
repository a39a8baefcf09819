//! Grammars compiled in the background, once for each text.

use std::fmt;
use std::fs;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, TrySendError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use llguidance::ParserFactory;
use lru::LruCache;

use crate::error::GrammarError;
use crate::grammar::{Grammar, JsonSpace};
use crate::matcher::{Matcher, first_line};
use crate::tokenizer::Tokenizer;
use crate::vocabulary::Vocabulary;

/// Most matchers of one grammar that are kept for other texts.
const USED: usize = 16;

/// What compiling may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Threads that compile.
    pub threads: NonZeroUsize,
    /// Threads that compute masks ahead.
    pub mask_threads: NonZeroUsize,
    /// Grammars that are kept; the one used longest ago gives way.
    pub kept: NonZeroUsize,
    /// Grammars that may wait to be compiled.
    pub waiting: usize,
    /// Bytes of one grammar's text.
    pub bytes: usize,
    /// Time for one grammar, from when it is asked for.
    pub time: Duration,
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
        }
    }
}

/// How a [`Compiler`] does its work.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// What compiling may cost.
    pub limits: Limits,
    /// White space of JSON.
    pub space: JsonSpace,
    /// The model's `tokenizer.json`. It is read in the background, before the first grammar is compiled. One that
    /// [cannot be used](Tokenizer::from_json) is as none: then only single tokens without alternative are jumped over.
    pub tokenizer: Option<PathBuf>,
}

/// How far a grammar is.
#[derive(Clone, Debug)]
pub enum Progress {
    /// It waits, or is being compiled.
    Compiling,
    /// A matcher at the start of a text, with its first mask. To be cloned.
    Ready(Arc<Ready>),
    /// It cannot be used.
    Failed(Arc<GrammarError>),
}

/// A compiled grammar.
#[derive(Debug)]
pub struct Ready {
    /// Locked for the time of a clone.
    matcher: Mutex<Matcher>,
    /// Matchers at the start again, which know more states of the grammar than a new one.
    used: Mutex<Vec<Matcher>>,
    /// The first mask.
    pub(crate) mask: Arc<Vec<u32>>,
}

impl Ready {
    /// A matcher at the start of a text.
    pub fn matcher(&self) -> Matcher {
        let used = lock(&self.used).pop();
        used.unwrap_or_else(|| lock(&self.matcher).clone())
    }

    /// Keeps a matcher for another text.
    pub(crate) fn give_back(&self, mut matcher: Matcher) {
        if matcher.reset() {
            let mut used = lock(&self.used);
            if used.len() < USED {
                used.push(matcher);
            }
        }
    }
}

/// A grammar that was asked for. Clones are of the same one.
#[derive(Clone, Debug)]
pub struct Pending(Arc<State>);

#[derive(Debug)]
struct State {
    kind: &'static str,
    asked: Instant,
    limit: Duration,
    progress: Mutex<Progress>,
    changed: Condvar,
}

impl Pending {
    fn new(grammar: &Grammar, limit: Duration, progress: Progress) -> Self {
        Self(Arc::new(State {
            kind: grammar.kind(),
            asked: Instant::now(),
            limit,
            progress: Mutex::new(progress),
            changed: Condvar::new(),
        }))
    }

    /// How far it is now. What takes longer than the limit has failed.
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

    fn is_failed(&self) -> bool {
        matches!(self.progress(), Progress::Failed(_))
    }

    /// Not where the limit of time has passed: then that is known.
    fn settle(&self, result: Result<Ready, GrammarError>) {
        let mut progress = lock(&self.0.progress);
        if matches!(*progress, Progress::Compiling) {
            *progress = match result {
                Ok(ready) => Progress::Ready(Arc::new(ready)),
                Err(error) => Progress::Failed(Arc::new(error)),
            };
        }
        self.0.changed.notify_all();
    }
}

/// Work for the threads.
type Task = Box<dyn FnOnce() + Send>;

/// Compiles grammars for one vocabulary. Clones share threads and cache; the threads end with the last of them.
#[derive(Clone)]
pub struct Compiler(Arc<Inner>);

/// A model's tokens, ready to be followed.
struct Model {
    factory: ParserFactory,
    vocabulary: Vocabulary,
}

struct Inner {
    vocabulary: Vocabulary,
    settings: Arc<Settings>,
    /// Made by the first grammar: it looks at every token.
    model: Arc<OnceLock<Result<Model, String>>>,
    kept: Arc<Mutex<LruCache<Grammar, Pending>>>,
    compile: mpsc::SyncSender<Task>,
    ahead: Mutex<Sender<Task>>,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler")
            .field("vocabulary", &self.0.vocabulary)
            .field("settings", &self.0.settings)
            .finish_non_exhaustive()
    }
}

impl Compiler {
    /// Starts the threads.
    ///
    /// # Errors
    /// An I/O error if a thread cannot be started.
    pub fn new(vocabulary: Vocabulary, limits: Limits) -> std::io::Result<Self> {
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
    pub fn with_settings(vocabulary: Vocabulary, settings: Settings) -> std::io::Result<Self> {
        let limits = settings.limits;
        // No more than may wait are sent, so that sending never waits.
        let (compile, tasks) = mpsc::sync_channel(limits.waiting);
        start("pie-grammar", limits.threads, tasks)?;
        let (ahead, tasks) = mpsc::channel();
        start("pie-masks", limits.mask_threads, tasks)?;
        Ok(Self(Arc::new(Inner {
            vocabulary,
            settings: Arc::new(settings),
            model: Arc::default(),
            kept: Arc::new(Mutex::new(LruCache::new(limits.kept))),
            compile,
            ahead: Mutex::new(ahead),
        })))
    }

    /// The vocabulary that it compiles for.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.0.vocabulary
    }

    /// Asks for a grammar and returns at once. One that was asked for before, and did not fail, is not compiled again.
    pub fn compile(&self, grammar: &Grammar) -> Pending {
        let inner = &self.0;
        let mut kept = lock(&inner.kept);
        if let Some(pending) = kept.get(grammar)
            && !pending.is_failed()
        {
            return pending.clone();
        }
        let limits = inner.settings.limits;
        let limit = limits.time;
        let (kind, bytes) = (grammar.kind(), grammar.bytes());
        if bytes > limits.bytes {
            let limit_bytes = limits.bytes;
            let error = GrammarError::TooLong {
                kind,
                bytes,
                limit: limit_bytes,
            };
            return Pending::new(grammar, limit, Progress::Failed(Arc::new(error)));
        }
        let pending = Pending::new(grammar, limit, Progress::Compiling);
        let (model, vocabulary) = (Arc::clone(&inner.model), inner.vocabulary.clone());
        let settings = Arc::clone(&inner.settings);
        let (text, own, all) = (grammar.clone(), pending.clone(), Arc::clone(&inner.kept));
        let task = Box::new(move || {
            if !is_abandoned(&own, &text, &all) {
                let model = model.get_or_init(|| Model::new(vocabulary, &settings));
                own.settle(compile(model, &settings.space, &text));
            }
        });
        match inner.compile.try_send(task) {
            Ok(()) => {
                kept.put(grammar.clone(), pending.clone());
            }
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                let limit = limits.waiting;
                let waiting = limit;
                pending.settle(Err(GrammarError::Busy { waiting, limit }));
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

/// Whether nothing waits for a grammar any more, as when its request was aborted. Then it is forgotten.
fn is_abandoned(own: &Pending, text: &Grammar, all: &Mutex<LruCache<Grammar, Pending>>) -> bool {
    // Who asks for it now waits for this lock.
    let mut all = lock(all);
    let is_kept = all.peek(text).is_some_and(|it| Arc::ptr_eq(&it.0, &own.0));
    let alone = Arc::strong_count(&own.0) == 1 + usize::from(is_kept);
    if alone && is_kept {
        all.pop(text);
    }
    alone
}

/// Threads that do what is sent until the sender is dropped.
fn start(name: &str, threads: NonZeroUsize, tasks: Receiver<Task>) -> std::io::Result<()> {
    let tasks = Arc::new(Mutex::new(tasks));
    for _ in 0..threads.get() {
        let tasks = Arc::clone(&tasks);
        let work = move || {
            loop {
                let task = lock(&tasks).recv();
                match task {
                    Ok(task) => task(),
                    Err(_) => return,
                }
            }
        };
        thread::Builder::new().name(name.to_owned()).spawn(work)?;
    }
    Ok(())
}

impl Model {
    fn new(vocabulary: Vocabulary, settings: &Settings) -> Result<Self, String> {
        let read = |path: &PathBuf| Tokenizer::from_json(&fs::read(path).ok()?).ok();
        let tokenizer = settings.tokenizer.as_ref().and_then(read);
        let vocabulary = match tokenizer {
            Some(tokenizer) => vocabulary.with_tokenizer(tokenizer),
            None => vocabulary,
        };
        let mut factory = ParserFactory::new_simple(vocabulary.env())
            .map_err(|error| first_line(&error.to_string()))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Self {
            factory,
            vocabulary,
        })
    }
}

fn compile(
    model: &Result<Model, String>,
    space: &JsonSpace,
    grammar: &Grammar,
) -> Result<Ready, GrammarError> {
    let kind = grammar.kind();
    let wrong = |reason| GrammarError::Wrong { kind, reason };
    let model = model.as_ref().map_err(|error| wrong(error.clone()))?;
    let Model {
        factory,
        vocabulary,
    } = model;
    let parser = factory.create_parser(grammar.parse(vocabulary, space)?);
    let inner = llguidance::Matcher::new(parser);
    if let Some(error) = inner.get_error() {
        return Err(wrong(first_line(&error)));
    }
    let mut matcher = Matcher::new(inner, vocabulary.clone());
    let mut mask = vec![0; vocabulary.mask_words()];
    matcher
        .mask_into(&mut mask)
        .map_err(|error| wrong(error.to_string()))?;
    if mask.iter().all(|&word| word == 0) {
        return Err(wrong("it allows no text".to_owned()));
    }
    let matcher = Mutex::new(matcher);
    let used = Mutex::default();
    Ok(Ready {
        matcher,
        used,
        mask: Arc::new(mask),
    })
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
