//! What all transports have in common.

use std::error::Error;
use std::{env, process};

use pie_ring::Wait;

use crate::{floor, iceoryx, ring, socket, topics, zeromq};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The client's end.
pub(crate) trait Client {
    /// Sends a request, waits for the response and shows it to `read`.
    fn call(&mut self, request: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<()>;
}

/// The server's end.
pub(crate) trait Server {
    /// Waits for a request and answers it with [`crate::echo::answer`].
    fn answer(&mut self) -> Result<()>;
}

/// A transport. The number of a kind is its name between the two processes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Ring,
    PingPong,
    Memcpy,
    Iceoryx2,
    Iceoryx2Topics,
    UnixSocket,
    ZeroMq,
}

impl Kind {
    pub(crate) const ALL: [Self; 7] = [
        Self::Ring,
        Self::PingPong,
        Self::Memcpy,
        Self::Iceoryx2,
        Self::Iceoryx2Topics,
        Self::UnixSocket,
        Self::ZeroMq,
    ];
    pub(crate) const PEERS: [Self; 6] = [
        Self::PingPong,
        Self::Memcpy,
        Self::Iceoryx2,
        Self::Iceoryx2Topics,
        Self::UnixSocket,
        Self::ZeroMq,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ring => "ours",
            Self::PingPong => "ping_pong",
            Self::Memcpy => "memcpy",
            Self::Iceoryx2 => "iceoryx2",
            Self::Iceoryx2Topics => "iceoryx2_pub_sub",
            Self::UnixSocket => "unix_socket",
            Self::ZeroMq => "zeromq_ipc",
        }
    }

    pub(crate) fn server(self, setup: &Setup) -> Result<Box<dyn Server>> {
        Ok(match self {
            Self::Ring => Box::new(ring::RingServer::new(setup)?),
            Self::PingPong => Box::new(floor::PingPong::create(setup)?),
            Self::Memcpy => Box::new(floor::Memcpy::create(setup)?),
            Self::Iceoryx2 => Box::new(iceoryx::IceoryxServer::new(setup)?),
            Self::Iceoryx2Topics => Box::new(topics::Topics::server(setup)?),
            Self::UnixSocket => Box::new(socket::SocketServer::new(setup)?),
            Self::ZeroMq => Box::new(zeromq::ZeroMqServer::new(setup)?),
        })
    }

    pub(crate) fn client(self, setup: &Setup) -> Result<Box<dyn Client>> {
        Ok(match self {
            Self::Ring => Box::new(ring::RingClient::new(setup)?),
            Self::PingPong => Box::new(floor::PingPong::open(setup)?),
            Self::Memcpy => Box::new(floor::Memcpy::open(setup)?),
            Self::Iceoryx2 => Box::new(iceoryx::IceoryxClient::new(setup)?),
            Self::Iceoryx2Topics => Box::new(topics::Topics::client(setup)?),
            Self::UnixSocket => Box::new(socket::SocketClient::new(setup)?),
            Self::ZeroMq => Box::new(zeromq::ZeroMqClient::new(setup)?),
        })
    }
}

const SETUP: &str = "PIE_BENCH_SERVER";

/// What both processes must know to meet.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Starts the name of everything that has one.
    pub(crate) prefix: String,
    /// Bytes of a request, and of a response.
    pub(crate) size: usize,
    /// Spinning or parking, on both sides.
    pub(crate) wait: Wait,
}

impl Setup {
    pub(crate) fn new(size: usize, wait: Wait) -> Self {
        let prefix = format!("pie_bench_{}", process::id());
        Self { prefix, size, wait }
    }

    pub(crate) fn is_spinning(&self) -> bool {
        self.wait == Wait::Spin
    }

    /// The environment variable that makes a process the server.
    pub(crate) fn variable(&self) -> (&'static str, String) {
        let (waiting, Self { prefix, size, .. }) = (u8::from(self.is_spinning()), self);
        (SETUP, format!("{prefix} {size} {waiting}"))
    }

    /// The setup of this process, if it was started as a server.
    pub(crate) fn of_server_process() -> Option<Self> {
        let text = env::var(SETUP).ok()?;
        let (prefix, rest) = text.split_once(' ')?;
        let (size, waiting) = rest.split_once(' ')?;
        let wait = if waiting == "1" {
            Wait::Spin
        } else {
            Wait::Park
        };
        Some(Self {
            prefix: prefix.to_owned(),
            size: size.parse().ok()?,
            wait,
        })
    }
}
