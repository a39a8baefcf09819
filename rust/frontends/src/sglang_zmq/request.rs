//! A request as the tokenizer manager sends it.

use std::sync::Arc;

use pie_engine::TraceParent;
use pie_ingress::{Ingress, RawEmbedding, RawRequest, Refusal};

use crate::sglang_zmq::backend::Media;
use crate::sglang_zmq::error::SglangFrontendError;
use crate::sglang_zmq::hidden_states::HiddenStates;
use crate::sglang_zmq::msgpack::Value;
use crate::sglang_zmq::processor_output::{ProcessorFields, ProcessorOutput};
use crate::sglang_zmq::schema::{Fields, MessageClass, field_indices, find};
use crate::sglang_zmq::session::SessionParams;
use crate::sglang_zmq::unsupported::{EMBEDDING, PARAMS, REQUEST, Refusals};
use crate::sglang_zmq::value::{flag, integer, optional_text, pickle, wrong};

/// `TokenizedGenerateReqInput` or `TokenizedEmbeddingReqInput`, as far as it is served.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a field of the message"
)]
pub struct GenerateRequest {
    /// Its name, unique among those that have not ended.
    pub rid: String,
    /// Whether it is one for an embedding, whose answers are messages of another class.
    pub embeds: bool,
    /// Which of several HTTP workers sent it; every output carries it.
    pub worker: Option<String>,
    /// Whether it wants every token as it comes.
    pub stream: bool,
    /// Tokens from one output of a stream to the next.
    pub stream_interval: Option<u32>,
    /// The tokenizer manager's name of the adapter.
    pub adapter: Option<String>,
    /// The session in which it continues.
    pub session: Option<SessionParams>,
    /// Images, audio or video, or what is wrong with them.
    pub media: Option<Result<Media, Refusal>>,
    /// Whether the model thinks first: tokens up to the end of it are counted.
    pub reasons: bool,
    /// Whether it wants log-probabilities: then its answer has lists of them, though it is refused.
    pub wants_logprobs: bool,
    /// Which hidden states it wants.
    pub hidden_states: HiddenStates,
    /// The span of the tokenizer manager, if it is traced.
    pub parent: Option<TraceParent>,
    /// How tokens become text.
    pub text: TextParams,
    /// What it asks of the engine, or why it cannot be served, for the client.
    pub parsed: Result<RawRequest, Refusal>,
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
#[derive(Debug)]
pub enum Incoming {
    /// Requests; several of them in one message are in their order. In the index of one that has no name, by which it could be
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

mod fields;

field_indices! {
    /// Where the fields of a request stand.
    RequestFields of "TokenizedGenerateReqInput" {
        rid, http_worker_ipc, input_ids, sampling_params, stream, priority, routing_key, extra_key, require_reasoning,
        return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob, lora_id, session_params, mm_inputs,
        input_embeds,
        time_stats, custom_logit_processor, return_hidden_states,
    }
}
field_indices! {
    EmbeddingFields of "TokenizedEmbeddingReqInput" {
        rid, http_worker_ipc, input_ids, lora_id, priority, dimensions, mm_inputs, time_stats,
    }
}
field_indices! { SessionFields of "SessionParams" { id, rid, offset, replace, drop_previous_output } }
field_indices! {
    ParamFields of "SamplingParams" {
        max_new_tokens, min_new_tokens, stop_token_ids, stop_strs, stop_regex_strs, ignore_eos, temperature, top_p, top_k, min_p, sampling_seed,
        frequency_penalty, presence_penalty, repetition_penalty, logit_bias, json_schema, regex, ebnf, structural_tag,
        skip_special_tokens, spaces_between_special_tokens, no_stop_trim, stream_interval, custom_params,
    }
}
field_indices! { BatchFields of "BatchTokenizedGenerateReqInput" { rids, batch } }
field_indices! { EmbeddingBatchFields of "BatchTokenizedEmbeddingReqInput" { rids, batch } }
field_indices! { AbortFields of "AbortReq" { rid, abort_all } }

/// Reads messages of the installed classes.
#[derive(Debug, Clone)]
pub struct Decoder {
    request: RequestFields,
    embedding: EmbeddingFields,
    params: ParamFields,
    session: SessionFields,
    batch: BatchFields,
    embedding_batch: EmbeddingBatchFields,
    abort: AbortFields,
    media: Option<ProcessorFields>,
    refused_requests: Refusals,
    refused_params: Refusals,
    refused_embeddings: Refusals,
    ingress: Arc<Ingress>,
    original_logprobs: bool,
    traces: bool,
}

impl Decoder {
    /// `ingress` has the limits of lists and names. `original_logprobs`: log-probabilities are those before the temperature. `traces`: read which spans requests are part of.
    ///
    /// # Errors
    /// [`SglangFrontendError`] if a class is missing, or lacks a field that is read.
    pub fn new(
        classes: &[MessageClass],
        ingress: Arc<Ingress>,
        original_logprobs: bool,
        traces: bool,
    ) -> Result<Self, SglangFrontendError> {
        let index = |class: &'static str| {
            let class = find(classes, class)?;
            Ok(move |name: &str| class.fields.iter().position(|field| field.name == name))
        };
        Ok(Self {
            request: RequestFields::new(classes)?,
            embedding: EmbeddingFields::new(classes)?,
            params: ParamFields::new(classes)?,
            session: SessionFields::new(classes)?,
            batch: BatchFields::new(classes)?,
            embedding_batch: EmbeddingBatchFields::new(classes)?,
            abort: AbortFields::new(classes)?,
            media: ProcessorFields::new(classes)?,
            refused_requests: Refusals::new(REQUEST, index("TokenizedGenerateReqInput")?),
            refused_params: Refusals::new(PARAMS, index("SamplingParams")?),
            refused_embeddings: Refusals::new(EMBEDDING, index("TokenizedEmbeddingReqInput")?),
            ingress,
            original_logprobs,
            traces,
        })
    }

    /// Reads a message. What is wrong with a request is a refusal in it, or stands in its index: it never fails another one.
    pub fn decode(&self, bytes: &[u8]) -> Incoming {
        let Some((tag, fields, is_whole)) = Fields::of_message(bytes) else {
            return Incoming::Unreadable(
                "it is no list that begins with the name of a class".to_owned(),
            );
        };
        match tag {
            b"TokenizedGenerateReqInput" => {
                Incoming::Generate(vec![self.request(Kind::Generate, &fields, is_whole, None)])
            }
            b"TokenizedEmbeddingReqInput" => {
                Incoming::Generate(vec![self.request(Kind::Embed, &fields, is_whole, None)])
            }
            b"BatchTokenizedGenerateReqInput" => {
                let at = (self.batch.rids, self.batch.batch);
                self.batch(Kind::Generate, at, &fields, is_whole)
            }
            b"BatchTokenizedEmbeddingReqInput" => {
                let at = (self.embedding_batch.rids, self.embedding_batch.batch);
                self.batch(Kind::Embed, at, &fields, is_whole)
            }
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
    fn batch(
        &self,
        kind: Kind,
        (rids, batch): (usize, usize),
        fields: &Fields<'_>,
        is_whole: bool,
    ) -> Incoming {
        let mut names = match fields.get(rids) {
            Value::List(names) => Some(names),
            _ => None,
        };
        let mut name = || {
            let name = names.as_mut()?.next()?;
            optional_text("rids", name).ok().flatten()
        };
        match fields.get(batch) {
            Value::List(batch) => Incoming::Generate(
                batch
                    .map(|request| {
                        let name = name();
                        let Value::List(items) = request else {
                            return refused(
                                kind,
                                name,
                                wrong("batch", request, "a list of requests"),
                            );
                        };
                        // Its tag comes first.
                        let fields = Fields::of_items(items.rest());
                        self.request(kind, &fields, true, name)
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
                    .map(|name| refused(kind, Some(name), error.clone()));
                Incoming::Generate(refused.collect())
            }
        }
    }

    /// A request, and why it cannot be served if a field has what its client may not ask for: the tokenizer manager checks few of
    /// them. `name` is what a batch calls it.
    fn request(
        &self,
        kind: Kind,
        fields: &Fields<'_>,
        is_whole: bool,
        name: Option<String>,
    ) -> Result<GenerateRequest, String> {
        let at = match kind {
            Kind::Generate => self.request.rid,
            Kind::Embed => self.embedding.rid,
        };
        let rid = match optional_text("rid", fields.get(at)) {
            Ok(Some(rid)) => rid,
            Ok(None) => return refused(kind, name, wrong("rid", Value::Nil, "a text")),
            Err(error) => return refused(kind, name, error),
        };
        if !is_whole {
            return refused(kind, Some(rid), Refusal::Other(CUT.to_owned()));
        }
        let mut request = GenerateRequest::refused(kind, rid, Refusal::Other(String::new()));
        request.parsed = match kind {
            Kind::Generate => self.read(fields, &mut request),
            Kind::Embed => self.read_embedding(fields, &mut request),
        };
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
        request.media = self.media(fields.get(at.mm_inputs)).transpose();
        let wants_logprobs = fields.get(at.return_logprob);
        request.wants_logprobs = !matches!(wants_logprobs, Value::Nil | Value::Flag(false));
        request.parent = self.parent(fields.get(at.time_stats))?;
        request.stream = flag("stream", fields.get(at.stream))?;
        let params = match fields.get(at.sampling_params) {
            Value::List(params) => Fields::of_items(params),
            other => return Err(wrong("sampling_params", other, "a list")),
        };
        let refused = self.refused_requests.find(fields);
        if let Some(reason) = refused.or_else(|| self.refused_params.find(&params)) {
            return Err(Refusal::Other(reason));
        }
        request.adapter = self.name("lora_id", fields.get(at.lora_id))?;
        request.hidden_states = HiddenStates::of(fields.get(at.return_hidden_states))?;
        request.session = self.session(fields.get(at.session_params))?;
        request.reasons = flag("require_reasoning", fields.get(at.require_reasoning))?;
        request.text = self.text(&params)?;
        request.stream_interval = fields::interval(params.get(self.params.stream_interval))?;
        let embeds = self.input_embeds(fields.get(at.input_embeds))?;
        let prompt = match &embeds {
            // Their tokens, if there are any, are ignored, as with SGLang.
            Some(embeds) => vec![0; embeds.tokens() as usize],
            None => self.prompt(fields.get(at.input_ids))?,
        };
        let raw = RawRequest::new(request.rid.clone(), prompt);
        let raw = RawRequest {
            images: embeds,
            priority: integer("priority", fields.get(at.priority))?,
            routing_key: self.name("routing_key", fields.get(at.routing_key))?,
            extra_key: self.name("extra_key", fields.get(at.extra_key))?,
            logprobs: self.logprobs(fields)?,
            logit_processor: self.logit_processor(fields)?,
            hidden_states: request.hidden_states != HiddenStates::None,
            ..raw
        };
        self.sampled(&params, raw)
    }

    /// Images and others, pickled or as a message, as the installed version sends them.
    fn media(&self, value: Value<'_>) -> Result<Option<Media>, Refusal> {
        if value == Value::Nil {
            return Ok(None);
        }
        if let Some(at) = &self.media {
            let read = ProcessorOutput::of(at, self.ingress.limits(), value)?;
            Ok(Some(Media::Message(read)))
        } else {
            let pickle = pickle("mm_inputs", value)?;
            Ok(pickle.map(|pickle| Media::Pickle(pickle.into())))
        }
    }

    /// As [`read`](Self::read), of a request for an embedding. Its sampling parameters have no meaning.
    fn read_embedding(
        &self,
        fields: &Fields<'_>,
        request: &mut GenerateRequest,
    ) -> Result<RawRequest, Refusal> {
        let at = &self.embedding;
        let worker = optional_text("http_worker_ipc", fields.get(at.http_worker_ipc));
        request.worker = worker?;
        request.media = self.media(fields.get(at.mm_inputs)).transpose();
        request.parent = self.parent(fields.get(at.time_stats))?;
        if let Some(reason) = self.refused_embeddings.find(fields) {
            return Err(Refusal::Other(reason));
        }
        request.adapter = self.name("lora_id", fields.get(at.lora_id))?;
        let dimensions = integer("dimensions", fields.get(at.dimensions))?;
        Ok(RawRequest {
            priority: integer("priority", fields.get(at.priority))?,
            embedding: Some(RawEmbedding { dimensions }),
            ..RawRequest::new(request.rid.clone(), self.prompt(fields.get(at.input_ids))?)
        })
    }
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Generate,
    Embed,
}

/// What is wrong with a message that ends too early, or holds what `MessagePack` does not know.
const CUT: &str = "the message is cut off, or holds what is not MessagePack";

impl GenerateRequest {
    /// One that asks for nothing but an answer that says why not.
    fn refused(kind: Kind, rid: String, reason: Refusal) -> Self {
        Self {
            rid,
            embeds: kind == Kind::Embed,
            worker: None,
            stream: false,
            stream_interval: None,
            adapter: None,
            session: None,
            media: None,
            reasons: false,
            wants_logprobs: false,
            hidden_states: HiddenStates::None,
            parent: None,
            text: TextParams::default(),
            parsed: Err(reason),
        }
    }
}

/// A request that cannot be read: refused, if it has a name to be answered by.
fn refused(kind: Kind, name: Option<String>, error: Refusal) -> Result<GenerateRequest, String> {
    match name {
        Some(rid) => Ok(GenerateRequest::refused(kind, rid, error)),
        None => Err(error.to_string()),
    }
}
