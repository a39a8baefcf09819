//! Outcomes: finish reasons for clients.

use std::sync::Arc;

use pie_engine::{FinishReason, StopRegexes, StopStrings, ValidationError};

/// The stop strings and expressions of a request, for finish reasons.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopTexts {
    strings: StopStrings,
    regexes: Option<Arc<StopRegexes>>,
}

impl StopTexts {
    pub(crate) const fn new(strings: StopStrings, regexes: Option<Arc<StopRegexes>>) -> Self {
        Self { strings, regexes }
    }

    fn string(&self, index: u32) -> String {
        let text = self.strings.texts().get(index as usize);
        text.map(|text| String::from_utf8_lossy(text).into_owned())
            .unwrap_or_default()
    }

    fn regex(&self, index: u32) -> String {
        let patterns = self.regexes.as_deref().map(StopRegexes::patterns);
        let pattern = patterns.and_then(|mut patterns| patterns.nth(index as usize));
        pattern.unwrap_or_default().to_owned()
    }
}

/// The outcome of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It reached its length limit.
    Length,
    /// A stop token.
    StopToken(u32),
    /// A stop string.
    StopString(String),
    /// A stop expression.
    StopRegex(String),
    /// Aborted.
    Aborted,
    /// Aborted while its grammar was compiling.
    AbortedUnready,
    /// It failed, perhaps after a part of its output.
    Failed {
        /// The cause.
        failure: Failure,
        /// One line for the client.
        message: String,
    },
}

/// The cause of a failure, which determines the status code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Invalid request: 400.
    Invalid,
    /// The request id is in use.
    Known,
    /// Overloaded: 503.
    Busy,
    /// Deadline exceeded: 503.
    Deadline,
    /// Internal error: 500.
    Internal,
}

/// The outcome of an end, with the stop texts of the request.
pub fn outcome(end: &FinishReason, stops: &StopTexts) -> Outcome {
    let failed = |failure, message: &str| Outcome::Failed {
        failure,
        message: one_line(message),
    };
    match end {
        FinishReason::Length => Outcome::Length,
        FinishReason::StopToken(token) => Outcome::StopToken(*token),
        FinishReason::StopString { index, .. } => Outcome::StopString(stops.string(*index)),
        FinishReason::StopRegex { index } => Outcome::StopRegex(stops.regex(*index)),
        FinishReason::Aborted => Outcome::Aborted,
        FinishReason::Unready => Outcome::AbortedUnready,
        FinishReason::Deadline => failed(Failure::Deadline, "its time was over"),
        FinishReason::Refused(refusal) => {
            let failure = match refusal {
                ValidationError::QueueFull { .. } => Failure::Busy,
                ValidationError::Known { .. } => Failure::Known,
                _ => Failure::Invalid,
            };
            failed(failure, &refusal.to_string())
        }
        FinishReason::Displaced => failed(Failure::Busy, &end.message().unwrap_or_default()),
        FinishReason::Busy(reason) => failed(Failure::Busy, reason),
        FinishReason::Grammar(reason) | FinishReason::Processor(reason) => {
            failed(Failure::Invalid, reason)
        }
        FinishReason::Failed(reason) => failed(Failure::Internal, reason),
    }
}

/// A client's text for a message: its first characters, escaped.
pub fn shown(text: &str) -> String {
    text.chars().take(60).flat_map(char::escape_debug).collect()
}

/// A message and its hint on one line.
pub fn one_line(text: &str) -> String {
    text.replace("\n\nhint: ", ". ").replace('\n', " ")
}
