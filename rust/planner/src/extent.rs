//! Ranges in half the room.

use std::ops::Range;

/// A range of an array of the plan. A frame is smaller than 4 GiB, so 32 bits name each of its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Extent {
    start: u32,
    end: u32,
}

impl Extent {
    pub(crate) const fn new(start: usize, end: usize) -> Self {
        Self {
            start: start as u32,
            end: end as u32,
        }
    }

    pub(crate) const fn start(self) -> usize {
        self.start as usize
    }

    pub(crate) const fn end(self) -> usize {
        self.end as usize
    }

    pub(crate) const fn len(self) -> usize {
        self.end() - self.start()
    }

    pub(crate) const fn is_empty(self) -> bool {
        self.start == self.end
    }

    pub(crate) const fn range(self) -> Range<usize> {
        self.start()..self.end()
    }

    /// Leaves nothing of it.
    pub(crate) const fn clear(&mut self) {
        self.end = self.start;
    }
}
