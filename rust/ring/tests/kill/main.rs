//! Peers under the eye of a tracer.
#![cfg(target_arch = "x86_64")]

mod calls;
#[path = "../common/mod.rs"]
mod common;
mod tracee;
