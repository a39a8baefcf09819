//! What the extension of a frame asks of logits, beyond the samplers of the Pie protocol.

use std::sync::Arc;

use pie_wire::{ExtensionRow, Penalties};

use crate::fault::RequestFault;
use crate::limits::Limits;
use crate::sampler::params::{Asked, Params, wrong};

/// Words of a slot's record: its row of the block table; KV indices of the first token that counts and after the last one;
/// frequency, presence and repetition penalty (bits of float32). Then its first word of biases, how many it has, and 0.
pub const RECORD_WORDS: usize = 8;
/// The record of a slot that nothing is asked of.
pub(crate) type Record = [i32; RECORD_WORDS];

/// Words of biases and history that a step has room for, next to its logit masks.
pub const STEP_EXTRA_WORDS: usize = 1 << 16;

/// Where a request stands in KV.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvPlace<'a> {
    /// The engine's row of the block table.
    pub(crate) table_row: usize,
    /// Its pages.
    pub(crate) pages: &'a [u32],
    /// KV index of its first row.
    pub(crate) prefix: u32,
    /// KV index after its last row.
    pub(crate) end: u32,
    /// Its first row of the plan.
    pub(crate) first_row: usize,
    /// Whether some of its rows are sampled.
    pub(crate) samples: bool,
}

/// What one request asks for in one step.
#[derive(Debug, Clone)]
struct Extra {
    params: Arc<Params>,
    /// Its log-probabilities are wanted.
    scores: bool,
    table_row: u32,
    prefix: u32,
    first_row: u32,
}

/// What the requests of a frame ask for.
#[derive(Debug, Default)]
pub(crate) struct Extras {
    all: Vec<Extra>,
    /// Storage slots and the tokens whose KV they have.
    history: Vec<[i64; 2]>,
    /// Tokens whose log-probabilities are asked for.
    given: usize,
    counts: bool,
    adjusts: bool,
}

impl Extras {
    pub(crate) fn clear(&mut self) {
        self.all.clear();
        self.history.clear();
        self.given = 0;
        (self.counts, self.adjusts) = (false, false);
    }

    /// Whether tokens are to be noted as they are stored.
    pub(crate) const fn counts(&self) -> bool {
        self.counts
    }

    /// Whether some request asks for other logits than the model's.
    pub(crate) const fn adjusts(&self) -> bool {
        self.adjusts
    }

    /// Tokens that were stored before the frame and that the device may not know of.
    pub(crate) fn history(&self) -> &[[i64; 2]] {
        &self.history
    }

    /// The log-probabilities that are asked for by that number.
    pub(crate) fn asked(&self, extra: u32) -> Option<&Asked> {
        let extra = self.all.get(extra as usize).filter(|extra| extra.scores)?;
        extra.params.logprobs.as_ref()
    }

    /// Tokens whose log-probabilities some request of the frame asks for.
    pub(crate) const fn given_words(&self) -> usize {
        self.given
    }

    /// Most words that a step needs for its history and biases, with so many slots.
    pub(crate) fn words(&self, slots: impl Iterator<Item = u32>) -> usize {
        let biases = |extra: u32| {
            let params = self.all.get(extra as usize).map(|extra| &extra.params);
            params.map_or(0, |params| params.biases.len() + params.suppressed.len())
        };
        2 * (self.history.len() + slots.map(biases).sum::<usize>())
    }

    /// Checks the row of a request and notes what it and its parameters ask for; returns its number.
    ///
    /// # Errors
    /// [`RequestFault::Extension`]; nothing is noted then.
    pub(crate) fn add(
        &mut self,
        row: &ExtensionRow<'_>,
        params: &Arc<Params>,
        limits: &Limits,
        place: KvPlace<'_>,
    ) -> Result<u32, RequestFault> {
        check(row, limits, place.prefix)?;
        let skipped = place.prefix - row.history.len() as u32;
        let page_size = limits.page_size;
        for (index, token) in (skipped..).zip(row.history.iter()) {
            let page = place.pages[(index / page_size) as usize];
            let slot = limits.first_slot(page) + index % page_size;
            self.history.push([i64::from(slot), i64::from(token)]);
        }
        let Params {
            penalties, biases, ..
        } = &**params;
        // Of a prompt nothing counts.
        let counts = penalties.any() && place.end > penalties.counted_from;
        self.counts |= counts;
        let suppresses = !params.suppressed.is_empty() && place.prefix < params.suppressed_until;
        self.adjusts |= place.samples && (counts || !biases.is_empty() || suppresses);
        let scores = row.wants_logprobs();
        if let Some(asked) = params.logprobs.as_ref().filter(|_| scores) {
            self.given += asked.given.len();
        }
        self.all.push(Extra {
            params: Arc::clone(params),
            scores,
            table_row: place.table_row as u32,
            prefix: place.prefix,
            first_row: place.first_row as u32,
        });
        Ok(self.all.len() as u32 - 1)
    }

    /// Writes the record of a slot on a row of the plan, and its biases as pairs of id and float32 after the first `used` of
    /// `words`. Returns the record and the words then in use, `None` when there are too few.
    pub(crate) fn put(
        &self,
        extra: u32,
        row: usize,
        (words, used): (&mut [i32], usize),
    ) -> Option<(Record, usize)> {
        let Some(extra) = self.all.get(extra as usize) else {
            return Some((EMPTY, used));
        };
        let end = extra.prefix + (row as u32 - extra.first_row) + 1;
        let params = &*extra.params;
        let biases = &params.biases;
        let suppressed = if end < params.suppressed_until {
            &params.suppressed[..]
        } else {
            &[]
        };
        let count = biases.len() + suppressed.len();
        let out = words.get_mut(used..used + 2 * count)?;
        let never = f32::NEG_INFINITY.to_bits().cast_signed();
        let pairs = biases.iter().copied();
        let pairs = pairs.chain(suppressed.iter().map(|&id| [id, never]));
        for (out, pair) in out.as_chunks_mut().0.iter_mut().zip(pairs) {
            *out = pair;
        }
        let Penalties {
            frequency,
            presence,
            repetition,
            counted_from,
        } = params.penalties;
        let counted_from = if params.penalties.any() {
            counted_from.min(end)
        } else {
            end
        };
        let [frequency, presence, repetition] =
            [frequency, presence, repetition].map(|value| value.to_bits().cast_signed());
        let record = [
            extra.table_row as i32,
            counted_from as i32,
            end as i32,
            frequency,
            presence,
            repetition,
            used as i32,
            count as i32,
        ];
        Some((record, used + 2 * count))
    }
}

/// Nothing counts, and there are no biases.
pub(crate) const EMPTY: Record = [0; RECORD_WORDS];

fn check(row: &ExtensionRow<'_>, limits: &Limits, prefix: u32) -> Result<(), RequestFault> {
    let vocab_size = limits.vocab_size;
    if let Some(id) = row.history.iter().find(|&id| id >= vocab_size) {
        return Err(wrong("history", &id, "ids of the vocabulary"));
    }
    if row.history.len() > prefix as usize {
        let tokens = row.history.len();
        return Err(wrong("history", &tokens, "no longer than what is stored"));
    }
    let words = row.mask.len();
    if words != 0 && words != limits.mask_words() {
        return Err(wrong(
            "mask",
            &words,
            "one bit for each token, in whole words",
        ));
    }
    let next = row.prompt_logprobs().map(|prompt| prompt.next);
    match next.filter(|&next| next >= vocab_size) {
        Some(next) => Err(wrong("next_token", &next, "an id of the vocabulary")),
        None => Ok(()),
    }
}
