//! `iceoryx2`, request-response: polled to spin; to park, with an event in each direction.
//!
//! Set up as its own latency benchmark is: one client, one server, buffers of one, memory for the
//! payload reserved, and the next request loaned while the response is awaited.

#![expect(unsafe_code, reason = "a payload that was filled must be declared so")]

use iceoryx2::port::client::Client as Requester;
use iceoryx2::port::listener::Listener;
use iceoryx2::port::notifier::Notifier;
use iceoryx2::port::server::Server as Responder;
use iceoryx2::prelude::{
    Alignment, Config, FileName, LogLevel, Node, NodeBuilder, Path, SemanticString, ServiceName,
    SignalHandlingMode, ipc, set_log_level,
};
use iceoryx2::request_mut_uninit::RequestMutUninit;
use iceoryx2::service::port_factory::request_response::PortFactory;
use std::mem::MaybeUninit;

use crate::transport::{Client, Result, Server, Setup};
use crate::{echo, leftovers};

/// Like a region's payloads.
pub(crate) const ALIGNMENT: usize = 64;

type Requests = PortFactory<ipc::Service, [u8], (), [u8], ()>;
type Loan = RequestMutUninit<ipc::Service, [MaybeUninit<u8>], (), [u8], ()>;

/// What the names of all files start with.
pub(crate) fn prefix(prefix: &str) -> String {
    format!("{prefix}_iceoryx2")
}

/// A node whose files all have our prefix.
pub(crate) fn node(setup: &Setup) -> Result<Node<ipc::Service>> {
    set_log_level(LogLevel::Error);
    let mut config = Config::default();
    let folder = leftovers::folder(&setup.prefix);
    config.global.prefix = FileName::new((prefix(&setup.prefix) + "_").as_bytes())?;
    config
        .global
        .set_root_path(&Path::new(folder.as_os_str().as_encoded_bytes())?);
    let builder = NodeBuilder::new().config(&config);
    Ok(builder
        .signal_handling_mode(SignalHandlingMode::Disabled)
        .create()?)
}

fn requests(node: &Node<ipc::Service>) -> Result<Requests> {
    let alignment = Alignment::new(ALIGNMENT).ok_or("an alignment is a power of two")?;
    let builder = node.service_builder(&ServiceName::new("echo")?);
    let builder = builder.request_response::<[u8], [u8]>();
    let builder = builder.request_payload_alignment(alignment);
    let builder = builder.response_payload_alignment(alignment);
    let builder = builder
        .max_clients(1)
        .max_servers(1)
        .max_response_buffer_size(1);
    Ok(builder.max_loaned_requests(2).open_or_create()?)
}

/// What a parking side waits for, and what it wakes the other with.
pub(crate) struct Events {
    awaited: Listener<ipc::Service>,
    raised: Notifier<ipc::Service>,
}

impl Events {
    /// None for a side that spins.
    pub(crate) fn new(
        node: &Node<ipc::Service>,
        setup: &Setup,
        names: [&str; 2],
    ) -> Result<Option<Self>> {
        if setup.is_spinning() {
            return Ok(None);
        }
        let [awaited, raised] = names.map(|name| -> Result<_> {
            let builder = node.service_builder(&ServiceName::new(name)?);
            Ok(builder.event().open_or_create()?)
        });
        Ok(Some(Self {
            awaited: awaited?.listener_builder().create()?,
            raised: raised?.notifier_builder().create()?,
        }))
    }

    /// Sleeps until the other side raises its event; returns at once for a side that spins.
    pub(crate) fn wait(events: Option<&Self>) -> Result<()> {
        if let Some(events) = events {
            events.awaited.blocking_wait(|_| ())?;
        }
        Ok(())
    }

    pub(crate) fn wake(events: Option<&Self>) -> Result<()> {
        if let Some(events) = events {
            events.raised.notify()?;
        }
        Ok(())
    }
}

pub(crate) struct IceoryxServer {
    responder: Responder<ipc::Service, [u8], (), [u8], ()>,
    events: Option<Events>,
    _node: Node<ipc::Service>,
}

impl IceoryxServer {
    pub(crate) fn new(setup: &Setup) -> Result<Self> {
        let node = node(setup)?;
        let requests = requests(&node)?;
        let builder = requests.server_builder();
        Ok(Self {
            responder: builder.initial_max_slice_len(setup.size).create()?,
            events: Events::new(&node, setup, ["request", "response"])?,
            _node: node,
        })
    }
}

impl Server for IceoryxServer {
    fn answer(&mut self) -> Result<()> {
        let request = loop {
            if let Some(request) = self.responder.receive()? {
                break request;
            }
            Events::wait(self.events.as_ref())?;
        };
        let mut response = request.loan_slice_uninit(request.payload().len())?;
        echo::answer_uninit(request.payload(), response.payload_mut());
        // SAFETY: both payloads have the same length, so every byte was written.
        unsafe { response.assume_init() }.send()?;
        Events::wake(self.events.as_ref())
    }
}

pub(crate) struct IceoryxClient {
    requester: Requester<ipc::Service, [u8], (), [u8], ()>,
    /// Memory for the next request.
    next: Option<Loan>,
    events: Option<Events>,
    size: usize,
    _node: Node<ipc::Service>,
}

impl IceoryxClient {
    pub(crate) fn new(setup: &Setup) -> Result<Self> {
        let node = node(setup)?;
        let requests = requests(&node)?;
        let builder = requests.client_builder();
        let requester = builder.initial_max_slice_len(setup.size).create()?;
        Ok(Self {
            next: Some(requester.loan_slice_uninit(setup.size)?),
            requester,
            events: Events::new(&node, setup, ["response", "request"])?,
            size: setup.size,
            _node: node,
        })
    }
}

impl Client for IceoryxClient {
    fn call(&mut self, request: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<()> {
        let loan = self.next.take().ok_or("loaned by the call before")?;
        let pending = loan.write_from_slice(request).send()?;
        Events::wake(self.events.as_ref())?;
        self.next = Some(self.requester.loan_slice_uninit(self.size)?);
        loop {
            if let Some(response) = pending.receive()? {
                read(response.payload());
                return Ok(());
            }
            Events::wait(self.events.as_ref())?;
        }
    }
}
