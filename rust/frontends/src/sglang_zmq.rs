//! `SGLang`'s messages between its front end and a scheduler, read and written without Python.
//!
//! | module | what it is |
//! |---|---|
//! | `table` | where each field stands, by the installed classes; writing messages |
//! | `msgpack`, `value` | values of a message, read in place |
//! | `request`, `unserved` | a request as it comes, and what is refused of it |
//! | `media` | the images of a request, which the [`Backend`] reads |
//! | `session` | conversations that a client opens, turn by turn |
//! | `open`, `output`, `logprobs` | what is known of a request, and what the detokenizer gets of it |
//! | `times` | when a request was admitted and computed, for the metrics of `SGLang`'s front end |
//! | `trace` | the span of a request, in what the front end sends |
//! | `backend` | who computes the requests |
//! | `front` | all requests of a front end, over a [`Backend`] |

mod backend;
mod error;
mod front;
mod logprobs;
mod media;
mod msgpack;
mod open;
mod output;
mod request;
mod session;
mod table;
mod times;
mod trace;
mod unserved;
mod value;

pub use backend::Backend;
pub use error::FrontError;
pub use front::{Front, FrontSettings, Outgoing};
pub use request::{Decoder, GenerateRequest, Incoming, TextParams};
pub use session::SessionParams;
pub use table::{MessageClass, MessageField};
pub use times::{TimeStats, TimesTemplate};
