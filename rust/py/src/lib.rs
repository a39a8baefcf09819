//! `pie_driver_sglang._core`: thin Python wrappers around the driver's Rust crates. No logic lives here.
//!
//! | module | what it is |
//! |---|---|
//! | `server`, `shared` | the region, and the work that comes through it |
//! | `batch`, `pass`, `slot_group`, `images` | a batch, pass by pass |
//! | `copy`, `load`, `step` | the other jobs, and what needs no work |
//! | `planner`, `graph_path`, `counts`, `guard` | what a driver is set up with, what it counts, how it ends |
//! | `ranks`, `broadcast` | a model on several devices |
//! | `runtime`, `traced` | the engine: drivers with schedulers; traced requests |
//! | `sglang_frontend`, `gateway`, `image_backend`, `logprobs` | the server frontends, images that Python reads, log-probabilities |
//! | `client`, `request`, `extension` | the other side of the ring, for the demo, tests and tools |
//! | `radix`, `radix_results`, `pages`, `drafter`, `patterns` | parts of the driver by themselves |
//! | `arrays`, `error` | ids and errors, between the languages |

// Doc comments here become Python docstrings, which mark code in their own way.
#![allow(clippy::doc_markdown)]

mod arrays;
mod batch;
mod broadcast;
mod client;
mod copy;
mod counts;
mod drafter;
mod error;
mod extension;
mod gateway;
mod graph_path;
mod guard;
mod image_backend;
mod images;
mod load;
mod logprobs;
mod pages;
mod pass;
mod patterns;
mod planner;
mod radix;
mod radix_results;
mod ranks;
mod request;
mod runtime;
mod server;
mod sglang_frontend;
mod shared;
mod slot_group;
mod step;
mod traced;

use pyo3::prelude::*;

/// The native half of the driver: ring, wire format and batch planning.
#[pymodule(gil_used = false)]
mod _core {
    /// Most sequences (`n`) of one request to SGLang's server, which makes a request of each.
    #[pymodule_export]
    const MAX_SAMPLES: u32 = 1024;
    /// The adapter that a warm-up may bind without loading one.
    #[pymodule_export]
    const WARM_UP_ADAPTER: i64 = pie_planner::WARM_UP_ADAPTER;
    /// Words outside of the block of a step that its extension may take.
    #[pymodule_export]
    const STEP_EXTRA_WORDS: usize = pie_planner::STEP_EXTRA_WORDS;
    /// Words of log-probabilities that an extended graph writes at most.
    #[pymodule_export]
    const STEP_LOGPROB_WORDS: usize = pie_planner::STEP_LOGPROB_WORDS;
    /// Most probable tokens that such a graph finds for a slot.
    #[pymodule_export]
    const STEP_TOP: u32 = pie_planner::STEP_TOP;
    #[pymodule_export]
    use super::build_info;
    #[pymodule_export]
    use crate::batch::Batch;
    #[pymodule_export]
    use crate::broadcast::Broadcast;
    #[pymodule_export]
    use crate::client::{Client, Reply};
    #[pymodule_export]
    use crate::copy::Copy;
    #[pymodule_export]
    use crate::counts::Counts;
    #[pymodule_export]
    use crate::drafter::Drafter;
    #[pymodule_export]
    use crate::extension::Extension;
    #[pymodule_export]
    use crate::gateway::Gateway;
    #[pymodule_export]
    use crate::graph_path::GraphPath;
    #[pymodule_export]
    use crate::guard::ExitGuard;
    #[pymodule_export]
    use crate::images::{ImageSpan, PassImages};
    #[pymodule_export]
    use crate::load::Load;
    #[pymodule_export]
    use crate::pages::{PagePool, PoolStats};
    #[pymodule_export]
    use crate::pass::{AttentionMask, Pass};
    #[pymodule_export]
    use crate::patterns::LayerPatterns;
    #[pymodule_export]
    use crate::planner::{Planner, graph_layout};
    #[pymodule_export]
    use crate::radix::RadixIndex;
    #[pymodule_export]
    use crate::radix_results::{CacheEvent, Evicted, Inserted, Match, NodeInfo};
    #[pymodule_export]
    use crate::ranks::{Follower, die_with_parent};
    #[pymodule_export]
    use crate::request::{Image, Request, Sampler, encode_forward};
    #[pymodule_export]
    use crate::runtime::{Output, Requests, Runtime, check_request_limits, run_grammar_compiler};
    #[pymodule_export]
    use crate::server::{Server, region_bytes};
    #[pymodule_export]
    use crate::sglang_frontend::SglangFrontend;
    #[pymodule_export]
    use crate::slot_group::SlotGroup;
    #[pymodule_export]
    use crate::step::{Step, Wake};
    #[pymodule_export]
    use crate::traced::TracedRequest;
}

/// Information about this build for bug reports: `version`, `profile`, `target`, and `commit`, which is empty unless the build was
/// given by `PIE_DRIVER_COMMIT`, as `make` does it.
#[pyfunction]
fn build_info() -> std::collections::BTreeMap<&'static str, &'static str> {
    let profile = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
    let target = std::env::consts::ARCH;
    [
        ("version", env!("CARGO_PKG_VERSION")),
        ("profile", profile),
        ("target", target),
        (
            "commit",
            option_env!("PIE_DRIVER_COMMIT").unwrap_or_default(),
        ),
    ]
    .into()
}
