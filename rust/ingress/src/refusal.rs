//! Why a request is not served.

use pie_engine::{GrammarSetupError, SamplingError, StopRegexError, StopStringError};
use thiserror::Error;

use crate::outcome::one_line;

/// Why a request is not served: one line with the value, the limit and the remedy, the same by whichever frontend it came.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A field that holds more than a limit of the table allows.
    #[error(
        "`{field}` has {found} {unit}, {most} is the most: send fewer, or raise the request limit `{limit}`"
    )]
    Limit {
        /// The field.
        field: &'static str,
        /// What it has.
        found: u64,
        /// Of what.
        unit: &'static str,
        /// How many it may have.
        most: u64,
        /// The row of the table.
        limit: &'static str,
    },
    /// A value out of range.
    #[error("{field} is {value}, it must be {wanted}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        wanted: String,
    },
    /// A token that the model does not have.
    #[error(
        "token {token} of `{field}` is not in the vocabulary, which has {vocab}: send ids below that"
    )]
    Token {
        /// Where it is.
        field: &'static str,
        /// What stands for it.
        token: String,
        /// Tokens of the model.
        vocab: u32,
    },
    /// What the scheduler would refuse, too.
    #[error("{}", one_line(&.0.to_string()))]
    Scheduler(#[from] pie_engine::Refusal),
    /// A sampling parameter, or a wish for log-probabilities, that has no meaning.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// Stop strings that cannot be searched.
    #[error(transparent)]
    StopStrings(#[from] StopStringError),
    /// Stop expressions that cannot be searched.
    #[error("{}", one_line(&.0.to_string()))]
    StopRegexes(#[from] StopRegexError),
    /// A grammar where there can be none.
    #[error("{kind}: {}", one_line(&.error.to_string()))]
    Grammar {
        /// Which one.
        kind: &'static str,
        /// What is wrong.
        error: GrammarSetupError,
    },
    /// What only one frontend can get wrong: a field that it does not serve, or of a wrong type.
    #[error("{0}")]
    Other(String),
}
