//! What a request asks for, in owned values: afterwards nobody reads its bytes again.

use std::time::{Duration, Instant};

use pie_batch::Planner;
use pie_ring::Lease;
use pie_wire::{
    AdapterOp, ArchivedAdapterRequest, ArchivedCopyRequest, ArchivedPayload, CopyDirection,
    CopyResource, NativeSlice,
};

use crate::copy::Pairs;
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
    /// Copy pages.
    Copy(Pairs),
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
/// `host_pages` is the size of the host pool.
pub(crate) fn decide(
    lease: &Lease,
    words: &mut Vec<u64>,
    planner: &mut Planner,
    host_pages: u32,
) -> Decision {
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
                ArchivedPayload::Copy(request) => {
                    let pools = Pools {
                        device_pages: planner.limits().total_pages,
                        host_pages,
                        states: planner.states(),
                    };
                    Some(copy(request, pools))
                }
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

/// How much of each there is.
#[derive(Clone, Copy)]
struct Pools {
    device_pages: u32,
    host_pages: u32,
    states: u32,
}

fn copy(request: &ArchivedCopyRequest, pools: Pools) -> Action {
    let (direction, resource) = (request.dir.to_native(), request.resource.to_native());
    let (sources, targets) = (request.srcs.native(), request.dsts.native());
    let refuse = |code, text: String| {
        let text = format!("{direction:?} copy of {resource:?} {text}");
        Action::refuse(code, "copy", text)
    };
    let states = resource == CopyResource::Rs;
    if states && pools.states == 0 {
        let text = "is not supported: the model has no recurrent state";
        return refuse(status::UNSUPPORTED, text.to_owned());
    }
    if states && direction != CopyDirection::D2D {
        let text = "is not supported: recurrent state stays on the device";
        return refuse(status::UNSUPPORTED, text.to_owned());
    }
    if pools.host_pages == 0 && direction != CopyDirection::D2D {
        let text =
            "is not supported: there is no host pool, as the option `cpu_mem_budget_in_gb` is 0";
        return refuse(status::UNSUPPORTED, text.to_owned());
    }
    if sources.len() != targets.len() {
        let (from, to) = (sources.len(), targets.len());
        let text = format!("names {from} sources and {to} targets");
        return refuse(status::MALFORMED, text);
    }
    let device = if states {
        ("state slot", pools.states)
    } else {
        ("device page", pools.device_pages)
    };
    let host = ("host slot", pools.host_pages);
    let (source_pool, target_pool) = match direction {
        CopyDirection::D2H => (device, host),
        CopyDirection::H2D => (host, device),
        CopyDirection::D2D => (device, device),
        CopyDirection::H2H => (host, host),
    };
    let outside =
        outside("source", sources, source_pool).or_else(|| outside("target", targets, target_pool));
    if let Some(text) = outside {
        return refuse(status::OUT_OF_RANGE, text);
    }
    if sources.is_empty() {
        return Action::Status(status::OK);
    }
    Action::Copy(Pairs {
        direction,
        states,
        sources: sources.to_vec(),
        targets: targets.to_vec(),
    })
}

/// Names the first id that the pool, of `limit` pages called `noun`, does not have.
fn outside(role: &str, ids: &[u32], (noun, limit): (&str, u32)) -> Option<String> {
    let id = ids.iter().find(|&&id| id >= limit)?;
    Some(format!(
        "names {role} {noun} {id}, but there are only {limit}"
    ))
}
