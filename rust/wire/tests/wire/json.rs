//! The JSON form of payloads used by the index of a vector folder.

use pie_wire::{
    AdapterBinding, AdapterOp, AdapterRequest, Brle, CopyDirection, CopyRequest, CopyResource,
    ForwardRequest, ForwardResponse, Frame, Payload, ResponseFrame, ResponsePayload, Sampler,
    StatusResponse,
};
use serde_json::{Map, Value, json};

use crate::message::Message;

/// Conversion of one schema type, panicking on anything unexpected.
trait Json: Sized {
    fn to_json(&self) -> Value;
    fn from_json(value: &Value) -> Self;
}

macro_rules! json_integer {
    ($($type:ty: $read:ident),*) => {$(
        impl Json for $type {
            fn to_json(&self) -> Value {
                json!(self)
            }

            fn from_json(value: &Value) -> Self {
                let number = value.$read().unwrap_or_else(|| panic!("not an integer: {value}"));
                number.try_into().expect("the integer is in range")
            }
        }
    )*};
}

json_integer!(u8: as_u64, u32: as_u64, u64: as_u64, i32: as_i64, i64: as_i64);

impl Json for f32 {
    fn to_json(&self) -> Value {
        json!(f64::from(*self))
    }

    fn from_json(value: &Value) -> Self {
        value.as_f64().expect("a number") as Self
    }
}

impl Json for bool {
    fn to_json(&self) -> Value {
        json!(self)
    }

    fn from_json(value: &Value) -> Self {
        value.as_bool().expect("a boolean")
    }
}

impl Json for String {
    fn to_json(&self) -> Value {
        json!(self)
    }

    fn from_json(value: &Value) -> Self {
        value.as_str().expect("a string").to_owned()
    }
}

impl<T: Json> Json for Vec<T> {
    fn to_json(&self) -> Value {
        self.iter().map(Json::to_json).collect()
    }

    fn from_json(value: &Value) -> Self {
        let items = value.as_array().expect("an array");
        items.iter().map(Json::from_json).collect()
    }
}

/// Takes a field out of an object, so that leftovers can be detected.
fn take<T: Json>(object: &mut Map<String, Value>, name: &str) -> T {
    let value = object.remove(name);
    T::from_json(&value.unwrap_or_else(|| panic!("no field {name:?}")))
}

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().expect("an object").clone()
}

fn assert_empty(object: &Map<String, Value>) {
    assert!(object.is_empty(), "unknown fields: {object:?}");
}

macro_rules! json_struct {
    ($type:ident { $($field:ident),* $(,)? }) => {
        impl Json for $type {
            fn to_json(&self) -> Value {
                // Naming every field here makes a forgotten one an error.
                let $type { $($field),* } = self;
                let fields = [$((stringify!($field), $field.to_json())),*];
                fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
            }

            fn from_json(value: &Value) -> Self {
                let mut object = object(value);
                let result = $type { $($field: take(&mut object, stringify!($field))),* };
                assert_empty(&object);
                result
            }
        }
    };
}

macro_rules! json_enum {
    ($type:ident { $($variant:ident),* $(,)? }) => {
        impl Json for $type {
            fn to_json(&self) -> Value {
                match self {
                    $($type::$variant => json!(stringify!($variant)),)*
                }
            }

            fn from_json(value: &Value) -> Self {
                match value.as_str() {
                    $(Some(stringify!($variant)) => $type::$variant,)*
                    _ => panic!("unknown {}: {value}", stringify!($type)),
                }
            }
        }
    };
}

macro_rules! json_tagged {
    ($type:ident { $($variant:ident { $($field:ident),* }),* $(,)? }) => {
        impl Json for $type {
            fn to_json(&self) -> Value {
                match self {
                    $($type::$variant { $($field),* } => json!({
                        "type": stringify!($variant),
                        $(stringify!($field): $field.to_json()),*
                    }),)*
                }
            }

            fn from_json(value: &Value) -> Self {
                let mut object = object(value);
                let tag: String = take(&mut object, "type");
                let result = match tag.as_str() {
                    $(stringify!($variant) => $type::$variant {
                        $($field: take(&mut object, stringify!($field))),*
                    },)*
                    _ => panic!("unknown {}: {value}", stringify!($type)),
                };
                assert_empty(&object);
                result
            }
        }
    };
}

json_struct!(Brle { buffer, total_size });
json_struct!(AdapterBinding { adapter_id, seed });
json_struct!(CopyRequest {
    dir,
    srcs,
    dsts,
    resource
});
json_struct!(AdapterRequest {
    op,
    adapter_id,
    path
});
json_struct!(StatusResponse { status });
json_enum!(CopyDirection { D2H, H2D, D2D, H2H });
json_enum!(CopyResource { Kv, Rs });
json_enum!(AdapterOp {
    Load,
    Save,
    ZoInit,
    ZoUpdate,
    GenerateAudio
});
json_tagged!(Sampler {
    Multinomial { temperature, seed },
    TopK { temperature, k },
    TopP { temperature, p },
    MinP { temperature, p },
    TopKTopP { temperature, k, p },
    Embedding {},
    Dist { temperature, num_tokens },
    RawLogits {},
    Logprob { token_id },
    Logprobs { token_ids },
    Entropy {},
});
json_struct!(ForwardRequest {
    token_ids,
    position_ids,
    kv_page_indices,
    kv_page_indptr,
    kv_last_page_lens,
    qo_indptr,
    rs_slot_ids,
    rs_slot_flags,
    masks,
    mask_indptr,
    logit_masks,
    logit_mask_indptr,
    sampling_indices,
    sampling_indptr,
    samplers,
    sampler_indptr,
    adapter_bindings,
    spec_token_ids,
    spec_position_ids,
    spec_indptr,
    output_spec_flags,
    context_ids,
    single_token_mode,
    has_user_mask,
    image_indptr,
    image_grids,
    image_anchor_positions,
    image_pixels,
    image_pixel_indptr,
    image_mrope_positions,
    image_mrope_indptr,
    image_patch_positions,
    image_anchor_rows,
    audio_features,
    audio_feature_indptr,
    audio_anchor_rows,
    audio_indptr,
});
json_struct!(ForwardResponse {
    num_requests,
    tokens_indptr,
    tokens,
    dists_req_indptr,
    dists_kv_indptr,
    dists_ids,
    dists_probs,
    logits_req_indptr,
    logits_byte_indptr,
    logits_bytes,
    logprobs_req_indptr,
    logprobs_val_indptr,
    logprobs_values,
    entropies_indptr,
    entropies,
    spec_indptr,
    spec_tokens,
    spec_positions,
    probe_wire_parse_us,
    probe_plan_us,
    probe_h2d_us,
    probe_kernel_launch_us,
    probe_sync_us,
    probe_response_build_us,
});

impl Json for Payload {
    fn to_json(&self) -> Value {
        match self {
            Self::Forward(body) => json!({ "Forward": body.to_json() }),
            Self::Copy(body) => json!({ "Copy": body.to_json() }),
            Self::Adapter(body) => json!({ "Adapter": body.to_json() }),
            Self::Health => json!("Health"),
        }
    }

    fn from_json(value: &Value) -> Self {
        match only_entry(value) {
            ("Forward", body) => Self::Forward(Json::from_json(body)),
            ("Copy", body) => Self::Copy(Json::from_json(body)),
            ("Adapter", body) => Self::Adapter(Json::from_json(body)),
            ("Health", _) => Self::Health,
            (tag, _) => panic!("unknown payload {tag:?}"),
        }
    }
}

impl Json for ResponsePayload {
    fn to_json(&self) -> Value {
        match self {
            Self::Forward(body) => json!({ "Forward": body.to_json() }),
            Self::Status(body) => json!({ "Status": body.to_json() }),
        }
    }

    fn from_json(value: &Value) -> Self {
        match only_entry(value) {
            ("Forward", body) => Self::Forward(Json::from_json(body)),
            ("Status", body) => Self::Status(Json::from_json(body)),
            (tag, _) => panic!("unknown payload {tag:?}"),
        }
    }
}

/// The variant's name and body; a bare string is a variant without body.
fn only_entry(value: &Value) -> (&str, &Value) {
    match value {
        Value::String(tag) => (tag, &Value::Null),
        Value::Object(entries) if entries.len() == 1 => {
            let (tag, body) = entries.iter().next().expect("one entry");
            (tag, body)
        }
        _ => panic!("not a variant: {value}"),
    }
}

/// The index entry of a payload, without its name.
pub(crate) fn to_entry(message: &Message) -> Value {
    match message {
        Message::Request(frame) => json!({
            "kind": "request",
            "driver_id": frame.driver_id,
            "payload": frame.payload.to_json(),
        }),
        Message::Response(frame) => json!({
            "kind": "response",
            "driver_id": frame.driver_id,
            "aborted": frame.aborted,
            "payload": frame.payload.to_json(),
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
    let driver_id = u32::from_json(&entry["driver_id"]);
    match entry["kind"].as_str() {
        Some("request") => Message::Request(Frame {
            driver_id,
            payload: Json::from_json(&entry["payload"]),
        }),
        Some("response") => Message::Response(ResponseFrame {
            driver_id,
            aborted: Json::from_json(&entry["aborted"]),
            payload: Json::from_json(&entry["payload"]),
        }),
        Some("fast") => Message::Fast {
            driver_id,
            tokens: Json::from_json(&entry["tokens"]),
        },
        _ => panic!("unknown kind: {}", entry["kind"]),
    }
}
