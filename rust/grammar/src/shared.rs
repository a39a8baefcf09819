//! State that a compiler and its threads share.

use std::sync::{Arc, Mutex, OnceLock};

use lru::LruCache;

use crate::budget::MemoryBudget;
use crate::grammar::Grammar;
use crate::limits::Settings;
use crate::model::Model;
use crate::pending::PendingGrammar;
use crate::threads::lock;
use crate::vocabulary::Vocabulary;

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
                settings.space.clone(),
                Arc::clone(&self.budget),
            )
        };
        self.model.get_or_init(make).as_ref()
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
