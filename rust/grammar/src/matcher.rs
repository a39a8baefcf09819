//! One sequence and its grammar.

use std::fmt;

use crate::error::GrammarError;
use crate::parser::Parser;
use crate::vocabulary::Vocabulary;

/// Stands after the tokens of one sequence. A clone goes on by itself.
#[derive(Clone)]
pub struct Matcher {
    inner: Parser,
    vocabulary: Vocabulary,
    /// Tokens since the start, an end among them.
    committed: usize,
    /// Whether an end token came.
    ended: bool,
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Matcher")
            .field("committed", &self.committed)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl Matcher {
    pub(crate) fn new(inner: Parser, vocabulary: Vocabulary) -> Self {
        Self {
            inner,
            vocabulary,
            committed: 0,
            ended: false,
        }
    }

    /// The vocabulary whose tokens it takes.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Writes which tokens may come next: bit `i` of word `w` allows token `32 w + i`. Where the text is complete, so that nothing
    /// may follow, the tokens that end it are allowed.
    ///
    /// # Errors
    /// [`GrammarError::Buffer`] if `mask` has not [`Vocabulary::mask_words`] words; [`GrammarError::Matcher`] if a mask takes
    /// more work than the limits allow.
    pub fn mask_into(&mut self, mask: &mut [u32]) -> Result<(), GrammarError> {
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
        // What ends a text by one token ends it by any.
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

    /// Goes on by a token. After one that ends the text, every other one is refused.
    ///
    /// # Errors
    /// [`GrammarError::Forbidden`], with nothing changed; [`GrammarError::Matcher`] if it cannot go on.
    pub fn commit(&mut self, token: u32) -> Result<(), GrammarError> {
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
        self.committed += 1;
        Ok(())
    }

    /// As [`commit`](Self::commit), for a token that was drawn by the mask: after one that was not it cannot go on.
    pub(crate) fn advance(&mut self, token: u32) -> Result<(), GrammarError> {
        if self.ended || self.vocabulary.ends().contains(&token) {
            return self.commit(token);
        }
        self.inner.consume(token).map_err(GrammarError::Matcher)?;
        self.committed += 1;
        Ok(())
    }

    /// Goes back to the start. Whether it can, and there is memory to keep it.
    pub(crate) fn reset(&mut self) -> bool {
        (self.committed, self.ended) = (0, false);
        self.inner.may_be_kept() && self.inner.reset().is_ok()
    }

    /// Takes the last tokens back.
    ///
    /// # Errors
    /// [`GrammarError::Rollback`], with nothing changed; [`GrammarError::Matcher`].
    pub fn rollback(&mut self, tokens: usize) -> Result<(), GrammarError> {
        let committed = self.committed;
        if tokens > committed {
            let wanted = tokens;
            return Err(GrammarError::Rollback { wanted, committed });
        }
        if tokens == 0 {
            return Ok(());
        }
        // The end is not the inner matcher's.
        let inner = tokens - usize::from(self.ended);
        self.ended = false;
        if inner > 0 {
            self.inner.rollback(inner).map_err(GrammarError::Matcher)?;
        }
        self.committed -= tokens;
        Ok(())
    }

    /// Commits the tokens that have no alternative, until there is one, the text may end, or `most` are committed. They are added to
    /// `tokens`. `mask` is used as room, and is afterwards the mask of the next token.
    ///
    /// A token is taken when the mask has no other bit: so the text is the one that drawing by masks gives. With the
    /// [tokenizer](Vocabulary::with_tokenizer) text that the grammar forces is taken, too, as far as what follows cannot change its
    /// tokens.
    ///
    /// # Errors
    /// Those of [`mask_into`](Self::mask_into) and [`commit`](Self::commit).
    pub fn jump(
        &mut self,
        most: usize,
        mask: &mut [u32],
        tokens: &mut Vec<u32>,
    ) -> Result<(), GrammarError> {
        let mut left = most;
        loop {
            left -= self.jump_text(left, tokens)?;
            self.mask_into(mask)?;
            let forced = only(mask).filter(|token| !self.vocabulary.ends().contains(token));
            match forced {
                Some(token) if left > 0 => {
                    self.advance(token)?;
                    tokens.push(token);
                    left -= 1;
                }
                _ => return Ok(()),
            }
        }
    }

    /// Goes over the tokens of text that is forced. Returns how many.
    fn jump_text(&mut self, most: usize, tokens: &mut Vec<u32>) -> Result<usize, GrammarError> {
        if most == 0 || !self.vocabulary.is_canonical() || self.is_stopped() {
            return Ok(0);
        }
        let forced = self.inner.forced();
        let forced = &forced[..forced.len().min(most)];
        for &token in forced {
            self.advance(token)?;
        }
        tokens.extend_from_slice(forced);
        Ok(forced.len())
    }

    /// Whether the text may end here.
    ///
    /// # Errors
    /// [`GrammarError::Matcher`].
    pub fn is_accepting(&mut self) -> Result<bool, GrammarError> {
        Ok(self.ended || self.inner.is_accepting().map_err(GrammarError::Matcher)?)
    }

    /// Whether nothing but an end may follow.
    pub fn is_stopped(&self) -> bool {
        self.ended || self.inner.is_stopped()
    }

    /// Whether an end token was committed.
    pub fn has_ended(&self) -> bool {
        self.ended
    }
}

/// The token of a mask that has one bit.
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
