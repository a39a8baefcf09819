//! Grammars that the contracts name and [`Grammar`] does not.

use pie_engine::Grammar;

/// Any JSON object.
pub(crate) fn any_object() -> Grammar {
    Grammar::JsonSchema(r#"{"type": "object"}"#.into())
}

/// One of these texts.
pub(crate) fn one_of(texts: &[String]) -> Grammar {
    let escaped: Vec<String> = texts
        .iter()
        .map(|text| regex_syntax::escape(text))
        .collect();
    Grammar::Regex(format!("(?:{})", escaped.join("|")).into())
}
