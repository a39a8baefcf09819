//! The services by their generated clients, over drivers that keep account of every KV slot, and over drivers that fail.

mod any;
mod bench;
mod crowd;
#[path = "../../../engine/tests/service/driver.rs"]
mod driver;
mod events;
mod failures;
mod logprobs;
mod model_info;
mod sglang;
mod traces;
mod vllm;

/// Runs as the driver when a test's script says so; for the test runner it is a test that passes.
#[test]
fn stand_in() {
    if let Ok(config) = std::env::var("PIE_TEST_CONFIG") {
        driver::main(&config);
    }
}
