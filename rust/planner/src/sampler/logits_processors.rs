//! Logits processors of the extension: penalties, logit biases, suppressed tokens, log-probabilities.

use std::sync::Arc;

use pie_wire::{ExtensionRow, Penalties};

use crate::error::RequestError;
use crate::limits::Limits;
use crate::range32::Range32;
use crate::sampler::params::{ContextParams, LogprobOptions, wrong};

/// Words of a slot's record: block-table row; KV index range `[first, end)` of tokens that penalties count; frequency, presence
/// and repetition penalty (bits of float32); first word of its biases, and their number.
pub const RECORD_WORDS: usize = 8;
/// Penalty and bias record of a slot.
pub(crate) type LogitsRecord = [i32; RECORD_WORDS];

/// Maximum words of biases and token history of a step, next to its logit masks.
pub const STEP_EXTRA_WORDS: usize = 1 << 16;

/// KV location of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestKv<'a> {
    /// Block-table row in the engine.
    pub(crate) table_row: usize,
    /// Its pages.
    pub(crate) pages: &'a [u32],
    /// KV index of its first query token.
    pub(crate) prefix: u32,
    /// KV index after its last query token.
    pub(crate) end: u32,
    /// Its first query token in the plan.
    pub(crate) first_row: usize,
    /// Whether it has samplers.
    pub(crate) samples: bool,
    /// Context id.
    pub(crate) context: u64,
    /// Its query tokens.
    pub(crate) tokens: &'a [u32],
    /// How many of these are drafts.
    pub(crate) drafts: u32,
}

/// Logits processing of one request in one step.
#[derive(Debug, Clone)]
struct LogitsProcessor {
    params: Arc<ContextParams>,
    /// Log-probabilities are returned.
    scores: bool,
    table_row: u32,
    prefix: u32,
    first_row: u32,
    /// For a processor of the driver's process: context id, and the sequence's range of [`LogitsProcessors::sequences`].
    custom: Option<(u64, Range32)>,
}

/// Logits processing of a frame.
#[derive(Debug, Default)]
pub(crate) struct LogitsProcessors {
    all: Vec<LogitsProcessor>,
    /// `[KV slot, token]` of tokens stored by earlier steps.
    history: Vec<[i64; 2]>,
    /// Further tokens whose log-probabilities are requested.
    given: usize,
    counts: bool,
    adjusts: bool,
    /// Tokens of sequences with a processor of the driver's process, one sequence after the other.
    sequences: Vec<u32>,
}

/// A sampling slot whose logits a processor of the driver's process changes.
#[derive(Debug, Clone)]
pub struct CustomSlot {
    /// Index within the sampling group.
    pub slot: usize,
    /// Context id of its sequence.
    pub context: u64,
    params: Arc<ContextParams>,
    /// Tokens of the sequence up to this slot's row.
    pub tokens: Vec<u32>,
}

impl CustomSlot {
    /// The processor, which the driver's process reads.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.params.processor
    }
}

impl LogitsProcessors {
    pub(crate) fn clear(&mut self) {
        self.all.clear();
        self.history.clear();
        self.given = 0;
        self.sequences.clear();
        (self.counts, self.adjusts) = (false, false);
    }

    /// Whether penalties count tokens, which must be recorded as they are stored.
    pub(crate) const fn counts(&self) -> bool {
        self.counts
    }

    /// Whether some request has penalties or biases.
    pub(crate) const fn adjusts(&self) -> bool {
        self.adjusts
    }

    /// Whether some request has a processor of the driver's process.
    pub(crate) const fn has_custom(&self) -> bool {
        !self.sequences.is_empty()
    }

    /// The custom processor of a slot in this row of the plan.
    pub(crate) fn custom(&self, processor: u32, row: usize, slot: usize) -> Option<CustomSlot> {
        let own = self.all.get(processor as usize)?;
        let (context, range) = own.custom?;
        let end = (own.prefix as usize + row + 1).saturating_sub(own.first_row as usize);
        let tokens = &self.sequences[range.range()];
        Some(CustomSlot {
            slot,
            context,
            params: Arc::clone(&own.params),
            tokens: tokens[..end.min(tokens.len())].to_vec(),
        })
    }

    /// `[KV slot, token]` of tokens stored by earlier steps that the device may not have recorded.
    pub(crate) fn history(&self) -> &[[i64; 2]] {
        &self.history
    }

    /// The log-probability options with this index.
    pub(crate) fn logprobs(&self, processor: u32) -> Option<&LogprobOptions> {
        let processor = self
            .all
            .get(processor as usize)
            .filter(|processor| processor.scores)?;
        processor.params.logprobs.as_ref()
    }

    /// Number of further tokens whose log-probabilities are requested.
    pub(crate) const fn given_words(&self) -> usize {
        self.given
    }

    /// Upper bound of the words of history and biases.
    pub(crate) fn words(&self, slots: impl Iterator<Item = u32>) -> usize {
        let biases = |processor: u32| {
            let params = self
                .all
                .get(processor as usize)
                .map(|processor| &processor.params);
            params.map_or(0, |params| params.biases.len() + params.suppressed.len())
        };
        2 * (self.history.len() + slots.map(biases).sum::<usize>())
    }

    /// Validates and adds the extension row of a request; returns its index.
    ///
    /// # Errors
    /// [`RequestError::Extension`]; nothing is added then.
    pub(crate) fn add(
        &mut self,
        row: &ExtensionRow<'_>,
        params: &Arc<ContextParams>,
        limits: &Limits,
        kv: RequestKv<'_>,
    ) -> Result<u32, RequestError> {
        check(row, params, limits, &kv)?;
        let skipped = kv.prefix - row.history.len() as u32;
        let page_size = limits.page_size;
        let recorded = params.processor.is_empty() || params.penalties.any();
        let history = row.history.iter().filter(|_| recorded);
        for (index, token) in (skipped..).zip(history) {
            let page = kv.pages[(index / page_size) as usize];
            let slot = limits.first_slot(page) + index % page_size;
            self.history.push([i64::from(slot), i64::from(token)]);
        }
        let ContextParams {
            penalties, biases, ..
        } = &**params;
        // Prompt tokens do not count.
        let counts = penalties.any() && kv.end > penalties.counted_from;
        self.counts |= counts;
        let suppresses = !params.suppressed.is_empty() && kv.prefix < params.suppressed_until;
        self.adjusts |= kv.samples && (counts || !biases.is_empty() || suppresses);
        let scores = row.returns_logprobs();
        if let Some(logprobs) = params.logprobs.as_ref().filter(|_| scores) {
            self.given += logprobs.given.len();
        }
        let custom = !params.processor.is_empty() && kv.samples;
        let custom = custom.then(|| {
            let start = self.sequences.len();
            self.sequences.extend(row.history.iter());
            self.sequences.extend_from_slice(kv.tokens);
            (kv.context, Range32::new(start, self.sequences.len()))
        });
        self.all.push(LogitsProcessor {
            custom,
            params: Arc::clone(params),
            scores,
            table_row: kv.table_row as u32,
            prefix: kv.prefix,
            first_row: kv.first_row as u32,
        });
        Ok(self.all.len() as u32 - 1)
    }

    /// Writes the biases of a slot as `(id, float32)` pairs after the first `used` of `words`. Returns its record and the words then
    /// in use; `None` when there are too few.
    pub(crate) fn put(
        &self,
        processor: u32,
        row: usize,
        (words, used): (&mut [i32], usize),
    ) -> Option<(LogitsRecord, usize)> {
        let Some(processor) = self.all.get(processor as usize) else {
            return Some((EMPTY_RECORD, used));
        };
        let end = processor.prefix + (row as u32 - processor.first_row) + 1;
        let params = &*processor.params;
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
            processor.table_row as i32,
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

/// Checks what a processor of the driver's process needs: the whole sequence, and no drafts.
fn check_custom(row: &ExtensionRow<'_>, kv: &RequestKv<'_>) -> Result<(), RequestError> {
    let parameter = "custom_logit_processor";
    if row.history.len() != kv.prefix as usize {
        let history = format!("sent with {} tokens of history", row.history.len());
        return Err(wrong(
            parameter,
            &history,
            "with all tokens before the input",
        ));
    }
    if kv.drafts > 0 {
        let drafts = format!("sent with {} drafts", kv.drafts);
        return Err(wrong(parameter, &drafts, "without drafts"));
    }
    Ok(())
}

/// Record without penalties and biases.
pub(crate) const EMPTY_RECORD: LogitsRecord = [0; RECORD_WORDS];

fn check(
    row: &ExtensionRow<'_>,
    params: &ContextParams,
    limits: &Limits,
    kv: &RequestKv<'_>,
) -> Result<(), RequestError> {
    let (vocab_size, prefix) = (limits.vocab_size, kv.prefix);
    if !params.processor.is_empty() && kv.samples {
        check_custom(row, kv)?;
    }
    // A processor sees the placeholders of images, too.
    let outside = |&id: &u32| id >= vocab_size && params.processor.is_empty();
    if let Some(id) = row.history.iter().find(outside) {
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
