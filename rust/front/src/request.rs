//! A request as the tokenizer manager sends it.

use std::sync::Arc;

use pie_runtime::{Grammar, LogprobParams, Sampling, StopRegexes, StopStrings, TraceParent};

use crate::error::{FrontError, one_line};
use crate::logprobs;
use crate::msgpack::Value;
use crate::session::SessionParams;
use crate::table::{Fields, MessageClass, find};
use crate::trace;
use crate::unserved::{REQUEST, Refusals, SAMPLING};
use crate::value::{
    WrongValue, flag, integer, number, optional_text, pickle, texts, token_ids, wrong,
};

/// `TokenizedGenerateReqInput`, as far as it is served.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// Its name, unique among those that have not ended.
    pub rid: String,
    /// Which of several HTTP workers asked; every output carries it.
    pub worker: Option<String>,
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Whether it wants every token as it comes.
    pub stream: bool,
    /// Its place in the queue.
    pub priority: Option<i32>,
    /// For the policy of that name.
    pub routing_key: Option<String>,
    /// Requests of different ones share no prefix.
    pub extra_key: Option<String>,
    /// The tokenizer manager's name of the adapter.
    pub adapter: Option<String>,
    /// The session in which it goes on.
    pub session: Option<SessionParams>,
    /// Images, audio or video: a pickled `MultimodalProcessorOutput`.
    pub media: Option<Box<[u8]>>,
    /// Whether the model thinks first: tokens up to the end of it are counted.
    pub reasons: bool,
    /// Which log-probabilities it wants.
    pub logprobs: Option<LogprobParams>,
    /// The span of the tokenizer manager, if it is traced.
    pub parent: Option<TraceParent>,
    /// What it asks of each token, and when it ends.
    pub params: Params,
    /// Why it cannot be served, for the client.
    pub refusal: Option<String>,
}

impl GenerateRequest {
    /// One that asks for nothing but an answer that says why not.
    fn refused(rid: String, worker: Option<String>, reason: String) -> Self {
        Self {
            rid,
            worker,
            prompt: Vec::new(),
            stream: false,
            priority: None,
            routing_key: None,
            extra_key: None,
            adapter: None,
            session: None,
            media: None,
            reasons: false,
            logprobs: None,
            parent: None,
            params: Params::default(),
            refusal: Some(reason),
        }
    }
}

/// `SamplingParams`, as far as they are served.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Params {
    /// Most tokens; `None` for as many as there is room for.
    pub max_new_tokens: Option<u32>,
    /// Tokens before which no stop token may come.
    pub min_new_tokens: u32,
    /// They end it, besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Texts that end it.
    pub stop_strs: StopStrings,
    /// Expressions that end it.
    pub stop_regexes: Option<Arc<StopRegexes>>,
    /// What its text must be.
    pub grammar: Option<Grammar>,
    /// No token ends it.
    pub ignore_eos: bool,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// How tokens become text.
    pub text: TextParams,
    /// Tokens from one output of a stream to the next.
    pub stream_interval: Option<u32>,
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
#[derive(Debug, Clone, PartialEq)]
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
    original_logprobs: bool,
    traces: bool,
}

impl Decoder {
    /// `original_logprobs`: log-probabilities are those before the temperature. `traces`: read which spans requests are part of.
    ///
    /// # Errors
    /// [`FrontError`] if a class is missing, or lacks a field that is read.
    pub fn new(
        classes: &[MessageClass],
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
                let error = wrong("batch", other, "a list").to_string();
                let error = if is_whole { error } else { CUT.to_owned() };
                let named: Vec<_> = std::iter::from_fn(name).collect();
                if named.is_empty() {
                    return Incoming::Unreadable(error);
                }
                let refused = named.into_iter().map(|name| refused(Some(name), &error));
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
            return refused(Some(rid), CUT);
        }
        let worker = optional_text("http_worker_ipc", fields.get(at.http_worker_ipc));
        let known = worker.clone().ok().flatten();
        let request = worker.and_then(|worker| self.whole_request(fields, &rid, worker));
        Ok(request.unwrap_or_else(|error| GenerateRequest::refused(rid, known, error.to_string())))
    }

    fn whole_request(
        &self,
        fields: &Fields<'_>,
        rid: &str,
        worker: Option<String>,
    ) -> Result<GenerateRequest, WrongValue> {
        let at = &self.request;
        let params = match fields.get(at.sampling_params) {
            Value::List(params) => Fields::of_items(params),
            other => return Err(wrong("sampling_params", other, "a list")),
        };
        let mut refusal = self.refused_requests.find(fields);
        refusal = refusal.or_else(|| self.refused_params.find(&params));
        let prompt = match tokens("input_ids", fields.get(at.input_ids)) {
            Ok(prompt) => prompt,
            Err(reason) => {
                refusal.get_or_insert(reason);
                Vec::new()
            }
        };
        let asked = [
            at.return_logprob,
            at.logprob_start_len,
            at.top_logprobs_num,
            at.token_ids_logprob,
        ]
        .map(|place| fields.get(place));
        Ok(GenerateRequest {
            rid: rid.to_owned(),
            worker,
            prompt,
            stream: flag("stream", fields.get(at.stream))?,
            priority: integer("priority", fields.get(at.priority))?
                .map(|value| value.clamp(i32::MIN.into(), i32::MAX.into()) as i32),
            routing_key: optional_text("routing_key", fields.get(at.routing_key))?,
            extra_key: optional_text("extra_key", fields.get(at.extra_key))?,
            adapter: optional_text("lora_id", fields.get(at.lora_id))?,
            session: self.session(fields.get(at.session_params))?,
            media: pickle("mm_inputs", fields.get(at.mm_inputs))?.map(Into::into),
            reasons: flag("require_reasoning", fields.get(at.require_reasoning))?,
            logprobs: logprobs::asked(asked, self.original_logprobs, &mut refusal)?,
            parent: self.parent(fields)?,
            params: self.params(&params, &mut refusal)?,
            refusal,
        })
    }

    fn params(
        &self,
        fields: &Fields<'_>,
        refusal: &mut Option<String>,
    ) -> Result<Params, WrongValue> {
        let at = &self.params;
        let count = |name, place: usize| -> Result<Option<u32>, WrongValue> {
            let value = integer(name, fields.get(place))?;
            Ok(value.map(|value| value.clamp(0, u32::MAX.into()) as u32))
        };
        let real = |name, place: usize, default: f64| match fields.get(place) {
            Value::Nil => Ok(default),
            value => number(value).ok_or_else(|| wrong(name, value, "a number")),
        };
        let seed = integer("sampling_seed", fields.get(at.sampling_seed))?;
        let sampling = Sampling {
            temperature: real("temperature", at.temperature, 1.0)? as f32,
            top_k: integer("top_k", fields.get(at.top_k))?.map_or(-1, all_tokens),
            top_p: real("top_p", at.top_p, 1.0)? as f32,
            min_p: real("min_p", at.min_p, 0.0)? as f32,
            seed: seed.map(fold_seed),
            frequency_penalty: real("frequency_penalty", at.frequency_penalty, 0.0)? as f32,
            presence_penalty: real("presence_penalty", at.presence_penalty, 0.0)? as f32,
            repetition_penalty: real("repetition_penalty", at.repetition_penalty, 1.0)? as f32,
            logit_bias: biases(fields.get(at.logit_bias), refusal)?,
        };
        Ok(Params {
            max_new_tokens: count("max_new_tokens", at.max_new_tokens)?,
            min_new_tokens: count("min_new_tokens", at.min_new_tokens)?.unwrap_or(0),
            stop_token_ids: token_ids("stop_token_ids", fields.get(at.stop_token_ids), refusal)?,
            stop_strs: self.stop_strings(fields, refusal)?,
            stop_regexes: self.stop_regexes(fields, refusal)?,
            grammar: self.grammar(fields, refusal)?,
            ignore_eos: flag("ignore_eos", fields.get(at.ignore_eos))?,
            sampling,
            text: self.text(fields)?,
            stream_interval: count("stream_interval", at.stream_interval)?,
        })
    }
}

impl Decoder {
    fn parent(&self, fields: &Fields<'_>) -> Result<Option<TraceParent>, WrongValue> {
        if !self.traces {
            return Ok(None);
        }
        let stats = pickle("time_stats", fields.get(self.request.time_stats))?;
        Ok(stats.and_then(trace::parent))
    }

    fn stop_strings(
        &self,
        fields: &Fields<'_>,
        refusal: &mut Option<String>,
    ) -> Result<StopStrings, WrongValue> {
        let texts = texts("stop", fields.get(self.params.stop_strs))?;
        let strings = StopStrings::new(texts.into_iter().map(String::into_bytes));
        Ok(strings.unwrap_or_else(|error| {
            refusal.get_or_insert(error.to_string());
            StopStrings::default()
        }))
    }

    fn stop_regexes(
        &self,
        fields: &Fields<'_>,
        refusal: &mut Option<String>,
    ) -> Result<Option<Arc<StopRegexes>>, WrongValue> {
        let patterns = texts("stop_regex", fields.get(self.params.stop_regex_strs))?;
        if patterns.is_empty() {
            return Ok(None);
        }
        match StopRegexes::new(&patterns) {
            Ok(regexes) => Ok(Some(Arc::new(regexes))),
            Err(error) => {
                refusal.get_or_insert(one_line(&error.to_string()));
                Ok(None)
            }
        }
    }

    /// The one grammar that there is.
    fn grammar(
        &self,
        fields: &Fields<'_>,
        refusal: &mut Option<String>,
    ) -> Result<Option<Grammar>, WrongValue> {
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
                refusal.get_or_insert(format!(
                    "`{name}` is set, and another grammar is, too: keep one of json_schema, regex, ebnf and structural_tag"
                ));
            }
            found = Some(kind(text.into()));
        }
        Ok(found)
    }

    fn session(&self, value: Value<'_>) -> Result<Option<SessionParams>, WrongValue> {
        let fields = match value {
            Value::Nil => return Ok(None),
            Value::List(fields) => Fields::of_items(fields),
            other => return Err(wrong("session_params", other, "a list")),
        };
        let at = &self.session;
        let Some(id) = optional_text("session_params.id", fields.get(at.id))? else {
            return Ok(None);
        };
        Ok(Some(SessionParams {
            id,
            rid: optional_text("session_params.rid", fields.get(at.rid))?,
            offset: integer("session_params.offset", fields.get(at.offset))?.unwrap_or(0),
            replace: flag("session_params.replace", fields.get(at.replace))?,
            drops_output: flag(
                "session_params.drop_previous_output",
                fields.get(at.drop_previous_output),
            )?,
        }))
    }

    fn text(&self, fields: &Fields<'_>) -> Result<TextParams, WrongValue> {
        let at = &self.params;
        let spaces = fields.get(at.spaces_between_special_tokens);
        Ok(TextParams {
            skip_special_tokens: flag("skip_special_tokens", fields.get(at.skip_special_tokens))?,
            spaces_between_special_tokens: flag("spaces_between_special_tokens", spaces)?,
            no_stop_trim: flag("no_stop_trim", fields.get(at.no_stop_trim))?,
        })
    }
}

/// What is wrong with a message that ends too early, or holds what `MessagePack` does not know.
const CUT: &str = "the message is cut off, or holds what is not MessagePack";
/// How the tokenizer manager says that all tokens are kept.
const ALL_TOKENS: i64 = 1 << 30;

const fn all_tokens(top_k: i64) -> i64 {
    if top_k >= ALL_TOKENS { -1 } else { top_k }
}

/// The driver's seeds are from 0 to 2⁶³ - 1. Negative ones are brought there, so that the same seed is always the same.
const fn fold_seed(seed: i64) -> u64 {
    seed as u64 & i64::MAX as u64
}

/// Tokens and what is added to their logits, from a map by the tokens' digits, as in `OpenAI`'s API.
fn biases(value: Value<'_>, refusal: &mut Option<String>) -> Result<Vec<(u32, f32)>, WrongValue> {
    let entries = match value {
        Value::Nil => return Ok(Vec::new()),
        Value::Map(entries) => entries,
        other => return Err(wrong("logit_bias", other, "a map")),
    };
    let mut biases = Vec::new();
    for (token, bias) in entries.pairs() {
        let id = match token {
            Value::Text(text) => str::from_utf8(text).ok().and_then(|text| text.parse().ok()),
            Value::Integer(id) => u32::try_from(id).ok(),
            _ => None,
        };
        match (id, number(bias)) {
            (Some(id), Some(bias)) => biases.push((id, bias as f32)),
            _ => {
                refusal.get_or_insert(format!(
                    "`logit_bias` has {token}: {bias}, send ids of tokens and numbers"
                ));
            }
        }
    }
    Ok(biases)
}

/// A request that cannot be read: refused, if it has a name to be answered by.
fn refused(name: Option<String>, error: impl ToString) -> Result<GenerateRequest, String> {
    let error = error.to_string();
    match name {
        Some(rid) => Ok(GenerateRequest::refused(rid, None, error)),
        None => Err(error),
    }
}

/// A prompt, or why it is none; for the client.
fn tokens(field: &str, value: Value<'_>) -> Result<Vec<u32>, String> {
    let parts = match value {
        Value::List(mut parts) => [parts.next(), parts.next(), parts.next()],
        _ => [None; 3],
    };
    let [Some(Value::Text(kind)), Some(Value::Binary(bytes)), None] = parts else {
        return Err(format!(
            "the request has no `{field}`: send a text or tokens"
        ));
    };
    let (numbers, rest) = bytes.as_chunks::<8>();
    if kind != b"q" || !rest.is_empty() {
        return Err(format!("`{field}` are no 64-bit integers"));
    }
    let token = |(at, bytes): (usize, &[u8; 8])| {
        let token = i64::from_le_bytes(*bytes);
        u32::try_from(token)
            .map_err(|_| format!("token {token} at {at} of `{field}` is not in the vocabulary"))
    };
    numbers.iter().enumerate().map(token).collect()
}
