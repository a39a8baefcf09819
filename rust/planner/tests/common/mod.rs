//! What the test files share: a builder of frames, a naive planner, a device that knows only what it receives, a
//! bare engine, and random frames.
#![allow(dead_code, reason = "every test file uses a part")]

pub(crate) mod answer;
pub(crate) mod builder;
pub(crate) mod device;
pub(crate) mod draft_server;
pub(crate) mod engine;
pub(crate) mod generate;
pub(crate) mod logprobs;
pub(crate) mod naive;
pub(crate) mod naive_request;
pub(crate) mod naive_sampling;
