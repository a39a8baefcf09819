//! An open load of an adapter. Requests and batches may come and go meanwhile.

use std::sync::Arc;

use pie_ring::Lease;

use crate::note::Note;
use crate::shared_planner::SharedPlanner;
use crate::status;

/// Which adapter to load.
pub(crate) struct AdapterLoad {
    pub(crate) id: i64,
    pub(crate) path: String,
}

/// An adapter to load, in the place of the one that has its id already. Dropped without a commit it is answered by an
/// abort, and requests find what they found before.
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

    /// The id that requests bind, at least 1.
    #[must_use]
    pub const fn id(&self) -> i64 {
        self.adapter.id
    }

    /// Where the adapter lies; not empty.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.adapter.path
    }

    /// Answers with a code of [`crate::status`], once. After [`status::OK`] requests may bind the adapter. A `reason` says
    /// in words why they may not, to clients that read it.
    pub fn commit(&mut self, code: i32, reason: &str) -> Option<Note> {
        let lease = self.lease.take()?;
        if code == status::OK {
            let id = self.adapter.id;
            self.shared.change(move |planner| planner.add_adapter(id));
        }
        status::answer_with_reason(lease, self.driver_id, code, reason)
    }
}
