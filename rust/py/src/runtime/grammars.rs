//! Grammars of requests, by Python's names.

use pie_runtime::Grammar;
use pyo3::prelude::*;

use super::settings::value_error;

/// A grammar by the name of its kind.
pub(super) fn grammar_of(kind: &str, text: String) -> PyResult<Grammar> {
    let text = text.into_boxed_str();
    Ok(match kind {
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
    })
}
