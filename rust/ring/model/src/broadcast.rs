//! The two ends of a broadcast, on a model of their mapping.

#[path = "../../src/broadcast/listener.rs"]
pub(crate) mod listener;
pub(crate) mod mapping;
#[path = "../../src/broadcast/sender.rs"]
pub(crate) mod sender;
#[path = "../../src/broadcast/shape.rs"]
pub(crate) mod shape;
