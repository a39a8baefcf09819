//! Why a gRPC server does not start.

use std::io;
use std::net::SocketAddr;

/// Why a gRPC server does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatewayError {
    /// The drivers are not ready, so the server does not know what it serves.
    #[error("the drivers are not ready\n\nhint: wait for `wait_ready`, then start the server")]
    NotReady,
    /// The address cannot be listened at.
    #[error(
        "cannot listen at {address}: {source}\n\nhint: take another port, or 0 for any that is free"
    )]
    Address {
        /// The address asked for.
        address: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// The thread, or what it waits with, cannot be made.
    #[error("cannot start the server's thread: {0}")]
    Thread(io::Error),
}
