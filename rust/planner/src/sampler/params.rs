//! Sampling parameters registered per context: validated once, and looked up by handle.

use std::sync::Arc;

use pie_wire::{LogprobShape, MAX_KEPT_WORDS, ParamsRef, ParamsRow, ParamsRows, Penalties};
use rustc_hash::FxHashMap;

use crate::error::RequestError;
use crate::sampler::{SamplerParams, SlotClass};

/// Requested log-probabilities.
#[derive(Debug)]
pub(crate) struct LogprobOptions {
    /// Of each position.
    pub(crate) shape: LogprobShape,
    /// After the temperature.
    pub(crate) scaled: bool,
    /// Further token ids.
    pub(crate) given: Vec<i32>,
}

/// Sampling parameters of a context.
#[derive(Debug, Default)]
pub(crate) struct ContextParams {
    /// Replaces its token samplers.
    pub(crate) sampler: Option<(SlotClass, SamplerParams)>,
    pub(crate) penalties: Penalties,
    /// Logit biases: id, and bits of float32.
    pub(crate) biases: Vec<[i32; 2]>,
    pub(crate) suppressed: Vec<i32>,
    /// KV index from which on they may be sampled (`min_tokens`).
    pub(crate) suppressed_until: u32,
    pub(crate) logprobs: Option<LogprobOptions>,
    /// A logit processor of the driver's process; empty for none.
    pub(crate) processor: Vec<u8>,
}

impl ContextParams {
    /// Validates and copies a record.
    fn of(row: &ParamsRow<'_>, vocab_size: u32) -> Result<Self, RequestError> {
        check(row, vocab_size)?;
        let ids = |words: pie_wire::WordSlice<'_>| words.iter().map(u32::cast_signed).collect();
        let bias = |(id, value): (u32, f32)| [id.cast_signed(), value.to_bits().cast_signed()];
        let sampler = row.sampler();
        Ok(Self {
            sampler: sampler.map(|sampler| SamplerParams::combined(&sampler, vocab_size)),
            penalties: row.penalties(),
            biases: row.biases().map(bias).collect(),
            suppressed: ids(row.suppressed),
            suppressed_until: row.suppressed_until(),
            logprobs: row.has_logprobs().then(|| LogprobOptions {
                shape: LogprobShape {
                    top: row.top_logprobs(),
                    given: row.token_ids.len() as u32,
                    hidden: row.hidden(),
                },
                scaled: row.scaled(),
                given: ids(row.token_ids),
            }),
            processor: row.processor().to_vec(),
        })
    }

    /// Words of its lists in a frame.
    fn words(&self) -> usize {
        let given = self
            .logprobs
            .as_ref()
            .map_or(0, |logprobs| logprobs.given.len());
        let processor = self.processor.len().div_ceil(4);
        2 * self.biases.len() + self.suppressed.len() + given + processor
    }
}

/// Parameters, or why requests that use them are rejected.
type Entry = Result<Arc<ContextParams>, RequestError>;

/// Registered parameters of all contexts.
#[derive(Debug, Default)]
pub(crate) struct ParamsStore {
    kept: FxHashMap<u32, Entry>,
    /// Parameters in the current frame, by index.
    in_frame: Vec<Entry>,
    none: Arc<ContextParams>,
    /// Words of all kept lists.
    words: usize,
}

impl ParamsStore {
    /// Registers the parameters of a frame.
    pub(crate) fn take(&mut self, rows: ParamsRows<'_>, vocab_size: u32) {
        self.in_frame.clear();
        for row in rows {
            let params = || ContextParams::of(&row, vocab_size).map(Arc::new);
            let entry = match row.handle() {
                None => params(),
                Some(handle) => {
                    self.forget(handle);
                    let entry = self.check_space(row.list_words()).and_then(|()| params());
                    self.words += words(&entry);
                    self.kept.insert(handle, entry.clone());
                    entry
                }
            };
            self.in_frame.push(entry);
        }
    }

    /// Looks up the parameters of an extension row.
    pub(crate) fn of(&self, params: ParamsRef) -> Result<&Arc<ContextParams>, RequestError> {
        let (entry, number) = match params {
            ParamsRef::None => return Ok(&self.none),
            ParamsRef::InFrame(number) => (self.in_frame.get(number as usize), number),
            ParamsRef::Kept(handle) => (self.kept.get(&handle), handle),
        };
        let unknown = || wrong("parameters", &number, "a handle under which some were sent");
        entry.ok_or_else(unknown)?.as_ref().map_err(Clone::clone)
    }

    fn forget(&mut self, handle: u32) {
        if let Some(entry) = self.kept.remove(&handle) {
            self.words -= words(&entry);
        }
    }

    fn check_space(&self, words: usize) -> Result<(), RequestError> {
        if self.words + words <= MAX_KEPT_WORDS {
            return Ok(());
        }
        let wanted = "at most what the lists of other requests leave of 512 MiB";
        Err(wrong(
            "logit_bias",
            &format_args!("{} bytes long", 4 * words),
            wanted,
        ))
    }
}

fn words(entry: &Entry) -> usize {
    entry.as_ref().map_or(0, |params| params.words())
}

/// An invalid parameter.
pub(super) fn wrong(
    parameter: &'static str,
    value: &dyn ToString,
    wanted: &'static str,
) -> RequestError {
    RequestError::Extension {
        parameter,
        value: value.to_string().into(),
        wanted,
    }
}

fn check(row: &ParamsRow<'_>, vocab_size: u32) -> Result<(), RequestError> {
    check_numbers(row)?;
    let outside = |id: &u32| *id >= vocab_size;
    let lists = [
        ("logit_bias", row.biases().map(|(id, _)| id).find(outside)),
        ("stop_token_ids", row.suppressed.iter().find(outside)),
        ("token_ids_logprob", row.token_ids.iter().find(outside)),
    ];
    if let Some((name, Some(id))) = lists.into_iter().find(|(_, id)| id.is_some()) {
        return Err(wrong(name, &id, "ids of the vocabulary"));
    }
    let top = row.top_logprobs();
    if row.has_logprobs() && top > vocab_size {
        let wanted = "at most the number of tokens in the vocabulary";
        return Err(wrong("top_logprobs_num", &top, wanted));
    }
    Ok(())
}

fn check_numbers(row: &ParamsRow<'_>) -> Result<(), RequestError> {
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
