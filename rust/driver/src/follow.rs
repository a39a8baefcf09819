//! A worker's end of a model on several devices: it does what the [leader](crate::Lead) says.

use std::os::fd::OwnedFd;

use bytemuck::Zeroable;
use pie_ring::{BroadcastError, Listener, Message, Wait};
use thiserror::Error;

use crate::graph_path::{GraphPath, GraphPathError};
use crate::lead::{BLOCK, COMMAND, STEP, StepHead};

/// Why a follower cannot go on.
#[derive(Debug, Error)]
pub enum FollowError {
    /// The memory cannot be read.
    #[error(transparent)]
    Ring(#[from] BroadcastError),
    /// A step failed.
    #[error(transparent)]
    GraphPath(#[from] GraphPathError),
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
    graph_path: Option<GraphPath>,
    wait: Wait,
}

impl Follow {
    /// Follower number `index` of the leader whose [`Lead::fd`](crate::Lead::fd) was inherited as `fd`. Steps run on `graph_path`.
    ///
    /// # Errors
    /// [`BroadcastError`] when `fd` is not a leader's, or has no such follower.
    pub fn open(
        fd: OwnedFd,
        index: usize,
        graph_path: Option<GraphPath>,
        wait: Wait,
    ) -> Result<Self, BroadcastError> {
        let listener = Listener::open(fd, index)?;
        Ok(Self {
            listener,
            graph_path,
            wait,
        })
    }

    /// Waits for the next command. Until it comes, keeps `block` as the leader's staging block is, and runs the leader's
    /// steps.
    ///
    /// # Errors
    /// [`FollowError`]; this rank does no longer do what the others do.
    pub fn next(&mut self, block: &mut [u8]) -> Result<Vec<u8>, FollowError> {
        let graph_path = &mut self.graph_path;
        loop {
            let command = self.listener.with_next(self.wait, |kind, data| {
                match kind {
                    COMMAND => return Ok(Some(data.to_vec())),
                    BLOCK => put(block, data)?,
                    STEP => step(graph_path.as_mut(), data)?,
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

fn step(graph_path: Option<&mut GraphPath>, data: &Message<'_>) -> Result<(), FollowError> {
    let graph_path = graph_path.ok_or_else(|| strange("a step of the graph path".to_owned()))?;
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
    if !graph_path.follow(head, data, block)? {
        return Err(strange(format!("{head:?} with {bytes} bytes")));
    }
    Ok(())
}

fn strange(what: String) -> FollowError {
    FollowError::Message { what }
}
