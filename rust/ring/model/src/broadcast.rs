//! The two ends of a broadcast, on a model of their mapping.

#[path = "../../src/broadcast/layout.rs"]
pub(crate) mod layout;
#[path = "../../src/broadcast/listener.rs"]
pub(crate) mod listener;
pub(crate) mod mapping;
#[path = "../../src/broadcast/sender.rs"]
pub(crate) mod sender;
