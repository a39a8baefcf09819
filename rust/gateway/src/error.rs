//! Why a door does not open.

use std::io;
use std::net::SocketAddr;

/// Why a door does not open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatewayError {
    /// The drivers are not ready, so the door could not say what it serves.
    #[error("the drivers are not ready\n\nhint: wait for `wait_ready`, then open the door")]
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
    #[error("cannot start the door's thread: {0}")]
    Thread(io::Error),
}
