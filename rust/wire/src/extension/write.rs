//! Writing the extension of a request.

use super::{
    EXTENSION_MAGIC, HAS_LOGPROBS, HAS_SAMPLER, HAS_SEED, NO_PROMPT, ROW, RequestExtension, SCALED,
    SHARES_MASK, TRAILER, WORD,
};
use crate::error::WireError;

/// Writes words one after the other.
pub(super) struct Pen<'a> {
    out: std::slice::IterMut<'a, [u8; WORD]>,
}

impl<'a> Pen<'a> {
    /// A pen for exactly `needed` bytes of `buffer` from `at` on.
    pub(super) fn new(buffer: &'a mut [u8], at: usize, needed: usize) -> Result<Self, WireError> {
        let capacity = buffer.len();
        let end = at.saturating_add(needed);
        let room = buffer.get_mut(at..end).ok_or(WireError::BufferTooSmall {
            needed: end,
            capacity,
        })?;
        Ok(Self {
            out: room.as_chunks_mut().0.iter_mut(),
        })
    }

    pub(super) fn put(&mut self, words: impl IntoIterator<Item = u32>) {
        // The room was measured, so that none is left out.
        for (word, out) in words.into_iter().zip(&mut self.out) {
            *out = word.to_le_bytes();
        }
    }

    pub(super) fn end(&mut self, rows: usize, words: usize, magic: [u8; 8]) {
        let [first, second] = [0, 4]
            .map(|at| u32::from_le_bytes([magic[at], magic[at + 1], magic[at + 2], magic[at + 3]]));
        self.put([rows as u32, words as u32, first, second]);
    }
}

/// Words of the lists of a row.
fn list_words(row: &RequestExtension) -> usize {
    let ids = row
        .logprobs
        .as_ref()
        .map_or(0, |asked| asked.token_ids.len());
    2 * row.biases.len() + row.suppressed.len() + ids + row.history.len() + row.mask.len()
}

/// Bytes that [`append_extension`] adds; 0 without rows.
pub fn extension_len<'a>(rows: impl IntoIterator<Item = (u32, &'a RequestExtension)>) -> usize {
    let words: usize = (rows.into_iter())
        .map(|(_, row)| ROW + list_words(row))
        .sum();
    if words == 0 {
        0
    } else {
        WORD * (words + TRAILER)
    }
}

/// Writes the rows, each with the index of its request, which rise, after an archive of `len` bytes at the start of
/// `buffer`, and returns the length of both. Without rows nothing is written.
///
/// # Errors
/// [`WireError::BufferTooSmall`], found out before anything is written.
pub fn append_extension<'a, R>(rows: R, buffer: &mut [u8], len: usize) -> Result<usize, WireError>
where
    R: IntoIterator<Item = (u32, &'a RequestExtension)> + Clone,
{
    let needed = extension_len(rows.clone());
    if needed == 0 {
        return Ok(len);
    }
    let mut pen = Pen::new(buffer, len, needed)?;
    let (mut count, mut words) = (0, 0);
    for (request, row) in rows.clone() {
        pen.put(row_words(request, row));
        count += 1;
        words += list_words(row);
    }
    for (_, row) in rows {
        pen.put(
            row.biases
                .iter()
                .flat_map(|&(id, value)| [id, value.to_bits()]),
        );
        pen.put(row.suppressed.iter().copied());
        let ids = row.logprobs.iter().flat_map(|asked| &asked.token_ids);
        pen.put(ids.copied());
        pen.put(row.history.iter().copied());
        pen.put(row.mask.iter().copied());
    }
    pen.end(count, words, EXTENSION_MAGIC);
    Ok(len + needed)
}

fn row_words(request: u32, row: &RequestExtension) -> [u32; ROW] {
    let (sampler, asked) = (row.sampler.as_ref(), row.logprobs.as_ref());
    let prompt = asked.and_then(|asked| asked.prompt);
    let seed = sampler.and_then(|sampler| sampler.seed);
    let flag = |set: bool, flag: u32| if set { flag } else { 0 };
    let flags = flag(sampler.is_some(), HAS_SAMPLER)
        | flag(seed.is_some(), HAS_SEED)
        | flag(asked.is_some(), HAS_LOGPROBS)
        | flag(asked.is_some_and(|asked| asked.scaled), SCALED)
        | flag(row.shares_mask, SHARES_MASK);
    let seed = seed.unwrap_or(0);
    let penalties = &row.penalties;
    [
        request,
        flags,
        sampler.map_or(0, |sampler| sampler.temperature.to_bits()),
        sampler.map_or(0, |sampler| sampler.top_k),
        sampler.map_or(0, |sampler| sampler.top_p.to_bits()),
        sampler.map_or(0, |sampler| sampler.min_p.to_bits()),
        seed as u32,
        (seed >> 32) as u32,
        penalties.frequency.to_bits(),
        penalties.presence.to_bits(),
        penalties.repetition.to_bits(),
        penalties.counted_from,
        row.suppressed_until,
        asked.map_or(0, |asked| asked.top),
        prompt.map_or(NO_PROMPT, |prompt| prompt.from),
        row.biases.len() as u32,
        row.suppressed.len() as u32,
        asked.map_or(0, |asked| asked.token_ids.len() as u32),
        row.history.len() as u32,
        row.mask.len() as u32,
        prompt.map_or(0, |prompt| prompt.end),
        prompt.map_or(0, |prompt| prompt.next),
    ]
}
