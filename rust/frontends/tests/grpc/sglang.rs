//! Requests by `SglangScheduler`: what differs from the other contract.

use pie_frontends::grpc::Contract;
use pie_frontends::grpc::contract::common::{
    FlushCacheRequest, StartProfileRequest, StopProfileRequest,
};
use pie_frontends::grpc::contract::sglang as proto;
use pie_frontends::grpc::contract::sglang::generate_complete::MatchedStop;
use pie_frontends::grpc::contract::sglang::generate_response::Response;
use pie_frontends::grpc::contract::sglang::sampling_params::Constraint;
use pie_frontends::grpc::contract::sglang::sglang_scheduler_client::SglangSchedulerClient;
use prost_types::value::Kind;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

use crate::bench::{Bench, expected, prompt, run};
use crate::driver;

pub(crate) fn request(name: &str, prompt: &[u32], output: u32) -> proto::GenerateRequest {
    proto::GenerateRequest {
        request_id: name.to_owned(),
        tokenized: Some(proto::TokenizedInput {
            original_text: String::new(),
            input_ids: prompt.to_vec(),
        }),
        sampling_params: Some(proto::SamplingParams {
            temperature: 0.0,
            top_p: 1.0,
            top_k: -1,
            repetition_penalty: 1.0,
            max_new_tokens: Some(output),
            n: 1,
            ..proto::SamplingParams::default()
        }),
        stream: true,
        ..proto::GenerateRequest::default()
    }
}

fn params(request: &mut proto::GenerateRequest) -> &mut proto::SamplingParams {
    request.sampling_params.as_mut().unwrap()
}

pub(crate) async fn client(bench: &Bench) -> SglangSchedulerClient<Channel> {
    SglangSchedulerClient::new(bench.channel().await)
}

/// The chunks of a stream with one sequence, and its end.
async fn collect(
    stream: Streaming<proto::GenerateResponse>,
) -> (Vec<Vec<u32>>, proto::GenerateComplete) {
    let mut stream = stream;
    let (mut chunks, mut end) = (Vec::new(), None);
    while let Some(message) = stream.message().await.unwrap() {
        match message.response.unwrap() {
            Response::Chunk(chunk) => {
                assert!(end.is_none());
                chunks.push(chunk.token_ids);
            }
            Response::Complete(complete) => assert!(end.replace(complete).is_none()),
        }
    }
    (chunks, end.unwrap())
}

#[test]
fn a_request_is_answered_like_by_the_other_contract() {
    run(async {
        let bench = Bench::new("serve", Contract::Sglang);
        let mut client = client(&bench).await;
        let response = client.generate(request("a", &prompt(3), 20)).await.unwrap();
        let (chunks, end) = collect(response.into_inner()).await;
        assert_eq!(chunks.concat(), expected(&prompt(3), 20));
        assert_eq!(end.output_ids, chunks.concat());
        assert_eq!(
            (end.finish_reason.as_str(), end.completion_tokens),
            ("length", 20)
        );
        let mut asked = request("b", &prompt(3), 20);
        asked.stream = false;
        params(&mut asked).stop_token_ids = vec![end.output_ids[0]];
        let response = client.generate(asked).await.unwrap();
        let (chunks, end) = collect(response.into_inner()).await;
        assert!(chunks.is_empty());
        assert_eq!(end.finish_reason, "stop");
        assert_eq!(
            end.matched_stop,
            Some(MatchedStop::MatchedTokenId(end.output_ids[0]))
        );
    });
}

#[test]
fn an_interval_makes_parts_longer() {
    run(async {
        let bench = Bench::new("serve slow=1", Contract::Sglang);
        let mut client = client(&bench).await;
        let mut asked = request("a", &prompt(3), 20);
        params(&mut asked).stream_interval = Some(8);
        let response = client.generate(asked.clone()).await.unwrap();
        let (chunks, _) = collect(response.into_inner()).await;
        assert_eq!(chunks.concat(), expected(&prompt(3), 20));
        assert!(chunks.len() <= 4, "{chunks:?}");
        params(&mut asked).stream_interval = Some(0);
        let status = client.generate(asked).await.unwrap_err();
        assert!(status.message().contains("`stream_interval`"), "{status}");
    });
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    type Edit = fn(&mut proto::GenerateRequest);
    let wrong: &[(&str, Edit)] = &[
        ("this model takes text alone", |of| {
            of.mm_inputs = Some(proto::MultimodalInputs::default());
        }),
        ("`input_embeds`", |of| of.input_embeds = vec![0.5]),
        ("`disaggregated_params`", |of| {
            of.disaggregated_params = Some(proto::DisaggregatedParams::default());
        }),
        ("`custom_logit_processor`", |of| {
            of.custom_logit_processor = "x".to_owned();
        }),
        ("`lora_id`", |of| of.lora_id = "x".to_owned()),
        ("`data_parallel_rank`", |of| of.data_parallel_rank = 1),
        ("`return_hidden_states`", |of| {
            of.return_hidden_states = true;
        }),
        ("top_k is -2", |of| params(of).top_k = -2),
        ("repetition_penalty is 0", |of| {
            params(of).repetition_penalty = 0.0;
        }),
        ("token \"x\" of `logit_bias`", |of| {
            params(of).logit_bias.insert("x".to_owned(), 1.0);
        }),
        ("token 97 of `logit_bias`", |of| {
            params(of).logit_bias.insert("97".to_owned(), 1.0);
        }),
        ("EBNF grammar: grammars need the text of tokens", |of| {
            params(of).constraint = Some(Constraint::EbnfGrammar("x".to_owned()));
        }),
    ];
    run(async {
        let bench = Bench::new("serve", Contract::Sglang);
        let mut client = client(&bench).await;
        for (names, change) in wrong {
            let mut asked = request("a", &prompt(1), 3);
            change(&mut asked);
            let status = client.generate(asked).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{names}: {status}");
            assert!(status.message().contains(names), "{names}: {status}");
        }
        bench.until_idle().await;
    });
}

#[test]
fn an_abort_says_whether_there_was_one() {
    run(async {
        let bench = Bench::new("serve slow=5", Contract::Sglang);
        let mut client = client(&bench).await;
        let abort = |name: &str| proto::AbortRequest {
            request_id: name.to_owned(),
            reason: "Stream dropped".to_owned(),
        };
        assert!(!client.abort(abort("a")).await.unwrap().into_inner().success);
        let response = client
            .generate(request("a", &prompt(1), 100))
            .await
            .unwrap();
        assert!(client.abort(abort("a")).await.unwrap().into_inner().success);
        let (_, end) = collect(response.into_inner()).await;
        assert_eq!(end.finish_reason, "abort");
        assert!(!client.abort(abort("a")).await.unwrap().into_inner().success);
    });
}

#[test]
fn model_info_and_loads_have_what_the_gateway_reads() {
    run(async {
        let bench = Bench::with("serve", Contract::Sglang, &|_, server| {
            server.model.eos_tokens = vec![4, 9];
            server.model.default_sampling = r#"{"temperature": 0.6}"#.to_owned();
        });
        let mut client = client(&bench).await;
        let health = client
            .health_check(proto::HealthCheckRequest {})
            .await
            .unwrap();
        assert!(health.into_inner().healthy);
        let model = client
            .get_model_info(proto::GetModelInfoRequest {})
            .await
            .unwrap()
            .into_inner();
        assert_eq!(
            (
                model.served_model_name.as_str(),
                model.weight_version.as_str()
            ),
            ("stand-in", "first")
        );
        assert_eq!((model.max_context_length, model.vocab_size), (128, 97));
        assert_eq!(model.eos_token_ids, [4, 9]);
        assert_eq!((model.bos_token_id, model.supports_vision), (-1, false));
        assert_eq!(
            model.default_sampling_params_json,
            r#"{"temperature": 0.6}"#
        );
        let server = client
            .get_server_info(proto::GetServerInfoRequest {})
            .await
            .unwrap()
            .into_inner();
        assert_eq!(
            (server.max_total_num_tokens, server.active_requests),
            (192, 0)
        );
        let arguments = server.server_args.unwrap().fields;
        assert_eq!(arguments["page_size"].kind, Some(Kind::NumberValue(4.0)));
        assert!(server.start_time.is_some());
        // What only the prefix index holds is free.
        let response = client.generate(request("a", &prompt(3), 20)).await.unwrap();
        collect(response.into_inner()).await;
        bench.until_idle().await;
        let stats = bench.service.stats()[0].scheduler;
        assert!(stats.cached_pages > 0);
        let asked = proto::GetLoadsRequest::default();
        let loads = client.get_loads(asked).await.unwrap().into_inner();
        assert_eq!((loads.dp_rank_count, loads.version.as_str()), (1, "1.2.3"));
        let load = &loads.loads[0];
        assert_eq!((load.num_used_tokens, load.max_total_num_tokens), (0, 192));
        assert_eq!((load.token_usage, load.num_running_reqs), (0.0, 0));
        assert_eq!(load.max_running_requests, 8);
        assert_eq!(loads.aggregate.unwrap().total_reqs, 0);
        let other = proto::GetLoadsRequest {
            dp_rank: Some(1),
            include: Vec::new(),
        };
        assert!(
            client
                .get_loads(other)
                .await
                .unwrap()
                .into_inner()
                .loads
                .is_empty()
        );
    });
}

#[test]
fn the_rest_is_not_implemented_or_flushed() {
    run(async {
        let bench = Bench::new("serve", Contract::Sglang);
        let mut client = client(&bench).await;
        let codes = [
            client
                .start_profile(StartProfileRequest::default())
                .await
                .map(|_| ()),
            client.stop_profile(StopProfileRequest {}).await.map(|_| ()),
            client
                .embed(proto::EmbedRequest::default())
                .await
                .map(|_| ()),
            client
                .load_lo_ra_adapter(proto::LoadLoRaAdapterRequest::default())
                .await
                .map(|_| ()),
            client
                .unload_lo_ra_adapter(proto::UnloadLoRaAdapterRequest::default())
                .await
                .map(|_| ()),
            client
                .list_loaded_lo_ra_adapters(proto::ListLoadedLoRaAdaptersRequest {})
                .await
                .map(|_| ()),
        ];
        for called in codes {
            assert_eq!(called.unwrap_err().code(), Code::Unimplemented);
        }
        let response = client.generate(request("a", &prompt(3), 20)).await.unwrap();
        let running = client
            .flush_cache(FlushCacheRequest { timeout_s: 0.0 })
            .await
            .unwrap();
        let flushed = client.flush_cache(FlushCacheRequest { timeout_s: 60.0 });
        let (_, flushed) = tokio::join!(collect(response.into_inner()), flushed);
        assert!(flushed.unwrap().into_inner().success);
        // The request may have ended by then.
        let running = running.into_inner();
        assert!(
            running.success || running.message.contains("requests run"),
            "{running:?}"
        );
        let free = |bench: &Bench| bench.service.stats()[0].scheduler.free_pages;
        let all = driver::TOTAL_PAGES as usize;
        bench.until("free", |bench| free(bench) == all).await;
        let wrong = client
            .flush_cache(FlushCacheRequest { timeout_s: -1.0 })
            .await
            .unwrap_err();
        assert!(wrong.message().contains("`timeout_s` is -1"), "{wrong}");
    });
}
