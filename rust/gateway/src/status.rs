//! From the ends of sequences to finish reasons and statuses.

use pie_runtime::{End, Refusal, Rejected};
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

/// What is known of the request that ended.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    /// Its stop strings.
    pub(crate) stops: &'a [Box<[u8]>],
    /// Whether the service ends, or no driver is left.
    pub(crate) is_over: &'a dyn Fn() -> bool,
}

/// What an end is for the client. `tokens`: whether it had any.
pub(crate) fn outcome(end: &End, tokens: bool, request: Request<'_>) -> Outcome {
    let stop = |matched| Outcome::Finished {
        reason: "stop",
        matched,
    };
    match end {
        End::Length => Outcome::Finished {
            reason: "length",
            matched: Matched::Nothing,
        },
        End::StopToken(token) => stop(Matched::Token(*token)),
        End::StopString { index, .. } => {
            let text = request.stops.get(*index as usize);
            let text = text.map(|text| String::from_utf8_lossy(text).into_owned());
            stop(text.map_or(Matched::Nothing, Matched::Text))
        }
        // No contract has a field for stop expressions.
        End::StopRegex { .. } => stop(Matched::Nothing),
        End::Aborted | End::Unready if (request.is_over)() => Outcome::Failed(shut_down()),
        End::Aborted | End::Unready => Outcome::Finished {
            reason: "abort",
            matched: Matched::Nothing,
        },
        End::Deadline => Outcome::Failed(Status::deadline_exceeded("its time was over")),
        End::Refused(refusal) => Outcome::Failed(refused(refusal)),
        End::Displaced => {
            let reason = end.reason().unwrap_or_default();
            Outcome::Failed(Status::resource_exhausted(one_line(&reason)))
        }
        // A grammar that cannot be used fails before its first token.
        End::Grammar(reason) if tokens => Outcome::Failed(Status::internal(one_line(reason))),
        End::Grammar(reason) => Outcome::Failed(Status::invalid_argument(one_line(reason))),
        End::Failed(reason) if (request.is_over)() => {
            Outcome::Failed(Status::unavailable(one_line(reason)))
        }
        End::Failed(reason) => Outcome::Failed(Status::internal(one_line(reason))),
    }
}

fn refused(refusal: &Refusal) -> Status {
    let message = one_line(&refusal.to_string());
    match refusal {
        Refusal::QueueFull { .. } => Status::resource_exhausted(message),
        Refusal::Known { .. } => Status::already_exists(message),
        _ => Status::invalid_argument(message),
    }
}

/// The gateway tries another worker.
pub(crate) fn rejected(rejected: &Rejected) -> Status {
    Status::unavailable(one_line(&rejected.to_string()))
}

pub(crate) const SHUTTING_DOWN: &str = "the server is shutting down";

/// The same where the door closes.
pub(crate) fn shut_down() -> Status {
    Status::unavailable(SHUTTING_DOWN)
}

/// Clients get one line: the message and its hint.
pub(crate) fn one_line(text: &str) -> String {
    text.replace("\n\nhint: ", ". ").replace('\n', " ")
}
