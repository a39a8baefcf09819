//! Reading the parameters of contexts.

use super::read::WordSlice;
use super::{
    CombinedSampler, ExtensionError, HAS_LOGPROBS, HAS_SAMPLER, HAS_SEED, LogprobOptions,
    MAX_HANDLES, NO_HANDLE, PARAMS, PARAMS_FLAGS, Penalties, RequestExtension, SCALED, WORD, float,
    word,
};

/// Records of parameters one after the other.
#[derive(Debug, Clone, Default)]
pub struct ParamsRows<'a> {
    pub(super) rows: &'a [[u8; WORD]],
    pub(super) words: WordSlice<'a>,
}

impl<'a> Iterator for ParamsRows<'a> {
    type Item = ParamsRow<'a>;

    fn next(&mut self) -> Option<ParamsRow<'a>> {
        let (row, rest) = self.rows.split_at_checked(PARAMS)?;
        self.rows = rest;
        let [biases, suppressed, token_ids, processor] =
            lists(row).map(|words| self.words.take(words as usize));
        Some(ParamsRow {
            row,
            biases,
            suppressed,
            token_ids,
            processor,
        })
    }
}

/// Parameters of a context; see [`RequestExtension`].
#[derive(Debug, Clone, Copy)]
pub struct ParamsRow<'a> {
    row: &'a [[u8; WORD]],
    biases: WordSlice<'a>,
    /// Tokens that may not be sampled at first.
    pub suppressed: WordSlice<'a>,
    /// Further tokens whose log-probabilities are requested.
    pub token_ids: WordSlice<'a>,
    /// Its logit processor, padded to whole words.
    processor: WordSlice<'a>,
}

impl<'a> ParamsRow<'a> {
    fn has(&self, flag: u32) -> bool {
        word(self.row, 1) & flag != 0
    }

    /// Handle to register them under, replacing earlier ones; `None` = for this frame only.
    pub fn handle(&self) -> Option<u32> {
        let handle = word(self.row, 0);
        (handle != NO_HANDLE).then_some(handle)
    }

    /// Replaces the token samplers.
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

    /// KV index from which on suppressed tokens may be sampled.
    pub fn suppressed_until(&self) -> u32 {
        word(self.row, 12)
    }

    /// Whether log-probabilities are requested.
    pub fn has_logprobs(&self) -> bool {
        self.has(HAS_LOGPROBS)
    }

    /// Whether they are those after the temperature.
    pub fn scaled(&self) -> bool {
        self.has(SCALED)
    }

    /// Number of most probable tokens with log-probabilities.
    pub fn top_logprobs(&self) -> u32 {
        word(self.row, 13)
    }

    /// Numbers of a row's hidden state, if these are requested.
    pub fn hidden(&self) -> u32 {
        word(self.row, 18)
    }

    /// Logit biases: ids and values.
    pub fn biases(&self) -> impl ExactSizeIterator<Item = (u32, f32)> + Clone + use<'a> {
        let pairs = self.biases.pairs();
        pairs.iter().map(|pair| (word(pair, 0), float(pair, 1)))
    }

    /// Its logit processor; empty for none.
    pub fn processor(&self) -> &'a [u8] {
        &self.processor.bytes()[..word(self.row, 17) as usize]
    }

    /// Words of its lists.
    pub const fn list_words(&self) -> usize {
        self.biases.len() + self.suppressed.len() + self.token_ids.len() + self.processor.len()
    }

    /// In owned values, without what a step adds.
    pub fn to_owned(&self) -> RequestExtension {
        RequestExtension {
            sampler: self.sampler(),
            penalties: self.penalties(),
            biases: self.biases().collect(),
            suppressed: self.suppressed.iter().collect(),
            suppressed_until: self.suppressed_until(),
            logprobs: self.has_logprobs().then(|| LogprobOptions {
                scaled: self.scaled(),
                top: self.top_logprobs(),
                token_ids: self.token_ids.iter().collect(),
                hidden: self.hidden(),
                prompt: None,
            }),
            processor: self.processor().to_vec(),
            ..RequestExtension::default()
        }
    }
}

/// Words of each list of a record: biases, suppressed tokens, ids, processor.
fn lists(row: &[[u8; WORD]]) -> [u64; 4] {
    let [biases, suppressed, ids, bytes] = [14, 15, 16, 17].map(|at| u64::from(word(row, at)));
    [2 * biases, suppressed, ids, bytes.div_ceil(WORD as u64)]
}

/// Checks records, and returns the words that their lists take.
pub(super) fn check(rows: &[[u8; WORD]]) -> Result<u64, ExtensionError> {
    let table = "record";
    let mut claimed = 0;
    for (number, row) in rows.chunks_exact(PARAMS).enumerate() {
        let (handle, flags, ids) = (word(row, 0), word(row, 1), word(row, 16));
        if flags & !PARAMS_FLAGS != 0 {
            return Err(ExtensionError::Flags {
                table,
                row: number,
                flags,
                known: PARAMS_FLAGS,
            });
        }
        if handle >= MAX_HANDLES && handle != NO_HANDLE {
            return Err(ExtensionError::Params {
                table,
                row: number,
                params: handle,
                limit: MAX_HANDLES,
            });
        }
        if flags & HAS_LOGPROBS == 0 && ids > 0 {
            return Err(ExtensionError::UnexpectedIds { row: number, ids });
        }
        claimed += lists(row).iter().sum::<u64>();
    }
    Ok(claimed)
}
