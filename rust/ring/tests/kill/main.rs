//! A process is watched, terminated or killed after each single step that others can see.
#![cfg(target_arch = "x86_64")]

mod calls;
#[path = "../common/mod.rs"]
mod common;
mod deaths;
mod shutdown;
mod tracee;
