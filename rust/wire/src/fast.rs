//! The fast token reply (§8.2).
//!
//! | Offset | Field |
//! |---|---|
//! | 0 | `PIETFWD1` |
//! | 8 | driver id, u32 little-endian |
//! | 12 | number of requests, u32 |
//! | 16 | number of tokens, u32; equals the number of requests |
//! | 20 | the tokens, u32 each |

use crate::error::WireError;

/// The first 8 bytes of a fast token reply.
pub const FAST_TOKENS_MAGIC: [u8; 8] = *b"PIETFWD1";

const HEADER_LEN: usize = 20;
const TOKEN_LEN: usize = 4;

/// Bytes of a fast token reply with `tokens` tokens.
///
/// Saturates instead of overflowing.
pub const fn fast_tokens_len(tokens: usize) -> usize {
    tokens.saturating_mul(TOKEN_LEN).saturating_add(HEADER_LEN)
}

/// A fast token reply: every request produced exactly one token.
///
/// It can be read at any alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FastTokens<'a> {
    driver_id: u32,
    tokens: &'a [[u8; TOKEN_LEN]],
}

impl<'a> FastTokens<'a> {
    /// Reads a reply that starts with [`FAST_TOKENS_MAGIC`].
    ///
    /// The magic itself is the caller's to check.
    ///
    /// # Errors
    ///
    /// [`WireError::FastTooShort`], [`WireError::FastCount`] or
    /// [`WireError::FastLength`].
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let Some((header, body)) = bytes.split_first_chunk::<HEADER_LEN>() else {
            return Err(WireError::FastTooShort {
                len: bytes.len(),
                min: HEADER_LEN,
            });
        };
        let [_, _, driver_id, requests, count] = words(header);
        if requests != count {
            return Err(WireError::FastCount {
                requests,
                tokens: count,
            });
        }
        let (tokens, rest) = body.as_chunks();
        if !rest.is_empty() || tokens.len() as u64 != u64::from(count) {
            return Err(WireError::FastLength {
                tokens: count,
                expected: HEADER_LEN as u64 + TOKEN_LEN as u64 * u64::from(count),
                len: bytes.len(),
            });
        }
        Ok(Self { driver_id, tokens })
    }

    /// The driver that answered; the server ignores it.
    pub const fn driver_id(&self) -> u32 {
        self.driver_id
    }

    /// Number of tokens, and of requests.
    pub const fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether the reply answers an empty batch.
    pub const fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The token of one request.
    pub fn get(&self, request: usize) -> Option<u32> {
        self.tokens.get(request).map(|raw| u32::from_le_bytes(*raw))
    }

    /// The tokens, in the order of the requests.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u32> + use<'a> {
        self.tokens.iter().map(|raw| u32::from_le_bytes(*raw))
    }
}

/// Splits a header into its 32-bit words; the first two are the magic.
fn words(header: &[u8; HEADER_LEN]) -> [u32; 5] {
    let (words, _) = header.as_chunks();
    std::array::from_fn(|index| u32::from_le_bytes(words[index]))
}

/// Writes a fast token reply and returns its length (§8.2).
///
/// Use it only when every request of the batch has exactly one token, no
/// probe output and no drafts.
///
/// # Errors
///
/// [`WireError::BufferTooSmall`], or [`WireError::TooLarge`] when the tokens
/// cannot be counted in 32 bits.
pub fn encode_fast_tokens(
    driver_id: u32,
    tokens: &[u32],
    buffer: &mut [u8],
) -> Result<usize, WireError> {
    let needed = fast_tokens_len(tokens.len());
    let count = u32::try_from(tokens.len()).map_err(|_| WireError::TooLarge {
        limit: fast_tokens_len(u32::MAX as usize),
    })?;
    let capacity = buffer.len();
    let Some(reply) = buffer.get_mut(..needed) else {
        return Err(WireError::BufferTooSmall { needed, capacity });
    };
    let (header, body) = reply.split_at_mut(HEADER_LEN);
    let (magic, fields) = header.split_at_mut(FAST_TOKENS_MAGIC.len());
    magic.copy_from_slice(&FAST_TOKENS_MAGIC);
    write_words(fields, &[driver_id, count, count]);
    write_words(body, tokens);
    Ok(needed)
}

/// Writes as many words as both sides hold.
fn write_words(out: &mut [u8], words: &[u32]) {
    for (slot, word) in out.as_chunks_mut().0.iter_mut().zip(words) {
        *slot = word.to_le_bytes();
    }
}
