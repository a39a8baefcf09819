//! When a sequence ends by what it says.

use crate::new_request::StopCriteria;
use crate::output::Finish;
use crate::regex::{Search, StopRegexes};
use crate::stop_strings::Matching;

/// How far the text of a sequence has come towards the strings and expressions that end it.
#[derive(Debug)]
pub(crate) struct Found {
    strings: Matching,
    /// The expressions that are plain texts.
    plain: Matching,
    search: Option<Box<Search>>,
    /// Bytes of the text.
    length: u64,
    /// Whether there is nothing to look for.
    is_idle: bool,
}

impl Found {
    pub(crate) fn new(ends: &StopCriteria) -> Self {
        let search = ends.stop_regexes.as_deref().and_then(Search::new);
        Self {
            strings: Matching::default(),
            plain: Matching::default(),
            search: search.map(Box::new),
            length: 0,
            is_idle: ends.stop_strings.is_empty() && ends.stop_regexes.is_none(),
        }
    }

    pub(crate) const fn is_idle(&self) -> bool {
        self.is_idle
    }

    /// Goes on by the bytes of a token. Returns what ends the text by it: the string that is complete first, else the first of the
    /// expressions that match.
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
