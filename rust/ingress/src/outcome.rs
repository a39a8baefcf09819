//! How a sequence ended, for its client.

use std::sync::Arc;

use pie_engine::{FinishReason, Refusal as Unserved, StopRegexes, StopStrings};

/// The texts that end the sequences of a request, by which their ends are named.
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

/// How a sequence ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has as many tokens as it may.
    Length,
    /// This token ended it.
    StopToken(u32),
    /// This stop string ended it.
    StopString(String),
    /// This expression ended it.
    StopRegex(String),
    /// It was aborted.
    Aborted,
    /// The same, while its grammar was compiled.
    AbortedUnready,
    /// It has no answer, or only a part of it.
    Failed {
        /// Whose fault it is.
        failure: Failure,
        /// One line, for the client.
        message: String,
    },
}

/// Whose fault it is that a request has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The client's: 400.
    Invalid,
    /// The client's: the request's name is that of one that runs.
    Known,
    /// Nobody's: there is too much to do. 503.
    Busy,
    /// Its time was over: 503.
    Deadline,
    /// The server's: 500.
    Internal,
}

/// What an end is for the client of a request with these stop texts.
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
                Unserved::QueueFull { .. } => Failure::Busy,
                Unserved::Known { .. } => Failure::Known,
                _ => Failure::Invalid,
            };
            failed(failure, &refusal.to_string())
        }
        FinishReason::Displaced => failed(Failure::Busy, &end.message().unwrap_or_default()),
        FinishReason::Busy(reason) => failed(Failure::Busy, reason),
        FinishReason::Grammar(reason) => failed(Failure::Invalid, reason),
        FinishReason::Failed(reason) => failed(Failure::Internal, reason),
    }
}

/// What a client wrote, as a message shows it: its first characters, on one line.
pub fn shown(text: &str) -> String {
    text.chars().take(60).flat_map(char::escape_debug).collect()
}

/// Clients get one line: the message and its hint.
pub fn one_line(text: &str) -> String {
    text.replace("\n\nhint: ", ". ").replace('\n', " ")
}
