//! The tokens of a model.

use std::fmt;
use std::sync::{Arc, OnceLock};

use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::error::GrammarError;
use crate::tokenizer::{CanonicalTokenizer, Tokenizer};

/// The bytes of a model's tokens, and the tokens that end a text. Clones share all of it.
///
/// The token trie is built by the first use that needs it, which is on a thread of a [`Compiler`](crate::Compiler).
#[derive(Clone)]
pub struct Vocabulary(Arc<Inner>);

struct Inner {
    words: Arc<Vec<Box<[u8]>>>,
    special: Vec<(u32, String)>,
    ends: Box<[u32]>,
    tokenizer: Option<Tokenizer>,
    env: OnceLock<TokEnv>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary")
            .field("size", &self.size())
            .field("ends", &self.0.ends)
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
        let words = tokens.iter().map(|word| word.as_ref().into()).collect();
        Self::shared(Arc::new(words), special.to_vec(), ends)
    }

    /// As [`new`](Self::new), without a copy of the tokens.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn shared(
        tokens: Arc<Vec<Box<[u8]>>>,
        special: Vec<(u32, String)>,
        ends: &[u32],
    ) -> Result<Self, GrammarError> {
        let size = tokens.len();
        let mut known = special.iter().map(|(token, _)| token).chain(ends);
        if let Some(&token) = known.find(|&&token| token as usize >= size) {
            return Err(GrammarError::Token { token, size });
        }
        if ends.is_empty() {
            return Err(GrammarError::NoEnd);
        }
        Ok(Self(Arc::new(Inner {
            words: tokens,
            special,
            ends: ends.into(),
            tokenizer: None,
            env: OnceLock::new(),
        })))
    }

    /// The same with the tokenizer of the model. Then [`Matcher::jump_forward_tokens`](crate::Matcher::jump_forward_tokens) goes over every text that a grammar
    /// forces, by the tokens that the model would write it with, and masks allow nothing else there.
    #[must_use]
    pub fn with_tokenizer(&self, tokenizer: Tokenizer) -> Self {
        Self(Arc::new(Inner {
            words: Arc::clone(&self.0.words),
            special: self.0.special.clone(),
            ends: self.0.ends.clone(),
            tokenizer: Some(tokenizer),
            env: OnceLock::new(),
        }))
    }

    /// Whether it has the tokenizer of the model.
    pub fn is_canonical(&self) -> bool {
        self.0.tokenizer.is_some()
    }

    /// Tokens.
    pub fn size(&self) -> usize {
        self.0.words.len()
    }

    /// The tokens that end a text.
    pub fn ends(&self) -> &[u32] {
        &self.0.ends
    }

    /// Words of 32 bits that a mask takes: bit `i` of word `w` is token `32 w + i`.
    pub fn mask_words(&self) -> usize {
        self.size().div_ceil(32)
    }

    /// What each token adds to a text.
    pub(crate) fn words(&self) -> &Arc<Vec<Box<[u8]>>> {
        &self.0.words
    }

    /// Tokens without text, and their names.
    pub(crate) fn special(&self) -> &[(u32, String)] {
        &self.0.special
    }

    /// Bytes of the longest name of a token without text.
    pub(crate) fn longest_special(&self) -> usize {
        let lengths = self.0.special.iter().map(|(_, name)| name.len());
        // Ends without a name are called by their number.
        lengths.max().unwrap_or(0).max("<|end 4294967295|>".len())
    }

    /// Whether a token without text has this name, which is in angle brackets.
    pub(crate) fn has_special(&self, name: &str) -> bool {
        let named = name.starts_with('<') && name.ends_with('>');
        named && self.env().tok_trie().get_special_token(name).is_some()
    }

    /// The token trie, which the first call builds: that takes time for each token.
    pub(crate) fn env(&self) -> &TokEnv {
        self.0.env.get_or_init(|| {
            let trie = self.0.trie();
            match &self.0.tokenizer {
                Some(tokenizer) => Arc::new(CanonicalTokenizer {
                    trie,
                    tokenizer: tokenizer.clone(),
                }),
                None => Arc::new(ApproximateTokEnv::new(trie)),
            }
        })
    }
}

impl Inner {
    fn trie(&self) -> TokTrie {
        let mut words: Vec<Vec<u8>> = self.words.iter().map(|word| word.to_vec()).collect();
        for (token, name) in &self.special {
            words[*token as usize] = marked(name);
        }
        for &token in &self.ends {
            // An end is no text, whatever it looks like.
            let word = &mut words[token as usize];
            if word.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
                *word = marked(&format!("<|end {token}|>"));
            }
        }
        let info = TokRxInfo::new(words.len() as u32, self.ends[0]);
        TokTrie::from(&info, &words).with_eos_tokens(&self.ends)
    }
}

/// As the trie marks what is no text.
fn marked(name: &str) -> Vec<u8> {
    let mut bytes = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    bytes.extend_from_slice(name.as_bytes());
    bytes
}
