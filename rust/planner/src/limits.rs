//! Limits of the model, its KV pool and the configuration.

use thiserror::Error;

/// Words of attention masks that every pass may have: 4 MiB.
const ATTENTION_WORDS: usize = 1 << 20;

/// Limits of every plan, in the units that the fields name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of one KV page.
    pub page_size: u32,
    /// Pages that the runtime may name: ids `0..total_pages`.
    pub total_pages: u32,
    /// Rows of the embedding table: token ids `0..vocab_size`.
    pub vocab_size: u32,
    /// Rows of the position table: positions `0..max_positions`.
    pub max_positions: u32,
    /// Pages of one block-table row, which bounds the KV length of one request.
    pub row_pages: u32,
    /// Requests of one pass (rows of the block table).
    pub max_requests: u32,
    /// Tokens of one pass.
    pub chunk_tokens: u32,
    /// Sampling slots (logit rows) computed at once.
    pub max_slots: u32,
    /// Bytes of a response.
    pub reply_bytes: u32,
}

/// An unusable limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LimitError {
    /// A limit is 0.
    #[error("{0} is 0, must be at least 1")]
    Zero(&'static str),
    /// A product of limits exceeds a 31-bit index.
    #[error("{what} is {value}, more than the {} that 31 bits count", i32::MAX)]
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// Its value.
        value: u64,
    },
}

impl Limits {
    /// Checks that no limit is 0 and every derived index fits 31 bits.
    ///
    /// # Errors
    /// [`LimitError`] names the first limit that is 0 or too large.
    pub fn check(&self) -> Result<(), LimitError> {
        let limits = [
            ("page_size", self.page_size),
            ("total_pages", self.total_pages),
            ("vocab_size", self.vocab_size),
            ("max_positions", self.max_positions),
            ("row_pages", self.row_pages),
            ("max_requests", self.max_requests),
            ("chunk_tokens", self.chunk_tokens),
            ("max_slots", self.max_slots),
            ("reply_bytes", self.reply_bytes),
        ];
        if let Some((name, _)) = limits.into_iter().find(|&(_, value)| value == 0) {
            return Err(LimitError::Zero(name));
        }
        let products = [
            (
                "the storage slots of the pool",
                (u64::from(self.total_pages) + 1) * u64::from(self.page_size),
            ),
            (
                "the entries of the block table",
                u64::from(self.max_requests) * u64::from(self.row_pages),
            ),
            ("the KV length of a request", self.max_kv_len()),
            ("vocab_size", u64::from(self.vocab_size)),
            ("chunk_tokens", u64::from(self.chunk_tokens)),
            // Relative pointers of the response have 31 bits too.
            ("reply_bytes", u64::from(self.reply_bytes)),
            (
                "the words of the packed logit masks",
                u64::from(self.max_slots) * self.mask_words() as u64,
            ),
        ];
        let large = products
            .into_iter()
            .find(|&(_, value)| value > i32::MAX as u64);
        large.map_or(Ok(()), |(what, value)| {
            Err(LimitError::TooLarge { what, value })
        })
    }

    /// Longest KV sequence of one request, in tokens.
    #[must_use]
    pub const fn max_kv_len(&self) -> u64 {
        self.row_pages as u64 * self.page_size as u64
    }

    /// Words of one packed logit mask.
    #[must_use]
    pub const fn mask_words(&self) -> usize {
        self.vocab_size.div_ceil(32) as usize
    }

    /// Words for the block-table updates of a step beyond those in its block: a full row.
    #[must_use]
    pub const fn extra_update_words(&self) -> usize {
        2 * self.row_pages as usize
    }

    /// Maximum words of the attention masks of one pass. A full pass of one context without cached prefix always fits, and so
    /// does one token of the longest context.
    #[must_use]
    pub const fn attention_words(&self) -> usize {
        let (chunk, row) = (
            self.chunk_tokens as usize,
            self.max_kv_len().div_ceil(32) as usize,
        );
        let own = chunk * chunk.div_ceil(32);
        let least = if own > ATTENTION_WORDS {
            own
        } else {
            ATTENTION_WORDS
        };
        let least = if row > least { row } else { least };
        if chunk * row < least {
            chunk * row
        } else {
            least
        }
    }

    /// KV slots of the whole pool, the padding page included.
    #[must_use]
    pub const fn storage_slots(&self) -> usize {
        (self.total_pages as usize + 1) * self.page_size as usize
    }

    /// The block-table update that sets entry `column` of `row` to `page`: `[entry index, first KV slot of the page]`. Row 0 of the
    /// engine's table is for padding.
    pub(crate) fn table_update(&self, row: usize, column: usize, page: u32) -> [i64; 2] {
        let entry = (row as i64 + 1) * i64::from(self.row_pages) + column as i64;
        [entry, i64::from(self.first_slot(page))]
    }

    /// First KV slot of `page`. The engine keeps page 0 of its pool as the padding page, so the runtime's
    /// page `p` is the pool's page `p + 1`.
    #[must_use]
    pub const fn first_slot(&self, page: u32) -> u32 {
        (page + 1) * self.page_size
    }
}
