//! Index ranges of 8 bytes.

use std::ops::Range;

/// A half-open index range with 32-bit bounds: a frame is smaller than 4 GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Range32 {
    start: u32,
    end: u32,
}

impl Range32 {
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

    /// Makes the range empty.
    pub(crate) const fn clear(&mut self) {
        self.end = self.start;
    }
}
