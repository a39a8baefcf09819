//! An open load of a `LoRA` adapter. Other requests are served meanwhile.

use std::sync::Arc;

use pie_ring::Lease;

use crate::log_line::LogLine;
use crate::shared_planner::SharedPlanner;
use crate::status;

/// The adapter to load.
pub(crate) struct AdapterLoad {
    pub(crate) id: i64,
    pub(crate) path: String,
}

/// A load of an adapter, which replaces one with the same id. Dropping it aborts the request and changes nothing.
pub struct Load {
    lease: Option<Lease>,
    driver_id: u32,
    adapter: AdapterLoad,
    shared: Arc<SharedPlanner>,
}

impl Load {
    pub(crate) const fn new(
        lease: Lease,
        driver_id: u32,
        adapter: AdapterLoad,
        shared: Arc<SharedPlanner>,
    ) -> Self {
        Self {
            lease: Some(lease),
            driver_id,
            adapter,
            shared,
        }
    }

    /// The adapter id, at least 1.
    #[must_use]
    pub const fn id(&self) -> i64 {
        self.adapter.id
    }

    /// The path of the adapter; not empty.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.adapter.path
    }

    /// Responds with a code of [`crate::status`], once, and for clients that read it a `reason`. After [`status::OK`] requests may use
    /// the adapter.
    pub fn commit(&mut self, code: i32, reason: &str) -> Option<LogLine> {
        let lease = self.lease.take()?;
        if code == status::OK {
            let id = self.adapter.id;
            self.shared.change(move |planner| planner.add_adapter(id));
        }
        status::answer_with_reason(lease, self.driver_id, code, reason)
    }
}
