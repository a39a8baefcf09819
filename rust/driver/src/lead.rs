//! A model on several devices: the leader sends its followers what it is about to do, and they do the same.
//!
//! Three kinds of messages travel, in one order: parts of the staging block, commands that only Python understands, and steps
//! of the graph path, which carry all that a graph reads.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pie_ring::{Broadcast, BroadcastError};

pub(crate) const COMMAND: u32 = 0;
pub(crate) const BLOCK: u32 = 1;
pub(crate) const STEP: u32 = 2;

/// What precedes a step's block and its mask words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct StepHead {
    /// Number of the graph.
    pub(crate) graph: u32,
    /// Rows in use.
    pub(crate) rows: u32,
    /// Slots whose results are awaited.
    pub(crate) results: u32,
    /// Number of the step, which its results bear.
    pub(crate) step: u32,
    /// Words of its logit masks.
    pub(crate) mask_words: u32,
}

/// Sends to all followers; clones share one mutex.
#[derive(Clone)]
pub struct Lead(Arc<Mutex<Broadcast>>);

impl Lead {
    /// A broadcast for `followers` others.
    ///
    /// # Errors
    /// [`BroadcastError`] when the memory cannot be had.
    pub fn new(followers: usize) -> Result<Self, BroadcastError> {
        Ok(Self(Arc::new(Mutex::new(Broadcast::create(followers)?))))
    }

    /// What a follower's process must inherit.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.lock().fd().as_raw_fd()
    }

    /// Has the followers do what their [`Follow::next`](crate::Follow::next) returns: `parts`, one after the other.
    ///
    /// # Errors
    /// [`BroadcastError`] when a follower has damaged the memory.
    pub fn command(&self, parts: &[&[u8]]) -> Result<(), BroadcastError> {
        self.lock().send(COMMAND, parts)
    }

    /// Gives the followers the beginning of the staging block.
    ///
    /// # Errors
    /// As [`Lead::command`].
    pub fn block(&self, data: &[u8]) -> Result<(), BroadcastError> {
        self.lock().send(BLOCK, &[data])
    }

    pub(crate) fn step(
        &self,
        head: StepHead,
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
