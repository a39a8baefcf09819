//! `sglang.grpc.scheduler.SglangScheduler`.

pub(crate) mod request;

use std::collections::BTreeMap;
use std::iter::once;
use std::sync::Arc;

use prost_types::value::Kind;
use prost_types::{Struct, Value};
use tonic::{Request, Response, Status};

use crate::grpc::contract::common::{
    FlushCacheRequest, FlushCacheResponse, ProfileResponse, SubscribeKvEventsRequest,
};
use crate::grpc::contract::sglang::generate_complete::MatchedStop;
use crate::grpc::contract::sglang::generate_response::Response as Message;
use crate::grpc::contract::sglang::sglang_scheduler_server::{
    SglangScheduler, SglangSchedulerServer,
};
use crate::grpc::contract::sglang::{
    AbortRequest, AbortResponse, AggregateMetrics, EmbedResponse, GenerateComplete,
    GenerateRequest, GenerateResponse, GenerateStreamChunk, GetLoadsRequest, GetLoadsResponse,
    GetModelInfoResponse, GetServerInfoResponse, HealthCheckResponse, InputLogProbs,
    InputTokenLogProb, ListLoadedLoRaAdaptersResponse, LoadLoRaAdapterResponse, MemoryMetrics,
    OutputLogProbs, QueueMetrics, SchedulerLoad, SpeculativeMetrics, TopLogProbs,
    UnloadLoRaAdapterResponse,
};
use crate::grpc::core::Core;
use crate::grpc::encoded::{Encoded, Reply};
use crate::grpc::events::Subscription;
use crate::grpc::handle::{Answer, Answers, StreamHandle, Wording};
use crate::grpc::loads::Loads;
use crate::grpc::logprobs::{Row, Rows};
use crate::grpc::messages::answer_messages;
use crate::grpc::status::Matched;
use crate::grpc::times;
use crate::grpc::tokenizer::{self, Bundle};
use crate::grpc::unsupported::NO_EMBEDDINGS;
use crate::grpc::vllm::flushed;

/// The service over a core.
pub(crate) fn service(core: Arc<Core>, message_bytes: usize) -> SglangSchedulerServer<Scheduler> {
    SglangSchedulerServer::new(Scheduler(core))
        .max_decoding_message_size(message_bytes)
        .max_encoding_message_size(message_bytes)
}

#[derive(Debug)]
pub(crate) struct Scheduler(Arc<Core>);

answer_messages! {
    // The stream says which request it is.
    response { request_id: String::new() }
    output { token_ids_logprobs }
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
    "this server loads no adapters; `pie-sglang serve` without `--front gateway` does";
const NO_PROFILE: &str = "profiles are not taken here; `--option trace_file=PATH` traces the steps";

#[tonic::async_trait]
impl SglangScheduler for Scheduler {
    type GenerateStream = Answers<Words>;
    type GetTokenizerStream = Bundle;
    type SubscribeKvEventsStream = Subscription;

    async fn generate(&self, request: Request<Encoded>) -> Reply<Self::GenerateStream> {
        let (metadata, _, message) = request.into_parts();
        let is_large = message.is_large();
        let message: GenerateRequest = message.decode().await?;
        let params = message.sampling_params.as_ref();
        // The first grammar has the vocabulary read.
        let is_slow = is_large || params.is_some_and(|params| params.constraint.is_some());
        let read = move |core: &Core| {
            let reader = core.reader();
            request::parse(message, reader.images, &reader.ingress)
        };
        let handle = StreamHandle::open(&self.0, is_slow, read, metadata).await?;
        Ok(Response::new(Answers::begin(handle).await?))
    }

    async fn embed(&self, _: Request<Encoded>) -> Result<Response<EmbedResponse>, Status> {
        Err(Status::unimplemented(NO_EMBEDDINGS))
    }

    async fn health_check(&self, _: Request<Encoded>) -> Reply<HealthCheckResponse> {
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

    async fn get_model_info(&self, _: Request<Encoded>) -> Reply<GetModelInfoResponse> {
        let (model, capabilities) = (self.0.model(), self.0.capabilities());
        let length = self.0.context_length() as i32;
        let token = |token: Option<u32>| token.map_or(-1, |token| token as i32);
        Ok(Response::new(GetModelInfoResponse {
            model_path: model.model_path.clone(),
            tokenizer_path: model.tokenizer_path.clone(),
            is_generation: true,
            weight_version: model.weight_version.clone(),
            served_model_name: model.served_name.clone(),
            max_context_length: length,
            vocab_size: capabilities.vocab_size as i32,
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

    async fn get_server_info(&self, _: Request<Encoded>) -> Reply<GetServerInfoResponse> {
        let (capabilities, model) = (self.0.capabilities(), self.0.model());
        let tokens: u64 = self.0.loads().iter().map(|loads| loads.total_tokens).sum();
        let arguments = [
            ("tp_size", 1.0),
            ("dp_size", self.0.replicas() as f64),
            ("page_size", capabilities.kv_page_size.into()),
            ("max_running_requests", self.0.max_running().into()),
        ];
        let info = [
            ("max_total_num_tokens", tokens as f64),
            ("max_req_input_len", self.0.context_length().into()),
        ];
        Ok(Response::new(GetServerInfoResponse {
            server_args: Some(structure(&arguments)),
            scheduler_info: Some(structure(&info)),
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

    async fn get_loads(&self, request: Request<Encoded>) -> Reply<GetLoadsResponse> {
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

    async fn flush_cache(&self, request: Request<Encoded>) -> Reply<FlushCacheResponse> {
        let request: FlushCacheRequest = request.into_inner().decode().await?;
        let limit = times::seconds(request.timeout_s)?;
        Ok(Response::new(flushed(self.0.flush(limit).await)))
    }

    async fn start_profile(&self, _: Request<Encoded>) -> Reply<ProfileResponse> {
        Err(Status::unimplemented(NO_PROFILE))
    }

    async fn stop_profile(&self, _: Request<Encoded>) -> Result<Response<ProfileResponse>, Status> {
        Err(Status::unimplemented(NO_PROFILE))
    }

    async fn get_tokenizer(&self, _: Request<Encoded>) -> Reply<Self::GetTokenizerStream> {
        Ok(Response::new(tokenizer::read(self.0.model()).await?))
    }

    async fn subscribe_kv_events(
        &self,
        request: Request<Encoded>,
    ) -> Reply<Self::SubscribeKvEventsStream> {
        let request: SubscribeKvEventsRequest = request.into_inner().decode().await?;
        let cursor = request.start_sequence_number;
        Ok(Response::new(self.0.subscribe(cursor)?))
    }

    async fn load_lo_ra_adapter(&self, _: Request<Encoded>) -> Reply<LoadLoRaAdapterResponse> {
        Err(Status::unimplemented(NO_ADAPTERS))
    }

    async fn unload_lo_ra_adapter(&self, _: Request<Encoded>) -> Reply<UnloadLoRaAdapterResponse> {
        Err(Status::unimplemented(NO_ADAPTERS))
    }

    async fn list_loaded_lo_ra_adapters(
        &self,
        _: Request<Encoded>,
    ) -> Reply<ListLoadedLoRaAdaptersResponse> {
        Err(Status::unimplemented(NO_ADAPTERS))
    }
}
