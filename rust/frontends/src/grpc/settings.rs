//! Settings of a gRPC server.

use std::net::SocketAddr;

use pie_ingress::RequestLimits;

/// Which gRPC service a server implements. The gateway detects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contract {
    /// `vllm.grpc.engine.VllmEngine`: the gateway passes stop strings and seeds on.
    Vllm,
    /// `sglang.grpc.scheduler.SglangScheduler`.
    Sglang,
}

/// Settings of a gRPC server.
#[derive(Clone, Debug)]
pub struct GatewaySettings {
    /// Where it listens; with port 0 on any that is free.
    pub address: SocketAddr,
    /// What it offers.
    pub contract: Contract,
    /// What it says of the model.
    pub model: ServedModel,
    /// How the model takes images, if it takes any and the runtime has room for them.
    pub images: Option<VisionInfo>,
    /// What a request may hold.
    pub limits: RequestLimits,
    /// Requests that run at once, where the scheduler has that limit; else as many as the driver takes.
    pub max_running: Option<u32>,
    /// The driver may draft for requests.
    pub speculates: bool,
    /// How many batches of changes of the prefix index are kept for a gateway that lost its connection; 0 to publish none.
    pub event_history: usize,
    /// What happened when to requests is kept for [`Gateway::take_traced`](crate::grpc::Gateway::take_traced): to those whose call has no
    /// `traceparent`, or one of a trace that is recorded.
    pub traces: bool,
}

impl GatewaySettings {
    /// A server on the loopback, on any port that is free.
    pub fn new(contract: Contract, model: ServedModel) -> Self {
        Self {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            contract,
            model,
            images: None,
            limits: RequestLimits::default(),
            max_running: None,
            speculates: false,
            event_history: 10_000,
            traces: false,
        }
    }
}

/// How a model takes images: as patches, squares of which are tokens, with a rotary position for frames, rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VisionInfo {
    /// Patches along a side of such a square; at least 1.
    pub merge: u32,
}

/// What the gateway learns of a model. Sizes come from the driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServedModel {
    /// The folder, which the gateway reads the tokenizer and the template from, if it has it.
    pub model_path: String,
    /// The folder of the tokenizer, if it is another one.
    pub tokenizer_path: String,
    /// What clients call the model.
    pub served_name: String,
    /// As `config.json` says it.
    pub model_type: String,
    /// As `config.json` says it.
    pub architectures: Vec<String>,
    /// The tokens that end a request, unless it ignores them.
    pub eos_tokens: Vec<u32>,
    /// Begins texts.
    pub bos_token: Option<u32>,
    /// Fills batches.
    pub pad_token: Option<u32>,
    /// Most tokens of prompt and output together; the driver may allow fewer.
    pub context_length: Option<u32>,
    /// Sampling parameters for what a client leaves out, as a JSON object; empty for none.
    pub default_sampling: String,
    /// Names the weights.
    pub weight_version: String,
    /// The program's version.
    pub version: String,
}
