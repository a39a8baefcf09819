//! State that a service shares with its replicas' threads, and its settings.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pie_ring::Client;
use pie_scheduler::{Config, Stats, TokenBytes};

use crate::error::EngineError;
use crate::grammars::GrammarSettings;
use crate::handshake::Capabilities;
use crate::log::ServiceLog;
use crate::output_collector::OutputCollector;
use crate::settings::DriverSettings;

/// Settings of a service.
#[derive(Clone)]
pub struct ServiceSettings {
    /// One for each replica.
    pub drivers: Vec<DriverSettings>,
    /// Settings of each scheduler. A [`max_running`](Config::max_running) of 0 is replaced by the driver's `max_forward_requests`.
    pub scheduler: Config,
    /// Most KV pages to use of a driver's pool.
    pub max_pages: Option<u32>,
    /// Most bytes of images in a step; 0: images are refused.
    pub max_image_bytes: u32,
    /// The bytes of tokens, for stop strings.
    pub token_bytes: Option<Arc<dyn TokenBytes>>,
    /// Vocabulary and limits for grammars; without it requests with a grammar are refused.
    pub grammars: Option<GrammarSettings>,
    /// Longest time in the queue; then a request ends as [`FinishReason::Deadline`](crate::FinishReason::Deadline).
    pub waiting_limit: Option<Duration>,
    /// Most restarts of a driver in a row, without a reply in between.
    pub max_restarts: u32,
    /// Receives the drivers' logs and the service's own messages.
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
    /// One driver, with defaults, whose log is dropped.
    pub fn new(driver: DriverSettings) -> Self {
        Self {
            drivers: vec![driver],
            scheduler: Config {
                max_running: 0,
                ..Config::default()
            },
            max_pages: None,
            max_image_bytes: 0,
            token_bytes: None,
            grammars: None,
            waiting_limit: None,
            max_restarts: 3,
            log: Arc::new(|_, _| ()),
        }
    }
}

/// Statistics of one replica.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReplicaStats {
    /// Its scheduler's; some milliseconds old while it computes.
    pub scheduler: Stats,
    /// Restarts of its driver.
    pub restarts: u64,
    /// KV pages that its scheduler uses.
    pub total_pages: u32,
    /// KV pages on the host.
    pub host_pages: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// Most running sequences.
    pub max_running: u32,
    /// Most positions of a sequence.
    pub max_model_len: u32,
    /// Host gap, from a reply to the next frame, in ns: median and 99th percentile. The device waits meanwhile.
    pub gaps_ns: [u64; 2],
    /// Sum of the host gaps.
    pub host_ns: u64,
    /// Sum of the times from a frame to its reply: driver and device.
    pub driver_ns: u64,
    /// The driver's process id; 0 while there is none.
    pub driver_pid: u32,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) outputs: OutputCollector,
    states: Mutex<Vec<ReplicaState>>,
    pub(crate) changed: Condvar,
}

/// State of a replica, as callers' threads see it.
#[derive(Debug, Default)]
pub(crate) struct ReplicaState {
    pub(crate) caps: Option<Capabilities>,
    pub(crate) stats: ReplicaStats,
    /// Aborts calls of the driver.
    pub(crate) client: Option<ClientHandle>,
    /// Why the replica failed for good.
    pub(crate) failed: Option<Arc<EngineError>>,
    pub(crate) stopping: bool,
    /// Its thread has closed the inbox. Requests are sent under this lock, so none can be sent afterwards.
    pub(crate) closed: bool,
    /// Whether its steps are traced.
    pub(crate) tracing: bool,
    /// Adapters that a restarted driver has to load.
    pub(crate) adapters: BTreeMap<u64, String>,
}

/// A client with `Debug`.
pub(crate) struct ClientHandle(pub(crate) Arc<Client>);

impl fmt::Debug for ClientHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl Shared {
    pub(crate) fn new(replicas: usize) -> Self {
        let mut states = Vec::new();
        states.resize_with(replicas, ReplicaState::default);
        Self {
            outputs: OutputCollector::default(),
            states: Mutex::new(states),
            changed: Condvar::new(),
        }
    }

    /// Changes the state of a replica and wakes those who wait for it.
    pub(crate) fn update<R>(
        &self,
        replica: usize,
        change: impl FnOnce(&mut ReplicaState) -> R,
    ) -> R {
        let changed = change(&mut self.lock()[replica]);
        self.changed.notify_all();
        changed
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<ReplicaState>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
