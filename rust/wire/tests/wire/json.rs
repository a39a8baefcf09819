//! The JSON form of payloads used by the index of a vector folder.

use pie_wire::{Frame, ResponseFrame};
use serde_json::{Value, from_value, json};

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

fn field<T: serde::de::DeserializeOwned>(entry: &Value, name: &str) -> T {
    from_value(entry[name].clone()).unwrap_or_else(|error| panic!("{name}: {error}"))
}
