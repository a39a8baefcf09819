//! What every frontend makes of a request.
//!
//! | module | what it is |
//! |---|---|
//! | `limits` | the table of limits on what a request may hold |
//! | `raw`, `spec` | a request as its frontend understood it, and as the engine takes it: [`Ingress::validate`] |
//! | `refusal` | why a request is not served, in one line |
//! | `outcome`, `logprobs` | on the way back: how sequences ended, and what log-probabilities are of |

mod limits;
mod logprobs;
mod outcome;
mod raw;
mod refusal;
mod spec;

pub use limits::{LIMITS, Limit, RequestLimits, UnknownLimit};
pub use logprobs::LogprobRows;
pub use outcome::{Failure, Outcome, StopTexts, one_line, outcome, shown};
pub use raw::{RawLogprobs, RawRequest};
pub use refusal::Refusal;
pub use spec::{Ingress, ModelFacts, RequestSpec};
