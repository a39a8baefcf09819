//! Fields of a request.

use pie_engine::{Grammar, InputEmbedsError, PromptImages, SamplingParams, TraceParent};
use pie_ingress::{RawLogprobs, RawRequest, Refusal};

use super::{Decoder, TextParams};
use crate::sglang_zmq::extension::typed_array;
use crate::sglang_zmq::json::json;
use crate::sglang_zmq::msgpack::Value;
use crate::sglang_zmq::schema::Fields;
use crate::sglang_zmq::session::SessionParams;
use crate::sglang_zmq::trace;
use crate::sglang_zmq::value::{flag, integer, number, optional_text, pickle, wrong};

impl Decoder {
    /// With what stands in `SamplingParams`.
    pub(super) fn sampled(
        &self,
        fields: &Fields<'_>,
        raw: RawRequest,
    ) -> Result<RawRequest, Refusal> {
        let at = &self.params;
        let ignore_eos = flag("ignore_eos", fields.get(at.ignore_eos))?;
        let stop_token_ids = self.integers("stop_token_ids", fields.get(at.stop_token_ids))?;
        let count = |name, index: usize| integer(name, fields.get(index));
        Ok(RawRequest {
            max_new_tokens: count("max_new_tokens", at.max_new_tokens)?,
            min_new_tokens: count("min_new_tokens", at.min_new_tokens)?.unwrap_or(0),
            // As with SGLang, no token ends a request that ignores the model's own.
            stop_token_ids: if ignore_eos {
                Vec::new()
            } else {
                stop_token_ids
            },
            ignore_eos,
            stop: self.texts("stop", "stop_strings", fields.get(at.stop_strs))?,
            stop_regex: self.texts("stop_regex", "stop_regexes", fields.get(at.stop_regex_strs))?,
            grammar: self.grammar(fields)?,
            sampling: self.sampling(fields)?,
            logit_bias: self.biases(fields.get(at.logit_bias))?,
            custom_params: custom_params(fields.get(at.custom_params))?,
            ..raw
        })
    }

    fn sampling(&self, fields: &Fields<'_>) -> Result<SamplingParams, Refusal> {
        let at = &self.params;
        let real = |name, index: usize, default: f64| match fields.get(index) {
            Value::Nil => Ok(default as f32),
            value => number(value)
                .map(|value| value as f32)
                .ok_or_else(|| wrong(name, value, "a number")),
        };
        let seed = integer("sampling_seed", fields.get(at.sampling_seed))?;
        Ok(SamplingParams {
            temperature: real("temperature", at.temperature, 1.0)?,
            top_k: integer("top_k", fields.get(at.top_k))?.unwrap_or(-1),
            top_p: real("top_p", at.top_p, 1.0)?,
            min_p: real("min_p", at.min_p, 0.0)?,
            seed: seed.map(fold_seed),
            frequency_penalty: real("frequency_penalty", at.frequency_penalty, 0.0)?,
            presence_penalty: real("presence_penalty", at.presence_penalty, 0.0)?,
            repetition_penalty: real("repetition_penalty", at.repetition_penalty, 1.0)?,
            logit_bias: Vec::new(),
        })
    }

    pub(super) fn logit_processor(&self, fields: &Fields<'_>) -> Result<Option<String>, Refusal> {
        const FIELD: &str = "custom_logit_processor";
        let text = optional_text(FIELD, fields.get(self.request.custom_logit_processor))?;
        let text = text.filter(|text| !text.is_empty());
        let bytes = text.as_ref().map_or(0, String::len) as u64;
        let limits = self.ingress.limits();
        limits.check(FIELD, "logit_processor_bytes", bytes)?;
        Ok(text)
    }

    pub(super) fn parent(&self, time_stats: Value<'_>) -> Result<Option<TraceParent>, Refusal> {
        if !self.traces {
            return Ok(None);
        }
        let stats = pickle("time_stats", time_stats)?;
        Ok(stats.and_then(trace::parent))
    }

    /// A name that a client chose.
    pub(super) fn name(
        &self,
        field: &'static str,
        value: Value<'_>,
    ) -> Result<Option<String>, Refusal> {
        let name = optional_text(field, value)?;
        let checked = name
            .as_deref()
            .map(|name| self.ingress.check_name(field, name));
        checked.transpose()?;
        Ok(name)
    }

    /// A list of texts.
    fn texts(
        &self,
        field: &'static str,
        limit: &'static str,
        value: Value<'_>,
    ) -> Result<Vec<String>, Refusal> {
        let values = match value {
            Value::Nil => return Ok(Vec::new()),
            Value::List(values) => values,
            other => return Err(wrong(field, other, "a list of texts")),
        };
        self.ingress.limits().check(field, limit, values.count())?;
        values
            .filter_map(|value| optional_text(field, value).transpose())
            .collect()
    }

    /// A list of integers, as many as the limit of the field's name allows.
    fn integers(&self, field: &'static str, value: Value<'_>) -> Result<Vec<i64>, Refusal> {
        let values = match value {
            Value::Nil => return Ok(Vec::new()),
            Value::List(values) => values,
            other => return Err(wrong(field, other, "a list")),
        };
        self.ingress.limits().check(field, field, values.count())?;
        let integer =
            |value| integer(field, value)?.ok_or_else(|| wrong(field, value, "a list of integers"));
        values.map(integer).collect()
    }

    /// The fields that ask for log-probabilities.
    pub(super) fn logprobs(&self, fields: &Fields<'_>) -> Result<Option<RawLogprobs>, Refusal> {
        let at = &self.request;
        if !flag("return_logprob", fields.get(at.return_logprob))? {
            return Ok(None);
        }
        let number = |name, index: usize| integer(name, fields.get(index));
        Ok(Some(RawLogprobs {
            top_logprobs_num: number("top_logprobs_num", at.top_logprobs_num)?.unwrap_or(0),
            token_ids_logprob: self
                .integers("token_ids_logprob", fields.get(at.token_ids_logprob))?,
            logprob_start_len: number("logprob_start_len", at.logprob_start_len)?.unwrap_or(-1),
            original: self.original_logprobs,
        }))
    }

    /// The one grammar that there is.
    fn grammar(&self, fields: &Fields<'_>) -> Result<Option<Grammar>, Refusal> {
        type Kind = fn(Box<str>) -> Grammar;
        let at = &self.params;
        let kinds: [(&'static str, usize, Kind); 4] = [
            ("json_schema", at.json_schema, Grammar::JsonSchema),
            ("regex", at.regex, Grammar::Regex),
            ("ebnf", at.ebnf, Grammar::Ebnf),
            ("structural_tag", at.structural_tag, Grammar::StructuralTag),
        ];
        let mut found = None;
        for (name, index, kind) in kinds {
            let text = optional_text(name, fields.get(index))?;
            let Some(text) = text.filter(|text| !text.is_empty()) else {
                continue;
            };
            if found.is_some() {
                return Err(Refusal::Other(format!(
                    "`{name}` is set, and another grammar is, too: keep one of json_schema, regex, ebnf and structural_tag"
                )));
            }
            found = Some(kind(text.into()));
        }
        Ok(found)
    }

    pub(super) fn session(&self, value: Value<'_>) -> Result<Option<SessionParams>, Refusal> {
        let fields = match value {
            Value::Nil => return Ok(None),
            Value::List(fields) => Fields::of_items(fields),
            other => return Err(wrong("session_params", other, "a list")),
        };
        let at = &self.session;
        let Some(id) = self.name("session_params.id", fields.get(at.id))? else {
            return Ok(None);
        };
        Ok(Some(SessionParams {
            id,
            rid: self.name("session_params.rid", fields.get(at.rid))?,
            offset: integer("session_params.offset", fields.get(at.offset))?.unwrap_or(0),
            replace: flag("session_params.replace", fields.get(at.replace))?,
            drops_output: flag(
                "session_params.drop_previous_output",
                fields.get(at.drop_previous_output),
            )?,
        }))
    }

    pub(super) fn text(&self, fields: &Fields<'_>) -> Result<TextParams, Refusal> {
        let at = &self.params;
        let spaces = fields.get(at.spaces_between_special_tokens);
        Ok(TextParams {
            skip_special_tokens: flag("skip_special_tokens", fields.get(at.skip_special_tokens))?,
            spaces_between_special_tokens: flag("spaces_between_special_tokens", spaces)?,
            no_stop_trim: flag("no_stop_trim", fields.get(at.no_stop_trim))?,
        })
    }

    /// Tokens and what is added to their logits, from a map by the tokens' digits, as in `OpenAI`'s API.
    fn biases(&self, value: Value<'_>) -> Result<Vec<(i64, f32)>, Refusal> {
        const FIELD: &str = "logit_bias";
        let entries = match value {
            Value::Nil => return Ok(Vec::new()),
            Value::Map(entries) => entries,
            other => return Err(wrong(FIELD, other, "a map")),
        };
        self.ingress
            .limits()
            .check(FIELD, FIELD, entries.count() / 2)?;
        let bias = |(token, bias): (Value<'_>, Value<'_>)| {
            let token = match token {
                Value::Text(text) => self
                    .ingress
                    .token_of_text(FIELD, &String::from_utf8_lossy(text))?,
                Value::Integer(token) => token,
                other => return Err(wrong(FIELD, other, "a map from ids of tokens")),
            };
            let bias = number(bias).ok_or_else(|| wrong(FIELD, bias, "a map to numbers"))?;
            Ok((token, bias as f32))
        };
        entries.pairs().map(bias).collect()
    }

    /// A prompt of embeddings: a list of lists of numbers.
    pub(super) fn input_embeds(&self, value: Value<'_>) -> Result<Option<PromptImages>, Refusal> {
        const FIELD: &str = "input_embeds";
        const EXPECTED: &str = "a list with a list of numbers for each token";
        let rows = match value {
            Value::Nil => return Ok(None),
            Value::List(rows) => rows,
            other => return Err(wrong(FIELD, other, EXPECTED)),
        };
        let size = self.ingress.model().embed_size;
        let numbers = rows.count().saturating_mul(size.into());
        self.ingress.check_input_embeds(numbers)?;
        let mut embeds = Vec::with_capacity(numbers as usize);
        for (index, row) in rows.enumerate() {
            let Value::List(row) = row else {
                return Err(wrong(FIELD, row, EXPECTED));
            };
            if row.count() != u64::from(size) {
                let found = row.count() as usize;
                let error = InputEmbedsError::Size { index, found, size };
                return Err(Refusal::Other(error.to_string()));
            }
            for value in row {
                let number = number(value).ok_or_else(|| wrong(FIELD, value, EXPECTED))?;
                embeds.push(number as f32);
            }
        }
        self.ingress.input_embeds(&embeds).map(Some)
    }

    pub(super) fn prompt(&self, value: Value<'_>) -> Result<Vec<u32>, Refusal> {
        const FIELD: &str = "input_ids";
        let Some((typecode, bytes)) = typed_array(value) else {
            return Err(Refusal::Other(format!(
                "the request has no `{FIELD}`: send a text or tokens"
            )));
        };
        let (numbers, rest) = bytes.as_chunks::<8>();
        if typecode != b"q" || !rest.is_empty() {
            return Err(Refusal::Other(format!("`{FIELD}` are no 64-bit integers")));
        }
        let token = |bytes: &[u8; 8]| self.ingress.token_id(FIELD, i64::from_le_bytes(*bytes));
        numbers.iter().map(token).collect()
    }
}

/// The parameters of a custom logit processor as JSON.
fn custom_params(value: Value<'_>) -> Result<Option<String>, Refusal> {
    match value {
        Value::Nil => Ok(None),
        Value::Map(_) => json("custom_params", value).map(Some),
        other => Err(wrong("custom_params", other, "an object")),
    }
}

/// The driver's seeds are from 0 to 2⁶³ - 1. Negative ones are brought there, so that the same seed is always the same.
const fn fold_seed(seed: i64) -> u64 {
    seed as u64 & i64::MAX as u64
}

/// Tokens from one output to the next; fewer than one is one.
pub(super) fn interval(value: Value<'_>) -> Result<Option<u32>, Refusal> {
    let interval = integer("stream_interval", value)?;
    Ok(interval.map(|interval| interval.clamp(1, u32::MAX.into()) as u32))
}
