//! The memory that all matchers of a compiler take together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Matchers that may always have their share, however much others take.
const SHARES: usize = 256;

/// Bytes of all matchers. They are estimates: what tables hold, not what the allocator reserves for them.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: usize,
    used: AtomicUsize,
}

impl Budget {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        let used = AtomicUsize::new(0);
        Arc::new(Self { limit, used })
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Whether less is used than half of it, so that something may be kept for later.
    pub(crate) fn has_room(&self) -> bool {
        self.used.load(Ordering::Relaxed) < self.limit / 2
    }
}

/// What one matcher takes. A clone takes as much again.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Charge {
    pub(crate) fn new(budget: Arc<Budget>) -> Self {
        Self { budget, bytes: 0 }
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Takes so many bytes from now on. Returns whether that is allowed: everything is while the limit holds, and a share of it always.
    pub(crate) fn set(&mut self, bytes: usize) -> bool {
        let used = &self.budget.used;
        let before = used.fetch_add(bytes, Ordering::Relaxed);
        used.fetch_sub(self.bytes, Ordering::Relaxed);
        let all = before + bytes - self.bytes;
        self.bytes = bytes;
        all <= self.budget.limit || bytes <= self.budget.limit / SHARES
    }
}

impl Clone for Charge {
    fn clone(&self) -> Self {
        let mut copy = Self::new(Arc::clone(&self.budget));
        copy.set(self.bytes);
        copy
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_gives_way() {
        let budget = Budget::new(256 * 10);
        let mut large = Charge::new(Arc::clone(&budget));
        assert!(budget.has_room() && large.set(2550));
        assert!(!budget.has_room());
        let mut small = Charge::new(Arc::clone(&budget));
        assert!(small.set(10) && !small.set(11));
        assert!(!large.set(2551));
        let copy = small.clone();
        drop(large);
        assert!(budget.has_room() && small.set(100));
        drop((small, copy));
        assert_eq!(budget.used.load(Ordering::Relaxed), 0);
    }
}
