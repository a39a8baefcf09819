//! `SGLang`'s messages between its front end and a scheduler, read and written without Python.
//!
//! | module | what it is |
//! |---|---|
//! | `schema` | where each field stands, by the installed classes; writing messages |
//! | `msgpack`, `value`, `json` | values of a message, read in index; as JSON |
//! | `request`, `unsupported` | a request as it comes, and what is refused of it |
//! | `media`, `processor_output` | the images of a request: pickled, which the [`Backend`] reads, or as part of the message |
//! | `extension`, `shared_memory` | arrays and tensors in a message, and those that it names |
//! | `session` | conversations that a client opens, turn by turn |
//! | `open_request`, `output`, `logprobs`, `hidden_states` | what is known of a request, and what the detokenizer gets of it |
//! | `weight_versions` | which version of the weights each token is of |
//! | `times` | when a request was admitted and computed, for the metrics of `SGLang`'s front end |
//! | `trace` | the span of a request, in what the front end sends |
//! | `backend` | who computes the requests |
//! | `frontend` | all requests of a front end, over a [`Backend`] |

mod backend;
mod error;
mod extension;
mod frontend;
mod hidden_states;
mod json;
mod logprobs;
mod media;
mod msgpack;
mod open_request;
mod output;
mod processor_output;
mod request;
mod schema;
mod session;
mod shared_memory;
mod times;
mod trace;
mod unsupported;
mod value;
mod weight_versions;

pub use backend::{Backend, Media};
pub use error::SglangFrontendError;
pub use frontend::{Outgoing, SglangFrontend, SglangFrontendSettings};
pub use processor_output::ProcessorOutput;
pub use request::{Decoder, GenerateRequest, Incoming, TextParams};
pub use schema::{MessageClass, MessageField};
pub use session::SessionParams;
pub use times::{TimeStats, TimesTemplate};
