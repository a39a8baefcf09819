//! Recurrent state (Mamba, linear attention): the slot in the engine's state pool of each request.

use crate::error::RequestError;
use crate::frame::Frame;

/// Bit 0 of `rs_slot_flags`: reset to zeros.
const RESET: u8 = 1;

/// The engine's state slot times 2, plus 1 to reset it to zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecurrentState(u32);

impl Default for RecurrentState {
    /// The padding slot, reset.
    fn default() -> Self {
        Self(1)
    }
}

impl RecurrentState {
    /// The state slot of request `index`, for a pool of `slots`. Drafts are rejected: the state cannot be rolled back.
    pub(crate) fn of(
        frame: &Frame<'_>,
        slots: u32,
        index: usize,
        drafts: u32,
    ) -> Result<Self, RequestError> {
        if drafts > 0 {
            return Err(RequestError::StateDrafts { drafts });
        }
        let slot = *frame
            .state_slots
            .get(index)
            .ok_or(RequestError::NoStateSlot)?;
        if slot >= slots {
            return Err(RequestError::StateSlot { slot, slots });
        }
        let flags = frame.state_flags.get(index).copied().unwrap_or(0);
        Ok(Self(2 * (slot + 1) + u32::from(flags & RESET)))
    }

    /// The engine's slot; 0 = padding.
    pub(crate) const fn slot(self) -> u32 {
        self.0 / 2
    }

    /// Whether the state is reset to zeros.
    pub(crate) const fn resets(self) -> bool {
        self.0 % 2 == 1
    }
}
