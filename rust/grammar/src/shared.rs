//! State that a compiler and its threads share.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use lru::LruCache;

use crate::budget::MemoryBudget;
use crate::error::one_line;
use crate::grammar::Grammar;
use crate::limits::Settings;
use crate::model::Model;
use crate::pending::{CompiledGrammar, PendingGrammar};
use crate::threads::lock;
use crate::vocabulary::Vocabulary;

/// Least time between two reports of relaxed schemas.
const REPORTS: Duration = Duration::from_secs(10);

/// A grammar to compile.
pub(crate) struct Job {
    pub(crate) grammar: Grammar,
    pub(crate) pending: PendingGrammar,
}

/// State of the compiler and its threads.
pub(crate) struct Shared {
    pub(crate) vocabulary: Vocabulary,
    pub(crate) settings: Settings,
    model: OnceLock<Result<Model, String>>,
    pub(crate) kept: Mutex<LruCache<Grammar, PendingGrammar>>,
    /// Memory budget of all matchers.
    pub(crate) budget: Arc<MemoryBudget>,
    /// When a relaxed schema was reported last.
    reported: Mutex<Option<Instant>>,
}

impl Shared {
    pub(crate) fn new(vocabulary: Vocabulary, settings: Settings) -> Self {
        let limits = settings.limits;
        Self {
            vocabulary,
            settings,
            model: OnceLock::new(),
            kept: Mutex::new(LruCache::new(limits.kept)),
            budget: MemoryBudget::new(limits.matchers),
            reported: Mutex::default(),
        }
    }

    pub(crate) fn has_model(&self) -> bool {
        self.model.get().is_some()
    }

    /// The tokens, ready to be followed; the first call prepares them, which takes time for each token.
    pub(crate) fn model(&self) -> Result<&Model, &String> {
        let settings = &self.settings;
        let make = || {
            Model::new(
                self.vocabulary.clone(),
                settings.tokenizer.as_ref(),
                (settings.space.clone(), settings.strict_schemas),
                Arc::clone(&self.budget),
            )
        };
        self.model.get_or_init(make).as_ref()
    }

    /// Reports a grammar that allows more than its schemas do.
    pub(crate) fn report(&self, compiled: &CompiledGrammar) {
        let (Some(notice), Some(first)) = (&self.settings.notice, compiled.relaxed().first())
        else {
            return;
        };
        let now = Instant::now();
        {
            let mut last = lock(&self.reported);
            if last.is_some_and(|last| now < last + REPORTS) {
                return;
            }
            *last = Some(now);
        }
        let others = match compiled.relaxed().len() - 1 {
            0 => String::new(),
            others => format!(" and {others} other keywords"),
        };
        let path = one_line(&format!("{first:?}"));
        let why = "cannot be enforced by a grammar, answers may violate it";
        (notice.0)(&format!("a JSON schema is relaxed: {path}{others} {why}"));
    }

    /// Whether nothing waits for a grammar any more, as when its request was aborted. Then it is forgotten.
    pub(crate) fn is_abandoned(&self, job: &Job) -> bool {
        // Who requests it now waits for this lock.
        let mut kept = lock(&self.kept);
        let entry = kept.peek(&job.grammar);
        let is_kept = entry.is_some_and(|it| it.is_same(&job.pending));
        let alone = job.pending.has_only_references(1 + usize::from(is_kept));
        if alone && is_kept {
            kept.pop(&job.grammar);
        }
        alone
    }
}
