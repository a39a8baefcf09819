//! What a compiler and its threads share.

use std::sync::{Arc, Mutex, OnceLock};

use lru::LruCache;

use crate::budget::Budget;
use crate::grammar::Grammar;
use crate::limits::Settings;
use crate::model::Model;
use crate::pending::Pending;
use crate::threads::lock;
use crate::vocabulary::Vocabulary;

/// A grammar to compile.
pub(crate) struct Job {
    pub(crate) grammar: Grammar,
    pub(crate) pending: Pending,
}

/// What the compiler and its threads know.
pub(crate) struct Shared {
    pub(crate) vocabulary: Vocabulary,
    pub(crate) settings: Settings,
    model: OnceLock<Result<Model, String>>,
    pub(crate) kept: Mutex<LruCache<Grammar, Pending>>,
    /// What the matchers of all grammars take.
    pub(crate) budget: Arc<Budget>,
}

impl Shared {
    pub(crate) fn new(vocabulary: Vocabulary, settings: Settings) -> Self {
        let limits = settings.limits;
        Self {
            vocabulary,
            settings,
            model: OnceLock::new(),
            kept: Mutex::new(LruCache::new(limits.kept)),
            budget: Budget::new(limits.matchers),
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
        let alone = job.pending.is_known_to(1 + usize::from(is_kept));
        if alone && is_kept {
            kept.pop(&job.grammar);
        }
        alone
    }
}
