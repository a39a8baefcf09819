//! Locks: reference counts along the path to the root.

use crate::radix::error::RadixError;
use crate::radix::index::RadixIndex;
use crate::radix::node::NodeId;

impl RadixIndex {
    /// Locks a node and its ancestors against eviction; `SGLang`'s `inc_lock_ref`. Locks are counted.
    ///
    /// Returns the device pages that became protected.
    ///
    /// # Errors
    ///
    /// [`RadixError::UnknownNode`].
    pub fn lock(&mut self, node: NodeId) -> Result<usize, RadixError> {
        let at = self.resolve(node)?;
        Ok(self.lock_path(at))
    }

    /// Unlocks a node and its ancestors; `SGLang`'s `dec_lock_ref`. Returns the device pages that became evictable.
    ///
    /// # Errors
    ///
    /// [`RadixError::UnknownNode`] and [`RadixError::NotLocked`].
    pub fn unlock(&mut self, node: NodeId) -> Result<usize, RadixError> {
        let mut at = self.resolve(node)?;
        let start = &self.nodes[at as usize];
        if start.locks == 0 && !start.is_root() {
            return Err(RadixError::NotLocked { index: at });
        }
        let mut freed = 0;
        while !self.nodes[at as usize].is_root() {
            let node = &mut self.nodes[at as usize];
            node.locks -= 1;
            if node.locks == 0 {
                freed += if node.on_device() { node.edge.len() } else { 0 };
                self.requeue(at);
            }
            at = self.nodes[at as usize].parent;
        }
        self.evictable += freed;
        self.protected -= freed;
        Ok(freed)
    }

    /// Locks a path upwards and removes it from the eviction queues.
    pub(crate) fn lock_path(&mut self, mut at: u32) -> usize {
        let mut locked = 0;
        while !self.nodes[at as usize].is_root() {
            let node = &mut self.nodes[at as usize];
            node.locks += 1;
            if node.locks == 1 {
                locked += if node.on_device() { node.edge.len() } else { 0 };
                self.dequeue(at);
            }
            at = self.nodes[at as usize].parent;
        }
        self.evictable -= locked;
        self.protected += locked;
        locked
    }
}
