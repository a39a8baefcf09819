//! `sglang.grpc.scheduler.SglangScheduler`.

use std::collections::BTreeMap;
use std::iter::once;
use std::sync::Arc;

use pie_ingress::{RawLogprobs, RawRequest, Refusal};
use pie_runtime::{Grammar, Pictures, Sampling};
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use tonic::{Request, Response, Status};

use crate::contract::common::{
    FlushCacheRequest, FlushCacheResponse, ProfileResponse, SubscribeKvEventsRequest,
};
use crate::contract::sglang::generate_complete::MatchedStop;
use crate::contract::sglang::generate_response::Response as Message;
use crate::contract::sglang::sampling_params::Constraint;
use crate::contract::sglang::sglang_scheduler_server::{SglangScheduler, SglangSchedulerServer};
use crate::contract::sglang::{
    AbortRequest, AbortResponse, AggregateMetrics, EmbedResponse, GenerateComplete,
    GenerateRequest, GenerateResponse, GenerateStreamChunk, GetLoadsRequest, GetLoadsResponse,
    GetModelInfoResponse, GetServerInfoResponse, HealthCheckResponse, InputLogProbs,
    InputTokenLogProb, ListLoadedLoRaAdaptersResponse, LoadLoRaAdapterResponse, MemoryMetrics,
    MultimodalInputs, OutputLogProbs, QueueMetrics, SamplingParams, SchedulerLoad,
    SpeculativeMetrics, TensorData, TopLogProbs, UnloadLoRaAdapterResponse,
};
use crate::core::{Asked, Core};
use crate::encoded::Encoded;
use crate::events::Subscription;
use crate::loads::Loads;
use crate::logprobs::{Row, Rows, Sides};
use crate::mailbox::Pace;
use crate::media::{self, Media, Tensor};
use crate::reader::RequestReader;
use crate::settings::ImageFacts;
use crate::status::{Matched, refused};
use crate::ticket::{Answer, Answers, Ticket, Wording};
use crate::times;
use crate::tokenizer::{self, Bundle};
use crate::unserved::{NO_EMBEDDINGS, SPLIT, or_one, refuse};
use crate::vllm::flushed;

/// The service over a core.
pub(crate) fn service(core: Arc<Core>, message_bytes: usize) -> SglangSchedulerServer<Scheduler> {
    SglangSchedulerServer::new(Scheduler(core))
        .max_decoding_message_size(message_bytes)
        .max_encoding_message_size(message_bytes)
}

#[derive(Debug)]
pub(crate) struct Scheduler(Arc<Core>);

#[derive(Debug)]
pub(crate) struct Words;

impl Wording for Words {
    type Message = GenerateResponse;

    fn say(answer: Answer, prompt_tokens: u32) -> GenerateResponse {
        let response = match answer {
            Answer::Tokens {
                sample,
                tokens,
                counts,
                scores,
            } => Message::Chunk(GenerateStreamChunk {
                token_ids: tokens,
                prompt_tokens,
                completion_tokens: counts.tokens,
                cached_tokens: counts.cached,
                index: sample,
                output_logprobs: scores.output.map(output),
                input_logprobs: scores.input.map(input),
                ..GenerateStreamChunk::default()
            }),
            Answer::End {
                sample,
                tokens,
                counts,
                scores,
                reason,
                matched,
            } => Message::Complete(GenerateComplete {
                output_ids: tokens,
                finish_reason: reason.to_owned(),
                prompt_tokens,
                completion_tokens: counts.tokens,
                cached_tokens: counts.cached,
                index: sample,
                output_logprobs: scores.output.map(output),
                input_logprobs: scores.input.map(input),
                matched_stop: match matched {
                    Matched::Nothing => None,
                    Matched::Token(token) => Some(MatchedStop::MatchedTokenId(token)),
                    Matched::Text(text) => Some(MatchedStop::MatchedStopStr(text)),
                },
                ..GenerateComplete::default()
            }),
        };
        GenerateResponse {
            // The stream says which request it is.
            request_id: String::new(),
            response: Some(response),
        }
    }
}

fn output(rows: Rows) -> OutputLogProbs {
    OutputLogProbs {
        token_logprobs: rows.values,
        token_ids: rows.ids,
        top_logprobs: rows.top.into_iter().map(tokens).collect(),
        token_ids_logprobs: rows.given.into_iter().map(tokens).collect(),
    }
}

/// Nothing comes before the first token of a prompt.
fn input(rows: Rows) -> InputLogProbs {
    let none = (!rows.top.is_empty()).then(TopLogProbs::default);
    let values = rows.values.into_iter().map(Some);
    InputLogProbs {
        token_logprobs: once(None)
            .chain(values)
            .map(|value| InputTokenLogProb { value })
            .collect(),
        token_ids: rows.ids,
        top_logprobs: none
            .into_iter()
            .chain(rows.top.into_iter().map(tokens))
            .collect(),
    }
}

fn tokens(row: Row) -> TopLogProbs {
    TopLogProbs {
        values: row.values,
        token_ids: row.ids,
    }
}

pub(crate) fn asked(mut request: GenerateRequest, reader: &RequestReader) -> Result<Asked, Status> {
    let (images, ingress) = (reader.images, &reader.ingress);
    let params = request.sampling_params.take().unwrap_or_default();
    refuse(&[
        (
            "input_embeds",
            !request.input_embeds.is_empty(),
            "it takes tokens and pictures",
        ),
        (
            "disaggregated_params",
            request.disaggregated_params.is_some(),
            SPLIT,
        ),
        (
            "custom_logit_processor",
            !request.custom_logit_processor.is_empty(),
            "it is a Python object",
        ),
        (
            "custom_params",
            params.custom_params.iter().any(|bytes| !bytes.is_empty()),
            "they are for a custom logit processor",
        ),
        (
            "lora_id",
            !request.lora_id.is_empty(),
            "this door loads no adapters",
        ),
        (
            "data_parallel_rank",
            request.data_parallel_rank > 0,
            "each replica has a port of its own",
        ),
        (
            "return_hidden_states",
            request.return_hidden_states,
            "hidden states stay in the driver",
        ),
    ])?;
    let interval = params.stream_interval.unwrap_or(1);
    let interval = u32::try_from(interval)
        .ok()
        .filter(|&interval| interval > 0);
    let interval = interval.ok_or_else(|| {
        Status::invalid_argument("`stream_interval` must be 1 or more: leave it out for 1")
    })?;
    let bias = |(token, &bias): (&String, &f32)| {
        let token = ingress.token_of_text("logit_bias", token)?;
        Ok((token, bias))
    };
    let logit_bias: Result<Vec<_>, Refusal> = params.logit_bias.iter().map(bias).collect();
    let logit_bias = logit_bias.map_err(|refusal| refused(&refusal))?;
    let logprobs = logprobs(&request);
    let prompt = request.tokenized.take().unwrap_or_default().input_ids;
    let inputs = request.mm_inputs.as_ref();
    let pictures = inputs.map(|inputs| pictures(inputs, images, prompt.len()));
    let raw = RawRequest {
        sampling: sampling(&params),
        logit_bias,
        logprobs,
        pictures: pictures.transpose()?,
        max_new_tokens: params.max_new_tokens.map(i64::from),
        min_new_tokens: params.min_new_tokens.into(),
        n: params.n.max(1).into(),
        stop_token_ids: params.stop_token_ids.into_iter().map(i64::from).collect(),
        stop: params.stop,
        ignore_eos: params.ignore_eos,
        grammar: params.constraint.map(grammar),
        streams: request.stream,
        ..RawRequest::new(request.request_id, prompt)
    };
    let pace = Pace {
        streams: request.stream,
        interval,
    };
    let sides = Sides::default();
    Ok(Asked { raw, pace, sides })
}

fn pictures(
    inputs: &MultimodalInputs,
    images: Option<ImageFacts>,
    prompt: usize,
) -> Result<Pictures, Status> {
    // Media that no gateway has made tensors of.
    let urls = [&inputs.image_urls, &inputs.video_urls, &inputs.audio_urls];
    let data = [&inputs.image_data, &inputs.video_data, &inputs.audio_data];
    let is_raw = urls.iter().any(|urls| !urls.is_empty());
    let has_others = [data[1], data[2]].iter().any(|data| !data.is_empty());
    if is_raw || has_others || inputs.pixel_values.is_none() {
        return Err(media::refusal(images));
    }
    let grids = Media::grids(inputs.model_specific_tensors.iter());
    let places = inputs.mm_placeholders.iter();
    let media = Media {
        pixels: inputs.pixel_values.as_ref().map(tensor),
        grids: grids.map(tensor),
        places: places.map(|place| (place.offset, place.length)).collect(),
    };
    media::pictures(&media, images, prompt)
}

fn tensor(data: &TensorData) -> Tensor<'_> {
    Tensor {
        shape: &data.shape,
        dtype: &data.dtype,
        data: &data.data,
    }
}

fn logprobs(request: &GenerateRequest) -> Option<RawLogprobs> {
    let is_wanted = request.return_logprob || !request.token_ids_logprob.is_empty();
    is_wanted.then(|| RawLogprobs {
        top_logprobs_num: request.top_logprobs_num.into(),
        token_ids_logprob: request
            .token_ids_logprob
            .iter()
            .copied()
            .map(i64::from)
            .collect(),
        logprob_start_len: request.logprob_start_len.into(),
        original: false,
    })
}

/// The contract asks for explicit values. A `top_p` or `top_k` of 0 stands for the neutral one. A repetition penalty of 0 is
/// refused.
fn sampling(params: &SamplingParams) -> Sampling {
    Sampling {
        temperature: params.temperature,
        top_k: params.top_k.into(),
        top_p: or_one(params.top_p),
        min_p: params.min_p,
        seed: None,
        frequency_penalty: params.frequency_penalty,
        presence_penalty: params.presence_penalty,
        repetition_penalty: params.repetition_penalty,
        logit_bias: Vec::new(),
    }
}

fn grammar(constraint: Constraint) -> Grammar {
    match constraint {
        Constraint::JsonSchema(text) => Grammar::JsonSchema(text.into()),
        Constraint::Regex(text) => Grammar::Regex(text.into()),
        Constraint::EbnfGrammar(text) => Grammar::Ebnf(text.into()),
        Constraint::StructuralTag(text) => Grammar::StructuralTag(text.into()),
    }
}

fn load(rank: usize, loads: &Loads) -> SchedulerLoad {
    SchedulerLoad {
        dp_rank: rank as i32,
        num_running_reqs: loads.running as i32,
        num_waiting_reqs: loads.waiting as i32,
        num_total_reqs: (loads.running + loads.waiting) as i32,
        num_used_tokens: loads.used_tokens as i32,
        max_total_num_tokens: loads.total_tokens as i32,
        token_usage: loads.usage(),
        gen_throughput: loads.throughput,
        cache_hit_rate: loads.hit_rate,
        utilization: loads.utilization(),
        max_running_requests: loads.max_running as i32,
        num_waiting_uncached_tokens: loads.pending_tokens as i32,
        memory: Some(MemoryMetrics {
            token_capacity: loads.total_tokens as i32,
            ..MemoryMetrics::default()
        }),
        speculative: loads
            .drafts
            .map(|(accept_length, accept_rate)| SpeculativeMetrics {
                accept_length,
                accept_rate,
            }),
        queues: Some(QueueMetrics {
            waiting: loads.waiting as i32,
            retracted: loads.retracted as i32,
            ..QueueMetrics::default()
        }),
        ..SchedulerLoad::default()
    }
}

fn sum(loads: &[SchedulerLoad]) -> AggregateMetrics {
    let count = loads.len().max(1) as f64;
    let mean = |value: fn(&SchedulerLoad) -> f64| loads.iter().map(value).sum::<f64>() / count;
    AggregateMetrics {
        total_running_reqs: loads.iter().map(|load| load.num_running_reqs).sum(),
        total_waiting_reqs: loads.iter().map(|load| load.num_waiting_reqs).sum(),
        total_reqs: loads.iter().map(|load| load.num_total_reqs).sum(),
        avg_token_usage: mean(|load| load.token_usage),
        avg_throughput: mean(|load| load.gen_throughput),
        avg_utilization: mean(|load| load.utilization),
    }
}

fn structure(values: &[(&str, f64)]) -> Struct {
    let value = |&(name, value): &(&str, f64)| {
        let kind = Some(Kind::NumberValue(value));
        (name.to_owned(), Value { kind })
    };
    Struct {
        fields: values.iter().map(value).collect::<BTreeMap<_, _>>(),
    }
}

const NO_ADAPTERS: &str =
    "this door loads no adapters; `pie-sglang serve` without `--front gateway` does";
const NO_PROFILE: &str = "profiles are not taken here; `--option trace_file=PATH` traces the steps";

#[tonic::async_trait]
impl SglangScheduler for Scheduler {
    type GenerateStream = Answers<Words>;
    type GetTokenizerStream = Bundle;
    type SubscribeKvEventsStream = Subscription;

    async fn generate(
        &self,
        request: Request<Encoded>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (metadata, _, message) = request.into_parts();
        let is_large = message.is_large();
        let message: GenerateRequest = message.decode().await?;
        let params = message.sampling_params.as_ref();
        // The first grammar has the vocabulary read.
        let is_slow = is_large || params.is_some_and(|params| params.constraint.is_some());
        let read = move |core: &Core| asked(message, core.reader());
        let ticket = Ticket::open(&self.0, is_slow, read, metadata).await?;
        Ok(Response::new(Answers::begin(ticket).await?))
    }

    async fn embed(&self, _: Request<Encoded>) -> Result<Response<EmbedResponse>, Status> {
        Err(Status::unimplemented(NO_EMBEDDINGS))
    }

    async fn health_check(
        &self,
        _: Request<Encoded>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let trouble = self.0.trouble();
        Ok(Response::new(HealthCheckResponse {
            healthy: trouble.is_none(),
            message: trouble.unwrap_or_else(|| "healthy".to_owned()),
        }))
    }

    async fn abort(&self, request: Request<Encoded>) -> Result<Response<AbortResponse>, Status> {
        let request: AbortRequest = request.into_inner().decode().await?;
        let success = self.0.abort(&request.request_id);
        let message = if success {
            "it ends with the next step"
        } else {
            "no request of this name is open"
        };
        Ok(Response::new(AbortResponse {
            success,
            message: message.to_owned(),
        }))
    }

    async fn get_model_info(
        &self,
        _: Request<Encoded>,
    ) -> Result<Response<GetModelInfoResponse>, Status> {
        let (model, able) = (self.0.model(), self.0.able());
        let length = self.0.context_length() as i32;
        let token = |token: Option<u32>| token.map_or(-1, |token| token as i32);
        Ok(Response::new(GetModelInfoResponse {
            model_path: model.model_path.clone(),
            tokenizer_path: model.tokenizer_path.clone(),
            is_generation: true,
            weight_version: model.weight_version.clone(),
            served_model_name: model.served_name.clone(),
            max_context_length: length,
            vocab_size: able.vocab_size as i32,
            model_type: model.model_type.clone(),
            eos_token_ids: model.eos_tokens.iter().map(|&token| token as i32).collect(),
            pad_token_id: token(model.pad_token),
            bos_token_id: token(model.bos_token),
            max_req_input_len: length,
            supports_vision: self.0.reader().images.is_some(),
            architectures: model.architectures.clone(),
            default_sampling_params_json: model.default_sampling.clone(),
            ..GetModelInfoResponse::default()
        }))
    }

    async fn get_server_info(
        &self,
        _: Request<Encoded>,
    ) -> Result<Response<GetServerInfoResponse>, Status> {
        let (able, model) = (self.0.able(), self.0.model());
        let tokens: u64 = self.0.loads().iter().map(|loads| loads.total_tokens).sum();
        let arguments = [
            ("tp_size", 1.0),
            ("dp_size", self.0.replicas() as f64),
            ("page_size", able.kv_page_size.into()),
            ("max_running_requests", self.0.max_running().into()),
        ];
        let facts = [
            ("max_total_num_tokens", tokens as f64),
            ("max_req_input_len", self.0.context_length().into()),
        ];
        Ok(Response::new(GetServerInfoResponse {
            server_args: Some(structure(&arguments)),
            scheduler_info: Some(structure(&facts)),
            active_requests: self.0.open_requests() as i32,
            last_receive_timestamp: self.0.last_request(),
            uptime_seconds: self.0.uptime().as_secs_f64(),
            sglang_version: model.version.clone(),
            server_type: "pie-gateway".to_owned(),
            start_time: Some(times::moment(self.0.uptime())),
            max_total_num_tokens: tokens as i32,
            ..GetServerInfoResponse::default()
        }))
    }

    async fn get_loads(
        &self,
        request: Request<Encoded>,
    ) -> Result<Response<GetLoadsResponse>, Status> {
        let request: GetLoadsRequest = request.into_inner().decode().await?;
        let wanted = request.dp_rank;
        let all = self.0.loads();
        let loads = all.iter().enumerate();
        let loads: Vec<SchedulerLoad> = loads
            .filter(|(rank, _)| wanted.is_none_or(|wanted| *rank as i32 == wanted))
            .map(|(rank, loads)| load(rank, loads))
            .collect();
        Ok(Response::new(GetLoadsResponse {
            timestamp: times::now(),
            version: self.0.model().version.clone(),
            dp_rank_count: all.len() as i32,
            aggregate: Some(sum(&loads)),
            loads,
        }))
    }

    async fn flush_cache(
        &self,
        request: Request<Encoded>,
    ) -> Result<Response<FlushCacheResponse>, Status> {
        let request: FlushCacheRequest = request.into_inner().decode().await?;
        let limit = times::seconds(request.timeout_s)?;
        Ok(Response::new(flushed(self.0.flush(limit).await)))
    }

    async fn start_profile(
        &self,
        _: Request<Encoded>,
    ) -> Result<Response<ProfileResponse>, Status> {
        Err(Status::unimplemented(NO_PROFILE))
    }

    async fn stop_profile(&self, _: Request<Encoded>) -> Result<Response<ProfileResponse>, Status> {
        Err(Status::unimplemented(NO_PROFILE))
    }

    async fn get_tokenizer(
        &self,
        _: Request<Encoded>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        Ok(Response::new(tokenizer::read(self.0.model()).await?))
    }

    async fn subscribe_kv_events(
        &self,
        request: Request<Encoded>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        let request: SubscribeKvEventsRequest = request.into_inner().decode().await?;
        let cursor = request.start_sequence_number;
        Ok(Response::new(self.0.subscribe(cursor)?))
    }

    async fn load_lo_ra_adapter(
        &self,
        _: Request<Encoded>,
    ) -> Result<Response<LoadLoRaAdapterResponse>, Status> {
        Err(Status::unimplemented(NO_ADAPTERS))
    }

    async fn unload_lo_ra_adapter(
        &self,
        _: Request<Encoded>,
    ) -> Result<Response<UnloadLoRaAdapterResponse>, Status> {
        Err(Status::unimplemented(NO_ADAPTERS))
    }

    async fn list_loaded_lo_ra_adapters(
        &self,
        _: Request<Encoded>,
    ) -> Result<Response<ListLoadedLoRaAdaptersResponse>, Status> {
        Err(Status::unimplemented(NO_ADAPTERS))
    }
}
