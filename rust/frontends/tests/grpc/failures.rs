//! Drivers that die, queues that are full, servers that close.

use std::time::{Duration, Instant};

use pie_engine::{CompilerCommand, CompilerSettings};
use pie_frontends::grpc::Contract;
use pie_frontends::grpc::contract::common::SubscribeKvEventsRequest;
use pie_frontends::grpc::contract::vllm as proto;
use pie_frontends::grpc::contract::vllm::sampling_params::Constraint;
use tonic::Code;

use crate::bench::{Bench, WATCHDOG, collect, collect_one, expected, prompt, request, run};

#[test]
fn a_driver_that_dies_changes_no_token() {
    run(async {
        let bench = Bench::new("die-at=12", Contract::Vllm);
        let mut client = bench.vllm().await;
        let mut streams = Vec::new();
        for number in 0..4 {
            let asked = request(&format!("r{number}"), &prompt(number), 40);
            streams.push(client.generate(asked).await.unwrap().into_inner());
        }
        for (number, stream) in streams.iter_mut().enumerate() {
            let story = collect_one(stream).await;
            assert_eq!(
                story.tokens,
                expected(&prompt(number as u32), 40),
                "{}",
                bench.log()
            );
            assert_eq!(story.end().finish_reason, "length");
        }
        assert_eq!(bench.service.stats()[0].restarts, 1);
    });
}

#[test]
fn a_driver_that_is_gone_for_good_is_not_hidden() {
    run(async {
        let bench = Bench::with("die-at=6 die-always", Contract::Vllm, &|service, _| {
            service.max_restarts = 0;
        });
        let mut client = bench.vllm().await;
        let mut stream = client
            .generate(request("a", &prompt(1), 50))
            .await
            .unwrap()
            .into_inner();
        let status = collect(&mut stream).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        let status = client
            .generate(request("b", &prompt(1), 5))
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert!(!status.message().contains('\n'), "{status}");
        let health = client
            .health_check(proto::HealthCheckRequest {})
            .await
            .unwrap();
        let health = health.into_inner();
        assert!(
            !health.healthy && health.message.contains("ended"),
            "{health:?}"
        );
    });
}

#[test]
fn a_request_that_gets_no_token_fails_alone() {
    run(async {
        let text = prompt(5);
        let bench = Bench::new(&format!("empty={}", text[0]), Contract::Vllm);
        let mut client = bench.vllm().await;
        let status = client.generate(request("a", &text, 5)).await.unwrap_err();
        assert_eq!(status.code(), Code::Internal, "{status}");
        let response = client.generate(request("b", &prompt(6), 5)).await.unwrap();
        assert_eq!(
            collect_one(&mut response.into_inner()).await.tokens,
            expected(&prompt(6), 5)
        );
    });
}

#[test]
fn a_full_queue_says_so() {
    run(async {
        let bench = Bench::with("serve slow=5", Contract::Vllm, &|service, _| {
            service.scheduler.max_running = 1;
            service.scheduler.max_queued = Some(1);
        });
        let mut client = bench.vllm().await;
        let running = client
            .generate(request("a", &prompt(1), 100))
            .await
            .unwrap();
        let mut other = bench.vllm().await;
        let waiting =
            tokio::spawn(async move { other.generate(request("b", &prompt(2), 3)).await });
        bench
            .until("waiting", |bench| bench.gateway.open_requests() == 2)
            .await;
        bench
            .until("queued", |bench| {
                bench.service.stats()[0].scheduler.waiting == 1
            })
            .await;
        let status = client
            .generate(request("c", &prompt(3), 3))
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
        assert!(status.message().contains("max_queued_requests"), "{status}");
        drop(running);
        let mut stream = waiting.await.unwrap().unwrap().into_inner();
        assert_eq!(
            collect_one(&mut stream).await.tokens,
            expected(&prompt(2), 3)
        );
    });
}

#[test]
fn without_a_compiler_for_its_grammar_a_request_may_come_again() {
    run(async {
        let compiler = CompilerSettings {
            process: Some(CompilerCommand {
                program: "/does/not/exist".into(),
                arguments: Vec::new(),
            }),
            ..CompilerSettings::default()
        };
        let bench = Bench::with_compiler(Contract::Vllm, &compiler);
        let mut asked = request("a", &prompt(1), 9);
        let params = asked.sampling_params.as_mut().unwrap();
        params.constraint = Some(Constraint::Regex("a".to_owned()));
        asked.stream = false;
        let status = bench.vllm().await.generate(asked).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
        assert!(status.message().ends_with("try again later"), "{status}");
    });
}

#[test]
fn a_server_that_closes_finishes_what_runs() {
    run(async {
        let bench = Bench::new("serve slow=5", Contract::Vllm);
        let mut client = bench.vllm().await;
        let events = SubscribeKvEventsRequest::default();
        let mut events = client
            .subscribe_kv_events(events)
            .await
            .unwrap()
            .into_inner();
        let mut stream = client
            .generate(request("a", &prompt(1), 60))
            .await
            .unwrap()
            .into_inner();
        let closing = tokio::task::spawn_blocking(move || {
            bench.gateway.close(WATCHDOG);
            bench
        });
        let story = collect_one(&mut stream).await;
        assert_eq!(story.tokens, expected(&prompt(1), 60));
        while events.message().await.unwrap().is_some() {}
        drop(client);
        closing.await.unwrap();
    });
}

#[test]
fn what_runs_when_the_time_is_over_is_told() {
    run(async {
        let bench = Bench::new("serve slow=20", Contract::Vllm);
        let mut client = bench.vllm().await;
        let mut stream = client
            .generate(request("a", &prompt(1), 100))
            .await
            .unwrap()
            .into_inner();
        let closed = tokio::task::spawn_blocking({
            let started = Instant::now();
            move || {
                bench.gateway.close(Duration::from_millis(100));
                (started.elapsed(), bench)
            }
        });
        let status = collect(&mut stream).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        let (took, bench) = closed.await.unwrap();
        assert!(took < Duration::from_secs(20), "{took:?}");
        bench.service.shutdown();
    });
}

#[test]
fn a_service_that_stops_ends_its_requests() {
    run(async {
        let bench = Bench::new("serve slow=5", Contract::Vllm);
        let mut client = bench.vllm().await;
        let mut stream = client
            .generate(request("a", &prompt(1), 100))
            .await
            .unwrap()
            .into_inner();
        let service = bench.service.clone();
        let stopped = tokio::task::spawn_blocking(move || service.shutdown());
        let status = collect(&mut stream).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        stopped.await.unwrap();
        let status = client
            .generate(request("b", &prompt(1), 5))
            .await
            .unwrap_err();
        assert_eq!(
            (status.code(), status.message()),
            (Code::Unavailable, "the server is shutting down")
        );
    });
}
