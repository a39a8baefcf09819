//! What a field of a message is, or why it is not what it should be.

use rmpv::{Utf8StringRef, ValueRef};

use crate::error::FrontError;

/// A list of tokens, or none. What is no token is a refusal.
pub(crate) fn token_ids(
    field: &'static str,
    value: &ValueRef<'_>,
    refusal: &mut Option<String>,
) -> Result<Vec<u32>, FrontError> {
    let values = match value {
        ValueRef::Nil => &[],
        ValueRef::Array(values) => &values[..],
        other => return Err(wrong(field, other, "a list")),
    };
    let mut tokens = Vec::with_capacity(values.len());
    for value in values {
        if let Some(Ok(token)) = integer(field, value)?.map(u32::try_from) {
            tokens.push(token);
        } else {
            let value = cut(value);
            refusal.get_or_insert_with(|| format!("`{field}` has {value}, which is no token"));
        }
    }
    Ok(tokens)
}

pub(crate) fn texts(field: &'static str, value: &ValueRef<'_>) -> Result<Vec<String>, FrontError> {
    match value {
        ValueRef::Nil => Ok(Vec::new()),
        ValueRef::Array(values) => values
            .iter()
            .filter_map(|value| optional_text(field, value).transpose())
            .filter(|text| !matches!(text, Ok(text) if text.is_empty()))
            .collect(),
        other => Err(wrong(field, other, "a list of texts")),
    }
}

pub(crate) fn optional_text(
    field: &'static str,
    value: &ValueRef<'_>,
) -> Result<Option<String>, FrontError> {
    match value {
        ValueRef::Nil => Ok(None),
        ValueRef::String(text) => match Utf8StringRef::as_str(text) {
            Some(text) => Ok(Some(text.to_owned())),
            None => Err(wrong(field, value, "a text in UTF-8")),
        },
        other => Err(wrong(field, other, "a text")),
    }
}

/// The pickle in `SGLang`'s `["PickleWrapper", bytes]`; `None` where there is none.
pub(crate) fn pickle<'v>(
    field: &'static str,
    value: &'v ValueRef<'_>,
) -> Result<Option<&'v [u8]>, FrontError> {
    match value {
        ValueRef::Nil => Ok(None),
        ValueRef::Array(parts) => match &parts[..] {
            [ValueRef::String(tag), ValueRef::Binary(pickle)]
                if tag.as_str() == Some("PickleWrapper") =>
            {
                Ok(Some(*pickle))
            }
            _ => Err(wrong(field, value, "a pickle")),
        },
        other => Err(wrong(field, other, "a pickle")),
    }
}

pub(crate) fn flag(field: &'static str, value: &ValueRef<'_>) -> Result<bool, FrontError> {
    match value {
        ValueRef::Nil => Ok(false),
        ValueRef::Boolean(value) => Ok(*value),
        other => Err(wrong(field, other, "true or false")),
    }
}

/// Up to here a float has every integer.
const LARGEST_WHOLE: f64 = (1u64 << 53) as f64;

pub(crate) fn integer(
    field: &'static str,
    value: &ValueRef<'_>,
) -> Result<Option<i64>, FrontError> {
    match value {
        ValueRef::Nil => Ok(None),
        ValueRef::Integer(value) => Ok(Some(value.as_i64().unwrap_or(i64::MAX))),
        // In JSON 5.0 is 5.
        &ValueRef::F64(value) if value.fract() == 0.0 && value.abs() <= LARGEST_WHOLE => {
            Ok(Some(value as i64))
        }
        other => Err(wrong(field, other, "an integer")),
    }
}

pub(crate) fn wrong(field: &'static str, value: &ValueRef<'_>, wanted: &'static str) -> FrontError {
    FrontError::Value {
        field,
        found: cut(value),
        wanted,
    }
}

/// The beginning of what a value looks like.
fn cut(value: &ValueRef<'_>) -> String {
    match value {
        ValueRef::Array(values) => format!("a list of {}", values.len()),
        ValueRef::Map(values) => format!("a map of {}", values.len()),
        ValueRef::Binary(bytes) => format!("{} bytes", bytes.len()),
        other => other.to_string().chars().take(60).collect(),
    }
}
