//! The model's tokenizer, which encodes jump-forward text.

use std::fmt;
use std::sync::Arc;

use toktrie::{TokTrie, TokenId, TokenizerEnv};
use toktrie_hf_tokenizers::ByteTokenizer;

use crate::error::GrammarError;

/// The tokenizer of a model, from its `tokenizer.json`.
#[derive(Clone)]
pub struct Tokenizer(Arc<ByteTokenizer>);

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tokenizer")
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json` whose tokens are bytes of UTF-8: byte-level BPE, or `SentencePiece` with bytes.
    ///
    /// # Errors
    /// [`GrammarError::Tokenizer`] if it is of another kind, or cannot be read.
    pub fn from_json(json: &[u8]) -> Result<Self, GrammarError> {
        // The library also asserts what it expects of such files.
        let read = std::panic::catch_unwind(|| ByteTokenizer::from_json_bytes(json));
        let wrong = |reason: String| GrammarError::Tokenizer { reason };
        match read {
            Ok(Ok(tokenizer)) => Ok(Self(Arc::new(tokenizer))),
            Ok(Err(error)) => Err(wrong(error.to_string())),
            Err(_) => Err(wrong("its tokens are not bytes".to_owned())),
        }
    }

    /// The tokens of a text; empty on an error.
    fn tokens(&self, text: &str) -> Vec<u32> {
        let encoded = self.0.hf_tokenizer.encode_fast(text, false);
        encoded.map_or_else(|_| Vec::new(), |encoded| encoded.get_ids().to_vec())
    }
}

/// The tokens of a model with its tokenizer.
pub(crate) struct CanonicalTokenizer {
    pub(crate) trie: TokTrie,
    pub(crate) tokenizer: Tokenizer,
}

impl CanonicalTokenizer {
    /// Whether tokens are this text, byte by byte, and no special ones.
    fn write(&self, tokens: &[u32], text: &[u8]) -> bool {
        let mut rest = text;
        let known = self.trie.vocab_size();
        tokens.iter().all(|&token| {
            let fits = (token as usize) < known && !self.trie.is_special_token(token);
            let after = fits.then(|| rest.strip_prefix(self.trie.token(token)));
            rest = after.flatten().unwrap_or(rest);
            matches!(after, Some(Some(_)))
        }) && rest.is_empty()
    }
}

impl TokenizerEnv for CanonicalTokenizer {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// Where the tokenizer writes something else, as it does where a text looks like a special token, the longest tokens come first.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let tokens = |text: &str| self.tokenizer.tokens(text);
        let found = self.trie.tokenize_with_greedy_fallback(bytes, tokens);
        if self.write(&found, bytes) {
            return found;
        }
        self.trie.greedy_tokenize(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use toktrie::TokRxInfo;

    use super::*;

    const POCKET: &[u8] = include_bytes!("../../../models/pocket/tokenizer.json");

    static CANONICAL: LazyLock<CanonicalTokenizer> = LazyLock::new(|| {
        let tokenizer = Tokenizer::from_json(POCKET).unwrap();
        let words = tokenizer.0.token_bytes();
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, 0), &words);
        CanonicalTokenizer { trie, tokenizer }
    });

    #[test]
    fn a_text_is_written_as_the_model_writes_it() {
        let env = &*CANONICAL;
        let tokens = env.tokenize_bytes(b"def name(self):\n    return");
        assert!(tokens.len() < 12);
        let inner = &env.tokenizer.0.hf_tokenizer;
        let expected = inner
            .encode_fast("def name(self):\n    return", false)
            .unwrap();
        assert_eq!(tokens, expected.get_ids());
        // What only looks like a special token is not one.
        let fake = env.tokenize_bytes(b"a <|im_end|> b");
        assert!(env.write(&fake, b"a <|im_end|> b"));
    }

    #[test]
    fn what_is_no_tokenizer_is_refused() {
        for json in [&b"{"[..], b"{}", b"[]"] {
            let error = Tokenizer::from_json(json).unwrap_err().to_string();
            assert!(
                error.starts_with("the tokenizer cannot be used: "),
                "{error}"
            );
        }
    }

    proptest! {
        /// Whatever the text, its tokens are its bytes.
        #[test]
        fn tokens_are_the_text(text in prop::collection::vec(any::<u8>(), 0..40), words in "[a-z <|>é😀\n]{0,40}") {
            let env = &*CANONICAL;
            for text in [&text[..], words.as_bytes()] {
                let tokens = env.tokenize_bytes(text);
                let bytes: Vec<u8> = tokens.iter().flat_map(|&token| env.trie.token(token).to_vec()).collect();
                prop_assert_eq!(bytes, text);
            }
        }
    }
}
