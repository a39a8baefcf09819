//! Recurrent state: which slot of the engine's state pool a request's layers read and advance.

use crate::RequestFault;
use crate::frame::Frame;
use crate::plan::{Planner, Segment};

/// Bit 0 of `rs_slot_flags`: what the slot holds belongs to nobody.
const RESET: u8 = 1;

/// A request's slot, and whether it starts from zeros: twice the engine's slot, and one for the zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State(u32);

impl Default for State {
    /// The engine's padding slot, from zeros.
    fn default() -> Self {
        Self(1)
    }
}

impl State {
    /// The slot of request `index`, for an engine with `slots` of them.
    pub(crate) fn of(frame: &Frame<'_>, slots: u32, index: usize) -> Result<Self, RequestFault> {
        let slot = *frame
            .state_slots
            .get(index)
            .ok_or(RequestFault::NoStateSlot)?;
        if slot >= slots {
            return Err(RequestFault::StateSlot { slot, slots });
        }
        let flags = frame.state_flags.get(index).copied().unwrap_or(0);
        Ok(Self(2 * (slot + 1) + u32::from(flags & RESET)))
    }

    /// The engine's slot; 0 is for padding.
    const fn slot(self) -> u32 {
        self.0 / 2
    }

    const fn resets(self) -> bool {
        self.0 % 2 == 1
    }
}

impl Planner {
    /// When several requests name one slot, the last one keeps it. An earlier one is what the runtime sent before it knew
    /// better, and advances the padding slot.
    pub(crate) fn keep_last_states(&mut self) {
        if self.states == 0 {
            return;
        }
        self.state_slots.clear();
        let computed = self
            .requests
            .iter_mut()
            .filter(|request| !request.rows.is_empty());
        for request in computed.rev() {
            if !self.state_slots.insert(request.state.slot()) {
                request.state = State::default();
            }
        }
    }

    /// Of each request of the last staged pass the slot in the engine's state pool, whose slot 0 is for padding, and 1
    /// where it starts from zeros; `None` for an engine without recurrent state.
    #[must_use]
    pub fn pass_states(&self) -> Option<Vec<[i64; 2]>> {
        let pass = self.stage.next_pass.checked_sub(1)?;
        let segments = &self.segments[self.passes.get(pass)?.clone()];
        (self.states > 0).then(|| {
            let entry = |segment: &Segment| {
                let request = &self.requests[segment.request()];
                let first = segment.start() == request.rows.start();
                let (slot, resets) = (request.state.slot(), request.state.resets() && first);
                [i64::from(slot), i64::from(resets)]
            };
            segments.iter().map(entry).collect()
        })
    }
}
