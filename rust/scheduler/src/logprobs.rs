//! Log-probabilities between step outputs and request outputs, as words that the scheduler does not interpret.

use std::ops::Range;

/// The log-probabilities that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Logprobs {
    /// Words of one token, at least 1.
    pub words: u32,
    /// Also of prompt tokens from this index on, at least 1. Tokens before `prompt_from - 1` may be cached. `None`: only of
    /// output tokens.
    pub prompt_from: Option<u32>,
    /// Also of all prompt tokens that come from rows after the cached ones, as with hidden states.
    pub uncached: bool,
}

/// Log-probabilities of a sequence that were not emitted yet.
#[derive(Debug)]
pub(crate) struct LogprobBuffer {
    words: u32,
    /// The next prompt token whose log-probabilities are missing; the prompt length when there is none.
    next: u32,
    prompt_len: u32,
    /// Rows of all uncached prompt tokens are wanted, and no step was scheduled yet.
    uncached: bool,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    /// See [`Output::scored`](crate::Output::scored).
    pub(crate) scored: Option<u32>,
}

impl LogprobBuffer {
    pub(crate) fn new(wanted: Logprobs, prompt_len: u32) -> Self {
        let from = wanted.prompt_from.unwrap_or(prompt_len);
        Self {
            words: wanted.words,
            next: from.clamp(1, prompt_len),
            prompt_len,
            uncached: wanted.uncached,
            prompt: Vec::new(),
            tokens: Vec::new(),
            scored: None,
        }
    }

    /// The sequence starts with so many cached tokens.
    pub(crate) fn start(&mut self, cached: u32) {
        if std::mem::take(&mut self.uncached) {
            self.next = self.next.min(cached + 1).min(self.prompt_len);
        }
    }

    /// Words of one token.
    pub(crate) const fn words(&self) -> u32 {
        self.words
    }

    /// Leading tokens that may be cached: the next log-probabilities come from the row after them.
    pub(crate) const fn cacheable(&self) -> u32 {
        if self.next < self.prompt_len {
            self.next - 1
        } else {
            u32::MAX
        }
    }

    /// Prompt tokens whose log-probabilities a row of `start..end` returns; a token's come from the row of its predecessor.
    pub(crate) fn of_row(&self, start: u32, end: u32) -> Range<u32> {
        let from = self.next.max(start + 1);
        from..self.prompt_len.min(end + 1).max(from)
    }

    /// The end of a row from `start` on that returns at most so many tokens' log-probabilities, a sampled token included.
    pub(crate) fn end_of_row(&self, start: u32, positions: u32) -> u32 {
        let from = self.next.max(start + 1);
        if self.prompt_len.saturating_sub(from) < positions {
            return u32::MAX;
        }
        (from - 1).saturating_add(positions)
    }

    /// Buffers the words of a row: those of `prompt` tokens, then of `sampled` output tokens, of which `kept` are kept. Returns
    /// whether their number is right.
    pub(crate) fn take(
        &mut self,
        prompt: Range<u32>,
        sampled: usize,
        kept: usize,
        words: &[u32],
    ) -> bool {
        let width = self.words as usize;
        let Some((of_prompt, others)) = words.split_at_checked(prompt.len() * width) else {
            return false;
        };
        if others.len() != sampled * width {
            return false;
        }
        // A recomputed row may return some again.
        let known = self.next.clamp(prompt.start, prompt.end) - prompt.start;
        if prompt.start <= self.next {
            self.prompt
                .extend_from_slice(&of_prompt[known as usize * width..]);
            self.next = self.next.max(prompt.end);
        }
        self.tokens.extend_from_slice(&others[..kept * width]);
        true
    }

    /// Buffered words of prompt tokens and of output tokens.
    pub(crate) fn pending(&self) -> (&[u32], &[u32]) {
        (&self.prompt, &self.tokens)
    }

    /// All of it was emitted.
    pub(crate) fn clear(&mut self) {
        self.prompt.clear();
        self.tokens.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Logprobs = Logprobs {
        words: 2,
        prompt_from: Some(3),
        uncached: false,
    };

    fn words(range: Range<u32>) -> Vec<u32> {
        range.flat_map(|token| [token, 100 + token]).collect()
    }

    #[test]
    fn rows_return_each_prompt_token_once() {
        let mut kept = LogprobBuffer::new(WANTED, 10);
        assert_eq!(kept.cacheable(), 2);
        assert_eq!(kept.of_row(0, 2), 3..3);
        assert_eq!(kept.of_row(2, 5), 3..6);
        assert_eq!(kept.of_row(9, 10), 10..10);
        assert!(kept.take(3..6, 0, 0, &words(3..6)));
        assert_eq!(kept.cacheable(), 5);
        // Recomputed from an earlier token on.
        assert_eq!(kept.of_row(2, 8), 6..9);
        assert!(kept.take(3..8, 0, 0, &words(3..8)));
        assert_eq!(kept.pending().0, words(3..8));
        // A gap is not kept.
        assert!(kept.take(9..10, 0, 0, &words(9..10)));
        assert_eq!((kept.pending().0.len(), kept.cacheable()), (10, 7));
        assert!(kept.take(8..10, 2, 1, &words(8..12)));
        assert_eq!(kept.pending(), (&words(3..10)[..], &words(10..11)[..]));
        assert_eq!((kept.cacheable(), kept.of_row(0, 12)), (u32::MAX, 10..10));
        kept.clear();
        assert_eq!(kept.pending(), (&[][..], &[][..]));
    }

    #[test]
    fn rows_after_the_cached_tokens_are_wanted_once_it_starts() {
        let wanted = Logprobs {
            prompt_from: None,
            uncached: true,
            ..WANTED
        };
        let mut kept = LogprobBuffer::new(wanted, 10);
        assert_eq!(kept.cacheable(), u32::MAX);
        kept.start(4);
        assert_eq!((kept.of_row(4, 10), kept.cacheable()), (5..10, 4));
        assert!(kept.take(5..8, 0, 0, &words(5..8)));
        // A retracted sequence starts again, and returns the others.
        kept.start(0);
        assert_eq!((kept.of_row(0, 10), kept.cacheable()), (8..10, 7));
        let mut both = LogprobBuffer::new(
            Logprobs {
                uncached: true,
                ..WANTED
            },
            10,
        );
        both.start(2);
        assert_eq!(both.of_row(2, 10), 3..10);
        let mut none = LogprobBuffer::new(wanted, 10);
        none.start(9);
        assert_eq!(none.of_row(9, 10), 10..10);
    }

    #[test]
    fn a_wrong_number_of_words_is_detected() {
        let mut kept = LogprobBuffer::new(WANTED, 10);
        assert!(!kept.take(3..5, 0, 0, &words(3..4)));
        assert!(!kept.take(3..4, 1, 1, &words(3..4)));
        assert!(!kept.take(3..4, 0, 0, &words(3..5)));
        let none = Logprobs {
            prompt_from: None,
            ..WANTED
        };
        let kept = LogprobBuffer::new(none, 10);
        assert_eq!((kept.cacheable(), kept.of_row(0, 10)), (u32::MAX, 10..10));
    }

    #[test]
    fn rows_are_limited_by_logprob_words() {
        let kept = LogprobBuffer::new(WANTED, 10);
        assert_eq!(kept.end_of_row(0, 3), 5);
        assert_eq!(kept.of_row(0, 5).len(), 3);
        assert_eq!(kept.end_of_row(4, 3), 7);
        assert_eq!(kept.of_row(4, 7).len(), 3);
        // The last row of the prompt also returns those of the sampled token.
        assert_eq!(kept.end_of_row(7, 3), u32::MAX);
        assert_eq!(kept.of_row(7, 10).len() + 1, 3);
        assert_eq!(kept.end_of_row(7, 2), 9);
        assert_eq!(kept.end_of_row(40, 1), u32::MAX);
    }
}
