//! Tensor parallelism: rank 0, the leader, broadcasts every step to the worker ranks before it runs it.
//!
//! There are three kinds of messages, in one order: the staging block, commands of Python, and steps of the graph path with all
//! inputs of the graph.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pie_ring::{Broadcast, BroadcastError};

pub(crate) const COMMAND: u32 = 0;
pub(crate) const BLOCK: u32 = 1;
pub(crate) const STEP: u32 = 2;

/// Header of a step message; its block and mask words follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct StepHeader {
    /// Number of the graph.
    pub(crate) graph: u32,
    /// Rows in use.
    pub(crate) rows: u32,
    /// Sampling slots with results.
    pub(crate) results: u32,
    /// Step number, with which its results are tagged.
    pub(crate) step: u32,
    /// Words of its logit masks.
    pub(crate) mask_words: u32,
}

/// The broadcast to all workers; clones share one mutex.
#[derive(Clone)]
pub struct Leader(Arc<Mutex<Broadcast>>);

impl Leader {
    /// A broadcast to `workers` ranks.
    ///
    /// # Errors
    /// [`BroadcastError`] without memory.
    pub fn new(workers: usize) -> Result<Self, BroadcastError> {
        Ok(Self(Arc::new(Mutex::new(Broadcast::create(workers)?))))
    }

    /// What a worker's process must inherit.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.lock().fd().as_raw_fd()
    }

    /// Sends a command, the concatenation of `parts`, which [`Worker::next`](crate::Worker::next) returns.
    ///
    /// # Errors
    /// [`BroadcastError`] when a worker has damaged the memory.
    pub fn command(&self, parts: &[&[u8]]) -> Result<(), BroadcastError> {
        self.lock().send(COMMAND, parts)
    }

    /// Sends the beginning of the staging block.
    ///
    /// # Errors
    /// As [`Leader::command`].
    pub fn block(&self, data: &[u8]) -> Result<(), BroadcastError> {
        self.lock().send(BLOCK, &[data])
    }

    pub(crate) fn step(
        &self,
        head: StepHeader,
        block: &[u8],
        mask_words: &[i32],
    ) -> Result<(), BroadcastError> {
        let parts = [
            bytemuck::bytes_of(&head),
            block,
            bytemuck::cast_slice(mask_words),
        ];
        self.lock().send(STEP, &parts)
    }

    fn lock(&self) -> MutexGuard<'_, Broadcast> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
