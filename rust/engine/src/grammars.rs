//! Grammar compiler of a service.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use pie_grammar::{
    Compiler, Grammar, GrammarError, Notice, Settings as CompilerSettings, Vocabulary,
};
use pie_scheduler::GrammarHandle;

use crate::constraint::GrammarConstraint;
use crate::log::ServiceLog;

/// Vocabulary and limits of the grammar compiler.
#[derive(Clone)]
pub struct GrammarSettings {
    /// The bytes of each token; empty for tokens without text.
    pub tokens: Arc<Vec<Box<[u8]>>>,
    /// Special tokens, and their names in grammars.
    pub special: Vec<(u32, String)>,
    /// End-of-sequence tokens.
    pub eos_token_ids: Vec<u32>,
    /// Limits, JSON white space, and the tokenizer.
    pub compiler: CompilerSettings,
}

impl fmt::Debug for GrammarSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarSettings")
            .field("tokens", &self.tokens.len())
            .field("eos_token_ids", &self.eos_token_ids)
            .field("compiler", &self.compiler)
            .finish_non_exhaustive()
    }
}

/// Why grammars cannot be compiled by this service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarSetupError {
    /// The service has no vocabulary.
    #[error(
        "grammars need the text of tokens, and this server has no tokenizer: start it with one"
    )]
    NoTokenizer,
    /// The vocabulary is invalid.
    #[error(transparent)]
    Tokens(#[from] GrammarError),
    /// The compiler's threads cannot be started.
    #[error("a thread for grammars cannot be started: {0}")]
    Thread(String),
}

/// Compiles grammars for the requests of a service; the first one creates the compiler.
#[derive(Debug)]
pub(crate) struct Grammars {
    settings: Option<GrammarSettings>,
    compiler: Mutex<Option<Compiler>>,
}

impl Grammars {
    pub(crate) fn new(mut settings: Option<GrammarSettings>, log: &ServiceLog) -> Self {
        if let Some(settings) = &mut settings {
            let log = Arc::clone(log);
            let notice = move |line: &str| log(0, &format!("pie-engine: {line}"));
            settings.compiler.notice = Some(Notice(Arc::new(notice)));
        }
        Self {
            settings,
            compiler: Mutex::new(None),
        }
    }

    /// Starts to compile a grammar that applies after the tokens `after`. Does not block.
    pub(crate) fn compile(
        &self,
        grammar: &Grammar,
        after: &[u32],
    ) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError> {
        let compiler = self.compiler()?;
        Ok(Arc::new(GrammarConstraint::new(&compiler, grammar, after)))
    }

    fn compiler(&self) -> Result<Compiler, GrammarSetupError> {
        let mut compiler = self.compiler.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(compiler) = &*compiler {
            return Ok(compiler.clone());
        }
        let settings = self
            .settings
            .as_ref()
            .ok_or(GrammarSetupError::NoTokenizer)?;
        let (tokens, special) = (Arc::clone(&settings.tokens), settings.special.clone());
        let vocabulary = Vocabulary::shared(tokens, special, &settings.eos_token_ids)?;
        let made = Compiler::with_settings(vocabulary, settings.compiler.clone());
        let made = made.map_err(|error| GrammarSetupError::Thread(error.to_string()))?;
        Ok(compiler.insert(made).clone())
    }
}
