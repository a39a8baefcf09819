//! `SGLang`'s messages between its front end and a scheduler, read and written without Python.
//!
//! | module | what it is |
//! |---|---|
//! | `table` | where each field stands, by the installed classes; writing messages |
//! | `request`, `value`, `unserved` | a request as it comes, and what is refused of it |
//! | `media` | the images of a request, which the [`Backend`] reads |
//! | `session` | conversations that a client opens, turn by turn |
//! | `open`, `output` | what is known of a request, and what the detokenizer gets of it |
//! | `times` | when a request was admitted and computed, for the metrics of `SGLang`'s front end |
//! | `front` | all requests of a front end, over a [`Backend`] |

mod error;
mod front;
mod logprobs;
mod media;
mod open;
mod output;
mod request;
mod session;
mod table;
mod times;
mod unserved;
mod value;

pub use error::FrontError;
pub use front::{Backend, Front, FrontSettings, Outgoing};
pub use request::{Decoder, GenerateRequest, Incoming, Params, TextParams};
pub use session::SessionParams;
pub use table::{MessageClass, MessageField};
pub use times::{TimeStats, TimesTemplate};
