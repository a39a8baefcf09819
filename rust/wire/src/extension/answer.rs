//! Log-probabilities after an answer.

use super::read::split;
use super::write::Pen;
use super::{ANSWER_MAGIC, ExtensionError, WORD, float, word};
use crate::error::WireError;

/// Words of a row: request, places of the prompt, tokens, most probable ones of each, given ones of each.
const ROW: usize = 5;
/// Words at the end.
const TRAILER: usize = super::TRAILER;

/// The log-probabilities of one place in owned values.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Logprobs {
    /// Of the token at this place.
    pub token: f32,
    /// The most probable tokens, best first.
    pub top: Vec<(u32, f32)>,
    /// Of the tokens that were given, in their order.
    pub given: Vec<f32>,
}

/// The log-probabilities of one request in owned values. All places have as many of each kind.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AnswerRow {
    /// Index of the request in its frame.
    pub request: u32,
    /// Of tokens of the prompt.
    pub prompt: Vec<Logprobs>,
    /// Of the tokens that it was answered.
    pub tokens: Vec<Logprobs>,
}

impl AnswerRow {
    /// Most probable and given tokens of each place.
    fn widths(&self) -> (usize, usize) {
        let first = self.prompt.first().or(self.tokens.first());
        first.map_or((0, 0), |place| (place.top.len(), place.given.len()))
    }

    fn words(&self) -> usize {
        let (top, given) = self.widths();
        (self.prompt.len() + self.tokens.len()) * (1 + 2 * top + given)
    }
}

/// Bytes that [`append_answer`] adds; 0 without rows.
pub fn answer_len(rows: &[AnswerRow]) -> usize {
    let words: usize = rows.iter().map(|row| ROW + row.words()).sum();
    if words == 0 {
        0
    } else {
        WORD * (words + TRAILER)
    }
}

/// Writes rows, whose requests rise, after an answer of `len` bytes at the start of `buffer`; returns the length of both.
/// Without rows nothing is written.
///
/// # Errors
/// [`WireError::BufferTooSmall`], found out before anything is written.
pub fn append_answer(
    rows: &[AnswerRow],
    buffer: &mut [u8],
    len: usize,
) -> Result<usize, WireError> {
    let needed = answer_len(rows);
    if needed == 0 {
        return Ok(len);
    }
    let mut pen = Pen::new(buffer, len, needed)?;
    for row in rows {
        let (top, given) = row.widths();
        let counts = [row.prompt.len(), row.tokens.len(), top, given];
        pen.put(
            [row.request]
                .into_iter()
                .chain(counts.map(|count| count as u32)),
        );
    }
    for place in rows
        .iter()
        .flat_map(|row| row.prompt.iter().chain(&row.tokens))
    {
        pen.put([place.token.to_bits()]);
        pen.put(place.top.iter().map(|&(id, _)| id));
        pen.put(place.top.iter().map(|&(_, value)| value.to_bits()));
        pen.put(place.given.iter().map(|value| value.to_bits()));
    }
    let words = rows.iter().map(AnswerRow::words).sum();
    pen.end(rows.len(), words, ANSWER_MAGIC);
    Ok(len + needed)
}

/// A checked answer's log-probabilities: rows rise by their requests, and their places lie within it.
#[derive(Debug, Clone, Copy, Default)]
pub struct AnswerExtension<'a> {
    rows: &'a [[u8; WORD]],
    words: &'a [[u8; WORD]],
}

impl<'a> AnswerExtension<'a> {
    /// The rows, in the order of their requests.
    pub fn rows(&self) -> impl Iterator<Item = LogprobRow<'a>> + use<'a> {
        let mut words = self.words;
        self.rows.chunks_exact(ROW).map(move |row| {
            let [prompt, tokens] = [1, 2].map(|at| word(row, at) as usize);
            let (own, rest) = words.split_at((prompt + tokens) * width(row) as usize);
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
            let places = u64::from(word(row, 1)) + u64::from(word(row, 2));
            claimed = claimed.saturating_add(places.saturating_mul(width(row)));
        }
        let words = self.words.len();
        if claimed != words as u64 {
            return Err(ExtensionError::Words { claimed, words });
        }
        Ok(())
    }
}

/// Words of each place of a row.
fn width(row: &[[u8; WORD]]) -> u64 {
    1 + 2 * u64::from(word(row, 3)) + u64::from(word(row, 4))
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

    /// In owned values.
    pub fn to_owned(&self) -> AnswerRow {
        let mut places = self.words.chunks_exact(width(self.row) as usize);
        let (top, prompt) = (word(self.row, 3) as usize, word(self.row, 1) as usize);
        let place = |words: &'a [[u8; WORD]]| Logprobs {
            token: float(words, 0),
            top: (1..=top)
                .map(|at| (word(words, at), float(words, at + top)))
                .collect(),
            given: (1 + 2 * top..words.len())
                .map(|at| float(words, at))
                .collect(),
        };
        AnswerRow {
            request: self.request(),
            prompt: places.by_ref().take(prompt).map(place).collect(),
            tokens: places.map(place).collect(),
        }
    }
}

/// Splits an answer into what [`decode_reply`](crate::decode_reply) reads and its log-probabilities. Only an answer to a
/// request that asked for some has any.
///
/// # Errors
/// [`ExtensionError`].
pub fn split_answer(bytes: &[u8]) -> Result<(&[u8], AnswerExtension<'_>), ExtensionError> {
    let Some((reply, rows, words)) = split(bytes, ANSWER_MAGIC, ROW)? else {
        return Ok((bytes, AnswerExtension::default()));
    };
    let extension = AnswerExtension { rows, words };
    extension.check()?;
    Ok((reply, extension))
}
