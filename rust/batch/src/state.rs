//! Recurrent state: which slot of the engine's state pool a request's layers read and advance.

use std::collections::HashSet;

use crate::RequestFault;
use crate::frame::Frame;
use crate::plan::Planner;

/// Bit 0 of `rs_slot_flags`: what the slot holds belongs to nobody.
const RESET: u8 = 1;

/// A request's slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State {
    slot: u32,
    /// The slot starts from zeros.
    reset: bool,
}

impl State {
    /// The slot of request `index`, for an engine with `slots` of them; `None` when it has none.
    pub(crate) fn of(
        frame: &Frame<'_>,
        slots: u32,
        index: usize,
    ) -> Result<Option<Self>, RequestFault> {
        if slots == 0 {
            return Ok(None);
        }
        let slot = *frame
            .state_slots
            .get(index)
            .ok_or(RequestFault::NoStateSlot)?;
        if slot >= slots {
            return Err(RequestFault::StateSlot { slot, slots });
        }
        let flags = frame.state_flags.get(index).copied().unwrap_or(0);
        let reset = flags & RESET != 0;
        Ok(Some(Self { slot, reset }))
    }
}

impl Planner {
    /// When several requests name one slot, the last one keeps it. An earlier one is what the runtime sent before it knew
    /// better, and advances the padding slot.
    pub(crate) fn keep_last_states(&mut self) {
        if self.states == 0 {
            return;
        }
        let mut taken = HashSet::new();
        let computed = self
            .requests
            .iter_mut()
            .filter(|request| !request.rows.is_empty());
        for request in computed.rev() {
            request.state = request.state.filter(|state| taken.insert(state.slot));
        }
    }

    /// Of each request of the last staged pass the slot in the engine's state pool, whose slot 0 is for padding, and 1
    /// where it starts from zeros; `None` for an engine without recurrent state.
    #[must_use]
    pub fn pass_states(&self) -> Option<Vec<[i64; 2]>> {
        let pass = self.stage.next_pass.checked_sub(1)?;
        let segments = &self.segments[self.passes.get(pass)?.clone()];
        (self.states > 0).then(|| {
            let entry = |segment: &crate::plan::Segment| {
                let request = &self.requests[segment.request];
                let first = segment.start == request.rows.start;
                request.state.map_or([0, 1], |state| {
                    [i64::from(state.slot) + 1, i64::from(state.reset && first)]
                })
            };
            segments.iter().map(entry).collect()
        })
    }
}
