//! The `llguidance` parser factory of a vocabulary.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use llguidance::ParserFactory;

use crate::budget::MemoryBudget;
use crate::error::{GrammarError, one_line};
use crate::grammar::{Grammar, JsonSpace};
use crate::matcher::Matcher;
use crate::parser::Parser;
use crate::pending::CompiledGrammar;
use crate::schema::Effort;
use crate::tokenizer::Tokenizer;
use crate::vocabulary::Vocabulary;

/// States of the automaton that finds the lexemes of one sequence, each of 1 to 2 kB. Schemas have thousands.
const LEXER_STATES: usize = 50_000;

/// The parser factory of a vocabulary.
pub(crate) struct Model {
    factory: ParserFactory,
    vocabulary: Vocabulary,
    space: JsonSpace,
    /// Whether schemas are refused that are not enforced completely.
    is_strict: bool,
    budget: Arc<MemoryBudget>,
}

impl Model {
    /// Builds the token trie. With a file of a tokenizer that can be used forced text is written as the model writes it.
    pub(crate) fn new(
        vocabulary: Vocabulary,
        tokenizer: Option<&PathBuf>,
        (space, is_strict): (JsonSpace, bool),
        budget: Arc<MemoryBudget>,
    ) -> Result<Self, String> {
        let read = |path: &PathBuf| Tokenizer::from_json(&fs::read(path).ok()?).ok();
        let vocabulary = match tokenizer.and_then(read) {
            Some(tokenizer) => vocabulary.with_tokenizer(tokenizer),
            None => vocabulary,
        };
        let mut factory = ParserFactory::new_simple(vocabulary.env())
            .map_err(|error| one_line(&error.to_string()))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        limits.max_lexer_states = LEXER_STATES;
        Ok(Self {
            factory,
            vocabulary,
            space,
            is_strict,
            budget,
        })
    }

    /// A matcher at the start of a text, and the first mask. JSON schemas that llguidance refuses are rewritten.
    pub(crate) fn compile(&self, grammar: &Grammar) -> Result<CompiledGrammar, GrammarError> {
        let mut failed = match self.attempt(grammar, None) {
            Err(error) if grammar.has_schemas() => error,
            result => return result,
        };
        for effort in [Effort::Exact, Effort::Small] {
            match self.attempt(grammar, Some(effort)) {
                Err(error) => failed = error,
                Ok(compiled) => return Ok(compiled),
            }
        }
        Err(failed)
    }

    fn attempt(
        &self,
        grammar: &Grammar,
        effort: Option<Effort>,
    ) -> Result<CompiledGrammar, GrammarError> {
        let kind = grammar.kind();
        let wrong = |reason: String| GrammarError::wrong(kind, &reason);
        let parsed = grammar.parse(&self.vocabulary, &self.space, effort)?;
        if let Some(path) = parsed.relaxed.first()
            && (self.is_strict || parsed.is_strict)
        {
            return Err(wrong(format!(
                "{path:?} cannot be enforced: remove it, or allow schemas that are not enforced completely"
            )));
        }
        let parser = self.factory.create_parser(parsed.grammar);
        let parser = parser.map_err(|error| {
            let paths = parsed.paths.iter().enumerate();
            wrong(paths.fold(error.to_string(), |reason, (number, path)| {
                reason.replace(&format!("#/$defs/_{number}_"), path)
            }))
        })?;
        let parser = Parser::new(parser, Arc::clone(&self.budget));
        let mut matcher = Matcher::new(parser, self.vocabulary.clone());
        let mut mask = vec![0; self.vocabulary.mask_words()];
        let begin = Instant::now();
        matcher
            .fill_bitmask(&mut mask)
            .map_err(|error| wrong(error.to_string()))?;
        if mask.iter().all(|&word| word == 0) {
            return Err(wrong("it allows no text".to_owned()));
        }
        let took = begin.elapsed();
        Ok(CompiledGrammar::new(matcher, mask, took, parsed.relaxed))
    }
}
