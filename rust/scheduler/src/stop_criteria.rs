//! Stop criteria: length, stop tokens, stop strings, regular expressions.

use std::sync::Arc;

use crate::output::Finish;
use crate::stop_regex::{StopRegexMatcher, StopRegexes};
use crate::stop_strings::{StopStringMatcher, StopStrings};

/// When a sequence ends, besides its deadline.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopCriteria {
    /// Most output tokens; cut to what model and pool allow. 0: prefill only, for the prefix cache; with log-probabilities the
    /// output has those of the first token, without the token.
    pub max_tokens: u32,
    /// Fewest output tokens: stop tokens are forbidden until then, see [`Row::forbidden`](crate::Row::forbidden).
    pub min_tokens: u32,
    /// Stop tokens in any order, the model's EOS tokens among them. The stop token is part of the output.
    pub stop_tokens: Vec<u32>,
    /// Stop strings, matched across token boundaries by [`TokenBytes`].
    pub stop_strings: StopStrings,
    /// Stop expressions, matched in the same text.
    pub stop_regexes: Option<Arc<StopRegexes>>,
}

/// The bytes that each token adds to the text, for stop strings and expressions.
pub trait TokenBytes: Send + Sync {
    /// The bytes of a token at any position; empty for special or unknown tokens.
    fn bytes(&self, token: u32) -> &[u8];
}

/// Bytes by token.
impl TokenBytes for Vec<Box<[u8]>> {
    fn bytes(&self, token: u32) -> &[u8] {
        self.get(token as usize).map_or(&[], |bytes| bytes)
    }
}

/// The match state of the stop strings and expressions of a sequence.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    strings: StopStringMatcher,
    /// Expressions without metacharacters.
    plain: StopStringMatcher,
    search: Option<Box<StopRegexMatcher>>,
    /// Bytes of text so far.
    length: u64,
    /// There are neither strings nor expressions.
    is_idle: bool,
}

impl StopMatcher {
    pub(crate) fn new(ends: &StopCriteria) -> Self {
        let search = ends.stop_regexes.as_deref().and_then(StopRegexMatcher::new);
        Self {
            strings: StopStringMatcher::default(),
            plain: StopStringMatcher::default(),
            search: search.map(Box::new),
            length: 0,
            is_idle: ends.stop_strings.is_empty() && ends.stop_regexes.is_none(),
        }
    }

    pub(crate) const fn is_idle(&self) -> bool {
        self.is_idle
    }

    /// Advances by the bytes of a token. Returns the stop string that is complete first, else the first matching expression.
    pub(crate) fn advance(&mut self, ends: &StopCriteria, bytes: &[u8]) -> Option<Finish> {
        let before = self.length;
        self.length += bytes.len() as u64;
        let regexes = ends.stop_regexes.as_deref();
        let string = self.strings.advance(&ends.stop_strings, bytes);
        let plain = regexes.and_then(|regexes| self.plain.advance(regexes.plain(), bytes));
        match (string, plain) {
            (Some((end, index)), plain) if plain.is_none_or(|(other, _)| end <= other) => {
                let length = ends.stop_strings.texts()[index as usize].len();
                let text_bytes = before + end as u64 - length as u64;
                return Some(Finish::StopString { index, text_bytes });
            }
            (_, Some((_, index))) => {
                let index = regexes?.plain_number(index);
                return Some(Finish::StopRegex { index });
            }
            _ => {}
        }
        let index = self.search.as_mut()?.advance(regexes?, bytes)?;
        Some(Finish::StopRegex { index })
    }

    /// Bytes at the end of the text that may be the start of a stop string.
    pub(crate) fn held(&self, ends: &StopCriteria) -> u32 {
        let plain = ends.stop_regexes.as_deref().map(StopRegexes::plain);
        let plain = plain.map_or(0, |plain| self.plain.held(plain));
        self.strings.held(&ends.stop_strings).max(plain)
    }
}

/// What decides on the end of a sequence, besides its request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EndRules {
    /// Other tokens are a failure of the driver.
    pub(crate) vocab_size: u32,
    /// [`Config::stop_before_length`](crate::Config::stop_before_length).
    pub(crate) stop_before_length: bool,
}
