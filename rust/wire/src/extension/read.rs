//! Reading the extension of a request in place.

use super::params::{self, ParamsRows};
use super::{
    EXTENSION_MAGIC, ExtensionError, HAS_LOGPROBS, IN_FRAME, LogprobOptions, MAX_HANDLES,
    NO_HANDLE, PARAMS, ParamsRef, PromptLogprobs, ROW, ROW_FLAGS, RequestExtension, SHARES_MASK,
    TRAILER, WORD, word,
};

/// A slice of unaligned little-endian u32 words.
#[derive(Debug, Clone, Copy, Default)]
pub struct WordSlice<'a>(&'a [[u8; WORD]]);

impl<'a> WordSlice<'a> {
    /// How many there are.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Address, which identifies a non-empty list within a payload.
    pub fn address(&self) -> usize {
        self.0.as_ptr().addr()
    }

    /// The numbers.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u32> + Clone + use<'a> {
        self.0.iter().map(|word| u32::from_le_bytes(*word))
    }

    /// Their bytes.
    pub(super) const fn bytes(&self) -> &'a [u8] {
        self.0.as_flattened()
    }

    /// Two by two.
    pub(super) const fn pairs(&self) -> &'a [[[u8; WORD]; 2]] {
        self.0.as_chunks().0
    }

    /// Takes the first `count`, which must be there.
    pub(super) fn take(&mut self, count: usize) -> Self {
        let (first, rest) = self.0.split_at(count);
        self.0 = rest;
        Self(first)
    }
}

/// A validated extension: rows have ascending requests, and lists are in bounds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Extension<'a> {
    params: &'a [[u8; WORD]],
    rows: &'a [[u8; WORD]],
    /// Lists of the parameters, then of the rows.
    words: WordSlice<'a>,
    /// Words of the former.
    params_words: usize,
}

impl<'a> Extension<'a> {
    /// Parameters that the rows of this frame, or of later ones, name. They hold in their order, before any row.
    pub const fn params(&self) -> ParamsRows<'a> {
        ParamsRows {
            rows: self.params,
            words: self.words,
        }
    }

    /// The rows, in the order of their requests.
    pub fn rows(&self) -> ExtensionRows<'a> {
        let mut words = self.words;
        words.take(self.params_words);
        ExtensionRows {
            rows: self.rows,
            words,
            mask: WordSlice(&[]),
        }
    }

    /// Whether it has neither parameters nor rows.
    pub const fn is_empty(&self) -> bool {
        self.params.is_empty() && self.rows.is_empty()
    }

    /// Bytes of its tables and its end.
    pub const fn bytes(&self) -> usize {
        WORD * (self.params.len() + self.rows.len() + self.words.len() + TRAILER)
    }

    /// The request of the last row.
    pub fn last_request(&self) -> Option<u32> {
        let row = self.rows.len().checked_sub(ROW)?;
        Some(word(self.rows, row))
    }

    /// Its rows in owned values. Parameters that a frame before brought are taken for none.
    pub fn to_owned(&self) -> Vec<(u32, RequestExtension)> {
        let params = |row: &ExtensionRow<'_>| match row.params() {
            ParamsRef::None => None,
            ParamsRef::InFrame(number) => self.params().nth(number as usize),
            ParamsRef::Kept(handle) => self
                .params()
                .filter(|it| it.handle() == Some(handle))
                .last(),
        };
        let owned = |row: ExtensionRow<'_>| {
            let params = params(&row).map(|params| params.to_owned());
            (row.request(), row.to_owned(params.unwrap_or_default()))
        };
        self.rows().map(owned).collect()
    }

    fn check(&mut self) -> Result<(), ExtensionError> {
        let mut claimed = params::check(self.params)?;
        // More than there are is refused below.
        self.params_words = usize::try_from(claimed).unwrap_or(usize::MAX);
        let records = (self.params.len() / PARAMS) as u32;
        let (mut last, mut before) = (None, 0);
        for (number, row) in self.rows.chunks_exact(ROW).enumerate() {
            let request = word(row, 0);
            if last.is_some_and(|last| request <= last) {
                return Err(ExtensionError::Order {
                    row: number,
                    request,
                });
            }
            last = Some(request);
            check_row(number, row, (records, before))?;
            before += usize::from(word(row, 7) > 0);
            claimed += lists(row).iter().sum::<u64>();
        }
        let words = self.words.len();
        if claimed != words as u64 {
            return Err(ExtensionError::Words { claimed, words });
        }
        Ok(())
    }
}

/// Checks a row in a frame with so many records of parameters, and so many rows before it that have masks of their own.
fn check_row(
    number: usize,
    row: &[[u8; WORD]],
    (records, before): (u32, usize),
) -> Result<(), ExtensionError> {
    let (flags, params, words) = (word(row, 1), word(row, 2), word(row, 7));
    if flags & !ROW_FLAGS != 0 {
        return Err(ExtensionError::Flags {
            table: "row",
            row: number,
            flags,
            known: ROW_FLAGS,
        });
    }
    let in_frame = flags & IN_FRAME != 0;
    let limit = if in_frame { records } else { MAX_HANDLES };
    if params >= limit && (in_frame || params != NO_HANDLE) {
        return Err(ExtensionError::Params {
            table: "row",
            row: number,
            params,
            limit,
        });
    }
    if flags & SHARES_MASK != 0 && (words > 0 || before == 0) {
        return Err(ExtensionError::SharedMask {
            row: number,
            words,
            before,
        });
    }
    Ok(())
}

/// Words of each list of a row: history, mask.
fn lists(row: &[[u8; WORD]]) -> [u64; 2] {
    [6, 7].map(|at| u64::from(word(row, at)))
}

/// Rows one after the other.
#[derive(Debug, Clone, Default)]
pub struct ExtensionRows<'a> {
    rows: &'a [[u8; WORD]],
    words: WordSlice<'a>,
    /// Of the last row that had one of its own.
    mask: WordSlice<'a>,
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
        let [history, mask] = lists(row).map(|words| self.words.take(words as usize));
        if !mask.is_empty() {
            self.mask = mask;
        }
        let shares_mask = word(row, 1) & SHARES_MASK != 0;
        Some(ExtensionRow {
            row,
            history,
            mask: if shares_mask { self.mask } else { mask },
        })
    }
}

/// The row of a request in one step; see [`RequestExtension`].
#[derive(Debug, Clone, Copy)]
pub struct ExtensionRow<'a> {
    row: &'a [[u8; WORD]],
    /// Tokens right before the input that penalties count, or a logit processor sees.
    pub history: WordSlice<'a>,
    /// Bit mask of allowed tokens; shared masks have the same address.
    pub mask: WordSlice<'a>,
}

impl ExtensionRow<'_> {
    fn has(&self, flag: u32) -> bool {
        word(self.row, 1) & flag != 0
    }

    /// Index of the request in its frame.
    pub fn request(&self) -> u32 {
        word(self.row, 0)
    }

    /// Where its parameters are.
    pub fn params(&self) -> ParamsRef {
        match word(self.row, 2) {
            number if self.has(IN_FRAME) => ParamsRef::InFrame(number),
            NO_HANDLE => ParamsRef::None,
            handle => ParamsRef::Kept(handle),
        }
    }

    /// Whether this step returns log-probabilities.
    pub fn returns_logprobs(&self) -> bool {
        self.has(HAS_LOGPROBS)
    }

    /// Requested prompt log-probabilities.
    pub fn prompt_logprobs(&self) -> Option<PromptLogprobs> {
        let [from, end, next] = [3, 4, 5].map(|at| word(self.row, at));
        (from != super::NO_PROMPT).then_some(PromptLogprobs { from, end, next })
    }

    /// The row with these parameters in owned values.
    #[must_use]
    pub fn to_owned(self, params: RequestExtension) -> RequestExtension {
        let shares_mask = self.has(SHARES_MASK);
        let wants = |_: &LogprobOptions| self.returns_logprobs();
        RequestExtension {
            logprobs: params.logprobs.filter(wants).map(|asked| LogprobOptions {
                prompt: self.prompt_logprobs(),
                ..asked
            }),
            history: self.history.iter().collect(),
            mask: if shares_mask {
                Vec::new()
            } else {
                self.mask.iter().collect()
            },
            shares_mask,
            ..params
        }
    }
}

/// Splits a request into its archive, for [`access_request`](crate::access_request), and its extension. A request that does
/// not end with [`EXTENSION_MAGIC`] has none. Nothing is copied or allocated.
///
/// # Errors
/// [`ExtensionError`].
pub fn split_request(bytes: &[u8]) -> Result<(&[u8], Extension<'_>), ExtensionError> {
    let Some((archive, [params, rows], words)) = split(bytes, EXTENSION_MAGIC, [PARAMS, ROW])?
    else {
        return Ok((bytes, Extension::default()));
    };
    let mut extension = Extension {
        params,
        rows,
        words: WordSlice(words),
        params_words: 0,
    };
    extension.check()?;
    Ok((archive, extension))
}

/// An archive, and the tables and words after it.
pub(super) type SplitPayload<'a, const TABLES: usize> =
    (&'a [u8], [&'a [[u8; WORD]]; TABLES], &'a [[u8; WORD]]);

/// Splits a payload that ends with a magic number, whose tables have rows of so many words each; `None` without that number.
pub(super) fn split<const TABLES: usize>(
    bytes: &[u8],
    magic: [u8; 8],
    sizes: [usize; TABLES],
) -> Result<Option<SplitPayload<'_, TABLES>>, ExtensionError> {
    // Rows of each table, words after them, magic number.
    let trailer = WORD * (TABLES + 3);
    let Some(body) = bytes.len().checked_sub(trailer) else {
        return Ok(None);
    };
    if !bytes.ends_with(&magic) {
        return Ok(None);
    }
    let (body, trailer) = bytes.split_at(body);
    let (trailer, _) = trailer.as_chunks::<WORD>();
    let counts: [u32; TABLES] = std::array::from_fn(|table| word(trailer, table));
    let words = word(trailer, TABLES);
    let rows = counts.iter().zip(sizes);
    // Numbers of 32 bits times small ones: this fits 64.
    let rows: u64 = rows
        .map(|(&rows, size)| u64::from(rows) * size as u64)
        .sum();
    let tables = WORD as u64 * (rows + u64::from(words));
    let start = usize::try_from(tables)
        .ok()
        .and_then(|tables| body.len().checked_sub(tables));
    let Some(start) = start else {
        return Err(ExtensionError::Length {
            rows: counts.iter().copied().map(u64::from).sum(),
            words,
            needed: tables + (WORD * (TABLES + 3)) as u64,
            len: bytes.len(),
        });
    };
    let (archive, tables) = body.split_at(start);
    let (mut tables, _) = tables.as_chunks::<WORD>();
    let parts = std::array::from_fn(|table| {
        let (part, rest) = tables.split_at(counts[table] as usize * sizes[table]);
        tables = rest;
        part
    });
    Ok(Some((archive, parts, tables)))
}
