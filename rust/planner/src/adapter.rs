//! `LoRA` adapters: which are loaded, and how many fit a pass.

use std::num::{NonZeroI64, NonZeroUsize};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::error::RequestError;

/// The adapter id of warm-ups, which needs no load; requests of the runtime cannot use it.
pub const WARM_UP_ADAPTER: i64 = i64::MAX;
/// The id of requests without adapter.
pub(crate) const NO_ADAPTER: i64 = -1;

/// Entry of rows without adapter in a step of a graph.
pub(crate) const NO_SLOT: i32 = -1;

/// The adapter id of a request, if it has one.
pub(crate) type Binding = Option<NonZeroI64>;

/// The adapters of an engine.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    slots: Option<NonZeroUsize>,
    loaded: FxHashSet<i64>,
    /// The device slot of each adapter that graphs can apply.
    resident: FxHashMap<i64, i32>,
}

impl Adapters {
    /// Enables adapters, with `slots` distinct bindings per pass.
    pub(crate) const fn set_slots(&mut self, slots: NonZeroUsize) {
        self.slots = Some(slots);
    }

    /// Distinct bindings per pass, "no adapter" included; `None` without `LoRA`.
    pub(crate) const fn slots(&self) -> Option<NonZeroUsize> {
        self.slots
    }

    /// Replaces the device slots of adapters.
    pub(crate) fn set_resident(&mut self, slots: impl IntoIterator<Item = (i64, i32)>) {
        self.resident.clear();
        self.resident.extend(slots);
    }

    /// The device slot of a binding, [`NO_SLOT`] for none; `None` if graphs cannot apply the adapter.
    pub(crate) fn device_slot(&self, binding: Binding) -> Option<i32> {
        binding.map_or(Some(NO_SLOT), |id| self.resident.get(&id.get()).copied())
    }

    pub(crate) fn load(&mut self, id: i64) {
        self.loaded.insert(id);
    }

    pub(crate) fn unload(&mut self, id: i64) {
        self.loaded.remove(&id);
    }

    /// Checks the adapter id of a request.
    pub(crate) fn binding(&self, id: i64) -> Result<Binding, RequestError> {
        match id {
            NO_ADAPTER => Ok(None),
            ..1 => Err(RequestError::AdapterId { id }),
            _ if self.slots.is_none() => Err(RequestError::AdaptersOff { id }),
            _ if self.loaded.contains(&id) => Ok(NonZeroI64::new(id)),
            _ => Err(RequestError::UnknownAdapter { id }),
        }
    }
}

/// The distinct bindings of the pass under construction.
#[derive(Debug, Default)]
pub(crate) struct PassAdapters {
    bindings: Vec<Binding>,
}

impl PassAdapters {
    /// Starts a pass.
    pub(crate) fn start(&mut self) {
        self.bindings.clear();
    }

    /// Whether a request with this binding fits the pass.
    pub(crate) fn admits(&self, binding: Binding, slots: usize) -> bool {
        self.bindings.contains(&binding) || self.bindings.len() < slots
    }

    /// Adds a request with this binding.
    pub(crate) fn add(&mut self, binding: Binding) {
        if !self.bindings.contains(&binding) {
            self.bindings.push(binding);
        }
    }
}
