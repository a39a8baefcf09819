//! From the ends of sequences to finish reasons and statuses.

use pie_engine::{FinishReason, SubmitError};
use pie_ingress::{Failure, Outcome as Ended, Refusal, StopTexts, one_line};
use tonic::Status;

/// How a sequence ended for its client.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It has an answer.
    Finished {
        /// In the gateway's words, which its clients see as they are.
        reason: &'static str,
        matched: Matched,
    },
    /// The request has none.
    Failed(Status),
}

/// What ended a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Matched {
    /// Nothing in it.
    Nothing,
    /// This token.
    Token(u32),
    /// This stop string.
    Text(String),
}

/// What an end is for the client of a request with these stop texts. `is_over`: whether the service ends, or no driver is left.
pub(crate) fn outcome(
    end: &FinishReason,
    stops: &StopTexts,
    is_over: impl Fn() -> bool,
) -> Outcome {
    let finished = |reason, matched| Outcome::Finished { reason, matched };
    match pie_ingress::outcome(end, stops) {
        Ended::Length => finished("length", Matched::Nothing),
        Ended::StopToken(token) => finished("stop", Matched::Token(token)),
        Ended::StopString(text) => finished("stop", Matched::Text(text)),
        // No contract has a field for stop expressions.
        Ended::StopRegex(_) => finished("stop", Matched::Nothing),
        Ended::Aborted | Ended::AbortedUnready if is_over() => Outcome::Failed(shut_down()),
        Ended::Aborted | Ended::AbortedUnready => finished("abort", Matched::Nothing),
        Ended::Failed { failure, message } => Outcome::Failed(match failure {
            Failure::Invalid => Status::invalid_argument(message),
            Failure::Known => Status::already_exists(message),
            Failure::Busy => Status::resource_exhausted(message),
            Failure::Deadline => Status::deadline_exceeded(message),
            Failure::Internal if is_over() => Status::unavailable(message),
            Failure::Internal => Status::internal(message),
        }),
    }
}

/// A request that is not served.
pub(crate) fn refused(refusal: &Refusal) -> Status {
    Status::invalid_argument(refusal.to_string())
}

/// The gateway tries another worker.
pub(crate) fn rejected(rejected: &SubmitError) -> Status {
    Status::unavailable(one_line(&rejected.to_string()))
}

pub(crate) const SHUTTING_DOWN: &str = "the server is shutting down";

/// The same where the server closes.
pub(crate) fn shut_down() -> Status {
    Status::unavailable(SHUTTING_DOWN)
}
