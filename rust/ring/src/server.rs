//! The server of a region: owns it and receives requests, oldest first.

use std::sync::Arc;
use std::time::Duration;

use crate::dispatch::Dispatcher;
use crate::error::{RegionError, SystemError};
use crate::guard::ExitGuard;
use crate::layout::RegionLayout;
use crate::lease::Lease;
use crate::mapping::Mapping;
use crate::named_file::RegionName;
use crate::region::RegionFile;
use crate::shared::{Stop, Waker};
use crate::wait::Wait;

/// How long [`Server::create`] waits for a live owner by default; a server that is ending needs less.
pub const DEFAULT_TAKEOVER: Duration = Duration::from_secs(5);

/// The parameters of a region.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// POSIX name, such as `/my_region`.
    pub name: String,
    /// Slots and capacities.
    pub layout: RegionLayout,
    /// Identity of the payload schema; the client demands the same.
    pub schema_hash: [u8; 8],
    /// The complete response sent for a request that was dropped without an answer.
    pub abort_reply: Vec<u8>,
    /// How long to wait for a live owner of the name.
    pub takeover: Duration,
}

impl ServerConfig {
    /// A configuration with the default layout and take-over time.
    pub fn new(name: impl Into<String>, schema_hash: [u8; 8], abort_reply: Vec<u8>) -> Self {
        Self {
            name: name.into(),
            layout: RegionLayout::default(),
            schema_hash,
            abort_reply,
            takeover: DEFAULT_TAKEOVER,
        }
    }
}

/// The owner of a region. Dropping it removes the region's name; leases stay usable.
pub struct Server {
    dispatcher: Dispatcher,
    region: RegionFile,
}

impl Server {
    /// Makes the region: name, lock, memory, header. Waits for a live owner, replaces a dead one.
    ///
    /// # Errors
    /// [`RegionError::Owned`] if another process keeps the name, [`RegionError::NoSpace`] if `/dev/shm` is too small,
    /// [`RegionError::Name`] and [`RegionError::AbortReplyTooLarge`] for a bad configuration, [`RegionError::System`]
    /// otherwise. On an error no file stays.
    pub fn create(config: &ServerConfig, guard: &ExitGuard) -> Result<Self, RegionError> {
        let name = RegionName::new(&config.name)?;
        let (len, capacity) = (config.abort_reply.len(), config.layout.response_capacity());
        if len > capacity {
            return Err(RegionError::AbortReplyTooLarge { len, capacity });
        }
        let bytes = config.layout.total_bytes() as u64;
        let region = RegionFile::create(&name, bytes, config.takeover, guard.registry())?;
        let mapping = Mapping::new(region.file(), config.layout, true)
            .map_err(|error| name.failed("map", error))?;
        mapping.write_header(&config.layout.encode_header(config.schema_hash));
        let dispatcher = Dispatcher::new(mapping, config.abort_reply.clone());
        guard.registry().serve(dispatcher.shared());
        Ok(Self { dispatcher, region })
    }

    /// The layout of the region.
    pub fn layout(&self) -> &RegionLayout {
        self.dispatcher.shared().mapping.layout()
    }

    /// A handle that stops the server.
    pub fn stop_handle(&self) -> Stop {
        Stop(Arc::clone(self.dispatcher.shared()))
    }

    /// A handle that interrupts the server's wait from other threads.
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(self.dispatcher.shared()))
    }

    /// Whether a [`Waker`] was called since the last time; check it when [`Server::wait`] returns `None`.
    pub fn take_wake(&self) -> bool {
        self.dispatcher.shared().take_wake()
    }

    /// Waits for the next request; `None` once stopped, or after a wake by a [`Waker`].
    ///
    /// With [`Wait::Spin`] the wake of an answer's client may be deferred until the next call: call again
    /// soon, or stop or drop the server.
    ///
    /// # Errors
    /// [`SystemError`] if the kernel refuses to wait.
    pub fn wait(&mut self, wait: Wait) -> Result<Option<Lease>, SystemError> {
        self.dispatcher.wait(wait)
    }

    /// Takes the oldest pending request, if there is one, without waiting.
    pub fn poll(&mut self) -> Option<Lease> {
        self.dispatcher.poll()
    }

    /// Removes the region's name, if it still leads to this region. Open mappings keep working.
    pub fn unlink(&self) {
        self.region.unlink();
    }
}
