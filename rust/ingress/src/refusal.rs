//! Validation errors.

use pie_engine::{GrammarSetupError, SamplingError, StopRegexError, StopStringError};
use thiserror::Error;

use crate::outcome::one_line;

/// Why a request is rejected: one line with the value, the limit and the remedy, the same for all frontends.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A field beyond a request limit.
    #[error(
        "`{field}` has {found} {unit}, {most} is the most: send fewer, or raise the request limit `{limit}`"
    )]
    Limit {
        /// The field.
        field: &'static str,
        /// Its size.
        found: u64,
        /// The unit.
        unit: &'static str,
        /// The limit.
        most: u64,
        /// Name of the limit.
        limit: &'static str,
    },
    /// A value out of range.
    #[error("{field} is {value}, it must be {wanted}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// The valid range.
        wanted: String,
    },
    /// A token outside of the vocabulary.
    #[error(
        "token {token} of `{field}` is not in the vocabulary, which has {vocab}: send ids below that"
    )]
    Token {
        /// The field.
        field: &'static str,
        /// The token.
        token: String,
        /// Vocabulary size.
        vocab: u32,
    },
    /// A request for tokens to a server of embeddings.
    #[error(
        "the model returns embeddings and generates no text: use /v1/embeddings, /encode, /classify, /v1/rerank or /v1/score \
         (`Engine.encode`), or start a model that generates, without `--is-embedding`"
    )]
    Embeds,
    /// A request for an embedding to a server of text.
    #[error(
        "the model generates text and returns no embeddings: start it with `--is-embedding` (`is_embedding=True`)"
    )]
    Generates,
    /// Rejected by a check of the scheduler.
    #[error("{}", one_line(&.0.to_string()))]
    Scheduler(#[from] pie_engine::ValidationError),
    /// Invalid sampling or log-probability parameters.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// Invalid stop strings.
    #[error(transparent)]
    StopStrings(#[from] StopStringError),
    /// Invalid stop expressions.
    #[error("{}", one_line(&.0.to_string()))]
    StopRegexes(#[from] StopRegexError),
    /// A grammar that cannot be used.
    #[error("{kind}: {}", one_line(&.error.to_string()))]
    Grammar {
        /// Its kind.
        kind: &'static str,
        /// The error.
        error: GrammarSetupError,
    },
    /// An error of a single frontend: an unsupported field, or a wrong type.
    #[error("{0}")]
    Other(String),
}

/// A number in a range, which the narrower type has.
pub(crate) fn within<T: TryFrom<i64>>(
    field: &'static str,
    value: Option<i64>,
    least: impl Into<i64>,
    most: impl Into<i64>,
) -> Result<Option<T>, Refusal> {
    let Some(value) = value else { return Ok(None) };
    let (least, most) = (least.into(), most.into());
    let narrow = (least..=most)
        .contains(&value)
        .then(|| T::try_from(value).ok())
        .flatten();
    narrow.map(Some).ok_or_else(|| Refusal::Range {
        field,
        value: value.to_string(),
        wanted: format!("from {least} to {most}"),
    })
}
