//! `SGLang`'s messages between its front end and a scheduler, read and written without Python.
//!
//! | module | what it is |
//! |---|---|
//! | `table` | where each field stands, by the installed classes; writing messages |
//! | `request`, `unserved` | a request as it comes, and what is refused of it |
//! | `open`, `output` | what is known of a request, and what the detokenizer gets of it |
//! | `front` | all requests of a front end, over a [`Backend`] |

mod error;
mod front;
mod open;
mod output;
mod request;
mod table;
mod unserved;

pub use error::FrontError;
pub use front::{Backend, Front, FrontSettings, Outgoing};
pub use request::{Decoder, GenerateRequest, Incoming, Params, TextParams};
pub use table::{MessageClass, MessageField};
