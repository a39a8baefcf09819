//! Inputs of a pass besides the staging block: `LoRA` adapters, recurrent state, token history, images.

use std::num::NonZeroI64;
use std::ops::Range;

use crate::adapter::{Binding, NO_ADAPTER};
use crate::error::RequestError;
use crate::frame::request::Segment;
use crate::frame::request::pass_tokens;
use crate::image::PassImages;
use crate::plan::Plan;

impl Plan {
    /// The distinct adapter ids of the next pass.
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

    /// Rejects the requests of later passes whose adapter cannot be loaded. Their tokens stay in these passes, without adapter,
    /// outputs or KV writes, because earlier passes are staged already.
    pub fn drop_adapter(&mut self, id: i64, reason: &str) {
        let rest = self.passes().from(self.next_pass()).iter();
        let mut dropped: Vec<usize> = rest
            .map(|segment| segment.request())
            .filter(|&index| self.requests()[index].adapter() == NonZeroI64::new(id))
            .collect();
        // The segments of a request are adjacent.
        dropped.dedup();
        self.reject_requests(&dropped, || RequestError::AdapterLost {
            id,
            reason: reason.into(),
        });
    }

    /// See [`StagedPass::adapters`](crate::StagedPass::adapters).
    pub(crate) fn pass_adapters(&self) -> Option<Vec<i64>> {
        let segments = self.staged_segments();
        self.bindings(segments).find_map(|binding| binding)?;
        let ids = self
            .bindings(segments)
            .map(|binding| binding.map_or(NO_ADAPTER, NonZeroI64::get));
        Some(ids.collect())
    }

    /// See [`StagedPass::states`](crate::StagedPass::states).
    pub(crate) fn pass_states(&self) -> Option<Vec<[i64; 2]>> {
        self.has_states().then(|| {
            let entry = |segment: &Segment| {
                let request = &self.requests()[segment.request()];
                let first = segment.start() == request.tokens().start();
                let (slot, resets) = (request.state().slot(), request.state().resets() && first);
                [i64::from(slot), i64::from(resets)]
            };
            self.staged_segments().iter().map(entry).collect()
        })
    }

    /// `[KV slot, token]` that the pass must record for penalties: before the first pass the history of its requests, later
    /// nothing more. `None` without penalties.
    #[must_use]
    pub(crate) fn token_history(&self) -> Option<&[[i64; 2]]> {
        let processors = self.slots().processors();
        let first = self.next_pass() <= 1;
        processors
            .counts()
            .then(|| if first { processors.history() } else { &[] })
    }

    /// The images of the staged pass.
    pub(crate) fn pass_images(&self) -> Option<PassImages> {
        let (segments, requests) = (self.staged_segments(), self.requests());
        if segments.is_empty() {
            return None;
        }
        // The first segment with tokens of an image belongs to its request: images do not cross requests.
        let locate = |rows: &Range<usize>| {
            let entry = segments.partition_point(|segment| segment.tokens().end <= rows.start);
            let request = &requests[segments[entry].request()];
            let kv = |row: usize| request.prefix() + (row - request.tokens().start());
            (entry, kv(rows.start)..kv(rows.end))
        };
        let positions = self.query_tokens().positions();
        self.images()
            .of_pass(&pass_tokens(segments), positions, locate)
    }

    fn bindings(&self, segments: &[Segment]) -> impl Iterator<Item = Binding> {
        segments
            .iter()
            .map(|segment| self.requests()[segment.request()].adapter())
    }
}
