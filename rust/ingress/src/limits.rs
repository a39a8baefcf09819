//! The table of limits on what a request may hold.

use thiserror::Error;

use crate::refusal::Refusal;

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// By which `request_limits` sets it.
    pub name: &'static str,
    /// Without that.
    pub default: u64,
    /// What it counts.
    pub unit: &'static str,
    /// What it bounds.
    pub bounds: &'static str,
}

/// A limit that is not in the table.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("there is no request limit `{name}`: the limits are {}", names())]
pub struct UnknownLimit {
    /// Its name.
    pub name: String,
}

fn names() -> String {
    let names: Vec<&str> = LIMITS.iter().map(|limit| limit.name).collect();
    names.join(", ")
}

macro_rules! limits {
    ($($name:ident: $default:expr, $unit:literal, $bounds:literal;)*) => {
        /// Limits on what a request may hold, whichever frontend it comes by.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct RequestLimits {
            $(#[doc = $bounds] pub $name: u64,)*
        }

        /// The table, in the order of the documentation.
        pub const LIMITS: &[Limit] = &[$(Limit {
            name: stringify!($name),
            default: $default,
            unit: $unit,
            bounds: $bounds,
        },)*];

        impl Default for RequestLimits {
            fn default() -> Self {
                Self { $($name: $default,)* }
            }
        }

        impl RequestLimits {
            /// Changes a limit.
            ///
            /// # Errors
            /// [`UnknownLimit`].
            pub fn set(&mut self, name: &str, value: u64) -> Result<(), UnknownLimit> {
                match name {
                    $(stringify!($name) => self.$name = value,)*
                    _ => return Err(UnknownLimit { name: name.to_owned() }),
                }
                Ok(())
            }

            /// The value of a limit of the table.
            #[must_use]
            pub fn get(&self, name: &str) -> Option<u64> {
                match name {
                    $(stringify!($name) => Some(self.$name),)*
                    _ => None,
                }
            }
        }
    };
}

limits! {
    name_bytes: 1 << 10, "bytes", "Each name: request id, adapter, routing key, extra key, session id.";
    n: 1 << 10, "sequences", "`n`: sequences of one request.";
    logit_bias: 1 << 19, "tokens", "`logit_bias`: tokens with a bias.";
    stop_strings: 1 << 10, "strings", "`stop`: stop strings.";
    stop_string_bytes: 1 << 12, "bytes", "`stop`: the longest stop string.";
    stop_total_bytes: 1 << 16, "bytes", "`stop`: all stop strings together.";
    stop_token_ids: 1 << 12, "tokens", "`stop_token_ids`: stop tokens, without the model's own.";
    stop_regexes: 1 << 6, "expressions", "`stop_regex`: stop expressions.";
    stop_regex_bytes: 1 << 13, "bytes", "`stop_regex`: all stop expressions together. Their automaton has 256 KiB at most besides.";
    grammar_bytes: 1 << 20, "bytes", "The text of a grammar: `json_schema`, `regex`, `ebnf` or `structural_tag`.";
    logit_processor_bytes: 1 << 20, "bytes", "`custom_logit_processor` and `custom_params`: each text.";
    top_logprobs_num: 1 << 14, "tokens", "`top_logprobs_num`: most probable tokens of each position.";
    token_ids_logprob: 1 << 14, "tokens", "`token_ids_logprob`: tokens whose log-probabilities are wanted at each position.";
    hidden_state_bytes: 1 << 28, "bytes", "`return_hidden_states`: float32 states of the prompt and of as many tokens as `max_new_tokens` allows, of all `n` sequences.";
    images: 1 << 10, "images", "Images of a prompt.";
    image_bytes: 1 << 30, "bytes", "Pixels and positions of all images of a prompt together.";
    input_embeds_bytes: 1 << 29, "bytes", "`input_embeds`: float32 embeddings of a prompt.";
    sessions: 1 << 14, "sessions", "Sessions that are open at once (HTTP sessions).";
    session_tokens: 1 << 24, "tokens", "Tokens that all turns of a session hold together (HTTP sessions); each turn counts 64 more.";
}

impl RequestLimits {
    /// Checks a field against a limit of the table. Adapters call it before they collect a list.
    ///
    /// # Errors
    /// [`Refusal::Limit`].
    pub fn check(
        &self,
        field: &'static str,
        limit: &'static str,
        found: u64,
    ) -> Result<(), Refusal> {
        let most = self.get(limit).unwrap_or(u64::MAX);
        if found <= most {
            return Ok(());
        }
        let row = LIMITS.iter().find(|row| row.name == limit);
        Err(Refusal::Limit {
            field,
            found,
            unit: row.map_or("entries", |row| row.unit),
            most,
            limit,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_can_be_set_and_others_are_refused_by_name() {
        let mut limits = RequestLimits::default();
        for row in LIMITS {
            assert_eq!(limits.get(row.name), Some(row.default));
            limits.set(row.name, 7).unwrap();
            assert_eq!(limits.get(row.name), Some(7));
            assert!(limits.check("field", row.name, 7).is_ok());
            let refusal = limits.check("field", row.name, 8).unwrap_err().to_string();
            let expected = format!(
                "`field` has 8 {}, 7 is the most: send fewer, or raise the request limit `{}`",
                row.unit, row.name
            );
            assert_eq!(refusal, expected);
        }
        let unknown = limits.set("stops", 1).unwrap_err().to_string();
        assert!(
            unknown
                .starts_with("there is no request limit `stops`: the limits are name_bytes, n, "),
            "{unknown}"
        );
    }

    /// The table in the documentation is this one.
    #[test]
    fn the_documents_have_the_same_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/limits.md");
        let page = std::fs::read_to_string(path).unwrap();
        let row = |limit: &Limit| {
            format!(
                "| `{}` | {} | {} | {} |",
                limit.name,
                grouped(limit.default),
                limit.unit,
                limit.bounds
            )
        };
        let found: Vec<&str> = page
            .lines()
            .filter(|line| line.starts_with("| `"))
            .take(LIMITS.len())
            .collect();
        let expected: Vec<String> = LIMITS.iter().map(row).collect();
        assert_eq!(
            found,
            expected,
            "docs/limits.md should have:\n{}",
            expected.join("\n")
        );
    }

    /// With commas between thousands.
    fn grouped(value: u64) -> String {
        let digits = value.to_string();
        let mut grouped = String::new();
        for (at, digit) in digits.chars().enumerate() {
            if at > 0 && (digits.len() - at).is_multiple_of(3) {
                grouped.push(',');
            }
            grouped.push(digit);
        }
        grouped
    }
}
