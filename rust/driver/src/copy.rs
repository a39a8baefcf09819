//! An open copy of pages or of recurrent state.

use std::sync::Arc;

use pie_planner::{PagePool, Planner};
use pie_ring::Lease;
use pie_wire::CopyDirection;

use crate::copy_batches::copy_batches;
use crate::log_line::LogLine;
use crate::shared_planner::SharedPlanner;
use crate::status;

/// Validated page copies: as many sources as targets, all within their pools.
pub(crate) struct CopyPairs {
    pub(crate) direction: CopyDirection,
    /// Slots of recurrent state, not pages.
    pub(crate) states: bool,
    pub(crate) sources: Vec<u32>,
    pub(crate) targets: Vec<u32>,
}

impl CopyPairs {
    /// Records the copies in the planner; after a failure the targets are unknown.
    fn update_page_tokens(&self, planner: &mut Planner, code: i32) {
        let (from, to) = match self.direction {
            CopyDirection::D2D => (PagePool::Device, PagePool::Device),
            CopyDirection::D2H => (PagePool::Device, PagePool::Host),
            CopyDirection::H2D => (PagePool::Host, PagePool::Device),
            CopyDirection::H2H => (PagePool::Host, PagePool::Host),
        };
        for (&source, &target) in self.sources.iter().zip(&self.targets) {
            if code == status::OK {
                planner.page_copied((from, source), (to, target));
            } else {
                planner.page_invalidated((to, target));
            }
        }
    }
}

/// A copy of KV pages within or between the device pool and the host pool, or of recurrent state slots. Dropping it aborts the
/// request.
pub struct Copy {
    lease: Option<Lease>,
    driver_id: u32,
    pairs: Arc<CopyPairs>,
    shared: Arc<SharedPlanner>,
}

impl Copy {
    pub(crate) fn new(
        lease: Lease,
        driver_id: u32,
        pairs: CopyPairs,
        shared: Arc<SharedPlanner>,
    ) -> Self {
        Self {
            lease: Some(lease),
            driver_id,
            pairs: Arc::new(pairs),
            shared,
        }
    }

    /// The pools that sources and targets belong to.
    #[must_use]
    pub fn direction(&self) -> CopyDirection {
        self.pairs.direction
    }

    /// Whether recurrent state is copied, not pages.
    #[must_use]
    pub fn states(&self) -> bool {
        self.pairs.states
    }

    /// Number of pairs.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "no copy is empty")]
    pub fn len(&self) -> usize {
        self.pairs.sources.len()
    }

    /// Sources and targets in batches: copying batch by batch, each in parallel, equals copying pair by pair. There is one batch
    /// unless pages overlap.
    pub fn batches(&self) -> impl Iterator<Item = (&[u32], &[u32])> {
        let CopyPairs {
            direction,
            sources,
            targets,
            ..
        } = &*self.pairs;
        let one_pool = matches!(direction, CopyDirection::D2D | CopyDirection::H2H);
        copy_batches(sources, targets, one_pool)
    }

    /// Responds with a code of [`crate::status`], once.
    pub fn commit(&mut self, code: i32) -> Option<LogLine> {
        let lease = self.lease.take()?;
        let CopyPairs {
            direction, states, ..
        } = *self.pairs;
        if code == status::OK {
            self.shared.counters().copied(direction, states, self.len());
        }
        if !states {
            let pairs = Arc::clone(&self.pairs);
            self.shared
                .change(move |planner| pairs.update_page_tokens(planner, code));
        }
        status::answer(lease, self.driver_id, code)
    }
}
