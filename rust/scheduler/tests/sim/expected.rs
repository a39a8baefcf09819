//! The expected output of a sequence.

use pie_scheduler::{Finish, NewRequest, WeightVersionEvent};
use regex::Regex;

use super::request::REGEXES;
use super::rule::Mind;

/// What a sequence must say.
#[derive(Debug)]
pub(super) struct Expected {
    pub(super) request: NewRequest<u64>,
    pub(super) mind: Mind,
    pub(super) tokens: Vec<u32>,
    pub(super) text: Vec<u8>,
    /// The most it may produce.
    pub(super) most: usize,
    /// A row of it got nothing, or its step failed.
    pub(super) hurt: bool,
    /// Log-probabilities of the prompt that are still to come.
    pub(super) prompt_logprobs: Vec<u32>,
    pub(super) stop_before_length: bool,
    /// Changes of the weights, by the tokens that were emitted.
    pub(super) weight_events: Vec<WeightVersionEvent>,
}

impl Expected {
    pub(super) fn only_scores(&self) -> bool {
        self.most == 0 && self.request.logprobs.is_some()
    }

    /// Takes log-probabilities of the prompt, which come in their order, each once.
    pub(super) fn hear_prompt(&mut self, words: &[u32]) {
        assert!(self.prompt_logprobs.starts_with(words), "of {self:?}");
        self.prompt_logprobs.drain(..words.len());
    }

    pub(super) fn forbidden(&self) -> &[u32] {
        let ends = &self.request.stop;
        let early = self.tokens.len() < ends.min_tokens as usize;
        if early { &ends.stop_tokens } else { &[] }
    }

    pub(super) fn say(&mut self, token: u32, sample: u32, text: &[Box<[u8]>]) {
        assert!(!self.has_ended(), "a token after the end of {self:?}");
        let expected = self.mind.next(sample, self.forbidden());
        assert_eq!(token, expected, "of {self:?}");
        self.mind.read(token);
        self.tokens.push(token);
        self.text.extend_from_slice(&text[token as usize]);
    }

    pub(super) fn stop_token(&self) -> Option<u32> {
        let ends = &self.request.stop;
        let last = self.tokens.last().copied();
        last.filter(|token| {
            self.tokens.len() > ends.min_tokens as usize && ends.stop_tokens.contains(token)
        })
    }

    /// Where the text has a stop string first.
    pub(super) fn stop_string(&self) -> Option<(u32, u64)> {
        (1..=self.text.len()).find_map(|end| {
            let strings = self.request.stop.stop_strings.texts();
            let mut all = strings.iter();
            let index = all.position(|string| self.text[..end].ends_with(string))?;
            Some((index as u32, (end - strings[index].len()) as u64))
        })
    }

    pub(super) fn has_ended(&self) -> bool {
        self.tokens.len() >= self.most || self.has_stop()
    }

    /// The first expression that matches; the one that is a plain text comes before the others.
    pub(super) fn stop_regex(&self) -> Option<u32> {
        self.request.stop.stop_regexes.as_ref()?;
        let text = std::str::from_utf8(&self.text).expect("letters");
        let matches = |&index: &u32| Regex::new(REGEXES[index as usize]).unwrap().is_match(text);
        [2, 0, 1].into_iter().find(matches)
    }

    fn has_stop(&self) -> bool {
        self.stop_token().is_some() || self.stop_string().is_some() || self.stop_regex().is_some()
    }

    pub(super) fn end(&self, finish: Finish) {
        let is_stop = matches!(
            finish,
            Finish::StopToken(_) | Finish::StopString { .. } | Finish::StopRegex { .. }
        );
        if is_stop && !self.stop_before_length {
            assert!(self.tokens.len() < self.most, "{self:?}");
        }
        match finish {
            Finish::Length => {
                assert_eq!(self.tokens.len(), self.most);
                assert!(!self.stop_before_length || !self.has_stop(), "{self:?}");
            }
            Finish::StopToken(token) => assert_eq!(self.stop_token(), Some(token)),
            Finish::StopString { index, text_bytes } => {
                assert_eq!(self.stop_string(), Some((index, text_bytes)));
            }
            Finish::StopRegex { index } => {
                assert_eq!(self.stop_regex(), Some(index));
                assert!(index == 2 || self.stop_string().is_none());
            }
            Finish::Failed => assert!(self.hurt, "{self:?}"),
            Finish::Aborted | Finish::Deadline | Finish::Unready | Finish::Displaced => {}
            Finish::Grammar | Finish::Processor | Finish::Busy => panic!("nothing is bound"),
        }
    }

    pub(super) fn check_held(&self, held: u32) {
        let ends = &self.request.stop;
        let mut strings: Vec<&[u8]> = ends.stop_strings.texts().iter().map(|it| &**it).collect();
        strings.extend(ends.stop_regexes.as_ref().map(|_| REGEXES[2].as_bytes()));
        let starts = |&length: &usize| {
            let end = &self.text[self.text.len() - length..];
            strings.iter().any(|string| string.starts_with(end))
        };
        let longest = (0..=self.text.len()).rev().find(starts).unwrap_or(0);
        assert_eq!(held as usize, longest);
    }
}
