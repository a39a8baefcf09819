//! What `SGLang`'s own processors allow next in a sequence.

use std::sync::Arc;

use pie_scheduler::Mask;

use super::{Kind, ThinkingTokens};

/// A processor along one sequence.
#[derive(Debug)]
pub(super) struct Matcher {
    kind: Kind,
    vocab_size: u32,
    state: State,
}

/// What a processor knows of its sequence.
#[derive(Debug)]
enum State {
    /// Nothing.
    Free,
    /// Always the same mask.
    Fixed(Mask),
    Thinking(Thinking),
    /// All tokens.
    Tokens(Vec<u32>),
}

/// How far the thinking of a sequence is.
#[derive(Debug)]
struct Thinking {
    tokens: ThinkingTokens,
    budget: u64,
    /// Tokens after its first start.
    thought: Option<u64>,
    ended: bool,
    /// The last output token.
    last: Option<u32>,
}

impl Thinking {
    fn push(&mut self, token: u32) {
        self.ended |= token == self.tokens.end;
        match &mut self.thought {
            Some(thought) => *thought += 1,
            None if token == self.tokens.start => self.thought = Some(0),
            None => {}
        }
    }

    /// The only token that may come next.
    fn forced(&self) -> Option<u32> {
        let is_spent = self.thought.is_some_and(|thought| thought >= self.budget);
        (is_spent && !self.ended).then(|| {
            // A new line comes before the end of the thinking.
            if self.last == Some(self.tokens.newline) {
                self.tokens.end
            } else {
                self.tokens.newline
            }
        })
    }
}

impl Matcher {
    pub(super) fn new(kind: Kind, prompt: &[u32], vocab_size: u32) -> Self {
        let state = match &kind {
            Kind::Python | Kind::Nothing => State::Free,
            Kind::Disallowed(tokens) => State::Fixed(all_but(tokens.iter().copied(), vocab_size)),
            Kind::ThinkingBudget(tokens, budget) => {
                let mut thinking = Thinking {
                    tokens: *tokens,
                    budget: *budget,
                    thought: None,
                    ended: false,
                    last: None,
                };
                for &token in prompt {
                    thinking.push(token);
                }
                State::Thinking(thinking)
            }
            Kind::NoRepeat { .. } => State::Tokens(prompt.to_vec()),
        };
        Self {
            kind,
            vocab_size,
            state,
        }
    }

    /// Follows a sampled token.
    pub(super) fn accept_token(&mut self, token: u32) {
        match &mut self.state {
            State::Free | State::Fixed(_) => {}
            State::Thinking(thinking) => {
                thinking.push(token);
                thinking.last = Some(token);
            }
            State::Tokens(tokens) => tokens.push(token),
        }
    }

    /// The tokens that may come next; `None` for all.
    pub(super) fn mask(&self) -> Option<Mask> {
        match &self.state {
            State::Free => None,
            State::Fixed(mask) => Some(Arc::clone(mask)),
            State::Thinking(thinking) => thinking.forced().map(only),
            State::Tokens(tokens) => {
                let banned = self.repeated(tokens);
                (!banned.is_empty()).then(|| all_but(banned.into_iter(), self.vocab_size))
            }
        }
    }

    /// The tokens that would repeat an n-gram of the window.
    fn repeated(&self, tokens: &[u32]) -> Vec<u32> {
        let Kind::NoRepeat {
            size,
            window,
            allowed,
        } = &self.kind
        else {
            return Vec::new();
        };
        if tokens.len() < *size {
            return Vec::new();
        }
        let prefix = &tokens[tokens.len() - (size - 1)..];
        let recent = &tokens[tokens.len().saturating_sub(*window)..];
        let repeats = recent
            .windows(*size)
            .filter(|gram| &gram[..size - 1] == prefix);
        let last = repeats.map(|gram| gram[size - 1]);
        let is_banned =
            |token: &u32| *token < self.vocab_size && allowed.binary_search(token).is_err();
        last.filter(is_banned).collect()
    }
}

/// A mask of one token.
fn only(token: u32) -> Mask {
    let mut words = vec![0; token as usize / 32 + 1];
    words[token as usize / 32] = 1 << (token % 32);
    Arc::new(words)
}

/// A mask of all tokens but these.
fn all_but(tokens: impl Iterator<Item = u32>, vocab_size: u32) -> Mask {
    let mut words = vec![u32::MAX; vocab_size.div_ceil(32) as usize];
    if let Some(last) = words.last_mut()
        && !vocab_size.is_multiple_of(32)
    {
        *last = (1 << (vocab_size % 32)) - 1;
    }
    for token in tokens {
        words[token as usize / 32] &= !(1 << (token % 32));
    }
    Arc::new(words)
}
