//! The tokens of a model.

use std::fmt;
use std::sync::Arc;

use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::error::GrammarError;
use crate::tokenizer::{Canonical, Tokenizer};

/// The bytes of a model's tokens, and the tokens that end a text.
#[derive(Clone)]
pub struct Vocabulary {
    env: TokEnv,
    canonical: bool,
    size: usize,
    ends: Arc<[u32]>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary")
            .field("size", &self.size)
            .field("ends", &self.ends)
            .finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// A vocabulary by the bytes that each token adds to a text; no bytes for a token that does not show. `special` names
    /// tokens without text, such as `<|tool|>`, to grammars. `ends` are the tokens that end a text.
    ///
    /// # Errors
    /// [`GrammarError::NoEnd`], [`GrammarError::Token`].
    pub fn new(
        tokens: &[impl AsRef<[u8]>],
        special: &[(u32, String)],
        ends: &[u32],
    ) -> Result<Self, GrammarError> {
        let size = tokens.len();
        let mut known = special.iter().map(|(token, _)| token).chain(ends);
        if let Some(&token) = known.find(|&&token| token as usize >= size) {
            return Err(GrammarError::Token { token, size });
        }
        let Some(&end) = ends.first() else {
            return Err(GrammarError::NoEnd);
        };
        let mut words: Vec<Vec<u8>> = tokens.iter().map(|word| word.as_ref().to_vec()).collect();
        for (token, name) in special {
            words[*token as usize] = marked(name);
        }
        for &token in ends {
            // An end is no text, whatever it looks like.
            let word = &mut words[token as usize];
            if word.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
                *word = marked(&format!("<|end {token}|>"));
            }
        }
        let info = TokRxInfo::new(size as u32, end);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(ends);
        Ok(Self {
            env: Arc::new(ApproximateTokEnv::new(trie)),
            canonical: false,
            size,
            ends: ends.into(),
        })
    }

    /// The same with the tokenizer of the model. Then [`Matcher::jump`](crate::Matcher::jump) goes over every text that a grammar
    /// forces, by the tokens that the model would write it with, and masks allow nothing else there.
    #[must_use]
    pub fn with_tokenizer(&self, tokenizer: Tokenizer) -> Self {
        let trie = self.env.tok_trie().clone();
        Self {
            env: Arc::new(Canonical { trie, tokenizer }),
            canonical: true,
            ..self.clone()
        }
    }

    /// Whether it has the tokenizer of the model.
    pub fn is_canonical(&self) -> bool {
        self.canonical
    }

    /// Tokens.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The tokens that end a text.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Words of 32 bits that a mask takes: bit `i` of word `w` is token `32 w + i`.
    pub fn mask_words(&self) -> usize {
        self.size.div_ceil(32)
    }

    /// Whether a token without text has this name, which is in angle brackets.
    pub(crate) fn has_special(&self, name: &str) -> bool {
        let named = name.starts_with('<') && name.ends_with('>');
        named && self.env.tok_trie().get_special_token(name).is_some()
    }

    pub(crate) fn env(&self) -> &TokEnv {
        &self.env
    }
}

/// As the trie marks what is no text.
fn marked(name: &str) -> Vec<u8> {
    let mut bytes = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    bytes.extend_from_slice(name.as_bytes());
    bytes
}
