//! What a request asks for, in owned values: afterwards nobody reads its bytes again.

use std::time::{Duration, Instant};

use pie_batch::Planner;
use pie_ring::Lease;
use pie_wire::{
    AdapterOp, ArchivedAdapterRequest, ArchivedCopyRequest, ArchivedPayload, CopyDirection,
    CopyResource, NativeSlice,
};

use crate::status;

/// What to do about a request.
pub(crate) struct Decision {
    pub(crate) driver_id: u32,
    /// `None`: the planner holds a plan.
    pub(crate) action: Option<Action>,
    /// Copying and validating the archive.
    pub(crate) parse: Duration,
    /// Planning.
    pub(crate) plan: Duration,
}

pub(crate) enum Action {
    /// Answer with a status.
    Status(i32),
    /// Answer with a status, and say why.
    Refuse {
        code: i32,
        kind: &'static str,
        text: String,
    },
    /// Copy pages: sources and targets.
    Copy(Vec<u32>, Vec<u32>),
}

impl Action {
    fn refuse(code: i32, kind: &'static str, text: String) -> Self {
        Self::Refuse { code, kind, text }
    }

    fn malformed(text: String) -> Self {
        Self::refuse(status::MALFORMED, "malformed", text)
    }
}

/// Reads the request and plans it if it is a batch. What is read is a copy in `words`: a client that
/// gives up rewrites its slot at any time, and what was checked must still be true when it is used.
pub(crate) fn decide(lease: &Lease, words: &mut Vec<u64>, planner: &mut Planner) -> Decision {
    let started = Instant::now();
    let length = lease.copy_request(words).map_err(|error| error.to_string());
    let bytes: &[u8] = bytemuck::cast_slice(words);
    let frame = length.and_then(|length| {
        pie_wire::access_request(&bytes[..length]).map_err(|error| error.to_string())
    });
    let parsed = Instant::now();
    let (driver_id, action) = match frame {
        Err(text) => (0, Some(Action::malformed(text))),
        Ok(frame) => {
            let driver_id = frame.driver_id.to_native();
            let action = match &frame.payload {
                ArchivedPayload::Health => Some(Action::Status(status::OK)),
                ArchivedPayload::Adapter(request) => Some(adapter(request)),
                ArchivedPayload::Copy(request) => Some(copy(request, planner.limits().total_pages)),
                ArchivedPayload::Forward(request) => {
                    let planned = planner.plan(driver_id, request);
                    planned
                        .err()
                        .map(|error| Action::malformed(error.to_string()))
                }
            };
            (driver_id, action)
        }
    };
    Decision {
        driver_id,
        action,
        parse: parsed - started,
        plan: parsed.elapsed(),
    }
}

fn adapter(request: &ArchivedAdapterRequest) -> Action {
    let operation = request.op.to_native();
    let code = match operation {
        AdapterOp::GenerateAudio => status::NO_AUDIO,
        _ => status::UNSUPPORTED,
    };
    let text = format!("adapter operation {operation:?} is not supported yet");
    Action::refuse(code, "adapter", text)
}

fn copy(request: &ArchivedCopyRequest, total_pages: u32) -> Action {
    let (direction, resource) = (request.dir.to_native(), request.resource.to_native());
    let (sources, targets) = (request.srcs.native(), request.dsts.native());
    let operation = format!("{direction:?} copy of {resource:?}");
    if direction != CopyDirection::D2D || resource != CopyResource::Kv {
        let text =
            format!("{operation} is not supported: there is no host pool and no recurrent state");
        return Action::refuse(status::UNSUPPORTED, "copy", text);
    }
    if sources.len() != targets.len() {
        let (from, to) = (sources.len(), targets.len());
        let text = format!("{operation} names {from} sources and {to} targets");
        return Action::refuse(status::MALFORMED, "copy", text);
    }
    if let Some(page) = sources
        .iter()
        .chain(targets)
        .find(|&&page| page >= total_pages)
    {
        let text = format!("{operation} names page {page}; the pool has {total_pages} pages");
        return Action::refuse(status::OUT_OF_RANGE, "copy", text);
    }
    if sources.is_empty() {
        return Action::Status(status::OK);
    }
    Action::Copy(sources.to_vec(), targets.to_vec())
}
