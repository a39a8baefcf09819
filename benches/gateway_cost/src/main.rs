//! CPU time of the runtime and its gRPC service for each streamed token, with a driver that computes nothing.
//!
//!     gateway_cost [--streams N,N] [--tokens N] [--step-us N] [--contract vllm] [--events] [--repeats N] [--json FILE]
//!
//! There are three processes. This one is the client, with one connection for all streams, as the gateway has it. The second one is the
//! runtime with its service, whose threads are counted. The third one is the driver, which answers each step after `--step-us`. Both
//! sides of the ring park, because a thread that spins counts time in which it does nothing.

mod client;
mod driver;
mod server;

use std::process::ExitCode;

/// Set in the processes that this one starts.
pub(crate) const ROLE: &str = "GATEWAY_COST_ROLE";

fn main() -> ExitCode {
    let done = match std::env::var(ROLE).as_deref() {
        Ok("driver") => driver::main(),
        Ok("server") => server::main(),
        _ => client::main(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gateway_cost: {error}");
            ExitCode::FAILURE
        }
    }
}
