//! `MessagePack` as JSON, for what the driver's process reads.

use pie_ingress::Refusal;
use serde_json::{Map, Number, Value as Json};

use crate::sglang_zmq::msgpack::Value;
use crate::sglang_zmq::value::wrong;

/// Deepest lists and objects within each other; JSON readers follow some more.
const MAX_DEPTH: u32 = 64;

/// A value as JSON.
///
/// # Errors
/// [`Refusal::Other`] for what JSON does not have: bytes, numbers that are not finite, keys that are no texts, or too many levels.
pub(crate) fn json(field: &'static str, value: Value<'_>) -> Result<String, Refusal> {
    converted(field, value, MAX_DEPTH).map(|value| value.to_string())
}

fn converted(field: &'static str, value: Value<'_>, depth: u32) -> Result<Json, Refusal> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(Refusal::Other(format!(
            "`{field}` has more than {MAX_DEPTH} levels: send a flatter one"
        )));
    };
    Ok(match value {
        Value::Nil => Json::Null,
        Value::Flag(value) => Json::Bool(value),
        Value::Integer(value) => value.into(),
        Value::Large(value) => value.into(),
        Value::Float(number) => Number::from_f64(number)
            .map(Json::Number)
            .ok_or_else(|| wrong(field, value, "made of finite numbers"))?,
        Value::Text(text) => Json::String(utf8(field, text, value)?),
        Value::List(values) => Json::Array(
            values
                .map(|value| converted(field, value, depth))
                .collect::<Result<_, _>>()?,
        ),
        Value::Map(entries) => Json::Object(
            entries
                .pairs()
                .map(|(key, value)| match key {
                    Value::Text(text) => {
                        Ok((utf8(field, text, key)?, converted(field, value, depth)?))
                    }
                    other => Err(wrong(field, other, "made of objects with texts as keys")),
                })
                .collect::<Result<Map<_, _>, _>>()?,
        ),
        Value::Binary(_) | Value::Extension(..) => {
            return Err(wrong(field, value, "made of what JSON has"));
        }
    })
}

fn utf8(field: &'static str, text: &[u8], value: Value<'_>) -> Result<String, Refusal> {
    let text = str::from_utf8(text).map_err(|_| wrong(field, value, "made of texts in UTF-8"))?;
    Ok(text.to_owned())
}
