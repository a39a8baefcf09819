//! What is worth a log line.

use pie_ring::Publish;

/// One line for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Short stable name; what the line's rate is limited by.
    pub kind: &'static str,
    /// What happened, with the values.
    pub text: String,
}

impl Note {
    pub(crate) fn new(kind: &'static str, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
        }
    }

    /// What is worth telling about a publication: nothing when the client got its answer.
    pub(crate) fn of_publication<E: ToString>(published: Result<Publish, E>) -> Option<Self> {
        match published {
            Ok(Publish::Delivered) => None,
            Ok(Publish::Stale) => {
                let text = "the client gave up on a request before its answer was ready";
                Some(Self::new("stale", text))
            }
            Err(error) => Some(Self::new("ring", error.to_string())),
        }
    }
}
