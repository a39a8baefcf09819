//! The grammar matcher of one sequence.

use std::fmt;

use crate::error::GrammarError;
use crate::parser::Parser;
use crate::vocabulary::Vocabulary;

/// Grammar state of one sequence. Clones are independent.
#[derive(Clone)]
pub struct Matcher {
    inner: Parser,
    vocabulary: Vocabulary,
    /// Tokens accepted since the start, EOS included.
    accepted: usize,
    /// Whether EOS was accepted.
    ended: bool,
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Matcher")
            .field("committed", &self.accepted)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl Matcher {
    pub(crate) fn new(inner: Parser, vocabulary: Vocabulary) -> Self {
        Self {
            inner,
            vocabulary,
            accepted: 0,
            ended: false,
        }
    }

    /// The vocabulary whose tokens it takes.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Fills the bit mask of allowed next tokens: bit `i` of word `w` allows token `32 w + i`. Where the grammar is complete, EOS tokens
    /// are allowed.
    ///
    /// # Errors
    /// [`GrammarError::Buffer`] if `mask` has not [`Vocabulary::mask_words`] words; [`GrammarError::Matcher`] if a mask takes
    /// more work than the limits allow.
    pub fn fill_bitmask(&mut self, mask: &mut [u32]) -> Result<(), GrammarError> {
        let needed = self.vocabulary.mask_words();
        if mask.len() != needed {
            let given = mask.len();
            return Err(GrammarError::Buffer { needed, given });
        }
        mask.fill(0);
        if self.ended {
            self.allow_ends(mask);
            return Ok(());
        }
        let bits = self.inner.mask().map_err(GrammarError::Matcher)?;
        let words = bits.as_slice();
        let common = words.len().min(needed);
        mask[..common].copy_from_slice(&words[..common]);
        if let Some(last) = mask.last_mut()
            && !self.vocabulary.size().is_multiple_of(32)
        {
            *last &= (1 << (self.vocabulary.size() % 32)) - 1;
        }
        let mut ends = self.vocabulary.ends().iter();
        // Where one EOS token is allowed, all are.
        if ends.any(|&end| mask[end as usize / 32] >> (end % 32) & 1 == 1) {
            self.allow_ends(mask);
        }
        Ok(())
    }

    fn allow_ends(&self, mask: &mut [u32]) {
        for &end in self.vocabulary.ends() {
            mask[end as usize / 32] |= 1 << (end % 32);
        }
    }

    /// Accepts a token. After EOS every token is rejected.
    ///
    /// # Errors
    /// [`GrammarError::Forbidden`], with nothing changed; [`GrammarError::Matcher`] if it cannot continue.
    pub fn accept_token(&mut self, token: u32) -> Result<(), GrammarError> {
        let forbidden = GrammarError::Forbidden { token };
        if self.ended || token as usize >= self.vocabulary.size() {
            return Err(forbidden);
        }
        if self.vocabulary.ends().contains(&token) {
            if !self.inner.is_stopped() && !self.is_accepting()? {
                return Err(forbidden);
            }
            self.ended = true;
        } else {
            let allowed = !self.inner.is_stopped()
                && self.inner.allows(token).map_err(GrammarError::Matcher)?;
            if !allowed {
                return Err(forbidden);
            }
            self.inner.consume(token).map_err(GrammarError::Matcher)?;
        }
        self.accepted += 1;
        Ok(())
    }

    /// As [`accept_token`](Self::accept_token), for a token that was sampled with the mask; others put the matcher into an error state.
    pub(crate) fn accept_unchecked(&mut self, token: u32) -> Result<(), GrammarError> {
        if self.ended || self.vocabulary.ends().contains(&token) {
            return self.accept_token(token);
        }
        self.inner.consume(token).map_err(GrammarError::Matcher)?;
        self.accepted += 1;
        Ok(())
    }

    /// Resets to the start; false if it cannot, or the memory budget does not allow keeping it.
    pub(crate) fn reset(&mut self) -> bool {
        (self.accepted, self.ended) = (0, false);
        self.inner.may_be_kept() && self.inner.reset().is_ok()
    }

    /// Rolls back the last tokens.
    ///
    /// # Errors
    /// [`GrammarError::Rollback`], with nothing changed; [`GrammarError::Matcher`].
    pub fn rollback(&mut self, tokens: usize) -> Result<(), GrammarError> {
        let accepted = self.accepted;
        if tokens > accepted {
            let wanted = tokens;
            return Err(GrammarError::Rollback { wanted, accepted });
        }
        if tokens == 0 {
            return Ok(());
        }
        // EOS is not in the inner matcher.
        let inner = tokens - usize::from(self.ended);
        self.ended = false;
        if inner > 0 {
            self.inner.rollback(inner).map_err(GrammarError::Matcher)?;
        }
        self.accepted -= tokens;
        Ok(())
    }

    /// Commits the tokens that have no alternative, until there is one, the text may end, or `most` are committed. They are added to
    /// `tokens`. `mask` is scratch space, and is afterwards the mask of the next token.
    ///
    /// A token is taken when the mask has no other bit: so the text is the one that drawing by masks gives. With the
    /// [tokenizer](Vocabulary::with_tokenizer) text that the grammar forces is taken, too, as far as what follows cannot change its
    /// tokens.
    ///
    /// # Errors
    /// Those of [`fill_bitmask`](Self::fill_bitmask) and [`accept_token`](Self::accept_token).
    pub fn jump_forward_tokens(
        &mut self,
        most: usize,
        mask: &mut [u32],
        tokens: &mut Vec<u32>,
    ) -> Result<(), GrammarError> {
        let mut left = most;
        loop {
            left -= self.jump_forced_text(left, tokens)?;
            self.fill_bitmask(mask)?;
            let forced = only(mask).filter(|token| !self.vocabulary.ends().contains(token));
            match forced {
                Some(token) if left > 0 => {
                    self.accept_unchecked(token)?;
                    tokens.push(token);
                    left -= 1;
                }
                _ => return Ok(()),
            }
        }
    }

    /// Accepts the tokens of forced text; returns their number.
    fn jump_forced_text(
        &mut self,
        most: usize,
        tokens: &mut Vec<u32>,
    ) -> Result<usize, GrammarError> {
        if most == 0 || !self.vocabulary.is_canonical() || self.is_stopped() {
            return Ok(0);
        }
        let forced = self.inner.forced();
        let forced = &forced[..forced.len().min(most)];
        for &token in forced {
            self.accept_unchecked(token)?;
        }
        tokens.extend_from_slice(forced);
        Ok(forced.len())
    }

    /// Whether EOS is allowed here.
    ///
    /// # Errors
    /// [`GrammarError::Matcher`].
    pub fn is_accepting(&mut self) -> Result<bool, GrammarError> {
        Ok(self.ended || self.inner.is_accepting().map_err(GrammarError::Matcher)?)
    }

    /// Whether only EOS is allowed.
    pub fn is_stopped(&self) -> bool {
        self.ended || self.inner.is_stopped()
    }

    /// Whether EOS was accepted.
    pub fn has_ended(&self) -> bool {
        self.ended
    }
}

/// The token of a mask with a single bit.
pub(crate) fn only(mask: &[u32]) -> Option<u32> {
    let mut found = None;
    for (at, &word) in (0..).zip(mask) {
        if word == 0 {
            continue;
        }
        if found.is_some() || !word.is_power_of_two() {
            return None;
        }
        found = Some(32 * at + word.trailing_zeros());
    }
    found
}
