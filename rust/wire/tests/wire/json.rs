//! The JSON form of payloads used by the index of a vector folder.

use pie_wire::{Frame, ResponseFrame};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, from_value, json, to_value};

use crate::message::Message;

/// The index entry of a payload, without its name.
pub(crate) fn to_entry(message: &Message) -> Value {
    match message {
        Message::Request(frame) => json!({
            "kind": "request",
            "driver_id": frame.driver_id,
            "payload": frame.payload,
        }),
        Message::Response(frame) => json!({
            "kind": "response",
            "driver_id": frame.driver_id,
            "aborted": frame.aborted,
            "payload": frame.payload,
        }),
        Message::Fast { driver_id, tokens } => json!({
            "kind": "fast",
            "driver_id": driver_id,
            "tokens": tokens,
        }),
    }
}

/// The payload that an index entry describes.
pub(crate) fn from_entry(entry: &Value) -> Message {
    let driver_id = field(entry, "driver_id");
    match entry["kind"].as_str() {
        Some("request") => Message::Request(Frame {
            driver_id,
            payload: field(entry, "payload"),
        }),
        Some("response") => Message::Response(ResponseFrame {
            driver_id,
            aborted: field(entry, "aborted"),
            payload: field(entry, "payload"),
        }),
        Some("fast") => Message::Fast {
            driver_id,
            tokens: field(entry, "tokens"),
        },
        _ => panic!("unknown kind: {}", entry["kind"]),
    }
}

fn field<T: DeserializeOwned + Serialize>(entry: &Value, name: &str) -> T {
    let value: T =
        from_value(entry[name].clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
    // serde ignores the fields of a unit variant with a tag, such as `{"type": "Entropy", "k": 1}`.
    let read = to_value(&value).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(keys(&entry[name]), keys(&read), "{name}: an unknown field");
    value
}

/// The keys of all objects within a value.
fn keys(value: &Value) -> usize {
    match value {
        Value::Array(items) => items.iter().map(keys).sum(),
        Value::Object(fields) => fields.len() + fields.values().map(keys).sum::<usize>(),
        _ => 0,
    }
}

#[test]
fn a_field_that_a_sampler_does_not_have_is_refused() {
    let samples = crate::samples::all();
    let (_, message) = samples
        .iter()
        .find(|(name, _)| *name == "forward_samplers")
        .expect("a sample with every sampler");
    let entry = to_entry(message);
    let samplers = "/payload/Forward/samplers";
    let count = entry.pointer(samplers).and_then(Value::as_array);
    for index in 0..count.expect("a list").len() {
        let mut extended = entry.clone();
        let sampler = extended
            .pointer_mut(&format!("{samplers}/{index}"))
            .expect("a sampler");
        sampler["unknown"] = json!(1);
        let sampler = sampler.to_string();
        let read = std::panic::catch_unwind(|| from_entry(&extended));
        assert!(read.is_err(), "{sampler}");
    }
}
