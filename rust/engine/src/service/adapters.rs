//! Adapters of a service.

use std::sync::{Arc, PoisonError};

use pie_ring::{CallError, Client};

use super::Service;
use crate::error::EngineError;
use crate::link;

impl Service {
    /// Loads a `LoRA` adapter in every driver and waits for it, while requests continue. Restarted drivers load it again. An id that was
    /// loaded before gets the new files: only while no request uses it.
    ///
    /// # Errors
    /// [`EngineError::Adapter`] if a driver refuses it; then no request can use it. Others, if there is no driver.
    pub fn load_adapter(&self, id: u64, path: &str) -> Result<(), Arc<EngineError>> {
        if self.is_forked() {
            return Err(Arc::new(EngineError::Forked));
        }
        let mut replicas = 0..self.replicas.len();
        for replica in replicas.clone() {
            self.shared
                .update(replica, |state| state.adapters.insert(id, path.to_owned()));
        }
        let loaded = replicas.try_for_each(|replica| {
            let client = self.wait_client(replica)?;
            Ok(link::load_adapter(&client, id, path)?)
        });
        if loaded.is_err() {
            self.unload_adapter(id);
        }
        loaded
    }

    /// Unloads an adapter: restarted drivers do not load it, others evict it when they need the room. Only while no request uses it; unknown
    /// ids are ignored.
    pub fn unload_adapter(&self, id: u64) {
        for replica in 0..self.replicas.len() {
            self.shared
                .update(replica, |state| state.adapters.remove(&id));
        }
    }

    /// The client of a driver; waits while the driver restarts.
    fn wait_client(&self, replica: usize) -> Result<Arc<Client>, Arc<EngineError>> {
        let mut states = self.shared.lock();
        loop {
            let state = &states[replica];
            if let Some(error) = &state.failed {
                return Err(Arc::clone(error));
            }
            if state.stopping {
                return Err(Arc::new(CallError::Aborted.into()));
            }
            if let Some(client) = &state.client {
                return Ok(Arc::clone(&client.0));
            }
            let waited = self.shared.changed.wait(states);
            states = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}
