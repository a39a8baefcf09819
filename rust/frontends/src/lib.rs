//! Frontends over an engine: requests come in as tokens, tokens go out, without Python.
//!
//! | module | protocol |
//! |---|---|
//! | [`sglang_zmq`] | `SGLang`'s messages between its HTTP server (tokenizer manager, detokenizer) and a scheduler, over `ZeroMQ` |
//! | [`grpc`] | the gRPC services that the gateway `smg` calls: `SGLang`'s and vLLM's contract |
//!
//! Both validate requests with [`pie_ingress`] and submit them to a [`Service`](pie_engine::Service).

pub mod grpc;
pub mod sglang_zmq;

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
