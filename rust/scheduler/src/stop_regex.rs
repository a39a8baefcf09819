//! Stop expressions (`stop_regex`), matched by stepping a Thompson NFA by token bytes. The lazy DFA of `regex-automata` does
//! not do: it gives up at non-ASCII text next to a Unicode `\b`, and its cache is larger than a sequence's NFA states.

use std::fmt;

use regex_automata::nfa::thompson::{BuildError, Compiler, Config, NFA, State, WhichCaptures};
use regex_automata::util::primitives::StateID;
use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Hir, HirKind, Look};
use thiserror::Error;

use crate::stop_strings::StopStrings;

/// Most bytes of the NFA of a request. A byte of text visits each of its states at most once.
const SIZE: usize = 256 << 10;
/// Bytes of context for word boundaries.
const CONTEXT: usize = 4;
/// Characters of an expression that an error message shows.
const SHOWN: usize = 60;
/// Metacharacters.
const META: &str = r".^$*+?{}[]\|()";

/// Why stop expressions are rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StopRegexError {
    /// Invalid syntax.
    #[error(
        "the stop_regex {pattern:?} is not served: {reason}\n\nhint: expressions have the syntax of Rust's `regex`, which has \
         no look-around and no references to groups"
    )]
    Wrong {
        /// The start of the expression.
        pattern: String,
        /// The parse error.
        reason: String,
    },
    /// The NFA is too large.
    #[error("the stop_regex takes an automaton of more than {limit} bytes: make it simpler")]
    TooLarge {
        /// Most bytes.
        limit: usize,
    },
}

/// The stop expressions of a request.
///
/// They are searched in the output so far as the whole text: `^` is its start, and `$` and `\b` treat its end as the end of the
/// text.
#[derive(Clone)]
pub struct StopRegexes {
    patterns: Box<[Box<str>]>,
    /// The NFA of all expressions but literals; `numbers` maps its pattern ids to indices.
    nfa: Option<NFA>,
    numbers: Box<[u32]>,
    /// Literals, matched as stop strings, and their indices.
    plain: StopStrings,
    plain_numbers: Box<[u32]>,
}

impl fmt::Debug for StopRegexes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StopRegexes").field(&self.patterns).finish()
    }
}

impl PartialEq for StopRegexes {
    fn eq(&self, other: &Self) -> bool {
        self.patterns == other.patterns
    }
}

impl Eq for StopRegexes {}

impl StopRegexes {
    /// Compiles expressions in the syntax of Rust's `regex`. Callers limit their number and size.
    ///
    /// # Errors
    /// [`StopRegexError`].
    pub fn new(patterns: &[impl AsRef<str>]) -> Result<Self, StopRegexError> {
        let patterns: Box<[Box<str>]> = patterns.iter().map(|it| it.as_ref().into()).collect();
        let mut hirs = Vec::new();
        let (mut numbers, mut plain_numbers) = (Vec::new(), Vec::new());
        let mut plain = Vec::new();
        for (number, pattern) in (0..).zip(&patterns) {
            if is_plain(pattern) {
                plain.push(pattern.as_bytes());
                plain_numbers.push(number);
            } else {
                hirs.push(parse(pattern)?);
                numbers.push(number);
            }
        }
        let plain = StopStrings::new(plain).map_err(|error| StopRegexError::Wrong {
            pattern: String::new(),
            reason: error.to_string(),
        })?;
        Ok(Self {
            nfa: (!hirs.is_empty()).then(|| compile(&hirs)).transpose()?,
            patterns,
            numbers: numbers.into(),
            plain,
            plain_numbers: plain_numbers.into(),
        })
    }

    /// The expressions.
    pub fn patterns(&self) -> impl ExactSizeIterator<Item = &str> {
        self.patterns.iter().map(|pattern| &**pattern)
    }

    /// The literals.
    pub(crate) const fn plain(&self) -> &StopStrings {
        &self.plain
    }

    /// The index of a literal among all expressions.
    pub(crate) fn plain_number(&self, index: u32) -> u32 {
        self.plain_numbers[index as usize]
    }
}

fn is_plain(pattern: &str) -> bool {
    !pattern.is_empty() && !pattern.contains(|letter| META.contains(letter))
}

fn parse(pattern: &str) -> Result<Hir, StopRegexError> {
    let hir = ParserBuilder::new().build().parse(pattern);
    hir.map(|hir| ends_as_python(&hir))
        .map_err(|error| StopRegexError::Wrong {
            pattern: pattern.chars().take(SHOWN).collect(),
            reason: match &error {
                regex_syntax::Error::Parse(error) => error.kind().to_string(),
                regex_syntax::Error::Translate(error) => error.kind().to_string(),
                other => other.to_string(),
            },
        })
}

/// Makes `$` also match before a final line feed, as in Python and so in `SGLang`.
fn ends_as_python(hir: &Hir) -> Hir {
    let all = |hirs: &[Hir]| hirs.iter().map(ends_as_python).collect();
    match hir.kind() {
        HirKind::Look(Look::End) => {
            let line = Hir::concat(vec![Hir::literal(*b"\n"), Hir::look(Look::End)]);
            Hir::alternation(vec![Hir::look(Look::End), line])
        }
        HirKind::Repetition(repetition) => {
            let mut repetition = repetition.clone();
            repetition.sub = Box::new(ends_as_python(&repetition.sub));
            Hir::repetition(repetition)
        }
        HirKind::Capture(capture) => ends_as_python(&capture.sub),
        HirKind::Concat(hirs) => Hir::concat(all(hirs)),
        HirKind::Alternation(hirs) => Hir::alternation(all(hirs)),
        HirKind::Empty | HirKind::Literal(_) | HirKind::Class(_) | HirKind::Look(_) => hir.clone(),
    }
}

fn compile(hirs: &[Hir]) -> Result<NFA, StopRegexError> {
    let config = Config::new()
        .which_captures(WhichCaptures::None)
        .nfa_size_limit(Some(SIZE));
    let built = Compiler::new().configure(config).build_many_from_hir(hirs);
    built.map_err(|error: BuildError| {
        if error.size_limit().is_some() {
            return StopRegexError::TooLarge { limit: SIZE };
        }
        StopRegexError::Wrong {
            pattern: String::new(),
            reason: error.to_string(),
        }
    })
}

/// The NFA state set of one sequence.
#[derive(Debug)]
pub(crate) struct StopRegexMatcher {
    /// States before the epsilon closure, which needs the next byte.
    states: Vec<StateID>,
    /// Byte-consuming states of the closure.
    closed: Vec<StateID>,
    /// The round in which each state was visited last.
    visited: Vec<u32>,
    round: u32,
    stack: Vec<StateID>,
    /// The last bytes, and those of an incomplete UTF-8 character.
    text: Vec<u8>,
    read: usize,
}

impl StopRegexMatcher {
    pub(crate) fn new(regexes: &StopRegexes) -> Option<Self> {
        let nfa = regexes.nfa.as_ref()?;
        Some(Self {
            states: vec![nfa.start_unanchored()],
            closed: Vec::new(),
            visited: vec![0; nfa.states().len()],
            round: 0,
            stack: Vec::new(),
            text: Vec::new(),
            read: 0,
        })
    }

    /// Advances by the bytes of a token. Returns the lowest index of the expressions that match, where the text ends in a whole
    /// character.
    pub(crate) fn advance(&mut self, regexes: &StopRegexes, bytes: &[u8]) -> Option<u32> {
        let nfa = regexes.nfa.as_ref()?;
        self.text.extend_from_slice(bytes);
        let end = self.text.len() - cut_bytes(&self.text);
        let mut found = None;
        let mut note = |pattern: Option<u32>| found = found.into_iter().chain(pattern).min();
        while self.read < end {
            note(self.close(nfa, end));
            let byte = self.text[self.read];
            let next = |&state: &StateID| by_byte(nfa.state(state), byte);
            self.states.clear();
            self.states.extend(self.closed.iter().filter_map(next));
            self.read += 1;
        }
        if end == self.text.len() && !bytes.is_empty() {
            note(self.close(nfa, end));
        }
        let kept = self.read.saturating_sub(CONTEXT);
        self.text.drain(..kept);
        self.read -= kept;
        found.map(|number| regexes.numbers[number as usize])
    }

    /// Computes the epsilon closure at the read position of a text that ends at `end`. Returns the lowest pattern that matches
    /// there.
    fn close(&mut self, nfa: &NFA, end: usize) -> Option<u32> {
        let text = &self.text[..end];
        let mut found: Option<u32> = None;
        self.closed.clear();
        self.round = self.round.wrapping_add(1);
        if self.round == 0 {
            self.visited.fill(0);
            self.round = 1;
        }
        self.stack.extend(&self.states);
        while let Some(id) = self.stack.pop() {
            let visited = &mut self.visited[id.as_usize()];
            if *visited == self.round {
                continue;
            }
            *visited = self.round;
            match nfa.state(id) {
                State::Look { look, next } => {
                    if nfa.look_matcher().matches(*look, text, self.read) {
                        self.stack.push(*next);
                    }
                }
                State::Union { alternates } => self.stack.extend(alternates.iter()),
                State::BinaryUnion { alt1, alt2 } => self.stack.extend([*alt1, *alt2]),
                State::Capture { next, .. } => self.stack.push(*next),
                State::Match { pattern_id } => {
                    let pattern = pattern_id.as_u32();
                    found = Some(found.map_or(pattern, |first| first.min(pattern)));
                }
                State::ByteRange { .. } | State::Sparse(_) | State::Dense(_) => {
                    self.closed.push(id);
                }
                State::Fail => {}
            }
        }
        found
    }
}

fn by_byte(state: &State, byte: u8) -> Option<StateID> {
    match state {
        State::ByteRange { trans } => trans.matches_byte(byte).then_some(trans.next),
        State::Sparse(transitions) => transitions.matches_byte(byte),
        State::Dense(transitions) => transitions.matches_byte(byte),
        _ => None,
    }
}

/// Bytes of an incomplete UTF-8 character at the end of a text.
fn cut_bytes(text: &[u8]) -> usize {
    let from = text.len().saturating_sub(3);
    let start = text[from..].iter().rposition(|byte| byte & 0xC0 != 0x80);
    let Some(start) = start.map(|at| from + at) else {
        return 0;
    };
    match std::str::from_utf8(&text[start..]) {
        Err(error) if error.error_len().is_none() => text.len() - start,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use regex::Regex;

    use super::*;

    /// The number of tokens until a match, and the expression.
    fn end(patterns: &[&str], tokens: &[&[u8]]) -> Option<(usize, u32)> {
        let regexes = StopRegexes::new(patterns).unwrap();
        let mut search = StopRegexMatcher::new(&regexes).unwrap();
        let mut numbered = (1..).zip(tokens);
        numbered.find_map(|(count, token)| Some((count, search.advance(&regexes, token)?)))
    }

    #[test]
    fn expressions_match_across_token_boundaries() {
        for (patterns, tokens, expected) in [
            (&["b+c"][..], &["ab", "b", "bc", "d"][..], Some((3, 0))),
            (
                &["[0-9]{3}", "x|y"],
                &["1", "2", "a1", "y2", "3"],
                Some((4, 1)),
            ),
            // The lowest index of those that match by the same token.
            (&["z$", "[a-c]"], &["d", "az"], Some((2, 0))),
            (
                &[r"\bend\b"],
                &["bend", " endless", " the", " end"],
                Some((4, 0)),
            ),
            (&["^b"], &["ab", "b"], None),
            (&["^a.c"], &["a", "\u{1f600}", "c"], Some((3, 0))),
            // As in Python: also before a final line feed.
            (&["ab$"], &["abc", "ab\nc", "ab\n"], Some((3, 0))),
            (&["(?m)^b$"], &["a\n", "b\n", "c"], Some((2, 0))),
            (&["(?i)stop"], &["s", "T", "oP"], Some((3, 0))),
            // An empty match matches at once.
            (&["a*"], &["b"], Some((1, 0))),
        ] {
            let tokens: Vec<&[u8]> = tokens.iter().map(|token| token.as_bytes()).collect();
            assert_eq!(end(patterns, &tokens), expected, "{patterns:?}");
        }
    }

    #[test]
    fn an_incomplete_character_is_waited_for() {
        let [smile, accent] = ["\u{1f600}".as_bytes(), "\u{e9}".as_bytes()];
        // The word boundary is only known with the whole character.
        let word: &[&[u8]] = &[b"foo", &accent[..1], &accent[1..]];
        assert_eq!(end(&[r"\bfoo\b\W"], word), None);
        let bordered: &[&[u8]] = &[b"-foo", &smile[..2], &smile[2..]];
        assert_eq!(end(&[r"foo\b\W"], bordered), Some((3, 0)));
        assert_eq!(
            end(&[r"foo$"], &[&[b"foo", &smile[..1]].concat(), &smile[1..]]),
            None
        );
        assert_eq!(
            end(&[r"foo."], &[b"foo", &smile[..3], &smile[3..]]),
            Some((3, 0))
        );
        // Invalid UTF-8 does not block.
        assert_eq!(end(&["a+b"], &[&[0xFF, 0x80], b"aab"]), Some((2, 0)));
    }

    #[test]
    fn literals_are_matched_as_stop_strings() {
        let regexes = StopRegexes::new(&["a.c", "stop it", "[x]", "\u{4f60}"]).unwrap();
        let plain = ["stop it", "\u{4f60}"].map(|text| text.as_bytes().into());
        assert_eq!(regexes.plain().texts(), plain);
        assert_eq!((regexes.plain_number(0), regexes.plain_number(1)), (1, 3));
        assert_eq!(regexes.patterns().count(), 4);
        assert!(StopRegexMatcher::new(&StopRegexes::new(&["plain"]).unwrap()).is_none());
    }

    #[test]
    fn invalid_expressions_are_rejected_by_name() {
        for (pattern, words) in [
            ("(a", "unclosed group"),
            ("(?=a)", "look-around"),
            (r"(a)\1", "backreferences are not supported"),
            ("a{100000}", "automaton of more than 262144 bytes"),
            (r"\w{500}", "automaton of more than 262144 bytes"),
        ] {
            let error = StopRegexes::new(&["fine", pattern])
                .unwrap_err()
                .to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    proptest! {
        /// Compares each token with a search of the whole text.
        #[test]
        fn matches_equal_a_search_of_the_whole_text(
            pattern in r"\(?[ab]\)?[*+?]?[bc.é]{1,2}(\{1,3\}|\+|\?|\\b|\|c)?[a-c]?(\$|\\b|\\w)?",
            text in "[abcé😀 ]{0,24}",
            cuts in prop::collection::vec(1_usize..5, 24),
        ) {
            let Ok(regex) = Regex::new(&pattern) else { return Ok(()) };
            let regexes = StopRegexes::new(&[&pattern]).unwrap();
            let Some(mut search) = StopRegexMatcher::new(&regexes) else { return Ok(()) };
            let mut from = 0;
            for cut in cuts {
                let to = (from + cut).min(text.len());
                let found = search.advance(&regexes, &text.as_bytes()[from..to]);
                if text.is_char_boundary(to) && to > from {
                    prop_assert_eq!(found.is_some(), regex.is_match(&text[..to]), "{} in {:?}", pattern, &text[..to]);
                }
                if found.is_some() {
                    break;
                }
                from = to;
            }
        }
    }
}
