//! Writing the extension of a request.

use super::{
    EXTENSION_MAGIC, HAS_LOGPROBS, HAS_SAMPLER, HAS_SEED, IN_FRAME, NO_HANDLE, NO_PROMPT, PARAMS,
    ParamsRef, PromptLogprobs, ROW, RequestExtension, SCALED, SHARES_MASK, TRAILER, WORD,
};
use crate::error::WireError;

/// Parameters to write; history, mask and prompt log-probabilities are ignored.
#[derive(Debug, Clone, Copy)]
pub struct Params<'a> {
    /// Handle to register them under; `None` = for this frame only.
    pub handle: Option<u32>,
    /// The parameters.
    pub asked: &'a RequestExtension,
}

/// A row to write; see [`RequestExtension`].
#[derive(Debug, Clone, Copy, Default)]
pub struct StepRow<'a> {
    /// Index of the request in its frame.
    pub request: u32,
    /// Where its parameters are.
    pub params: ParamsRef,
    /// Whether this step returns log-probabilities.
    pub returns_logprobs: bool,
    /// Prompt log-probabilities.
    pub prompt: Option<PromptLogprobs>,
    /// Tokens right before the input that penalties count.
    pub history: &'a [u32],
    /// Bit mask of allowed tokens; empty = all.
    pub mask: &'a [u32],
    /// Uses the mask of the nearest row before.
    pub shares_mask: bool,
}

impl<'a> StepRow<'a> {
    /// The row of a request whose parameters are record `number` of its frame.
    fn of(number: u32, request: u32, asked: &'a RequestExtension) -> Self {
        Self {
            request,
            params: ParamsRef::InFrame(number),
            returns_logprobs: asked.logprobs.is_some(),
            prompt: asked.logprobs.as_ref().and_then(|asked| asked.prompt),
            history: &asked.history,
            mask: &asked.mask,
            shares_mask: asked.shares_mask,
        }
    }
}

/// Writes words one after the other.
pub(super) struct WordWriter<'a> {
    out: std::slice::IterMut<'a, [u8; WORD]>,
}

impl<'a> WordWriter<'a> {
    /// A pen for exactly `needed` bytes of `buffer` from `at` on.
    pub(super) fn new(buffer: &'a mut [u8], at: usize, needed: usize) -> Result<Self, WireError> {
        let capacity = buffer.len();
        let end = at.saturating_add(needed);
        let out = buffer.get_mut(at..end).ok_or(WireError::BufferTooSmall {
            needed: end,
            capacity,
        })?;
        Ok(Self {
            out: out.as_chunks_mut().0.iter_mut(),
        })
    }

    pub(super) fn put(&mut self, words: impl IntoIterator<Item = u32>) {
        // The length was measured, so that none is left out.
        for (word, out) in words.into_iter().zip(&mut self.out) {
            *out = word.to_le_bytes();
        }
    }

    /// Writes bytes, padded to whole words.
    fn put_bytes(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<WORD>();
        self.put(words.iter().map(|word| u32::from_le_bytes(*word)));
        if !rest.is_empty() {
            let mut last = [0; WORD];
            last[..rest.len()].copy_from_slice(rest);
            self.put([u32::from_le_bytes(last)]);
        }
    }

    /// Writes how many rows each table has, how many words follow them, and the magic number.
    pub(super) fn end<const TABLES: usize>(
        &mut self,
        rows: [usize; TABLES],
        words: usize,
        magic: [u8; 8],
    ) {
        self.put(rows.map(|rows| rows as u32));
        let (magic, _) = magic.as_chunks();
        self.put([words as u32]);
        self.put(magic.iter().map(|word| u32::from_le_bytes(*word)));
    }
}

/// Words of the lists of a record.
fn params_words(asked: &RequestExtension) -> usize {
    let ids = (asked.logprobs.as_ref()).map_or(0, |asked| asked.token_ids.len());
    let processor = asked.processor.len().div_ceil(WORD);
    2 * asked.biases.len() + asked.suppressed.len() + ids + processor
}

/// Bytes of parameters with their lists.
pub fn params_len(asked: &RequestExtension) -> usize {
    WORD * (PARAMS + params_words(asked))
}

/// Bytes that [`append_extension`] adds; 0 without rows.
pub fn extension_len<'a>(rows: impl IntoIterator<Item = (u32, &'a RequestExtension)>) -> usize {
    let own = |row: &RequestExtension| {
        params_len(row) + WORD * (ROW + row.history.len() + row.mask.len())
    };
    match rows.into_iter().map(|(_, row)| own(row)).sum() {
        0 => 0,
        rows => rows + WORD * TRAILER,
    }
}

/// As [`write_extension`], of requests whose parameters are not kept.
///
/// # Errors
/// As there.
pub fn append_extension<'a>(
    rows: impl IntoIterator<Item = (u32, &'a RequestExtension)>,
    buffer: &mut [u8],
    len: usize,
) -> Result<usize, WireError> {
    let rows: Vec<_> = rows.into_iter().collect();
    let params = rows.iter().map(|&(_, asked)| Params {
        handle: None,
        asked,
    });
    let rows = (0..).zip(&rows);
    let rows = rows.map(|(number, &(request, asked))| StepRow::of(number, request, asked));
    write_extension(params, rows, buffer, len)
}

/// Writes parameters and rows, whose requests rise, after an archive of `len` bytes at the start of `buffer`, and returns the
/// length of both. Without either nothing is written.
///
/// # Errors
/// [`WireError::BufferTooSmall`], found out before anything is written.
pub fn write_extension<'a>(
    params: impl Iterator<Item = Params<'a>> + Clone,
    rows: impl Iterator<Item = StepRow<'a>> + Clone,
    buffer: &mut [u8],
    len: usize,
) -> Result<usize, WireError> {
    let (mut counts, mut words) = ([0, 0], 0);
    for Params { asked, .. } in params.clone() {
        counts[0] += 1;
        words += params_words(asked);
    }
    for row in rows.clone() {
        counts[1] += 1;
        words += row.history.len() + row.mask.len();
    }
    if counts == [0, 0] {
        return Ok(len);
    }
    let needed = WORD * (PARAMS * counts[0] + ROW * counts[1] + words + TRAILER);
    let mut writer = WordWriter::new(buffer, len, needed)?;
    params.clone().for_each(|it| writer.put(record(it)));
    rows.clone().for_each(|it| writer.put(row(&it)));
    for Params { asked, .. } in params {
        let biases = asked.biases.iter();
        writer.put(biases.flat_map(|&(id, value)| [id, value.to_bits()]));
        writer.put(asked.suppressed.iter().copied());
        let ids = asked.logprobs.iter().flat_map(|asked| &asked.token_ids);
        writer.put(ids.copied());
        writer.put_bytes(&asked.processor);
    }
    for row in rows {
        writer.put(row.history.iter().copied());
        writer.put(row.mask.iter().copied());
    }
    writer.end(counts, words, EXTENSION_MAGIC);
    Ok(len + needed)
}

const fn flag(set: bool, flag: u32) -> u32 {
    if set { flag } else { 0 }
}

fn record(Params { handle, asked }: Params<'_>) -> [u32; PARAMS] {
    let (sampler, logprobs) = (asked.sampler.as_ref(), asked.logprobs.as_ref());
    let seed = sampler.and_then(|sampler| sampler.seed);
    let flags = flag(sampler.is_some(), HAS_SAMPLER)
        | flag(seed.is_some(), HAS_SEED)
        | flag(logprobs.is_some(), HAS_LOGPROBS)
        | flag(logprobs.is_some_and(|asked| asked.scaled), SCALED);
    let seed = seed.unwrap_or(0);
    let penalties = &asked.penalties;
    [
        handle.unwrap_or(NO_HANDLE),
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
        asked.suppressed_until,
        logprobs.map_or(0, |asked| asked.top),
        asked.biases.len() as u32,
        asked.suppressed.len() as u32,
        logprobs.map_or(0, |asked| asked.token_ids.len() as u32),
        asked.processor.len() as u32,
        logprobs.map_or(0, |asked| asked.hidden),
    ]
}

fn row(row: &StepRow<'_>) -> [u32; ROW] {
    let (in_frame, params) = match row.params {
        ParamsRef::None => (false, NO_HANDLE),
        ParamsRef::InFrame(number) => (true, number),
        ParamsRef::Kept(handle) => (false, handle),
    };
    [
        row.request,
        flag(in_frame, IN_FRAME)
            | flag(row.returns_logprobs, HAS_LOGPROBS)
            | flag(row.shares_mask, SHARES_MASK),
        params,
        row.prompt.map_or(NO_PROMPT, |prompt| prompt.from),
        row.prompt.map_or(0, |prompt| prompt.end),
        row.prompt.map_or(0, |prompt| prompt.next),
        row.history.len() as u32,
        row.mask.len() as u32,
    ]
}
