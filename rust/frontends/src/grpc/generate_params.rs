//! What a request asks for, whichever contract it came by.

use pie_ingress::RawRequest;

use crate::grpc::logprobs::LogprobSides;
use crate::grpc::queue::StreamInterval;

/// A request in the words of neither contract, before it is validated.
#[derive(Debug)]
pub(crate) struct GenerateParams {
    pub(crate) raw: RawRequest,
    pub(crate) interval: StreamInterval,
    /// Which of its log-probabilities are sent.
    pub(crate) sides: LogprobSides,
}
