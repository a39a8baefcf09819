//! Messages and services, generated from the definitions that `smg-grpc-client` publishes; see `build.rs`.
#![allow(
    missing_docs,
    unreachable_pub,
    clippy::large_enum_variant,
    clippy::pedantic,
    rustdoc::all,
    reason = "generated, by the names of their authors"
)]

/// What both services share.
pub mod common {
    tonic::include_proto!("smg.grpc.common");
}

/// `vllm.grpc.engine.VllmEngine`.
pub mod vllm {
    tonic::include_proto!("vllm.grpc.engine");
    #[cfg(feature = "client")]
    include!(concat!(env!("OUT_DIR"), "/client/vllm.grpc.engine.rs"));
}

/// `sglang.grpc.scheduler.SglangScheduler`.
pub mod sglang {
    tonic::include_proto!("sglang.grpc.scheduler");
    #[cfg(feature = "client")]
    include!(concat!(env!("OUT_DIR"), "/client/sglang.grpc.scheduler.rs"));
}
