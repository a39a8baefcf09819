//! What the grammars of a service's requests are compiled with.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use pie_grammar::{Compiler, Grammar, GrammarError, Settings as CompilerSettings, Vocabulary};
use pie_scheduler::GrammarHandle;

use crate::constraint::GrammarConstraint;

/// The tokens of the model, as grammars need them.
#[derive(Clone)]
pub struct GrammarSettings {
    /// What each token adds to a text; nothing for tokens that do not show.
    pub tokens: Arc<Vec<Box<[u8]>>>,
    /// Tokens without text, with the names by which grammars may use them.
    pub special: Vec<(u32, String)>,
    /// The tokens that end a text.
    pub ends: Vec<u32>,
    /// What compiling may cost, white space of JSON, and how the model writes a text by its tokens.
    pub compiler: CompilerSettings,
}

impl fmt::Debug for GrammarSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarSettings")
            .field("tokens", &self.tokens.len())
            .field("ends", &self.ends)
            .field("compiler", &self.compiler)
            .finish_non_exhaustive()
    }
}

/// Why a request cannot be bound.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unbindable {
    /// The service was made without the text of tokens.
    #[error(
        "grammars need the text of tokens, and this server has no tokenizer: start it with one"
    )]
    NoTokenizer,
    /// The tokens cannot be used.
    #[error(transparent)]
    Tokens(#[from] GrammarError),
    /// The threads that compile cannot be started.
    #[error("a thread for grammars cannot be started: {0}")]
    Thread(String),
}

/// Compiles grammars for the requests of a service. The compiler is made by the first one.
#[derive(Debug)]
pub(crate) struct Grammars {
    settings: Option<GrammarSettings>,
    compiler: Mutex<Option<Compiler>>,
}

impl Grammars {
    pub(crate) fn new(settings: Option<GrammarSettings>) -> Self {
        Self {
            settings,
            compiler: Mutex::new(None),
        }
    }

    /// Asks for a grammar that binds what follows the tokens `after`, and returns at once.
    pub(crate) fn bind(
        &self,
        grammar: &Grammar,
        after: &[u32],
    ) -> Result<Arc<dyn GrammarHandle>, Unbindable> {
        let compiler = self.compiler()?;
        Ok(Arc::new(GrammarConstraint::new(&compiler, grammar, after)))
    }

    fn compiler(&self) -> Result<Compiler, Unbindable> {
        let mut compiler = self.compiler.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(compiler) = &*compiler {
            return Ok(compiler.clone());
        }
        let settings = self.settings.as_ref().ok_or(Unbindable::NoTokenizer)?;
        let (tokens, special) = (Arc::clone(&settings.tokens), settings.special.clone());
        let vocabulary = Vocabulary::shared(tokens, special, &settings.ends)?;
        let made = Compiler::with_settings(vocabulary, settings.compiler.clone());
        let made = made.map_err(|error| Unbindable::Thread(error.to_string()))?;
        Ok(compiler.insert(made).clone())
    }
}
