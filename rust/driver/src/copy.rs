//! An open copy of pages or of recurrent state.

use std::sync::Arc;

use pie_planner::{PagePool, Planner};
use pie_ring::Lease;
use pie_wire::CopyDirection;

use crate::groups::groups;
use crate::note::Note;
use crate::shared_planner::SharedPlanner;
use crate::status;

/// Which pages to copy: as many sources as targets, all within their pools.
pub(crate) struct Pairs {
    pub(crate) direction: CopyDirection,
    /// They are slots of recurrent state, not pages.
    pub(crate) states: bool,
    pub(crate) sources: Vec<u32>,
    pub(crate) targets: Vec<u32>,
}

impl Pairs {
    /// Informs the planner what the pages hold now; if the copy failed, nothing is known of its targets.
    fn note_in(&self, planner: &mut Planner, code: i32) {
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
                planner.page_lost((to, target));
            }
        }
    }
}

/// A copy of whole KV pages within or between the device pool and the host pool, or of recurrent state, pair by pair.
/// Dropped without a commit it is answered by an abort.
pub struct Copy {
    lease: Option<Lease>,
    driver_id: u32,
    pairs: Arc<Pairs>,
    shared: Arc<SharedPlanner>,
}

impl Copy {
    pub(crate) fn new(
        lease: Lease,
        driver_id: u32,
        pairs: Pairs,
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

    /// Sources and targets, cut so that copying the parts in order, and each of them at once, gives
    /// the result of copying pair by pair. Only lists that overlap have more than one part.
    pub fn groups(&self) -> impl Iterator<Item = (&[u32], &[u32])> {
        let Pairs {
            direction,
            sources,
            targets,
            ..
        } = &*self.pairs;
        let one_pool = matches!(direction, CopyDirection::D2D | CopyDirection::H2H);
        groups(sources, targets, one_pool)
    }

    /// Answers with a code of [`crate::status`], once.
    pub fn commit(&mut self, code: i32) -> Option<Note> {
        let lease = self.lease.take()?;
        let Pairs {
            direction, states, ..
        } = *self.pairs;
        if code == status::OK {
            self.shared.counters().copied(direction, states, self.len());
        }
        if !states {
            let pairs = Arc::clone(&self.pairs);
            self.shared
                .change(move |planner| pairs.note_in(planner, code));
        }
        status::answer(lease, self.driver_id, code)
    }
}
