//! The gRPC services that the gateway `smg` calls, over a [`Service`](pie_engine::Service): requests as tokens in, tokens out, and
//! no Python between them.
//!
//! | module | what it is |
//! |---|---|
//! | [`contract`] | messages and services, generated from the published definitions |
//! | `settings` | settings of a server, and what it reports of its model |
//! | `generate_params`, `core`, `handle` | requests, whichever contract they came by, and those that have not ended |
//! | `encoded`, `reader` | from a message's bytes to what the engine takes of it |
//! | `media`, `grammars`, `unsupported` | the images of a request, grammars that only the contracts name, what is refused |
//! | `queue` | what a request has brought forth and its client has not fetched |
//! | `status`, `logprobs`, `times` | ends as finish reasons and statuses, log-probabilities, times |
//! | `vllm`, `sglang`, `messages` | the two contracts, and what their answers have in common |
//! | `loads`, `events` | how busy the runtime is, and what its prefix index holds, for the gateway's routing |
//! | `tokenizer` | its files, for a gateway on another machine |
//! | `server` | the thread, the socket, the connections |

pub mod contract;
mod core;
mod encoded;
mod error;
mod events;
mod generate_params;
mod grammars;
mod handle;
mod loads;
mod logprobs;
mod media;
mod messages;
mod queue;
mod reader;
mod server;
mod settings;
mod sglang;
mod status;
mod times;
mod tokenizer;
mod unsupported;
mod vllm;

pub use error::GatewayError;
pub use reader::RequestReader;
pub use server::Gateway;
pub use settings::{Contract, GatewaySettings, ServedModel, VisionInfo};
