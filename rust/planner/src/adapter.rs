//! Adapters: which of them requests may bind, and how many a pass can hold.

use std::num::{NonZeroI64, NonZeroUsize};

use rustc_hash::FxHashSet;

use crate::fault::RequestFault;

/// The adapter that a warm-up may bind without loading one; no request of the runtime can.
pub const WARM_UP_ADAPTER: i64 = i64::MAX;
/// What a request that binds no adapter names.
pub(crate) const NO_ADAPTER: i64 = -1;

/// The adapter of a request, if it has one.
pub(crate) type Binding = Option<NonZeroI64>;

/// The adapters of an engine.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    slots: Option<NonZeroUsize>,
    loaded: FxHashSet<i64>,
}

impl Adapters {
    /// For an engine of which a pass can hold `slots` different bindings.
    pub(crate) const fn set_slots(&mut self, slots: NonZeroUsize) {
        self.slots = Some(slots);
    }

    /// Different bindings that a pass can hold, to none being one of them; `None` when the engine takes no adapters.
    pub(crate) const fn slots(&self) -> Option<NonZeroUsize> {
        self.slots
    }

    pub(crate) fn load(&mut self, id: i64) {
        self.loaded.insert(id);
    }

    pub(crate) fn unload(&mut self, id: i64) {
        self.loaded.remove(&id);
    }

    /// What a request is bound to, by the id that its frame names.
    pub(crate) fn binding(&self, id: i64) -> Result<Binding, RequestFault> {
        match id {
            NO_ADAPTER => Ok(None),
            ..1 => Err(RequestFault::AdapterId { id }),
            _ if self.slots.is_none() => Err(RequestFault::AdaptersOff { id }),
            _ if self.loaded.contains(&id) => Ok(NonZeroI64::new(id)),
            _ => Err(RequestFault::UnknownAdapter { id }),
        }
    }
}

/// The different bindings of the pass that is being cut.
#[derive(Debug, Default)]
pub(crate) struct PassAdapters {
    bindings: Vec<Binding>,
}

impl PassAdapters {
    /// Begins a pass without bindings.
    pub(crate) fn start(&mut self) {
        self.bindings.clear();
    }

    /// Whether a pass of so many `slots` can take a request of this binding, too.
    pub(crate) fn admits(&self, binding: Binding, slots: usize) -> bool {
        self.bindings.contains(&binding) || self.bindings.len() < slots
    }

    /// Adds a request of this binding.
    pub(crate) fn add(&mut self, binding: Binding) {
        if !self.bindings.contains(&binding) {
            self.bindings.push(binding);
        }
    }
}
