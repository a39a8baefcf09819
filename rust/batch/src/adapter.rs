//! Adapters: which of them requests may bind, how many a pass can hold, and what each request of a pass is bound to.

use std::num::{NonZeroI64, NonZeroUsize};

use rustc_hash::FxHashSet;

use crate::RequestFault;
use crate::plan::Planner;

/// The adapter that a rehearsal may bind without loading one; no request of the runtime can.
pub const REHEARSAL_ADAPTER: i64 = i64::MAX;
/// What a request that binds no adapter names.
const NONE: i64 = -1;

/// The adapter of a request, if it has one.
pub(crate) type Binding = Option<NonZeroI64>;

/// The adapters of an engine.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    /// Different bindings that a pass can hold, to none being one of them; `None` when the engine takes no adapters.
    slots: Option<NonZeroUsize>,
    loaded: FxHashSet<i64>,
    /// Different bindings of the pass that is being cut.
    pass: Vec<Binding>,
}

impl Adapters {
    /// What a request is bound to, by the id that its frame names.
    pub(crate) fn binding(&self, id: i64) -> Result<Binding, RequestFault> {
        match id {
            NONE => Ok(None),
            ..1 => Err(RequestFault::AdapterId { id }),
            _ if self.slots.is_none() => Err(RequestFault::AdaptersOff { id }),
            _ if self.loaded.contains(&id) => Ok(NonZeroI64::new(id)),
            _ => Err(RequestFault::UnknownAdapter { id }),
        }
    }

    /// Begins a pass without bindings.
    pub(crate) fn start_pass(&mut self) {
        self.pass.clear();
    }

    /// Whether the pass that is being cut can take a request of this binding, too.
    pub(crate) fn admits(&self, binding: Binding) -> bool {
        self.pass.contains(&binding) || self.slots.is_none_or(|slots| self.pass.len() < slots.get())
    }

    /// Adds a request of this binding to the pass that is being cut.
    pub(crate) fn add(&mut self, binding: Binding) {
        if !self.pass.contains(&binding) {
            self.pass.push(binding);
        }
    }
}

impl Planner {
    /// For an engine with adapters, of which a pass can hold `slots`; requests without one take a slot together.
    #[must_use]
    pub fn with_adapters(mut self, slots: NonZeroUsize) -> Self {
        self.adapters.slots = Some(slots);
        self
    }

    /// Whether the engine takes adapters.
    #[must_use]
    pub const fn takes_adapters(&self) -> bool {
        self.adapters.slots.is_some()
    }

    /// From now on requests may bind the adapter.
    pub fn add_adapter(&mut self, id: i64) {
        self.adapters.loaded.insert(id);
    }

    /// From now on requests may not bind the adapter.
    pub fn remove_adapter(&mut self, id: i64) {
        self.adapters.loaded.remove(&id);
    }

    /// The different adapters that the next pass needs.
    #[must_use]
    pub fn next_adapters(&self) -> Vec<i64> {
        let mut needed = Vec::new();
        for binding in self.bindings(self.stage.next_pass).flatten() {
            if !needed.contains(&binding.get()) {
                needed.push(binding.get());
            }
        }
        needed
    }

    /// The adapter of each request of the last staged pass, -1 for none; `None` when no request has one.
    #[must_use]
    pub fn pass_adapters(&self) -> Option<Vec<i64>> {
        let pass = self.stage.next_pass.checked_sub(1)?;
        self.bindings(pass).find_map(|binding| binding)?;
        let ids = self
            .bindings(pass)
            .map(|binding| binding.map_or(NONE, NonZeroI64::get));
        Some(ids.collect())
    }

    /// Empties the requests bound to an adapter that cannot be had, as far as passes to come compute them. Their rows
    /// stay in these passes, unbound, without outputs and without storing KV: what is staged already relies on the cut.
    pub fn drop_adapter(&mut self, id: i64, reason: &str) {
        let rest = self.passes.get(self.stage.next_pass..).unwrap_or(&[]);
        let rest = rest.iter().flat_map(|pass| &self.segments[pass.clone()]);
        let mut dropped: Vec<usize> = rest
            .map(|segment| segment.request())
            .filter(|&index| self.requests[index].adapter == NonZeroI64::new(id))
            .collect();
        // The segments of a request are neighbours.
        dropped.dedup();
        for &index in &dropped {
            let request = &mut self.requests[index];
            request.adapter = None;
            request.dropped = true;
            request.slots.clear();
        }
        // Whose outputs are refused already has its reason. Both lists rise.
        let mut faulty = self.faults.iter().map(|&(index, _)| index).peekable();
        dropped.retain(|&index| {
            while faulty.next_if(|&other| other < index).is_some() {}
            faulty.peek() != Some(&index)
        });
        self.add_faults(dropped.into_iter().map(|index| {
            let reason = reason.into();
            (index, RequestFault::AdapterLost { id, reason })
        }));
    }

    /// The binding of each request of a pass; none when there is no such pass, or no adapters.
    fn bindings(&self, pass: usize) -> impl Iterator<Item = Binding> {
        let pass = self.passes.get(pass).filter(|_| self.takes_adapters());
        let segments = pass.map_or(&[][..], |pass| &self.segments[pass.clone()]);
        segments
            .iter()
            .map(|segment| self.requests[segment.request()].adapter)
    }
}
