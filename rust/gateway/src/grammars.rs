//! Grammars that the contracts name and [`Grammar`] does not.

use pie_runtime::{Grammar, StopStrings};
use tonic::Status;

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

pub(crate) fn stop_strings(texts: Vec<String>) -> Result<StopStrings, Status> {
    StopStrings::new(texts.into_iter().map(String::into_bytes))
        .map_err(|error| Status::invalid_argument(error.to_string()))
}
