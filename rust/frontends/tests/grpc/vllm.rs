//! Requests by `VllmEngine`.

use std::sync::Arc;
use std::time::Duration;

use pie_frontends::grpc::contract::sglang::HealthCheckRequest;
use pie_frontends::grpc::contract::sglang::sglang_scheduler_client::SglangSchedulerClient;
use pie_frontends::grpc::contract::vllm as proto;
use pie_frontends::grpc::contract::vllm::generate_complete::MatchedStop;
use pie_frontends::grpc::contract::vllm::generate_request::Input;
use pie_frontends::grpc::contract::vllm::sampling_params::Constraint;
use pie_frontends::grpc::contract::vllm::vllm_engine_client::VllmEngineClient;
use pie_frontends::grpc::{Contract, Gateway, GatewayError};
use tonic::{Code, Status};

use crate::bench::{Bench, Story, collect, collect_one, expected, prompt, request, run};
use crate::driver;

fn params(request: &mut proto::GenerateRequest) -> &mut proto::SamplingParams {
    request.sampling_params.as_mut().unwrap()
}

async fn one(bench: &Bench, request: proto::GenerateRequest) -> Story {
    let mut client = bench.vllm().await;
    let response = client.generate(request).await.unwrap();
    collect_one(&mut response.into_inner()).await
}

async fn refused(bench: &Bench, request: proto::GenerateRequest) -> Status {
    bench.vllm().await.generate(request).await.unwrap_err()
}

#[test]
fn tokens_come_as_deltas_and_then_all_of_them() {
    run(async {
        // Tokens that come faster than they are sent become one chunk.
        let bench = Bench::new("serve slow=5", Contract::Vllm);
        let text = prompt(3);
        let story = one(&bench, request("a", &text, 20)).await;
        assert_eq!(story.tokens, expected(&text, 20));
        assert!(story.chunks > 1);
        let end = story.end();
        assert_eq!(end.output_ids, story.tokens);
        assert_eq!(
            (end.finish_reason.as_str(), &end.matched_stop),
            ("length", &None)
        );
        assert_eq!(
            (end.prompt_tokens as usize, end.cached_tokens),
            (text.len(), 0)
        );
        // Full pages of the first one are there; one token has to be computed.
        let again = one(&bench, request("a", &text, 20)).await;
        assert_eq!(again.tokens, story.tokens);
        assert_eq!(
            again.end().cached_tokens,
            (text.len() as u32 - 1) / driver::PAGE * driver::PAGE
        );
        bench.until_idle().await;
    });
}

#[test]
fn without_a_stream_there_is_only_the_end() {
    run(async {
        let bench = Bench::new("serve", Contract::Vllm);
        let mut asked = request("a", &prompt(1), 9);
        asked.stream = false;
        let story = one(&bench, asked).await;
        assert_eq!(
            (story.chunks, &story.end().output_ids),
            (0, &expected(&prompt(1), 9))
        );
        // Only the prompt is computed.
        let story = one(&bench, request("b", &prompt(2), 0)).await;
        assert_eq!(
            (story.chunks, story.end().finish_reason.as_str()),
            (0, "length")
        );
        assert!(story.end().output_ids.is_empty());
    });
}

#[test]
fn each_sequence_has_its_own_deltas_and_end() {
    run(async {
        let bench = Bench::new("serve", Contract::Vllm);
        let mut asked = request("a", &prompt(4), 12);
        params(&mut asked).n = 5;
        let mut client = bench.vllm().await;
        let mut stream = client.generate(asked).await.unwrap().into_inner();
        let stories = collect(&mut stream).await.unwrap();
        assert_eq!(stories.len(), 5);
        for story in stories.values() {
            assert_eq!(story.tokens, expected(&prompt(4), 12));
            assert_eq!(story.end().output_ids, story.tokens);
        }
    });
}

#[test]
fn stops_end_a_request_and_are_named() {
    run(async {
        let bench = Bench::with("serve", Contract::Vllm, &|_, server| {
            server.model.eos_tokens = vec![expected(&prompt(7), 4)[3]];
        });
        let tokens = expected(&prompt(7), 12);
        let eos = tokens[3];
        // Of the model, at its first place.
        let first = tokens.iter().position(|&token| token == eos).unwrap();
        let story = one(&bench, request("eos", &prompt(7), 12)).await;
        assert_eq!(story.tokens, tokens[..=first]);
        assert_eq!(story.end().finish_reason, "stop");
        assert_eq!(
            story.end().matched_stop,
            Some(MatchedStop::MatchedTokenId(eos))
        );
        let mut asked = request("ignored", &prompt(7), 12);
        params(&mut asked).ignore_eos = true;
        assert_eq!(one(&bench, asked).await.tokens, tokens);
        // Of the request: across two tokens.
        let text = format!("{} {}", tokens[0], tokens[1]);
        let mut asked = request("text", &prompt(7), 12);
        params(&mut asked).stop = vec!["never".to_owned(), text.clone()];
        let story = one(&bench, asked).await;
        assert_eq!(story.tokens, tokens[..2]);
        assert_eq!(
            story.end().matched_stop,
            Some(MatchedStop::MatchedStopStr(text))
        );
        let mut asked = request("token", &prompt(7), 12);
        params(&mut asked).stop_token_ids = vec![tokens[0]];
        assert_eq!(one(&bench, asked).await.tokens, tokens[..1]);
    });
}

#[test]
fn a_prompt_may_be_cut_to_its_last_tokens() {
    run(async {
        let bench = Bench::new("serve", Contract::Vllm);
        let mut asked = request("a", &prompt(6), 5);
        params(&mut asked).truncate_prompt_tokens = Some(4);
        let text = prompt(6);
        let rest = &text[text.len() - 4..];
        let story = one(&bench, asked.clone()).await;
        assert_eq!(story.tokens, expected(rest, 5));
        assert_eq!(story.end().prompt_tokens, 4);
        params(&mut asked).truncate_prompt_tokens = Some(-2);
        let status = refused(&bench, asked).await;
        assert!(
            status.message().contains("`truncate_prompt_tokens` is -2"),
            "{status}"
        );
    });
}

/// Each is refused before anything is answered, with what is wrong.
#[test]
fn what_cannot_be_served_is_refused_by_name() {
    type Edit = fn(&mut proto::GenerateRequest);
    let wrong: &[(&str, Code, Edit)] = &[
        ("the prompt is empty", Code::InvalidArgument, |of| {
            of.input = None;
        }),
        ("token 97 of `input_ids`", Code::InvalidArgument, |of| {
            *of = request("a", &[1, 97], 3);
        }),
        ("the prompt has 500 tokens", Code::InvalidArgument, |of| {
            *of = request("a", &[1; 500], 3);
        }),
        ("`text` is not served", Code::InvalidArgument, |of| {
            of.input = Some(Input::Text("hello".to_owned()));
        }),
        ("`request_id` is empty", Code::InvalidArgument, |of| {
            of.request_id.clear();
        }),
        ("this model takes text alone", Code::InvalidArgument, |of| {
            of.mm_inputs = Some(proto::MultimodalInputs::default());
        }),
        ("`media_refs` is not served", Code::InvalidArgument, |of| {
            of.media_refs = vec![Vec::new()];
        }),
        ("`kv_transfer_params_json`", Code::InvalidArgument, |of| {
            of.kv_transfer_params_json = Some("{}".to_owned());
        }),
        ("`data_parallel_rank`", Code::InvalidArgument, |of| {
            of.data_parallel_rank = Some(1);
        }),
        ("top_p is 1.5", Code::InvalidArgument, |of| {
            params(of).top_p = 1.5;
        }),
        ("temperature is NaN", Code::InvalidArgument, |of| {
            params(of).temperature = Some(f32::NAN);
        }),
        (
            "`n` has 2000 sequences, 1024 is the most",
            Code::InvalidArgument,
            |of| {
                params(of).n = 2000;
            },
        ),
        (
            "min_new_tokens must not exceed",
            Code::InvalidArgument,
            |of| {
                params(of).min_tokens = 9;
            },
        ),
        ("token 97 of `logit_bias`", Code::InvalidArgument, |of| {
            params(of).logit_bias.insert(97, 1.0);
        }),
        ("token -1 of `logit_bias`", Code::InvalidArgument, |of| {
            params(of).logit_bias.insert(-1, 1.0);
        }),
        (
            "`stop` has 1025 strings, 1024 is the most",
            Code::InvalidArgument,
            |of| {
                params(of).stop = vec!["x".to_owned(); 1025];
            },
        ),
        (
            "`stop_token_ids` has 5000 tokens, 4096",
            Code::InvalidArgument,
            |of| {
                params(of).stop_token_ids = vec![1; 5000];
            },
        ),
        (
            "`rid` has 2000 bytes, 1024 is the most",
            Code::InvalidArgument,
            |of| {
                of.request_id = "x".repeat(2000);
            },
        ),
        (
            "regular expression: grammars need the text of tokens",
            Code::InvalidArgument,
            |of| {
                params(of).constraint = Some(Constraint::Regex("a".to_owned()));
            },
        ),
    ];
    run(async {
        let bench = Bench::new("serve", Contract::Vllm);
        for (names, code, change) in wrong {
            let mut asked = request("a", &prompt(1), 3);
            change(&mut asked);
            let status = refused(&bench, asked).await;
            assert_eq!(status.code(), *code, "{names}: {status}");
            assert!(status.message().contains(names), "{names}: {status}");
            assert!(!status.message().contains('\n'));
        }
        // Nothing is left of them, and the next one is served.
        bench.until_idle().await;
        one(&bench, request("a", &prompt(1), 3)).await;
    });
}

#[test]
fn a_grammar_binds_and_a_wrong_one_is_refused() {
    run(async {
        let bench = Bench::with_grammars(Contract::Vllm);
        let bound = |constraint| {
            let mut asked = request("a", &prompt(1), 40);
            params(&mut asked).constraint = Some(constraint);
            asked
        };
        let text = |story: &Story| {
            let words = story.tokens.iter().filter(|&&token| token > 0);
            let words: Vec<String> = words.map(|token| format!("{token} ")).collect();
            words.concat()
        };
        let regex = Constraint::Regex("5[0-9] 7[0-9] ".to_owned());
        let story = one(&bench, bound(regex)).await;
        let said = text(&story);
        assert!(
            said.len() == 6 && said.starts_with('5') && &said[3..4] == "7",
            "{said}"
        );
        assert_eq!(story.end().finish_reason, "stop");
        let choices = ["61 62 ".to_owned(), "9 ".to_owned()].to_vec();
        let choice = Constraint::Choice(proto::ChoiceConstraint {
            choices: choices.clone(),
        });
        assert!(choices.contains(&text(&one(&bench, bound(choice)).await)));
        let status = refused(&bench, bound(Constraint::Regex("(".to_owned()))).await;
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        let free = one(&bench, bound(Constraint::JsonObject(false))).await;
        assert_eq!(free.tokens[..3], expected(&prompt(1), 3));
    });
}

#[test]
fn a_name_is_taken_until_its_request_ends() {
    run(async {
        let bench = Bench::new("serve slow=5", Contract::Vllm);
        let mut client = bench.vllm().await;
        let first = client.generate(request("a", &prompt(1), 60)).await.unwrap();
        let status = refused(&bench, request("a", &prompt(2), 3)).await;
        assert_eq!(status.code(), Code::AlreadyExists, "{status}");
        let story = collect_one(&mut first.into_inner()).await;
        assert_eq!(story.tokens, expected(&prompt(1), 60));
        one(&bench, request("a", &prompt(2), 3)).await;
    });
}

#[test]
fn an_abort_ends_the_stream() {
    run(async {
        let bench = Bench::new("serve slow=5", Contract::Vllm);
        let mut client = bench.vllm().await;
        let response = client
            .generate(request("a", &prompt(1), 100))
            .await
            .unwrap();
        let request_ids = vec!["unknown".to_owned(), "a".to_owned()];
        client
            .abort(proto::AbortRequest { request_ids })
            .await
            .unwrap();
        let story = collect_one(&mut response.into_inner()).await;
        assert_eq!(story.end().finish_reason, "abort");
        let tokens = story.tokens.len();
        assert!((1..100).contains(&tokens), "{tokens}");
        assert_eq!(story.tokens, expected(&prompt(1), tokens));
        bench.until_idle().await;
    });
}

#[test]
fn a_client_that_goes_away_ends_its_requests() {
    run(async {
        let bench = Bench::new("serve slow=5", Contract::Vllm);
        let finished = |bench: &Bench| bench.service.stats()[0].scheduler.finished;
        // The stream alone.
        let mut client = bench.vllm().await;
        let response = client
            .generate(request("a", &prompt(1), 100))
            .await
            .unwrap();
        drop(response);
        bench.until("ended", |bench| finished(bench) == 1).await;
        bench.until_idle().await;
        // Before its first message: the queue is busy.
        let other = client
            .generate(request("b", &prompt(2), 100))
            .await
            .unwrap();
        let waiting = client.generate(request("c", &prompt(3), 100));
        assert!(
            tokio::time::timeout(Duration::from_micros(100), waiting)
                .await
                .is_err()
        );
        drop(other);
        // With its connection.
        let mut gone = bench.vllm().await;
        let response = gone.generate(request("d", &prompt(4), 100)).await.unwrap();
        drop((response, gone));
        bench.until("ended", |bench| finished(bench) >= 3).await;
        bench.until_idle().await;
        let tokens = bench.service.stats()[0].scheduler.output_tokens;
        assert!(tokens < 200, "{tokens}");
    });
}

#[test]
fn a_client_that_does_not_read_gets_longer_parts() {
    run(async {
        let bench = Bench::new("serve slow=1", Contract::Vllm);
        // Room for three messages or so.
        let endpoint = bench.endpoint().initial_stream_window_size(64);
        let mut client = VllmEngineClient::new(endpoint.connect().await.unwrap());
        let response = client
            .generate(request("a", &prompt(1), 100))
            .await
            .unwrap();
        bench
            .until("computed", |bench| {
                bench.service.stats()[0].scheduler.finished == 1
            })
            .await;
        let story = collect_one(&mut response.into_inner()).await;
        assert_eq!(story.tokens, expected(&prompt(1), 100));
        assert!(story.chunks < 20, "{} parts", story.chunks);
    });
}

#[test]
fn another_contract_is_not_implemented() {
    run(async {
        let bench = Bench::new("serve", Contract::Vllm);
        let mut client = SglangSchedulerClient::new(bench.channel().await);
        let status = client
            .health_check(HealthCheckRequest {})
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented);
        let status = bench
            .vllm()
            .await
            .embed(proto::EmbedRequest::default())
            .await;
        assert_eq!(status.unwrap_err().code(), Code::Unimplemented);
    });
}

#[test]
fn a_taken_port_is_named() {
    run(async {
        let bench = Bench::new("serve", Contract::Vllm);
        let mut settings = pie_frontends::grpc::GatewaySettings::new(
            Contract::Vllm,
            pie_frontends::grpc::ServedModel::default(),
        );
        settings.address = bench.gateway.address();
        let error = Gateway::open(Arc::clone(&bench.service), settings).unwrap_err();
        assert!(
            matches!(&error, GatewayError::Address { address, .. } if *address == bench.gateway.address())
        );
    });
}
