//! Ours.

use std::time::Duration;

use pie_ring::{Client as Caller, ClientConfig, ExitGuard, Publish, ServerConfig, Wait};

use crate::echo;
use crate::transport::{Client, Result, Server, Setup};

const SCHEMA_HASH: [u8; 8] = *b"echo-1.0";

fn region(setup: &Setup) -> String {
    format!("/{}_ring", setup.prefix)
}

pub(crate) struct RingServer {
    server: pie_ring::Server,
    wait: Wait,
    request: Vec<u64>,
    response: Vec<u8>,
}

impl RingServer {
    /// The layout is the driver's default.
    pub(crate) fn new(setup: &Setup) -> Result<Self> {
        let config = ServerConfig::new(region(setup), SCHEMA_HASH, b"aborted".to_vec());
        let server = pie_ring::Server::create(&config, &ExitGuard::inert())?;
        Ok(Self {
            response: vec![0; server.layout().response_capacity()],
            server,
            wait: setup.wait,
            request: Vec::new(),
        })
    }
}

impl Server for RingServer {
    fn answer(&mut self) -> Result<()> {
        let lease = self.server.wait(self.wait)?.ok_or("stopped")?;
        // As the driver does it: a copy of the request, and an answer that is made elsewhere.
        let request = lease.copy_request(&mut self.request)?;
        let response = &mut self.response[..request.len()];
        echo::answer(request, response);
        match lease.reply(response)? {
            Publish::Delivered => Ok(()),
            Publish::Stale => Err("the client gave up".into()),
        }
    }
}

pub(crate) struct RingClient(Caller);

impl RingClient {
    pub(crate) fn new(setup: &Setup) -> Result<Self> {
        let config = ClientConfig {
            wait: setup.wait,
            timeout: Duration::from_secs(10),
        };
        Ok(Self(Caller::open(&region(setup), SCHEMA_HASH, config)?))
    }
}

impl Client for RingClient {
    fn call(&mut self, request: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<()> {
        Ok(self.0.call(request, read)?)
    }
}
