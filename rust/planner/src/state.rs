//! Recurrent state: which slot of the engine's state pool a request's layers read and advance.

use crate::fault::RequestFault;
use crate::frame::Frame;

/// Bit 0 of `rs_slot_flags`: the request starts anew, from zeros.
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
    /// The slot of request `index`, which brings `drafts`, for an engine with `slots` of them. Rejected drafts would spoil
    /// the state.
    pub(crate) fn of(
        frame: &Frame<'_>,
        slots: u32,
        index: usize,
        drafts: u32,
    ) -> Result<Self, RequestFault> {
        if drafts > 0 {
            return Err(RequestFault::StateDrafts { drafts });
        }
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
    pub(crate) const fn slot(self) -> u32 {
        self.0 / 2
    }

    /// Whether the request starts from zeros.
    pub(crate) const fn resets(self) -> bool {
        self.0 % 2 == 1
    }
}
