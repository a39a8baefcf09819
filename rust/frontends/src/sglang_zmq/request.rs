//! A request as the tokenizer manager sends it.

use std::sync::Arc;

use pie_engine::{Grammar, Sampling, TraceParent};
use pie_ingress::{Ingress, RawLogprobs, RawRequest, Refusal};

use crate::sglang_zmq::error::FrontError;
use crate::sglang_zmq::msgpack::Value;
use crate::sglang_zmq::session::SessionParams;
use crate::sglang_zmq::table::{Fields, MessageClass, find};
use crate::sglang_zmq::trace;
use crate::sglang_zmq::unserved::{REQUEST, Refusals, SAMPLING};
use crate::sglang_zmq::value::{flag, integer, number, optional_text, pickle, wrong};

/// `TokenizedGenerateReqInput`, as far as it is served.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    /// Its name, unique among those that have not ended.
    pub rid: String,
    /// Which of several HTTP workers asked; every output carries it.
    pub worker: Option<String>,
    /// Whether it wants every token as it comes.
    pub stream: bool,
    /// Tokens from one output of a stream to the next.
    pub stream_interval: Option<u32>,
    /// The tokenizer manager's name of the adapter.
    pub adapter: Option<String>,
    /// The session in which it goes on.
    pub session: Option<SessionParams>,
    /// Images, audio or video: a pickled `MultimodalProcessorOutput`.
    pub media: Option<Box<[u8]>>,
    /// Whether the model thinks first: tokens up to the end of it are counted.
    pub reasons: bool,
    /// Whether it wants log-probabilities: then its answer has lists of them, though it is refused.
    pub wants_logprobs: bool,
    /// The span of the tokenizer manager, if it is traced.
    pub parent: Option<TraceParent>,
    /// How tokens become text.
    pub text: TextParams,
    /// What it asks of the engine, or why it cannot be served, for the client.
    pub asked: Result<RawRequest, Refusal>,
}

/// What the detokenizer needs of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TextParams {
    /// Leave special tokens out.
    pub skip_special_tokens: bool,
    /// Put spaces between those that stay.
    pub spaces_between_special_tokens: bool,
    /// Keep what ended the text.
    pub no_stop_trim: bool,
}

/// What the tokenizer manager says.
#[derive(Debug, Clone)]
pub enum Incoming {
    /// Requests; several of them in one message are in their order. In the place of one that has no name, by which it could be
    /// answered, is what is wrong with it.
    Generate(Vec<Result<GenerateRequest, String>>),
    /// End one request, and those whose names begin with its name, or all.
    Abort {
        /// The name, or how it begins.
        rid: String,
        /// Whether all end.
        all: bool,
    },
    /// A message of another class.
    Other,
    /// One that cannot be read, and that has no name to be answered by: what is wrong with it.
    Unreadable(String),
}

macro_rules! places {
    ($(#[$doc:meta])* $name:ident of $class:literal { $($field:ident),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        struct $name { $($field: usize),* }

        impl $name {
            fn new(classes: &[MessageClass]) -> Result<Self, FrontError> {
                let class = find(classes, $class)?;
                Ok(Self { $($field: class.place($class, stringify!($field))?),* })
            }
        }
    };
}

places! {
    /// Where the fields of a request stand.
    RequestPlaces of "TokenizedGenerateReqInput" {
        rid, http_worker_ipc, input_ids, sampling_params, stream, priority, routing_key, extra_key, require_reasoning,
        return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob, lora_id, session_params, mm_inputs,
        time_stats,
    }
}
places! { SessionPlaces of "SessionParams" { id, rid, offset, replace, drop_previous_output } }
places! {
    ParamPlaces of "SamplingParams" {
        max_new_tokens, min_new_tokens, stop_token_ids, stop_strs, stop_regex_strs, ignore_eos, temperature, top_p, top_k, min_p, sampling_seed,
        frequency_penalty, presence_penalty, repetition_penalty, logit_bias, json_schema, regex, ebnf, structural_tag,
        skip_special_tokens, spaces_between_special_tokens, no_stop_trim, stream_interval,
    }
}
places! { BatchPlaces of "BatchTokenizedGenerateReqInput" { rids, batch } }
places! { AbortPlaces of "AbortReq" { rid, abort_all } }

/// Reads messages of the installed classes.
#[derive(Debug, Clone)]
pub struct Decoder {
    request: RequestPlaces,
    params: ParamPlaces,
    session: SessionPlaces,
    batch: BatchPlaces,
    abort: AbortPlaces,
    refused_requests: Refusals,
    refused_params: Refusals,
    ingress: Arc<Ingress>,
    original_logprobs: bool,
    traces: bool,
}

impl Decoder {
    /// `ingress` has the limits of lists and names. `original_logprobs`: log-probabilities are those before the temperature. `traces`: read which spans requests are part of.
    ///
    /// # Errors
    /// [`FrontError`] if a class is missing, or lacks a field that is read.
    pub fn new(
        classes: &[MessageClass],
        ingress: Arc<Ingress>,
        original_logprobs: bool,
        traces: bool,
    ) -> Result<Self, FrontError> {
        let place = |class: &'static str| {
            let class = find(classes, class)?;
            Ok(move |name: &str| class.fields.iter().position(|field| field.name == name))
        };
        Ok(Self {
            request: RequestPlaces::new(classes)?,
            params: ParamPlaces::new(classes)?,
            session: SessionPlaces::new(classes)?,
            batch: BatchPlaces::new(classes)?,
            abort: AbortPlaces::new(classes)?,
            refused_requests: Refusals::new(REQUEST, place("TokenizedGenerateReqInput")?),
            refused_params: Refusals::new(SAMPLING, place("SamplingParams")?),
            ingress,
            original_logprobs,
            traces,
        })
    }

    /// Reads a message. What is wrong with a request is a refusal in it, or stands in its place: it never fails another one.
    pub fn decode(&self, bytes: &[u8]) -> Incoming {
        let Some((tag, fields, is_whole)) = Fields::of_message(bytes) else {
            return Incoming::Unreadable(
                "it is no list that begins with the name of a class".to_owned(),
            );
        };
        match tag {
            b"TokenizedGenerateReqInput" => {
                Incoming::Generate(vec![self.request(&fields, is_whole, None)])
            }
            b"BatchTokenizedGenerateReqInput" => self.batch(&fields, is_whole),
            _ if !is_whole => Incoming::Unreadable(CUT.to_owned()),
            b"AbortReq" => self.abort(&fields),
            _ => Incoming::Other,
        }
    }

    fn abort(&self, fields: &Fields<'_>) -> Incoming {
        let rid = optional_text("rid", fields.get(self.abort.rid));
        let all = flag("abort_all", fields.get(self.abort.abort_all));
        match (rid, all) {
            (Ok(rid), Ok(all)) => Incoming::Abort {
                rid: rid.unwrap_or_default(),
                all,
            },
            (Err(error), _) | (_, Err(error)) => Incoming::Unreadable(error.to_string()),
        }
    }

    /// The requests of a batch, each by itself. One that cannot be read is answered by the name that the batch gives it.
    fn batch(&self, fields: &Fields<'_>, is_whole: bool) -> Incoming {
        let mut names = match fields.get(self.batch.rids) {
            Value::List(names) => Some(names),
            _ => None,
        };
        let mut name = || {
            let name = names.as_mut()?.next()?;
            optional_text("rids", name).ok().flatten()
        };
        match fields.get(self.batch.batch) {
            Value::List(batch) => Incoming::Generate(
                batch
                    .map(|request| {
                        let name = name();
                        let Value::List(items) = request else {
                            return refused(name, wrong("batch", request, "a list of requests"));
                        };
                        // Its tag comes first.
                        let fields = Fields::of_items(items.rest());
                        self.request(&fields, true, name)
                    })
                    .collect(),
            ),
            other => {
                let error = wrong("batch", other, "a list");
                let error = if is_whole {
                    error
                } else {
                    Refusal::Other(CUT.to_owned())
                };
                let named: Vec<_> = std::iter::from_fn(name).collect();
                if named.is_empty() {
                    return Incoming::Unreadable(error.to_string());
                }
                let refused = named
                    .into_iter()
                    .map(|name| refused(Some(name), error.clone()));
                Incoming::Generate(refused.collect())
            }
        }
    }

    /// A request, and why it cannot be served if a field has what its client may not ask for: the tokenizer manager checks few of
    /// them. `name` is what a batch calls it.
    fn request(
        &self,
        fields: &Fields<'_>,
        is_whole: bool,
        name: Option<String>,
    ) -> Result<GenerateRequest, String> {
        let at = &self.request;
        let rid = match optional_text("rid", fields.get(at.rid)) {
            Ok(Some(rid)) => rid,
            Ok(None) => return refused(name, wrong("rid", Value::Nil, "a text")),
            Err(error) => return refused(name, error),
        };
        if !is_whole {
            return refused(Some(rid), Refusal::Other(CUT.to_owned()));
        }
        let mut request = GenerateRequest::refused(rid, Refusal::Other(String::new()));
        request.asked = self.read(fields, &mut request);
        Ok(request)
    }

    /// Reads what is about a request's way first, so that it is known of one that is refused, too: media, for example, lie in
    /// memory that is freed when they are read.
    fn read(
        &self,
        fields: &Fields<'_>,
        request: &mut GenerateRequest,
    ) -> Result<RawRequest, Refusal> {
        let at = &self.request;
        let worker = optional_text("http_worker_ipc", fields.get(at.http_worker_ipc));
        request.worker = worker?;
        let media = pickle("mm_inputs", fields.get(at.mm_inputs));
        request.media = media?.map(Into::into);
        let wants_logprobs = fields.get(at.return_logprob);
        request.wants_logprobs = !matches!(wants_logprobs, Value::Nil | Value::Flag(false));
        request.parent = self.parent(fields)?;
        request.stream = flag("stream", fields.get(at.stream))?;
        let params = match fields.get(at.sampling_params) {
            Value::List(params) => Fields::of_items(params),
            other => return Err(wrong("sampling_params", other, "a list")),
        };
        let unserved = self.refused_requests.find(fields);
        if let Some(reason) = unserved.or_else(|| self.refused_params.find(&params)) {
            return Err(Refusal::Other(reason));
        }
        request.adapter = self.name("lora_id", fields.get(at.lora_id))?;
        request.session = self.session(fields.get(at.session_params))?;
        request.reasons = flag("require_reasoning", fields.get(at.require_reasoning))?;
        request.text = self.text(&params)?;
        request.stream_interval = interval(params.get(self.params.stream_interval))?;
        let raw = RawRequest::new(request.rid.clone(), self.prompt(fields.get(at.input_ids))?);
        let raw = RawRequest {
            priority: integer("priority", fields.get(at.priority))?,
            routing_key: self.name("routing_key", fields.get(at.routing_key))?,
            extra_key: self.name("extra_key", fields.get(at.extra_key))?,
            logprobs: self.logprobs(fields)?,
            ..raw
        };
        self.sampled(&params, raw)
    }

    /// With what stands in `SamplingParams`.
    fn sampled(&self, fields: &Fields<'_>, raw: RawRequest) -> Result<RawRequest, Refusal> {
        let at = &self.params;
        let ignore_eos = flag("ignore_eos", fields.get(at.ignore_eos))?;
        let stop_token_ids = self.integers("stop_token_ids", fields.get(at.stop_token_ids))?;
        let count = |name, place: usize| integer(name, fields.get(place));
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
            ..raw
        })
    }

    fn sampling(&self, fields: &Fields<'_>) -> Result<Sampling, Refusal> {
        let at = &self.params;
        let real = |name, place: usize, default: f64| match fields.get(place) {
            Value::Nil => Ok(default as f32),
            value => number(value)
                .map(|value| value as f32)
                .ok_or_else(|| wrong(name, value, "a number")),
        };
        let seed = integer("sampling_seed", fields.get(at.sampling_seed))?;
        Ok(Sampling {
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
}

impl Decoder {
    fn parent(&self, fields: &Fields<'_>) -> Result<Option<TraceParent>, Refusal> {
        if !self.traces {
            return Ok(None);
        }
        let stats = pickle("time_stats", fields.get(self.request.time_stats))?;
        Ok(stats.and_then(trace::parent))
    }

    /// A name that a client chose.
    fn name(&self, field: &'static str, value: Value<'_>) -> Result<Option<String>, Refusal> {
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
    fn logprobs(&self, fields: &Fields<'_>) -> Result<Option<RawLogprobs>, Refusal> {
        let at = &self.request;
        if !flag("return_logprob", fields.get(at.return_logprob))? {
            return Ok(None);
        }
        let number = |name, place: usize| integer(name, fields.get(place));
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
        for (name, place, kind) in kinds {
            let text = optional_text(name, fields.get(place))?;
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

    fn session(&self, value: Value<'_>) -> Result<Option<SessionParams>, Refusal> {
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

    fn text(&self, fields: &Fields<'_>) -> Result<TextParams, Refusal> {
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

    fn prompt(&self, value: Value<'_>) -> Result<Vec<u32>, Refusal> {
        const FIELD: &str = "input_ids";
        let parts = match value {
            Value::List(mut parts) => [parts.next(), parts.next(), parts.next()],
            _ => [None; 3],
        };
        let [Some(Value::Text(kind)), Some(Value::Binary(bytes)), None] = parts else {
            return Err(Refusal::Other(format!(
                "the request has no `{FIELD}`: send a text or tokens"
            )));
        };
        let (numbers, rest) = bytes.as_chunks::<8>();
        if kind != b"q" || !rest.is_empty() {
            return Err(Refusal::Other(format!("`{FIELD}` are no 64-bit integers")));
        }
        let token = |bytes: &[u8; 8]| self.ingress.token_id(FIELD, i64::from_le_bytes(*bytes));
        numbers.iter().map(token).collect()
    }
}

/// What is wrong with a message that ends too early, or holds what `MessagePack` does not know.
const CUT: &str = "the message is cut off, or holds what is not MessagePack";

/// The driver's seeds are from 0 to 2⁶³ - 1. Negative ones are brought there, so that the same seed is always the same.
const fn fold_seed(seed: i64) -> u64 {
    seed as u64 & i64::MAX as u64
}

/// Tokens from one output to the next; fewer than one is one.
fn interval(value: Value<'_>) -> Result<Option<u32>, Refusal> {
    let interval = integer("stream_interval", value)?;
    Ok(interval.map(|interval| interval.clamp(1, u32::MAX.into()) as u32))
}

impl GenerateRequest {
    /// One that asks for nothing but an answer that says why not.
    fn refused(rid: String, reason: Refusal) -> Self {
        Self {
            rid,
            worker: None,
            stream: false,
            stream_interval: None,
            adapter: None,
            session: None,
            media: None,
            reasons: false,
            wants_logprobs: false,
            parent: None,
            text: TextParams::default(),
            asked: Err(reason),
        }
    }
}

/// A request that cannot be read: refused, if it has a name to be answered by.
fn refused(name: Option<String>, error: Refusal) -> Result<GenerateRequest, String> {
    match name {
        Some(rid) => Ok(GenerateRequest::refused(rid, error)),
        None => Err(error.to_string()),
    }
}
