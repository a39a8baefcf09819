//! Requests of the simulation.

use std::sync::Arc;

use pie_scheduler::{Image, Logprobs, NewRequest, StopRegexes, StopStrings};

use super::rule::VOCAB;

/// Expressions that end a request; one of them is a plain text.
pub const REGEXES: [&str; 3] = ["b[ab]{2}c", "a+bb$", "bab"];

/// A request.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a property of its own"
)]
#[derive(Debug, Clone, Default)]
pub struct TestRequest {
    /// Requests of a family share a prefix.
    pub family: u8,
    /// So many tokens.
    pub common: u8,
    pub own: u8,
    pub max_tokens: u8,
    pub min_tokens: u8,
    pub samples: u8,
    pub salt: bool,
    pub priority: Option<i8>,
    pub routing_key: Option<u8>,
    pub session: Option<u8>,
    pub deadline: Option<u16>,
    pub admit_by: Option<u16>,
    /// Tokens before each image, and of it.
    pub images: Vec<(u8, u8)>,
    pub drafts: bool,
    pub stops: bool,
    pub strings: bool,
    /// It does not stream.
    pub whole: bool,
    /// What it brings to the frame with each row that samples.
    pub params_bytes: u8,
    /// Every step fails that computes so many tokens of it, or more.
    pub poison: Option<Poison>,
    /// Words of log-probabilities of a token, 0 for none, and the first token of the prompt that they are wanted of.
    pub logprobs: (u8, Option<u8>),
}

/// What a request does to steps.
#[derive(Debug, Clone, Copy)]
pub struct Poison {
    pub from: u8,
    /// The driver dies; otherwise it answers with an error.
    pub kills: bool,
}

impl TestRequest {
    /// One sequence without anything special.
    pub fn plain(common: u8, own: u8, max_tokens: u8) -> Self {
        Self {
            common,
            own,
            max_tokens,
            samples: 1,
            ..Self::default()
        }
    }

    fn prompt(&self, id: u64) -> Vec<u32> {
        let common = (0..u64::from(self.common)).map(|at| at * 13 + u64::from(self.family) * 5);
        let own = (0..u64::from(self.own)).map(|at| at * 11 + id * 3 + 1);
        common
            .chain(own)
            .map(|n| (n % u64::from(VOCAB)) as u32)
            .collect()
    }

    pub(super) fn request(&self, id: u64, now: u64) -> NewRequest<u64> {
        let salt = u64::from(self.salt);
        let mut request = NewRequest::new(id, self.prompt(id), salt, self.max_tokens.into());
        request.stop.min_tokens = self.min_tokens.into();
        if self.stops {
            request.stop.stop_tokens = vec![3, 17];
        }
        if self.strings {
            request.stop.stop_strings = StopStrings::new([&b"abca"[..], b"cc"]).expect("not empty");
        }
        if self.strings && self.stops {
            request.stop.stop_regexes = Some(Arc::new(StopRegexes::new(&REGEXES).expect("valid")));
        }
        request.samples = self.samples.into();
        request.namespace = self.salt.then(|| "salt".into());
        request.priority = self.priority.map(Into::into);
        request.routing_key = self.routing_key.map(|key| key.to_string().into());
        request.session = self.session.map(Into::into);
        request.deadline = self.deadline.map(|after| now + u64::from(after));
        request.admit_by = self.admit_by.map(|after| now + u64::from(after));
        let mut at = 0;
        let images = self.images.iter().map(|&(gap, tokens)| {
            let (start, tokens) = (at + u32::from(gap), u32::from(tokens));
            at = start + tokens;
            Image {
                start,
                tokens,
                bytes: 3 * tokens,
            }
        });
        let len = request.prompt.len() as u32;
        request.images = images.take_while(|image| image.end() <= len).collect();
        request.drafts = self.drafts;
        request.params_bytes = self.params_bytes.into();
        request.streams = !self.whole;
        let (words, prompt_from) = self.logprobs;
        request.logprobs = (words > 0).then(|| Logprobs {
            uncached: false,
            words: words.into(),
            prompt_from: prompt_from.map(Into::into),
        });
        request
    }
}
