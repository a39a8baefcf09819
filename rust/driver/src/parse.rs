//! Copies, validates and plans a request; its bytes in the ring are not read again.

use std::mem;
use std::time::{Duration, Instant};

use pie_planner::{Plan, Planner, WARM_UP_ADAPTER};
use pie_ring::{Lease, LeaseError};
use pie_wire::{
    AdapterOp, ArchivedAdapterRequest, ArchivedCopyRequest, ArchivedFrame, ArchivedPayload,
    CopyDirection, CopyResource, Extension, NativeSlice, WireError,
};

use crate::copy::CopyPairs;
use crate::counters::Counters;
use crate::load::AdapterLoad;
use crate::media::Media;
use crate::status;

/// A validated request.
pub(crate) struct ParsedRequest {
    pub(crate) driver_id: u32,
    pub(crate) kind: RequestKind,
    /// The pixels of its images.
    pub(crate) media: Option<Media>,
    /// Copying and validating the archive.
    pub(crate) parse: Duration,
    /// Planning.
    pub(crate) plan: Duration,
}

pub(crate) enum RequestKind {
    /// A batch to compute.
    Batch(Plan),
    /// Anything else.
    Other(Action),
}

pub(crate) enum Action {
    /// Respond with a status.
    Status(i32),
    /// Respond with a status, and log why.
    Refuse {
        code: i32,
        kind: &'static str,
        text: String,
    },
    /// Copy pages.
    Copy(CopyPairs),
    /// Load an adapter.
    Load(AdapterLoad),
}

impl Action {
    fn refuse(code: i32, kind: &'static str, text: String) -> Self {
        Self::Refuse { code, kind, text }
    }

    fn malformed(text: String) -> Self {
        Self::refuse(status::MALFORMED, "malformed", text)
    }
}

/// Copies the request to `words`, validates it, and plans it if it is a batch. The copy is needed because a client that gave up may
/// rewrite its slot at any time; it moves out of `words` with a batch that has images. `host_pages` is the size of the host pool.
pub(crate) fn parse_request(
    lease: &Lease,
    words: &mut Vec<u64>,
    planner: &mut Planner,
    host_pages: u32,
    counters: &Counters,
) -> ParsedRequest {
    let started = Instant::now();
    let frame = lease.copy_request(words).map_err(|error| match error {
        // The response is dropped and counted as abandoned.
        LeaseError::Stale { .. } => Action::Status(status::MALFORMED),
        error => Action::malformed(error.to_string()),
    });
    let frame = frame.and_then(|bytes| {
        let malformed = |error: WireError| Action::malformed(error.to_string());
        let split = pie_wire::split_request(bytes).map_err(|error| malformed(error.into()));
        let (bytes, extension) = split?;
        let frame = pie_wire::access_request(bytes).map_err(malformed)?;
        Ok((bytes, extension, frame))
    });
    let parsed = Instant::now();
    let mut pixels = 0..0;
    let (driver_id, kind) = match frame {
        Err(action) => (0, RequestKind::Other(action)),
        Ok((bytes, extension, frame)) => {
            if let ArchivedPayload::Forward(request) = &frame.payload {
                pixels = Media::pixel_range(bytes, request);
            }
            let kind = request_kind(frame, &extension, planner, host_pages, counters);
            (frame.driver_id.to_native(), kind)
        }
    };
    let has_images =
        matches!(&kind, RequestKind::Batch(plan) if !pixels.is_empty() && plan.has_images());
    ParsedRequest {
        driver_id,
        kind,
        media: has_images.then(|| Media::new(mem::take(words), pixels)),
        parse: parsed - started,
        plan: parsed.elapsed(),
    }
}

/// What a frame asks for: a batch is planned, anything else becomes an [`Action`].
fn request_kind(
    frame: &ArchivedFrame,
    extension: &Extension<'_>,
    planner: &mut Planner,
    host_pages: u32,
    counters: &Counters,
) -> RequestKind {
    RequestKind::Other(match &frame.payload {
        ArchivedPayload::Health => Action::Status(status::OK),
        ArchivedPayload::Adapter(request) => adapter(request, planner.supports_adapters()),
        ArchivedPayload::Copy(request) => {
            let pools = Pools {
                device_pages: planner.limits().total_pages,
                host_pages,
                states: planner.states(),
            };
            copy(request, pools)
        }
        ArchivedPayload::Forward(request) => {
            match planner.plan_extended(frame.driver_id.to_native(), request, extension) {
                Ok(plan) => {
                    counters.sample_pages(request.kv_page_indices.native());
                    return RequestKind::Batch(plan);
                }
                Err(error) => Action::malformed(error.to_string()),
            }
        }
    })
}

fn adapter(request: &ArchivedAdapterRequest, taken: bool) -> Action {
    let refuse = |code, text: String| Action::refuse(code, "adapter", text);
    let operation = request.op.to_native();
    match operation {
        AdapterOp::GenerateAudio => {
            let text = "GenerateAudio is not supported: the model makes no audio";
            return refuse(status::NO_AUDIO, text.to_owned());
        }
        AdapterOp::Load if taken => {}
        AdapterOp::Load => {
            let text = "adapters are off; set `enable_lora = true` in the options";
            return refuse(status::UNSUPPORTED, text.to_owned());
        }
        AdapterOp::Save | AdapterOp::ZoInit | AdapterOp::ZoUpdate => {
            let text = format!("adapter operation {operation:?} is not supported, only Load is");
            return refuse(status::UNSUPPORTED, text);
        }
    }
    let (id, path) = (request.adapter_id.to_native(), request.path.as_str());
    let largest = WARM_UP_ADAPTER - 1;
    let known = i64::try_from(id)
        .ok()
        .filter(|id| (1..=largest).contains(id));
    match known {
        None => {
            let text = format!("adapter id {id} is outside 1 to {largest}");
            refuse(status::MALFORMED, text)
        }
        Some(id) if path.is_empty() || path.contains('\0') => {
            let text = format!("the path of adapter {id} is empty or has a NUL in it");
            refuse(status::MALFORMED, text)
        }
        Some(id) => Action::Load(AdapterLoad {
            id,
            path: path.to_owned(),
        }),
    }
}

/// Sizes of the pools.
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
    Action::Copy(CopyPairs {
        direction,
        states,
        sources: sources.to_vec(),
        targets: targets.to_vec(),
    })
}

/// Describes the first id outside of its pool of `limit` items called `noun`.
fn outside(role: &str, ids: &[u32], (noun, limit): (&str, u32)) -> Option<String> {
    let id = ids.iter().find(|&&id| id >= limit)?;
    Some(format!(
        "names {role} {noun} {id}, but there are only {limit}"
    ))
}
