//! What the extension of a frame asks of logits, beyond the samplers of the Pie protocol.

use pie_wire::{ExtensionRow, Penalties, PlaceShape};

use crate::extent::Extent;
use crate::fault::RequestFault;
use crate::limits::Limits;
use crate::sampler::{SamplerParams, SlotClass};

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

/// Which log-probabilities a request asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// Of each place.
    pub(crate) shape: PlaceShape,
    /// After the temperature.
    pub(crate) scaled: bool,
    /// Tokens in [`Extras::given`].
    given: Extent,
}

/// What one request asks for.
#[derive(Debug, Clone)]
struct Extra {
    logprobs: Option<Asked>,
    penalties: Penalties,
    biases: Extent,
    suppressed: Extent,
    suppressed_until: u32,
    table_row: u32,
    prefix: u32,
    first_row: u32,
}

/// What the requests of a frame ask for.
#[derive(Debug, Default)]
pub(crate) struct Extras {
    all: Vec<Extra>,
    biases: Vec<[i32; 2]>,
    suppressed: Vec<i32>,
    /// Storage slots and the tokens whose KV they have.
    history: Vec<[i64; 2]>,
    /// Tokens whose log-probabilities are asked for.
    given: Vec<i32>,
    counts: bool,
    adjusts: bool,
}

impl Extras {
    pub(crate) fn clear(&mut self) {
        self.all.clear();
        self.biases.clear();
        self.suppressed.clear();
        self.history.clear();
        self.given.clear();
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
        self.all.get(extra as usize)?.logprobs.as_ref()
    }

    /// The tokens of some log-probabilities that are asked for.
    pub(crate) fn given(&self, asked: &Asked) -> &[i32] {
        &self.given[asked.given.range()]
    }

    /// Tokens whose log-probabilities some request of the frame asks for.
    pub(crate) const fn given_words(&self) -> usize {
        self.given.len()
    }

    /// Most words that a step needs for its history and biases, with so many slots.
    pub(crate) fn words(&self, slots: impl Iterator<Item = u32>) -> usize {
        let biases = |extra: u32| {
            let extra = self.all.get(extra as usize);
            extra.map_or(0, |extra| extra.biases.len() + extra.suppressed.len())
        };
        2 * (self.history.len() + slots.map(biases).sum::<usize>())
    }

    /// Checks the row of a request and notes what it asks for; returns its number.
    ///
    /// # Errors
    /// [`RequestFault::Extension`]; nothing is noted then.
    pub(crate) fn add(
        &mut self,
        row: &ExtensionRow<'_>,
        limits: &Limits,
        place: KvPlace<'_>,
    ) -> Result<u32, RequestFault> {
        let penalties = row.penalties();
        check(row, limits, place.prefix)?;
        let first = self.biases.len();
        let biases = row.biases();
        self.biases
            .extend(biases.map(|(id, value)| [id as i32, value.to_bits().cast_signed()]));
        let biases = Extent::new(first, self.biases.len());
        let first = self.suppressed.len();
        let ids = row.suppressed.iter().map(|id| id as i32);
        self.suppressed.extend(ids);
        let suppressed = Extent::new(first, self.suppressed.len());
        let skipped = place.prefix - row.history.len() as u32;
        let page_size = limits.page_size;
        for (index, token) in (skipped..).zip(row.history.iter()) {
            let page = place.pages[(index / page_size) as usize];
            let slot = limits.first_slot(page) + index % page_size;
            self.history.push([i64::from(slot), i64::from(token)]);
        }
        // Of a prompt nothing counts.
        let counts = penalties.any() && place.end > penalties.counted_from;
        self.counts |= counts;
        self.adjusts |= place.samples
            && (counts
                || !biases.is_empty()
                || (!suppressed.is_empty() && place.prefix < row.suppressed_until()));
        let logprobs = row.wants_logprobs().then(|| {
            let first = self.given.len();
            self.given.extend(row.token_ids.iter().map(|id| id as i32));
            Asked {
                shape: PlaceShape {
                    top: row.top_logprobs(),
                    given: row.token_ids.len() as u32,
                },
                scaled: row.scaled(),
                given: Extent::new(first, self.given.len()),
            }
        });
        self.all.push(Extra {
            logprobs,
            penalties,
            biases,
            suppressed,
            suppressed_until: row.suppressed_until(),
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
        let biases = &self.biases[extra.biases.range()];
        let suppressed = if end < extra.suppressed_until {
            &self.suppressed[extra.suppressed.range()]
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
        } = extra.penalties;
        let counted_from = if extra.penalties.any() {
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

/// The class and the parameters that a combined sampler stands for.
pub(crate) fn combined(
    row: &ExtensionRow<'_>,
    vocab_size: u32,
) -> Option<(SlotClass, SamplerParams)> {
    row.sampler()
        .map(|sampler| SamplerParams::combined(&sampler, vocab_size))
}

/// What a parameter is, and what it must be.
fn wrong(parameter: &'static str, value: &dyn ToString, wanted: &'static str) -> RequestFault {
    RequestFault::Extension {
        parameter,
        value: value.to_string().into(),
        wanted,
    }
}

fn check(row: &ExtensionRow<'_>, limits: &Limits, prefix: u32) -> Result<(), RequestFault> {
    check_numbers(row)?;
    let vocab_size = limits.vocab_size;
    let outside = |id: &u32| *id >= vocab_size;
    let lists = [
        ("logit_bias", row.biases().map(|(id, _)| id).find(outside)),
        ("stop_token_ids", row.suppressed.iter().find(outside)),
        ("token_ids_logprob", row.token_ids.iter().find(outside)),
        ("history", row.history.iter().find(outside)),
    ];
    if let Some((name, Some(id))) = lists.into_iter().find(|(_, id)| id.is_some()) {
        return Err(wrong(name, &id, "ids of the vocabulary"));
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
    check_logprobs(row, vocab_size)
}

fn check_logprobs(row: &ExtensionRow<'_>, vocab_size: u32) -> Result<(), RequestFault> {
    let top = row.top_logprobs();
    if row.wants_logprobs() && top > vocab_size {
        let wanted = "at most the number of tokens in the vocabulary";
        return Err(wrong("top_logprobs_num", &top, wanted));
    }
    let next = row.prompt_logprobs().map(|prompt| prompt.next);
    match next.filter(|&next| next >= vocab_size) {
        Some(next) => Err(wrong("next_token", &next, "an id of the vocabulary")),
        None => Ok(()),
    }
}

fn check_numbers(row: &ExtensionRow<'_>) -> Result<(), RequestFault> {
    let penalties = row.penalties();
    if let Some(sampler) = row.sampler() {
        let temperature = sampler.temperature;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return Err(wrong("temperature", &temperature, "0 or more, and finite"));
        }
        if !(sampler.top_p > 0.0 && sampler.top_p <= 1.0) {
            return Err(wrong("top_p", &sampler.top_p, "above 0 and at most 1"));
        }
        if !(0.0..=1.0).contains(&sampler.min_p) {
            return Err(wrong("min_p", &sampler.min_p, "from 0 to 1"));
        }
    }
    for (name, value) in [
        ("frequency_penalty", penalties.frequency),
        ("presence_penalty", penalties.presence),
    ] {
        if !value.is_finite() {
            return Err(wrong(name, &value, "finite"));
        }
    }
    let repetition = penalties.repetition;
    if !(repetition > 0.0 && repetition.is_finite()) {
        return Err(wrong(
            "repetition_penalty",
            &repetition,
            "above 0 and finite",
        ));
    }
    let value = row.biases().map(|(_, value)| value);
    match value.into_iter().find(|value| !value.is_finite()) {
        Some(value) => Err(wrong("logit_bias", &value, "finite")),
        None => Ok(()),
    }
}
