//! Log-probabilities after a response.

use super::read::split;
use super::write::WordWriter;
use super::{ExtensionError, RESPONSE_EXTENSION_MAGIC, WORD, word};
use crate::error::WireError;

/// Words of a row: request, positions of the prompt, tokens, most probable ones of each, given ones of each, numbers of a hidden
/// state.
const ROW: usize = 6;
/// Words at the end: rows, words of all positions, magic number.
const TRAILER: usize = 4;

/// Log-probabilities at each position besides those of its own token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogprobShape {
    /// Number of most probable tokens.
    pub top: u32,
    /// Number of further requested tokens.
    pub given: u32,
    /// Numbers of its hidden state; 0 for none.
    pub hidden: u32,
}

impl LogprobShape {
    /// Words of a position: log-probability of its token; most probable token ids, best first; their log-probabilities; those of
    /// the further tokens; the hidden state of the row.
    #[must_use]
    pub const fn words(self) -> usize {
        self.logprob_words() + self.hidden as usize
    }

    /// Those without the hidden state.
    #[must_use]
    pub const fn logprob_words(self) -> usize {
        1 + 2 * self.top as usize + self.given as usize
    }

    /// The hidden states of consecutive positions; empty ones without.
    pub fn hidden_states(self, words: &[u32]) -> impl ExactSizeIterator<Item = &[u32]> {
        words
            .chunks_exact(self.words())
            .map(move |position| &position[self.logprob_words()..])
    }

    /// Decodes consecutive positions; a partial one at the end is ignored.
    pub fn positions(self, words: &[u32]) -> impl ExactSizeIterator<Item = Logprobs> {
        let top = self.top as usize;
        words.chunks_exact(self.words()).map(move |position| {
            let (ids, values) = position[1..=2 * top].split_at(top);
            let values = values.iter().map(|&value| f32::from_bits(value));
            Logprobs {
                token: f32::from_bits(position[0]),
                top: ids.iter().copied().zip(values).collect(),
                given: position[1 + 2 * top..self.logprob_words()]
                    .iter()
                    .map(|&value| f32::from_bits(value))
                    .collect(),
            }
        })
    }
}

/// The log-probabilities at one position.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Logprobs {
    /// Of the token at this position.
    pub token: f32,
    /// The most probable tokens, best first.
    pub top: Vec<(u32, f32)>,
    /// Of the further tokens, in their order.
    pub given: Vec<f32>,
}

/// The log-probabilities of a response; buffers are reused.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogprobRows {
    rows: Vec<[u32; ROW]>,
    words: Vec<u32>,
}

impl LogprobRows {
    /// Bytes of a request's row without its positions.
    pub const ROW_BYTES: usize = WORD * ROW;
    /// Bytes at the end, where there is a row.
    pub const END_BYTES: usize = WORD * TRAILER;

    /// Starts another response.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.words.clear();
    }

    /// Adds the row of a request, with ascending indices. `words` has its positions, `prompt` ones of the prompt first.
    pub fn push(
        &mut self,
        request: u32,
        shape: LogprobShape,
        (prompt, tokens): (u32, u32),
        words: impl IntoIterator<Item = u32>,
    ) {
        let [start, positions] = [self.words.len(), (prompt + tokens) as usize];
        self.words.extend(words);
        debug_assert_eq!(self.words.len(), start + positions * shape.words());
        self.rows.push([
            request,
            prompt,
            tokens,
            shape.top,
            shape.given,
            shape.hidden,
        ]);
    }

    /// Bytes that [`append`](Self::append) adds; 0 without rows.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        if self.rows.is_empty() {
            0
        } else {
            Self::ROW_BYTES * self.rows.len() + WORD * self.words.len() + Self::END_BYTES
        }
    }

    /// Appends the rows to a response of `len` bytes at the start of `buffer`; returns the length of both. Without rows nothing is
    /// written.
    ///
    /// # Errors
    /// [`WireError::BufferTooSmall`], found out before anything is written.
    pub fn append(&self, buffer: &mut [u8], len: usize) -> Result<usize, WireError> {
        let needed = self.bytes();
        if needed == 0 {
            return Ok(len);
        }
        let mut writer = WordWriter::new(buffer, len, needed)?;
        writer.put(self.rows.as_flattened().iter().copied());
        writer.put(self.words.iter().copied());
        writer.end(
            [self.rows.len()],
            self.words.len(),
            RESPONSE_EXTENSION_MAGIC,
        );
        Ok(len + needed)
    }
}

/// The validated log-probabilities of a response: rows have ascending requests, and their words are in bounds.
#[derive(Debug, Clone, Copy, Default)]
pub struct ResponseExtension<'a> {
    rows: &'a [[u8; WORD]],
    words: &'a [[u8; WORD]],
}

impl<'a> ResponseExtension<'a> {
    /// The rows, in the order of their requests.
    pub fn rows(&self) -> impl Iterator<Item = LogprobRow<'a>> + use<'a> {
        let mut words = self.words;
        self.rows.chunks_exact(ROW).map(move |row| {
            let [prompt, tokens] = [1, 2].map(|at| word(row, at) as usize);
            let (own, rest) = words.split_at((prompt + tokens) * shape(row).words());
            words = rest;
            LogprobRow { row, words: own }
        })
    }

    fn check(&self) -> Result<(), ExtensionError> {
        let mut last = None;
        let mut claimed = 0_u64;
        for (number, row) in self.rows.chunks_exact(ROW).enumerate() {
            let request = word(row, 0);
            if last.is_some_and(|last| request <= last) {
                return Err(ExtensionError::Order {
                    row: number,
                    request,
                });
            }
            last = Some(request);
            let positions = u64::from(word(row, 1)) + u64::from(word(row, 2));
            claimed = claimed.saturating_add(positions.saturating_mul(shape(row).words() as u64));
        }
        let words = self.words.len();
        if claimed != words as u64 {
            return Err(ExtensionError::Words { claimed, words });
        }
        Ok(())
    }
}

fn shape(row: &[[u8; WORD]]) -> LogprobShape {
    LogprobShape {
        top: word(row, 3),
        given: word(row, 4),
        hidden: word(row, 5),
    }
}

/// The log-probabilities of one request.
#[derive(Debug, Clone, Copy)]
pub struct LogprobRow<'a> {
    row: &'a [[u8; WORD]],
    words: &'a [[u8; WORD]],
}

impl<'a> LogprobRow<'a> {
    /// Index of the request in its frame.
    pub fn request(&self) -> u32 {
        word(self.row, 0)
    }

    /// Log-probabilities at each of its positions.
    pub fn shape(&self) -> LogprobShape {
        shape(self.row)
    }

    /// Numbers of prompt positions, which come first, and of generated tokens.
    pub fn position_counts(&self) -> (u32, u32) {
        (word(self.row, 1), word(self.row, 2))
    }

    /// The words of its positions; see [`LogprobShape::words`].
    pub fn words(&self) -> impl ExactSizeIterator<Item = u32> + use<'a> {
        self.words.iter().map(|word| u32::from_le_bytes(*word))
    }
}

/// Splits a response into the part for [`decode_reply`](crate::decode_reply) and its log-probabilities.
///
/// # Errors
/// [`ExtensionError`].
pub fn split_response(bytes: &[u8]) -> Result<(&[u8], ResponseExtension<'_>), ExtensionError> {
    let Some((reply, [rows], words)) = split(bytes, RESPONSE_EXTENSION_MAGIC, [ROW])? else {
        return Ok((bytes, ResponseExtension::default()));
    };
    let extension = ResponseExtension { rows, words };
    extension.check()?;
    Ok((reply, extension))
}
