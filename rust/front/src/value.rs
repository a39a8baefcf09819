//! What a field of a message is, or why it is not what it should be.

use thiserror::Error;

use crate::msgpack::Value;

/// A field with a value that it cannot have.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{field}` is {found}, it must be {wanted}")]
pub(crate) struct WrongValue {
    pub(crate) field: &'static str,
    /// The beginning of what it looks like.
    found: String,
    /// What it may be.
    wanted: &'static str,
}

pub(crate) fn wrong(field: &'static str, value: Value<'_>, wanted: &'static str) -> WrongValue {
    WrongValue {
        field,
        found: value.to_string(),
        wanted,
    }
}

/// A list of tokens, or none. What is no token is a refusal.
pub(crate) fn token_ids(
    field: &'static str,
    value: Value<'_>,
    refusal: &mut Option<String>,
) -> Result<Vec<u32>, WrongValue> {
    let values = match value {
        Value::Nil => return Ok(Vec::new()),
        Value::List(values) => values,
        other => return Err(wrong(field, other, "a list")),
    };
    let mut tokens = Vec::new();
    for value in values {
        if let Some(Ok(token)) = integer(field, value)?.map(u32::try_from) {
            tokens.push(token);
        } else {
            refusal.get_or_insert_with(|| format!("`{field}` has {value}, which is no token"));
        }
    }
    Ok(tokens)
}

pub(crate) fn texts(field: &'static str, value: Value<'_>) -> Result<Vec<String>, WrongValue> {
    match value {
        Value::Nil => Ok(Vec::new()),
        Value::List(values) => values
            .filter_map(|value| optional_text(field, value).transpose())
            .filter(|text| !matches!(text, Ok(text) if text.is_empty()))
            .collect(),
        other => Err(wrong(field, other, "a list of texts")),
    }
}

pub(crate) fn optional_text(
    field: &'static str,
    value: Value<'_>,
) -> Result<Option<String>, WrongValue> {
    match value {
        Value::Nil => Ok(None),
        Value::Text(text) => match str::from_utf8(text) {
            Ok(text) => Ok(Some(text.to_owned())),
            Err(_) => Err(wrong(field, value, "a text in UTF-8")),
        },
        other => Err(wrong(field, other, "a text")),
    }
}

/// The pickle in `SGLang`'s `["PickleWrapper", bytes]`; `None` where there is none.
pub(crate) fn pickle<'v>(
    field: &'static str,
    value: Value<'v>,
) -> Result<Option<&'v [u8]>, WrongValue> {
    let mut parts = match value {
        Value::Nil => return Ok(None),
        Value::List(parts) => parts,
        other => return Err(wrong(field, other, "a pickle")),
    };
    match (parts.next(), parts.next(), parts.next()) {
        (Some(Value::Text(b"PickleWrapper")), Some(Value::Binary(pickle)), None) => {
            Ok(Some(pickle))
        }
        _ => Err(wrong(field, value, "a pickle")),
    }
}

pub(crate) fn flag(field: &'static str, value: Value<'_>) -> Result<bool, WrongValue> {
    match value {
        Value::Nil => Ok(false),
        Value::Flag(value) => Ok(value),
        other => Err(wrong(field, other, "true or false")),
    }
}

/// Up to here a float has every integer.
const LARGEST_WHOLE: f64 = (1u64 << 53) as f64;

/// An integer; one that is larger than any is the largest.
pub(crate) fn integer(field: &'static str, value: Value<'_>) -> Result<Option<i64>, WrongValue> {
    match value {
        Value::Nil => Ok(None),
        Value::Integer(value) => Ok(Some(value)),
        Value::Large(_) => Ok(Some(i64::MAX)),
        // In JSON 5.0 is 5.
        Value::Float(value) if value.fract() == 0.0 && value.abs() <= LARGEST_WHOLE => {
            Ok(Some(value as i64))
        }
        other => Err(wrong(field, other, "an integer")),
    }
}

/// Any number; -0 is 0.
pub(crate) fn number(value: Value<'_>) -> Option<f64> {
    match value {
        Value::Float(value) => Some(value + 0.0),
        Value::Integer(value) => Some(value as f64),
        Value::Large(value) => Some(value as f64),
        _ => None,
    }
}
