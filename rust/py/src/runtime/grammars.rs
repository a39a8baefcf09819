//! Grammars of requests, by Python's names.

use std::sync::{Arc, Mutex, PoisonError};

use pie_runtime::{Compiler, Constrain, Grammar, GrammarConstraint, GrammarLimits, Vocabulary};
use pyo3::prelude::*;

use super::settings::value_error;

/// What grammars are compiled with. The compiler is made by the first one: it copies every token.
pub(crate) struct Grammars {
    tokens: Arc<Vec<Box<[u8]>>>,
    special: Vec<(u32, String)>,
    ends: Vec<u32>,
    compiler: Mutex<Option<Compiler>>,
}

impl Grammars {
    pub(super) fn new(
        tokens: Arc<Vec<Box<[u8]>>>,
        special: Vec<(u32, String)>,
        ends: &[u32],
    ) -> Self {
        Self {
            tokens,
            special,
            ends: ends.to_vec(),
            compiler: Mutex::new(None),
        }
    }

    /// Asks for a grammar and returns at once.
    pub(super) fn bind(&self, kind: &str, text: String) -> PyResult<Arc<dyn Constrain>> {
        let text = text.into_boxed_str();
        let grammar = match kind {
            "json_schema" => Grammar::JsonSchema(text),
            "regex" => Grammar::Regex(text),
            "ebnf" => Grammar::Ebnf(text),
            "lark" => Grammar::Lark(text),
            "structural_tag" => Grammar::StructuralTag(text),
            _ => {
                return Err(value_error(format!(
                    "the grammar is a {kind:?}: take json_schema, regex, ebnf, lark or structural_tag"
                )));
            }
        };
        self.constrain(&grammar).map_err(value_error)
    }

    /// Asks for a grammar and returns at once.
    pub(crate) fn constrain(
        &self,
        grammar: &Grammar,
    ) -> Result<Arc<dyn Constrain>, Box<dyn std::error::Error>> {
        let compiler = self.compiler()?;
        Ok(Arc::new(GrammarConstraint::new(&compiler, grammar)))
    }

    fn compiler(&self) -> Result<Compiler, Box<dyn std::error::Error>> {
        let mut compiler = self.compiler.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(compiler) = &*compiler {
            return Ok(compiler.clone());
        }
        let vocabulary = Vocabulary::new(&self.tokens, &self.special, &self.ends);
        let made = Compiler::new(vocabulary?, GrammarLimits::default())?;
        Ok(compiler.insert(made).clone())
    }
}
