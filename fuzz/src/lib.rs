//! Fuzz targets: functions that take any bytes and panic when the product breaks a promise.
//!
//! `tests/corpus.rs` replays the corpus under plain `cargo test`; `src/main.rs` gives the same functions to libFuzzer.

mod answer;
mod brle;
mod cases;
mod extension;
mod front;
mod gateway;
mod grammar;
mod memory;
mod plan;
mod radix;
mod region;
mod serve;
mod staged;
mod step;
mod wire;

#[path = "../../rust/planner/tests/common/mod.rs"]
#[allow(unreachable_pub, clippy::pedantic, reason = "checked in its own crate")]
mod common;
#[path = "../../rust/frontends/tests/sglang_zmq/support/mod.rs"]
#[allow(clippy::pedantic, reason = "checked in its own crate")]
mod front_messages;
#[path = "../../rust/wire/tests/wire/message.rs"]
#[allow(dead_code, reason = "a part is used")]
mod message;
#[path = "../../rust/kv-cache/tests/pages/model/mod.rs"]
#[allow(unreachable_pub, clippy::pedantic, reason = "checked in its own crate")]
mod pool_model;
#[path = "../../rust/kv-cache/tests/radix/model/mod.rs"]
#[allow(unreachable_pub, clippy::pedantic, reason = "checked in its own crate")]
mod radix_model;
#[path = "../../rust/wire/tests/wire/samples.rs"]
#[allow(dead_code, reason = "a part is used")]
mod samples;
#[path = "../../rust/wire/tests/wire/walk.rs"]
mod walk;

pub mod seeds;

/// A target's name and its function.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: [Target; 14] = [
    ("wire_request", wire::request),
    ("wire_response", wire::response),
    ("extension", extension::check),
    ("front", front::check),
    ("answer", answer::check),
    ("gateway", gateway::check),
    ("grammar", grammar::check),
    ("brle", brle::check),
    ("plan_bytes", plan::bytes),
    ("plan_frames", cases::frames),
    ("region_header", region::header),
    ("serve", serve::call),
    ("radix", radix::index),
    ("pages", radix::pool),
];
