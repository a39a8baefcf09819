//! When a sequence ends by what it says.

use crate::arrival::Ends;
use crate::output::Finish;
use crate::regex::{Search, StopRegexes};

/// A text to be found in a stream of bytes, by Knuth, Morris and Pratt.
#[derive(Debug)]
struct Pattern {
    bytes: Box<[u8]>,
    /// For each number of bytes that agree: how many agree still when the next does not.
    fallback: Box<[u32]>,
}

impl Pattern {
    fn new(bytes: &[u8]) -> Self {
        let mut fallback = vec![0; bytes.len() + 1];
        let mut agreed = 0;
        for at in 1..bytes.len() {
            while agreed > 0 && bytes[at] != bytes[agreed as usize] {
                agreed = fallback[agreed as usize];
            }
            agreed += u32::from(bytes[at] == bytes[agreed as usize]);
            fallback[at + 1] = agreed;
        }
        Self {
            bytes: bytes.into(),
            fallback: fallback.into(),
        }
    }

    /// How many bytes of it agree with the end of a text, when one more comes.
    fn advance(&self, mut agreed: u32, byte: u8) -> u32 {
        while agreed > 0 && self.bytes[agreed as usize] != byte {
            agreed = self.fallback[agreed as usize];
        }
        agreed + u32::from(self.bytes[agreed as usize] == byte)
    }
}

/// The texts and expressions that end a request.
#[derive(Debug, Default)]
pub(crate) struct Patterns {
    /// Stop strings, then the expressions that are plain texts.
    texts: Vec<Pattern>,
    /// The numbers of these expressions.
    plain: Vec<u32>,
    strings: usize,
}

impl Patterns {
    /// Of strings that are not empty.
    pub(crate) fn new(ends: &Ends) -> Self {
        let regexes = ends.stop_regexes.as_deref();
        let (plain, texts): (Vec<u32>, Vec<&str>) =
            regexes.into_iter().flat_map(StopRegexes::plain).unzip();
        let strings = ends.stop_strings.iter().map(|bytes| Pattern::new(bytes));
        let texts = texts.into_iter().map(|text| Pattern::new(text.as_bytes()));
        Self {
            texts: strings.chain(texts).collect(),
            plain,
            strings: ends.stop_strings.len(),
        }
    }
}

/// How far each pattern agrees with the end of a sequence's text.
#[derive(Debug, Default)]
pub(crate) struct Found {
    agreed: Vec<u32>,
    /// Bytes of the text.
    length: u64,
    search: Option<Box<Search>>,
}

impl Found {
    pub(crate) fn new(patterns: &Patterns, ends: &Ends) -> Self {
        let search = ends.stop_regexes.as_deref().and_then(Search::new);
        Self {
            agreed: vec![0; patterns.texts.len()],
            length: 0,
            search: search.map(Box::new),
        }
    }

    /// Whether there is nothing to look for.
    pub(crate) fn is_idle(&self) -> bool {
        self.agreed.is_empty() && self.search.is_none()
    }

    /// Goes on by the bytes of a token. Returns what ends the text by it: the text that is complete first, else the first of the
    /// expressions that match.
    pub(crate) fn advance(
        &mut self,
        patterns: &Patterns,
        ends: &Ends,
        bytes: &[u8],
    ) -> Option<Finish> {
        if let Some((index, text_bytes)) = self.complete(patterns, bytes) {
            let plain = (index as usize).checked_sub(patterns.strings);
            return Some(match plain {
                Some(plain) => Finish::StopRegex {
                    index: patterns.plain[plain],
                },
                None => Finish::StopString { index, text_bytes },
            });
        }
        let (search, regexes) = (self.search.as_mut()?, ends.stop_regexes.as_deref()?);
        let index = search.advance(regexes, bytes)?;
        Some(Finish::StopRegex { index })
    }

    /// The text that is complete first, and the bytes before it.
    fn complete(&mut self, patterns: &Patterns, bytes: &[u8]) -> Option<(u32, u64)> {
        for &byte in bytes {
            self.length += 1;
            for (index, (pattern, agreed)) in (0..).zip(patterns.texts.iter().zip(&mut self.agreed))
            {
                *agreed = pattern.advance(*agreed, byte);
                let length = pattern.bytes.len();
                if *agreed as usize == length {
                    return Some((index, self.length - length as u64));
                }
            }
        }
        None
    }

    /// Bytes at the end of the text that may be the start of a stop string.
    pub(crate) fn held(&self) -> u32 {
        self.agreed.iter().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Found, Patterns};
    use crate::arrival::Ends;

    /// The first end of a pattern in a text, by looking everywhere.
    fn naive(strings: &[Box<[u8]>], text: &[u8]) -> Option<(u32, u64)> {
        (1..=text.len()).find_map(|end| {
            let mut all = strings.iter();
            let index = all.position(|pattern| text[..end].ends_with(pattern))?;
            Some((index as u32, (end - strings[index].len()) as u64))
        })
    }

    fn naive_held(strings: &[Box<[u8]>], text: &[u8]) -> u32 {
        let starts = |length: &usize| {
            let end = &text[text.len() - length..];
            strings.iter().any(|pattern| pattern.starts_with(end))
        };
        (0..=text.len()).rev().find(starts).unwrap_or(0) as u32
    }

    proptest! {
        #[test]
        fn finds_what_a_search_of_the_whole_text_finds(
            strings in prop::collection::vec(prop::collection::vec(0_u8..3, 1..6), 0..4),
            tokens in prop::collection::vec(prop::collection::vec(0_u8..3, 0..4), 0..20),
        ) {
            let strings: Vec<Box<[u8]>> = strings.into_iter().map(Into::into).collect();
            let ends = Ends { stop_strings: strings.clone(), ..Ends::default() };
            let patterns = Patterns::new(&ends);
            let mut found = Found::new(&patterns, &ends);
            let mut text = Vec::new();
            for token in tokens {
                text.extend_from_slice(&token);
                let hit = found.complete(&patterns, &token);
                prop_assert_eq!(hit, naive(&strings, &text));
                if hit.is_some() {
                    break;
                }
                prop_assert_eq!(found.held(), naive_held(&strings, &text));
            }
        }
    }
}
