//! The grammar formats.

use llguidance::api::TopLevelGrammar;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::GrammarError;
use crate::json::json_of;
use crate::schema::{Effort, SchemaReader};
use crate::vocabulary::Vocabulary;
use crate::{gbnf, tags};

/// In place of a schema: any JSON, as `SGLang` has it.
const ANY_JSON: &str = "$$ANY$$";

/// A grammar in one of the formats, by its text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Grammar {
    /// A JSON document that fits a schema, which is JSON itself.
    JsonSchema(Box<str>),
    /// Any JSON object.
    JsonObject,
    /// A text that a regular expression matches as a whole, in the syntax of the `regex` crate.
    Regex(Box<str>),
    /// A grammar in [llguidance's variant](https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md) of Lark.
    Lark(Box<str>),
    /// A grammar with rules `name ::= …`, as llama.cpp and xgrammar write them; one without any `::=` is Lark.
    Ebnf(Box<str>),
    /// Free text, and after certain triggers structured parts: JSON with `triggers`, and `structures` of `begin`, `schema`, `end`.
    StructuralTag(Box<str>),
}

/// JSON whitespace, unless the schema sets it by `x-guidance`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JsonSpace {
    /// None; else as much as a text likes.
    pub fixed: bool,
    /// What it must match instead.
    pub pattern: Option<String>,
}

impl JsonSpace {
    fn apply(&self, schema: &mut Value) {
        let Value::Object(fields) = schema else {
            return;
        };
        if !self.fixed && self.pattern.is_none() {
            return;
        }
        let options = fields.entry("x-guidance").or_insert_with(|| json!({}));
        if let Value::Object(options) = options {
            let flexible = options.entry("whitespace_flexible");
            flexible.or_insert(Value::Bool(!self.fixed));
            if let Some(pattern) = &self.pattern {
                let own = options.entry("whitespace_pattern");
                own.or_insert_with(|| pattern.clone().into());
            }
        }
    }
}

impl Grammar {
    /// The format, in words.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::JsonSchema(_) => "JSON schema",
            Self::JsonObject => "JSON object",
            Self::Regex(_) => "regular expression",
            Self::Lark(_) => "Lark grammar",
            Self::Ebnf(_) => "EBNF grammar",
            Self::StructuralTag(_) => "structural tag",
        }
    }

    /// Bytes of its text.
    pub fn bytes(&self) -> usize {
        match self {
            Self::JsonObject => 0,
            Self::JsonSchema(text)
            | Self::Regex(text)
            | Self::Lark(text)
            | Self::Ebnf(text)
            | Self::StructuralTag(text) => text.len(),
        }
    }

    /// Reads the text as far as that needs no compiler: the form, and what it refers to.
    ///
    /// # Errors
    /// [`GrammarError::Wrong`].
    pub fn check(&self, vocabulary: &Vocabulary) -> Result<(), GrammarError> {
        self.parse(vocabulary, &JsonSpace::default(), None)
            .map(drop)
    }

    /// Whether it has JSON schemas, which can be rewritten.
    pub(crate) fn has_schemas(&self) -> bool {
        match self {
            Self::JsonSchema(text) => **text != *ANY_JSON,
            Self::StructuralTag(_) => true,
            Self::JsonObject | Self::Regex(_) | Self::Lark(_) | Self::Ebnf(_) => false,
        }
    }

    /// llguidance's grammar, with JSON schemas as they are, or rewritten with an effort.
    pub(crate) fn parse(
        &self,
        vocabulary: &Vocabulary,
        space: &JsonSpace,
        effort: Option<Effort>,
    ) -> Result<Parsed, GrammarError> {
        let mut rewriter = SchemaReader::new(effort);
        let wrong = |reason: String| GrammarError::wrong(self.kind(), &reason);
        let fitting = |mut schema: Value| {
            space.apply(&mut schema);
            TopLevelGrammar::from_json_schema(schema)
        };
        let grammar = match self {
            Self::JsonSchema(text) if **text == *ANY_JSON => fitting(json!({})),
            Self::JsonSchema(text) => {
                let schema = json_of(text).and_then(|schema| rewriter.read(schema));
                fitting(schema.map_err(wrong)?)
            }
            Self::JsonObject => fitting(json!({"type": "object"})),
            Self::Regex(text) => TopLevelGrammar::from_regex(text),
            Self::Ebnf(text) if text.contains("::=") => {
                TopLevelGrammar::from_lark(gbnf::to_lark(text).map_err(wrong)?)
            }
            Self::Lark(text) | Self::Ebnf(text) => TopLevelGrammar::from_lark(text.to_string()),
            Self::StructuralTag(text) => {
                tags::parse(text, vocabulary, &mut rewriter).map_err(wrong)?
            }
        };
        Ok(Parsed {
            grammar,
            relaxed: rewriter.relaxed,
            paths: rewriter.paths,
            is_strict: rewriter.is_strict,
        })
    }
}

/// A grammar of llguidance.
pub(crate) struct Parsed {
    pub(crate) grammar: TopLevelGrammar,
    /// JSON pointers to the keywords of its schemas that allow more than they say.
    pub(crate) relaxed: Vec<String>,
    /// The path in the original of each definition of a rewritten schema.
    pub(crate) paths: Vec<String>,
    /// Whether a schema asks that nothing is relaxed.
    pub(crate) is_strict: bool,
}
