//! Reading the extension of a request in place.

use super::{
    CombinedSampler, EXTENSION_MAGIC, ExtensionError, FLAGS, HAS_LOGPROBS, HAS_SAMPLER, HAS_SEED,
    LogprobsAsked, NO_PROMPT, Penalties, PromptLogprobs, ROW, RequestExtension, SCALED,
    SHARES_MASK, TRAILER, WORD, float, word,
};

/// Numbers of an extension, wherever they lie.
#[derive(Debug, Clone, Copy, Default)]
pub struct Words<'a>(&'a [[u8; WORD]]);

impl<'a> Words<'a> {
    /// How many there are.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Where they lie: of two lists that are not empty it is the same only if they are one list of one payload.
    pub fn address(&self) -> usize {
        self.0.as_ptr().addr()
    }

    /// The numbers.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u32> + Clone + use<'a> {
        self.0.iter().map(|word| u32::from_le_bytes(*word))
    }

    /// Takes the first `count`, which must be there.
    fn take(&mut self, count: usize) -> Self {
        let (first, rest) = self.0.split_at(count);
        self.0 = rest;
        Self(first)
    }
}

/// A checked extension: its rows rise by their requests, and their lists lie within it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Extension<'a> {
    rows: &'a [[u8; WORD]],
    words: Words<'a>,
}

impl<'a> Extension<'a> {
    /// The rows, in the order of their requests.
    pub const fn rows(&self) -> ExtensionRows<'a> {
        ExtensionRows {
            rows: self.rows,
            words: self.words,
            mask: Words(&[]),
        }
    }

    /// Whether no request has a row.
    pub const fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Bytes of its tables and its end.
    pub const fn bytes(&self) -> usize {
        WORD * (self.rows.len() + self.words.len() + TRAILER)
    }

    /// The request of the last row.
    pub fn last_request(&self) -> Option<u32> {
        let row = self.rows.len().checked_sub(ROW)?;
        Some(word(self.rows, row))
    }

    fn check(&self) -> Result<(), ExtensionError> {
        let mut last = None;
        let (mut claimed, mut before) = (0, 0);
        for (number, row) in self.rows.chunks_exact(ROW).enumerate() {
            let (request, flags) = (word(row, 0), word(row, 1));
            if last.is_some_and(|last| request <= last) {
                return Err(ExtensionError::Order {
                    row: number,
                    request,
                });
            }
            if flags & !FLAGS != 0 {
                return Err(ExtensionError::Flags { row: number, flags });
            }
            let ids = word(row, 17);
            if flags & HAS_LOGPROBS == 0 && ids > 0 {
                return Err(ExtensionError::UnaskedIds { row: number, ids });
            }
            let words = word(row, 19);
            if flags & SHARES_MASK != 0 && (words > 0 || before == 0) {
                return Err(ExtensionError::SharedMask {
                    row: number,
                    words,
                    before,
                });
            }
            before += usize::from(words > 0);
            last = Some(request);
            claimed += lists(row).iter().sum::<u64>();
        }
        let words = self.words.len();
        if claimed != words as u64 {
            return Err(ExtensionError::Words { claimed, words });
        }
        Ok(())
    }
}

/// Words of each list of a row.
fn lists(row: &[[u8; WORD]]) -> [u64; 5] {
    let [biases, suppressed, ids, history, mask] =
        [15, 16, 17, 18, 19].map(|at| u64::from(word(row, at)));
    [2 * biases, suppressed, ids, history, mask]
}

/// Rows one after the other.
#[derive(Debug, Clone, Default)]
pub struct ExtensionRows<'a> {
    rows: &'a [[u8; WORD]],
    words: Words<'a>,
    /// Of the last row that had one of its own.
    mask: Words<'a>,
}

impl<'a> ExtensionRows<'a> {
    /// The row of a request, if it has one; rows of requests before it are passed over.
    pub fn of(&mut self, request: usize) -> Option<ExtensionRow<'a>> {
        while let Some(next) = self.rows.first() {
            let next = u32::from_le_bytes(*next) as usize;
            if next > request {
                return None;
            }
            let row = self.next();
            if next == request {
                return row;
            }
        }
        None
    }
}

impl<'a> Iterator for ExtensionRows<'a> {
    type Item = ExtensionRow<'a>;

    fn next(&mut self) -> Option<ExtensionRow<'a>> {
        let (row, rest) = self.rows.split_at_checked(ROW)?;
        self.rows = rest;
        let [biases, suppressed, token_ids, history, mask] =
            lists(row).map(|words| self.words.take(words as usize));
        if !mask.is_empty() {
            self.mask = mask;
        }
        let shares_mask = word(row, 1) & SHARES_MASK != 0;
        Some(ExtensionRow {
            row,
            biases,
            suppressed,
            token_ids,
            history,
            mask: if shares_mask { self.mask } else { mask },
        })
    }
}

/// What one request asks for; see [`RequestExtension`].
#[derive(Debug, Clone, Copy)]
pub struct ExtensionRow<'a> {
    row: &'a [[u8; WORD]],
    biases: Words<'a>,
    /// Tokens that must not be drawn at first.
    pub suppressed: Words<'a>,
    /// Tokens whose log-probabilities are wanted.
    pub token_ids: Words<'a>,
    /// Tokens that count and lie right before the input.
    pub history: Words<'a>,
    /// Bits of the tokens that may be drawn; the very words of the row that it shares them with.
    pub mask: Words<'a>,
}

impl<'a> ExtensionRow<'a> {
    fn has(&self, flag: u32) -> bool {
        word(self.row, 1) & flag != 0
    }

    /// Index of the request in its frame.
    pub fn request(&self) -> u32 {
        word(self.row, 0)
    }

    /// In place of the parameters of its samplers of tokens.
    pub fn sampler(&self) -> Option<CombinedSampler> {
        let row = self.row;
        let seed = || u64::from(word(row, 6)) | u64::from(word(row, 7)) << 32;
        self.has(HAS_SAMPLER).then(|| CombinedSampler {
            temperature: float(row, 2),
            top_k: word(row, 3),
            top_p: float(row, 4),
            min_p: float(row, 5),
            seed: self.has(HAS_SEED).then(seed),
        })
    }

    /// See [`Penalties`].
    pub fn penalties(&self) -> Penalties {
        Penalties {
            frequency: float(self.row, 8),
            presence: float(self.row, 9),
            repetition: float(self.row, 10),
            counted_from: word(self.row, 11),
        }
    }

    /// KV index of the first place for which suppressed tokens may be drawn.
    pub fn suppressed_until(&self) -> u32 {
        word(self.row, 12)
    }

    /// Whether log-probabilities are wanted.
    pub fn wants_logprobs(&self) -> bool {
        self.has(HAS_LOGPROBS)
    }

    /// Whether they are those after the temperature.
    pub fn scaled(&self) -> bool {
        self.has(SCALED)
    }

    /// How many most probable tokens are wanted with their log-probabilities.
    pub fn top_logprobs(&self) -> u32 {
        word(self.row, 13)
    }

    /// The tokens of the prompt whose log-probabilities are wanted.
    pub fn prompt_logprobs(&self) -> Option<PromptLogprobs> {
        let [from, end, next] = [14, 20, 21].map(|at| word(self.row, at));
        (from != NO_PROMPT).then_some(PromptLogprobs { from, end, next })
    }

    /// Ids, and what is added to their logits.
    pub fn biases(&self) -> impl ExactSizeIterator<Item = (u32, f32)> + Clone + use<'a> {
        let pairs = self.biases.0.as_chunks::<2>().0;
        pairs.iter().map(|pair| (word(pair, 0), float(pair, 1)))
    }

    /// The row in owned values.
    pub fn to_owned(&self) -> RequestExtension {
        RequestExtension {
            sampler: self.sampler(),
            penalties: self.penalties(),
            history: self.history.iter().collect(),
            biases: self.biases().collect(),
            suppressed: self.suppressed.iter().collect(),
            suppressed_until: self.suppressed_until(),
            logprobs: self.wants_logprobs().then(|| LogprobsAsked {
                scaled: self.scaled(),
                top: self.top_logprobs(),
                token_ids: self.token_ids.iter().collect(),
                prompt: self.prompt_logprobs(),
            }),
            mask: if self.has(SHARES_MASK) {
                Vec::new()
            } else {
                self.mask.iter().collect()
            },
            shares_mask: self.has(SHARES_MASK),
        }
    }
}

/// Splits a request into its archive, for [`access_request`](crate::access_request), and its extension. A request that does
/// not end with [`EXTENSION_MAGIC`] has none. Nothing is copied or allocated.
///
/// # Errors
/// [`ExtensionError`].
pub fn split_request(bytes: &[u8]) -> Result<(&[u8], Extension<'_>), ExtensionError> {
    let Some((archive, rows, words)) = split(bytes, EXTENSION_MAGIC, ROW)? else {
        return Ok((bytes, Extension::default()));
    };
    let extension = Extension {
        rows,
        words: Words(words),
    };
    extension.check()?;
    Ok((archive, extension))
}

/// An archive, and the rows and words after it.
pub(super) type Parts<'a> = (&'a [u8], &'a [[u8; WORD]], &'a [[u8; WORD]]);

/// Splits a payload that ends with a magic number, whose rows have so many words each; `None` without that number.
pub(super) fn split(
    bytes: &[u8],
    magic: [u8; 8],
    row: usize,
) -> Result<Option<Parts<'_>>, ExtensionError> {
    let Some((body, trailer)) = bytes.split_last_chunk::<{ WORD * TRAILER }>() else {
        return Ok(None);
    };
    let (trailer, _) = trailer.as_chunks::<WORD>();
    if !bytes.ends_with(&magic) {
        return Ok(None);
    }
    let (rows, words) = (word(trailer, 0), word(trailer, 1));
    // Two numbers of 32 bits, so that this fits 64.
    let tables = WORD as u64 * (u64::from(rows) * row as u64 + u64::from(words));
    let start = usize::try_from(tables)
        .ok()
        .and_then(|tables| body.len().checked_sub(tables));
    let Some(start) = start else {
        return Err(ExtensionError::Length {
            rows,
            words,
            needed: tables + (WORD * TRAILER) as u64,
            len: bytes.len(),
        });
    };
    let (archive, tables) = body.split_at(start);
    let (rows, words) = tables.as_chunks::<WORD>().0.split_at(rows as usize * row);
    Ok(Some((archive, rows, words)))
}
