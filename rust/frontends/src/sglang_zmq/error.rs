//! One error enum for the crate. A message names the value, the limit and the remedy.

/// Why the classes of the installed `SGLang` cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SglangFrontendError {
    /// A class that every message needs is missing.
    #[error("SGLang has no message class `{class}`: install the version that this package names")]
    Class {
        /// Its name.
        class: &'static str,
    },
    /// A field that is read or written is missing.
    #[error(
        "SGLang's class `{class}` has no field `{field}`: install the version that this package names"
    )]
    Field {
        /// The class.
        class: &'static str,
        /// The field.
        field: &'static str,
    },
    /// A field that must be written, and whose meaning is unknown.
    #[error(
        "SGLang's class `{class}` has the field `{field}`, which has no default and is not known here: install the \
         version of SGLang that this package names"
    )]
    Unknown {
        /// The class.
        class: &'static str,
        /// The field.
        field: String,
    },
}
