//! What a field of a message is, or why it is not what it should be.

use pie_ingress::Refusal;

use crate::sglang_zmq::msgpack::Value;

/// The refusal of a field with a value that it cannot have.
pub(crate) fn wrong(field: &'static str, value: Value<'_>, wanted: &'static str) -> Refusal {
    Refusal::Other(format!("`{field}` is {value}, it must be {wanted}"))
}

pub(crate) fn optional_text(
    field: &'static str,
    value: Value<'_>,
) -> Result<Option<String>, Refusal> {
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
) -> Result<Option<&'v [u8]>, Refusal> {
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

pub(crate) fn flag(field: &'static str, value: Value<'_>) -> Result<bool, Refusal> {
    match value {
        Value::Nil => Ok(false),
        Value::Flag(value) => Ok(value),
        other => Err(wrong(field, other, "true or false")),
    }
}

/// Up to here a float has every integer.
const LARGEST_WHOLE: f64 = (1u64 << 53) as f64;

/// An integer; one that is larger than any is the largest.
pub(crate) fn integer(field: &'static str, value: Value<'_>) -> Result<Option<i64>, Refusal> {
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
