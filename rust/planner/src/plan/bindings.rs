//! What the requests of a plan are bound to, pass by pass.

use std::num::NonZeroI64;

use crate::adapter::{Binding, NO_ADAPTER};
use crate::fault::RequestFault;
use crate::frame::request::Segment;
use crate::plan::Plan;

impl Plan {
    /// The different adapters that the next pass needs.
    #[must_use]
    pub fn next_adapters(&self) -> Vec<i64> {
        let next = self.passes().get(self.next_pass()).unwrap_or(&[]);
        let mut needed = Vec::new();
        for binding in self.bindings(next).flatten() {
            if !needed.contains(&binding.get()) {
                needed.push(binding.get());
            }
        }
        needed
    }

    /// Empties the requests bound to an adapter that cannot be had, as far as passes to come compute them. Their rows
    /// stay in these passes, unbound, without outputs and without storing KV: what is staged already relies on the cut.
    pub fn drop_adapter(&mut self, id: i64, reason: &str) {
        let rest = self.passes().from(self.next_pass()).iter();
        let mut dropped: Vec<usize> = rest
            .map(|segment| segment.request())
            .filter(|&index| self.requests()[index].adapter() == NonZeroI64::new(id))
            .collect();
        // The segments of a request are neighbours.
        dropped.dedup();
        self.unbind(&dropped, || RequestFault::AdapterLost {
            id,
            reason: reason.into(),
        });
    }

    /// The adapter of each request of the staged pass, -1 for none; `None` when no request has one.
    pub(crate) fn pass_adapters(&self) -> Option<Vec<i64>> {
        let segments = self.staged_segments();
        self.bindings(segments).find_map(|binding| binding)?;
        let ids = self
            .bindings(segments)
            .map(|binding| binding.map_or(NO_ADAPTER, NonZeroI64::get));
        Some(ids.collect())
    }

    /// Of each request of the staged pass the slot in the engine's state pool, whose slot 0 is for padding, and 1 where it
    /// starts from zeros; `None` for an engine without recurrent state.
    pub(crate) fn pass_states(&self) -> Option<Vec<[i64; 2]>> {
        self.has_states().then(|| {
            let entry = |segment: &Segment| {
                let request = &self.requests()[segment.request()];
                let first = segment.start() == request.rows().start();
                let (slot, resets) = (request.state().slot(), request.state().resets() && first);
                [i64::from(slot), i64::from(resets)]
            };
            self.staged_segments().iter().map(entry).collect()
        })
    }

    fn bindings(&self, segments: &[Segment]) -> impl Iterator<Item = Binding> {
        segments
            .iter()
            .map(|segment| self.requests()[segment.request()].adapter())
    }
}
