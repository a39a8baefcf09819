//! Request validation, limits and outcomes, shared by all frontends.
//!
//! | module | what it is |
//! |---|---|
//! | `limits` | the table of request limits |
//! | `raw`, `spec` | an unvalidated request; its validation by [`Ingress::validate`] |
//! | `model_info` | what requests are validated against |
//! | `embedding` | requests for embeddings, and the numbers of a pooled row |
//! | `refusal` | validation errors |
//! | `outcome`, `logprobs` | finish reasons, and the tokens that log-probabilities belong to |

mod embedding;
mod limits;
mod logprobs;
mod model_info;
mod outcome;
mod raw;
mod refusal;
mod spec;

pub use embedding::{EmbeddingInfo, PooledRow, RawEmbedding};
pub use limits::{LIMITS, Limit, RequestLimits, UnknownLimit};
pub use logprobs::LogprobRows;
pub use model_info::ModelInfo;
pub use outcome::{Failure, Outcome, StopTexts, one_line, outcome, shown};
pub use raw::{RawLogprobs, RawRequest};
pub use refusal::Refusal;
pub use spec::{Ingress, RequestSpec};
