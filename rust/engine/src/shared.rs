//! What a service and its replicas share: settings, how each stands, what was produced.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pie_ring::Client;
use pie_scheduler::{Config, Stats, TokenBytes};

use crate::error::RuntimeError;
use crate::grammars::GrammarSettings;
use crate::handshake::Capabilities;
use crate::outbox::Outbox;
use crate::settings::DriverSettings;

/// Takes each line of the drivers' logs, with the number of the replica, on threads of its own. See [`LogSink`](crate::LogSink).
pub type ServiceLog = Arc<dyn Fn(usize, &str) + Send + Sync>;

/// What a service is made of.
#[derive(Clone)]
pub struct ServiceSettings {
    /// One replica each: a driver process and a scheduler of its own.
    pub drivers: Vec<DriverSettings>,
    /// How each scheduler decides. What it says of [`max_running`](Config::max_running) counts if it is not 0; else as many
    /// requests run as a frame of the driver takes.
    pub scheduler: Config,
    /// Most pages of KV to use of what a driver has.
    pub max_pages: Option<u32>,
    /// Most bytes that the images of a step bring; 0: images are refused.
    pub max_image_bytes: u32,
    /// The bytes of tokens, for stop strings.
    pub text: Option<Arc<dyn TokenBytes>>,
    /// What grammars are compiled with; without it requests cannot be bound.
    pub grammars: Option<GrammarSettings>,
    /// How long a request may wait for its admission; then it ends as [`End::Deadline`](crate::End::Deadline).
    pub waiting_limit: Option<Duration>,
    /// How often in a row a driver may end or be stuck, without an answer in between, and is started again.
    pub max_restarts: u32,
    /// Takes the drivers' logs, and notes of the service's own.
    pub log: ServiceLog,
}

impl fmt::Debug for ServiceSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceSettings")
            .field("drivers", &self.drivers)
            .field("scheduler", &self.scheduler)
            .finish_non_exhaustive()
    }
}

impl ServiceSettings {
    /// One driver, with defaults, whose log is not read.
    pub fn new(driver: DriverSettings) -> Self {
        Self {
            drivers: vec![driver],
            scheduler: Config {
                max_running: 0,
                ..Config::default()
            },
            max_pages: None,
            max_image_bytes: 0,
            text: None,
            grammars: None,
            waiting_limit: None,
            max_restarts: 3,
            log: Arc::new(|_, _| ()),
        }
    }
}

/// How one replica stands.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReplicaStats {
    /// Its scheduler's counts; some milliseconds old while it computes.
    pub scheduler: Stats,
    /// How often its driver was started again.
    pub restarts: u64,
    /// Pages that its scheduler uses.
    pub total_pages: u32,
    /// Pages that it has on the host.
    pub host_pages: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// Sequences that may hold pages at once.
    pub max_running: u32,
    /// Positions of a sequence.
    pub max_model_len: u32,
    /// From the answer to a step seen to the next one's request made, in ns: the median, and what one in a hundred exceeds. The
    /// device waits so long for this side.
    pub gaps_ns: [u64; 2],
    /// All of these together.
    pub host_ns: u64,
    /// From a step's request made to its answer seen, of all steps together: the driver and its device.
    pub driver_ns: u64,
    /// The driver's process id; 0 while there is none.
    pub driver_pid: u32,
}

/// What all threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) outbox: Outbox,
    states: Mutex<Vec<State>>,
    pub(crate) changed: Condvar,
}

/// How a replica stands.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) caps: Option<Capabilities>,
    pub(crate) stats: ReplicaStats,
    /// By which a wait for the driver is ended.
    pub(crate) client: Option<ClientHandle>,
    /// Why there will be no driver any more.
    pub(crate) failed: Option<Arc<RuntimeError>>,
    pub(crate) stopping: bool,
    /// Its thread takes no more commands. Commands are sent under this lock, so none can be sent after its last look.
    pub(crate) closed: bool,
    /// Whether its steps are traced.
    pub(crate) tracing: bool,
    /// Adapters that its driver has, or has to read when it starts again.
    pub(crate) adapters: BTreeMap<u64, String>,
}

/// A client that another thread calls.
pub(crate) struct ClientHandle(pub(crate) Arc<Client>);

impl fmt::Debug for ClientHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl Shared {
    pub(crate) fn new(replicas: usize) -> Self {
        let mut states = Vec::new();
        states.resize_with(replicas, State::default);
        Self {
            outbox: Outbox::default(),
            states: Mutex::new(states),
            changed: Condvar::new(),
        }
    }

    /// Changes what is known of a replica.
    pub(crate) fn update<R>(&self, replica: usize, change: impl FnOnce(&mut State) -> R) -> R {
        let changed = change(&mut self.lock()[replica]);
        self.changed.notify_all();
        changed
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<State>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
