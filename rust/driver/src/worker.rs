//! A worker rank of a tensor-parallel model: runs what the [leader](crate::Leader) broadcasts.

use std::os::fd::OwnedFd;

use bytemuck::Zeroable;
use pie_ring::{BroadcastError, Listener, Message, Wait};
use thiserror::Error;

use crate::graph_path::{GraphPath, GraphPathError};
use crate::leader::{BLOCK, COMMAND, STEP, StepHeader};

/// Why a worker stopped.
#[derive(Debug, Error)]
pub enum WorkerError {
    /// The broadcast cannot be read.
    #[error(transparent)]
    Ring(#[from] BroadcastError),
    /// A step failed.
    #[error(transparent)]
    GraphPath(#[from] GraphPathError),
    /// A message of another build, or for other sizes.
    #[error("the leader sent {what}, for which this rank is not made")]
    Message {
        /// What came.
        what: String,
    },
}

/// A worker rank.
pub struct Worker {
    listener: Listener,
    graph_path: Option<GraphPath>,
    wait: Wait,
}

impl Worker {
    /// Worker number `index` of the leader whose [`Leader::fd`](crate::Leader::fd) was inherited as `fd`. Steps run on `graph_path`.
    ///
    /// # Errors
    /// [`BroadcastError`] when `fd` is not a leader's, or has no such worker.
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

    /// Waits for the next command of Python. Until then mirrors the leader's staging block in `block`, and runs its graph steps.
    ///
    /// # Errors
    /// [`WorkerError`]; this rank is out of sync with the others.
    pub fn next(&mut self, block: &mut [u8]) -> Result<Vec<u8>, WorkerError> {
        let graph_path = &mut self.graph_path;
        loop {
            let command = self.listener.receive_with(self.wait, |kind, data| {
                match kind {
                    COMMAND => return Ok(Some(data.to_vec())),
                    BLOCK => write_block(block, data)?,
                    STEP => run_step(graph_path.as_mut(), data)?,
                    _ => return Err(unexpected(format!("a message of kind {kind}"))),
                }
                Ok(None)
            })??;
            if let Some(command) = command {
                return Ok(command);
            }
        }
    }
}

fn write_block(block: &mut [u8], data: &Message<'_>) -> Result<(), WorkerError> {
    let (size, len) = (block.len(), data.len());
    let start = block.get_mut(..len);
    let start = start.ok_or_else(|| unexpected(format!("{len} bytes of a block of {size}")))?;
    data.copy(0, start);
    Ok(())
}

fn run_step(graph_path: Option<&mut GraphPath>, data: &Message<'_>) -> Result<(), WorkerError> {
    let graph_path = graph_path.ok_or_else(|| unexpected("a step of the graph path".to_owned()))?;
    let short = || unexpected(format!("a step of {} bytes", data.len()));
    let start = size_of::<StepHeader>();
    if data.len() < start {
        return Err(short());
    }
    let mut head = StepHeader::zeroed();
    data.copy(0, bytemuck::bytes_of_mut(&mut head));
    let masks = size_of::<i32>() * head.mask_words as usize;
    let end = data.len().checked_sub(masks).filter(|&end| end >= start);
    let block = start..end.ok_or_else(short)?;
    let bytes = block.len();
    if !graph_path.run_received_step(head, data, block)? {
        return Err(unexpected(format!("{head:?} with {bytes} bytes")));
    }
    Ok(())
}

fn unexpected(what: String) -> WorkerError {
    WorkerError::Message { what }
}
