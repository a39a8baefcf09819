//! `vllm.grpc.engine.VllmEngine`.

pub(crate) mod request;

use std::iter::once;
use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::grpc::contract::common::{
    FlushCacheRequest, FlushCacheResponse, SubscribeKvEventsRequest,
};
use crate::grpc::contract::vllm::generate_complete::MatchedStop;
use crate::grpc::contract::vllm::generate_response::Response as Message;
use crate::grpc::contract::vllm::vllm_engine_server::{VllmEngine, VllmEngineServer};
use crate::grpc::contract::vllm::{
    AbortRequest, AbortResponse, EmbedResponse, GenerateComplete, GenerateRequest,
    GenerateResponse, GenerateStreamChunk, GetLoadsRequest, GetLoadsResponse, GetModelInfoResponse,
    GetServerInfoResponse, HealthCheckResponse, InputLogProbs, InputTokenLogProb, OutputLogProbs,
    SchedulerLoad, TopLogProbs,
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

/// The service over a core.
pub(crate) fn service(core: Arc<Core>, message_bytes: usize) -> VllmEngineServer<Engine> {
    VllmEngineServer::new(Engine(core))
        .max_decoding_message_size(message_bytes)
        .max_encoding_message_size(message_bytes)
}

#[derive(Debug)]
pub(crate) struct Engine(Arc<Core>);

answer_messages! {}

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
    }
}

#[tonic::async_trait]
impl VllmEngine for Engine {
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
        let read = move |core: &Core| request::parse(message, core.reader().images);
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

    async fn flush_cache(&self, request: Request<Encoded>) -> Reply<FlushCacheResponse> {
        let request: FlushCacheRequest = request.into_inner().decode().await?;
        let limit = times::seconds(request.timeout_s)?;
        Ok(Response::new(flushed(self.0.flush(limit).await)))
    }

    async fn abort(&self, request: Request<Encoded>) -> Result<Response<AbortResponse>, Status> {
        let request: AbortRequest = request.into_inner().decode().await?;
        for name in request.request_ids {
            self.0.abort(&name);
        }
        Ok(Response::new(AbortResponse {}))
    }

    async fn get_model_info(&self, _: Request<Encoded>) -> Reply<GetModelInfoResponse> {
        let (model, capabilities) = (self.0.model(), self.0.capabilities());
        let length = self.0.context_length();
        let token = |token: Option<u32>| token.map_or(-1, |token| token as i32);
        Ok(Response::new(GetModelInfoResponse {
            model_path: model.model_path.clone(),
            is_generation: true,
            max_context_length: length,
            vocab_size: capabilities.vocab_size,
            supports_vision: self.0.reader().images.is_some(),
            served_model_name: model.served_name.clone(),
            tokenizer_path: model.tokenizer_path.clone(),
            model_type: model.model_type.clone(),
            architectures: model.architectures.clone(),
            eos_token_ids: model.eos_tokens.iter().map(|&token| token as i32).collect(),
            pad_token_id: token(model.pad_token),
            bos_token_id: token(model.bos_token),
            max_req_input_len: length as i32,
            default_sampling_params_json: model.default_sampling.clone(),
        }))
    }

    async fn get_server_info(&self, _: Request<Encoded>) -> Reply<GetServerInfoResponse> {
        Ok(Response::new(GetServerInfoResponse {
            active_requests: self.0.open_requests() as u32,
            last_receive_timestamp: self.0.last_request(),
            uptime_seconds: self.0.uptime().as_secs_f64(),
            server_type: "pie-gateway".to_owned(),
            data_parallel_size: self.0.replicas() as i32,
            block_size: self.0.capabilities().kv_page_size as i32,
            model_dtype: self.0.capabilities().activation_dtype.clone(),
            max_num_seqs: self.0.max_running() as i32,
            ..GetServerInfoResponse::default()
        }))
    }

    async fn get_loads(&self, request: Request<Encoded>) -> Reply<GetLoadsResponse> {
        let request: GetLoadsRequest = request.into_inner().decode().await?;
        let wanted = request.dp_rank;
        let all = self.0.loads();
        let loads = all.iter().enumerate();
        let loads = loads.filter(|(rank, _)| wanted.is_none_or(|wanted| *rank as i32 == wanted));
        Ok(Response::new(GetLoadsResponse {
            timestamp: times::now(),
            version: self.0.model().version.clone(),
            dp_rank_count: all.len() as i32,
            loads: loads.map(|(rank, loads)| load(rank, loads)).collect(),
        }))
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
}

/// What a flush says.
pub(crate) fn flushed(success: bool) -> FlushCacheResponse {
    let message = if success {
        "the prefix index is empty"
    } else {
        "requests run or wait: try again later"
    };
    FlushCacheResponse {
        success,
        message: message.to_owned(),
    }
}
