//! A model on several devices: the leader tells its followers what it is about to do, and they do the same.
//!
//! Three kinds of messages travel, in one order: parts of the staging block, commands that only Python understands, and steps
//! of the fast lane, which carry all that a graph reads.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Zeroable;
use pie_ring::{Broadcast, BroadcastError, Listener, Message, Wait};
use thiserror::Error;

use crate::lane::{Lane, LaneError};

const COMMAND: u32 = 0;
const BLOCK: u32 = 1;
const STEP: u32 = 2;

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

/// The leader's voice. Clones speak in turns.
#[derive(Clone)]
pub struct Lead(Arc<Mutex<Broadcast>>);

impl Lead {
    /// A voice for `followers` others.
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

    /// Has the followers do what their [`Follow::next`] returns.
    ///
    /// # Errors
    /// [`BroadcastError`] when a follower has spoilt the memory.
    pub fn command(&self, data: &[u8]) -> Result<(), BroadcastError> {
        self.lock().send(COMMAND, &[data])
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

/// Why a follower cannot go on.
#[derive(Debug, Error)]
pub enum FollowError {
    /// The memory cannot be read.
    #[error(transparent)]
    Ring(#[from] BroadcastError),
    /// A step failed.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// A message is of another build, or for other sizes.
    #[error("the leader sent {what}, for which this rank is not made")]
    Message {
        /// What came.
        what: String,
    },
}

/// A follower's end.
pub struct Follow {
    listener: Listener,
    lane: Option<Lane>,
    wait: Wait,
}

impl Follow {
    /// Follower number `index` of the leader whose [`Lead::fd`] was inherited as `fd`. Steps run on `lane`.
    ///
    /// # Errors
    /// [`BroadcastError`] when `fd` is not a leader's, or has no such follower.
    pub fn open(
        fd: OwnedFd,
        index: usize,
        lane: Option<Lane>,
        wait: Wait,
    ) -> Result<Self, BroadcastError> {
        let listener = Listener::open(fd, index)?;
        Ok(Self {
            listener,
            lane,
            wait,
        })
    }

    /// Waits for the next command. Until it comes, keeps `block` as the leader's staging block is, and runs the leader's
    /// steps.
    ///
    /// # Errors
    /// [`FollowError`]; this rank does no longer do what the others do.
    pub fn next(&mut self, block: &mut [u8]) -> Result<Vec<u8>, FollowError> {
        let lane = &mut self.lane;
        loop {
            let command = self.listener.with_next(self.wait, |kind, data| {
                match kind {
                    COMMAND => return Ok(Some(data.to_vec())),
                    BLOCK => put(block, data)?,
                    STEP => step(lane.as_mut(), data)?,
                    _ => return Err(strange(format!("a message of kind {kind}"))),
                }
                Ok(None)
            })??;
            if let Some(command) = command {
                return Ok(command);
            }
        }
    }
}

fn put(block: &mut [u8], data: &Message<'_>) -> Result<(), FollowError> {
    let (size, len) = (block.len(), data.len());
    let start = block.get_mut(..len);
    let start = start.ok_or_else(|| strange(format!("{len} bytes of a block of {size}")))?;
    data.copy(0, start);
    Ok(())
}

fn step(lane: Option<&mut Lane>, data: &Message<'_>) -> Result<(), FollowError> {
    let lane = lane.ok_or_else(|| strange("a step of the fast lane".to_owned()))?;
    let short = || strange(format!("a step of {} bytes", data.len()));
    let start = size_of::<StepHead>();
    if data.len() < start {
        return Err(short());
    }
    let mut head = StepHead::zeroed();
    data.copy(0, bytemuck::bytes_of_mut(&mut head));
    let masks = size_of::<i32>() * head.mask_words as usize;
    let end = data.len().checked_sub(masks).filter(|&end| end >= start);
    let block = start..end.ok_or_else(short)?;
    let bytes = block.len();
    if !lane.follow(head, data, block)? {
        return Err(strange(format!("{head:?} with {bytes} bytes")));
    }
    Ok(())
}

fn strange(what: String) -> FollowError {
    FollowError::Message { what }
}
