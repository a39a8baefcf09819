//! Stop strings, matched by an Aho-Corasick automaton that is stepped by token bytes.

use std::fmt;
use std::sync::Arc;

use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::contiguous::NFA;
use aho_corasick::{Anchored, MatchKind};
use rustc_hash::FxHashMap;
use thiserror::Error;

/// Why stop strings are rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StopStringError {
    /// An empty string.
    #[error("a stop string is empty: send one byte or more")]
    Empty,
    /// Too many states.
    #[error("the stop strings cannot be compiled: {0}")]
    Size(String),
}

/// The stop strings of a request as one automaton: a byte costs the same however many strings there are. Clones share it.
#[derive(Clone, Default)]
pub struct StopStrings(Option<Arc<Compiled>>);

struct Compiled {
    texts: Box<[Box<[u8]>]>,
    automaton: NFA,
    start: StateID,
    /// Depth of each state in bytes, i.e. the longest prefix of a stop string at the end of the text; the crate does not expose
    /// it.
    depths: FxHashMap<StateID, u32>,
}

impl StopStrings {
    /// Compiles stop strings. Callers limit their number and size: the automaton takes some 50 bytes for each of theirs.
    ///
    /// # Errors
    /// [`StopStringError`].
    pub fn new(
        texts: impl IntoIterator<Item = impl Into<Box<[u8]>>>,
    ) -> Result<Self, StopStringError> {
        let texts: Box<[Box<[u8]>]> = texts.into_iter().map(Into::into).collect();
        if texts.is_empty() {
            return Ok(Self(None));
        }
        if texts.iter().any(|text| text.is_empty()) {
            return Err(StopStringError::Empty);
        }
        let size = |error: &dyn fmt::Display| StopStringError::Size(error.to_string());
        let automaton = NFA::builder()
            .match_kind(MatchKind::Standard)
            .prefilter(false)
            .build(&texts)
            .map_err(|error| size(&error))?;
        let start = automaton
            .start_state(Anchored::No)
            .map_err(|error| size(&error))?;
        let mut depths = FxHashMap::default();
        for text in &texts {
            let mut state = start;
            for (depth, &byte) in (1..).zip(text) {
                state = automaton.next_state(Anchored::No, state, byte);
                depths.insert(state, depth);
            }
        }
        Ok(Self(Some(Arc::new(Compiled {
            texts,
            automaton,
            start,
            depths,
        }))))
    }

    /// The strings, in the given order.
    pub fn texts(&self) -> &[Box<[u8]>] {
        self.0.as_deref().map_or(&[], |compiled| &compiled.texts)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }
}

impl fmt::Debug for StopStrings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StopStrings").field(&self.texts()).finish()
    }
}

impl PartialEq for StopStrings {
    fn eq(&self, other: &Self) -> bool {
        self.texts() == other.texts()
    }
}

impl Eq for StopStrings {}

/// The automaton state of one sequence.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StopStringMatcher(Option<StateID>);

impl StopStringMatcher {
    /// Advances by the bytes of a token. Returns the end of the first match in these bytes, and the lowest index of the strings
    /// that end there.
    pub(crate) fn advance(&mut self, strings: &StopStrings, bytes: &[u8]) -> Option<(usize, u32)> {
        let Compiled {
            automaton, start, ..
        } = strings.0.as_deref()?;
        let mut state = self.0.unwrap_or(*start);
        for (end, &byte) in (1..).zip(bytes) {
            state = automaton.next_state(Anchored::No, state, byte);
            if automaton.is_match(state) {
                let matches = 0..automaton.match_len(state);
                let first = matches.map(|at| automaton.match_pattern(state, at)).min();
                return first.map(|pattern| (end, pattern.as_u32()));
            }
        }
        self.0 = Some(state);
        None
    }

    /// Bytes at the end of the text that may be the start of a stop string.
    pub(crate) fn held(self, strings: &StopStrings) -> u32 {
        let depths = strings.0.as_deref().map(|compiled| &compiled.depths);
        let depth = |state| depths?.get(&state).copied();
        self.0.and_then(depth).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The reference: a search of the whole text.
    fn naive(strings: &[Box<[u8]>], text: &[u8]) -> Option<(usize, u32)> {
        (1..=text.len()).find_map(|end| {
            let mut all = strings.iter();
            let index = all.position(|string| text[..end].ends_with(string))?;
            Some((end, index as u32))
        })
    }

    fn naive_held(strings: &[Box<[u8]>], text: &[u8]) -> u32 {
        let starts = |length: &usize| {
            let end = &text[text.len() - length..];
            strings.iter().any(|string| string.starts_with(end))
        };
        (0..=text.len()).rev().find(starts).unwrap_or(0) as u32
    }

    proptest! {
        #[test]
        fn stop_strings_equal_a_search_of_the_whole_text(
            strings in prop::collection::vec(prop::collection::vec(0_u8..3, 1..6), 0..5),
            tokens in prop::collection::vec(prop::collection::vec(0_u8..3, 0..4), 0..20),
        ) {
            let texts: Vec<Box<[u8]>> = strings.into_iter().map(Into::into).collect();
            let strings = StopStrings::new(texts.clone()).unwrap();
            let mut matching = StopStringMatcher::default();
            let mut text = Vec::new();
            for token in tokens {
                let before = text.len();
                text.extend_from_slice(&token);
                let hit = matching.advance(&strings, &token);
                prop_assert_eq!(hit.map(|(end, index)| (before + end, index)), naive(&texts, &text));
                if hit.is_some() {
                    break;
                }
                prop_assert_eq!(matching.held(&strings), naive_held(&texts, &text));
            }
        }
    }

    #[test]
    fn an_empty_string_is_refused() {
        let error = StopStrings::new([&b"a"[..], b""]).unwrap_err();
        assert_eq!(error, StopStringError::Empty);
        assert!(StopStrings::new([[0_u8; 0]; 0]).unwrap().is_empty());
    }

    /// A token costs a look-up for each of its bytes, not one for each string.
    #[test]
    fn as_many_states_as_the_strings_have_bytes_together() {
        let texts = (0_u32..10_000).map(|number| format!("stop {number:04}").into_bytes());
        let strings = StopStrings::new(texts).unwrap();
        let compiled = strings.0.as_deref().unwrap();
        assert!(compiled.automaton.memory_usage() < 4 << 20);
        let mut matching = StopStringMatcher::default();
        assert_eq!(matching.advance(&strings, b"do not stop 999"), None);
        assert_eq!(matching.held(&strings), 8);
        assert_eq!(matching.advance(&strings, b"9"), Some((1, 9999)));
    }
}
