//! The memory budget of all matchers of a compiler.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A matcher may always use this fraction of the budget.
const GUARANTEED_SHARES: usize = 256;

/// Bytes of all matchers, estimated from table contents.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    limit: usize,
    used: AtomicUsize,
}

impl MemoryBudget {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        let used = AtomicUsize::new(0);
        Arc::new(Self { limit, used })
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Whether less than half is used, so that matchers may be cached.
    pub(crate) fn has_space(&self) -> bool {
        self.used.load(Ordering::Relaxed) < self.limit / 2
    }
}

/// Bytes charged for one matcher; a clone is charged as much again.
#[derive(Debug)]
pub(crate) struct MemoryCharge {
    budget: Arc<MemoryBudget>,
    bytes: usize,
}

impl MemoryCharge {
    pub(crate) fn new(budget: Arc<MemoryBudget>) -> Self {
        Self { budget, bytes: 0 }
    }

    pub(crate) fn budget(&self) -> &MemoryBudget {
        &self.budget
    }

    /// Sets the charge. Returns whether it is within the limit, or within the guaranteed fraction.
    pub(crate) fn set(&mut self, bytes: usize) -> bool {
        let used = &self.budget.used;
        let before = used.fetch_add(bytes, Ordering::Relaxed);
        used.fetch_sub(self.bytes, Ordering::Relaxed);
        let all = before + bytes - self.bytes;
        self.bytes = bytes;
        all <= self.budget.limit || bytes <= self.budget.limit / GUARANTEED_SHARES
    }
}

impl Clone for MemoryCharge {
    fn clone(&self) -> Self {
        let mut copy = Self::new(Arc::clone(&self.budget));
        copy.set(self.bytes);
        copy
    }
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_gives_way() {
        let budget = MemoryBudget::new(256 * 10);
        let mut large = MemoryCharge::new(Arc::clone(&budget));
        assert!(budget.has_space() && large.set(2550));
        assert!(!budget.has_space());
        let mut small = MemoryCharge::new(Arc::clone(&budget));
        assert!(small.set(10) && !small.set(11));
        assert!(!large.set(2551));
        let copy = small.clone();
        drop(large);
        assert!(budget.has_space() && small.set(100));
        drop((small, copy));
        assert_eq!(budget.used.load(Ordering::Relaxed), 0);
    }
}
