//! What a request asks for, whichever contract it came by.

use pie_ingress::RawRequest;

use crate::grpc::logprobs::Sides;
use crate::grpc::queue::Pace;

/// A request in the words of neither contract, before it is validated.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) raw: RawRequest,
    pub(crate) pace: Pace,
    /// Which of its log-probabilities are sent.
    pub(crate) sides: Sides,
}
