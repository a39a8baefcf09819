//! Many at once.

use pie_frontends::grpc::Contract;
use pie_frontends::grpc::contract::vllm as proto;
use pie_frontends::grpc::contract::vllm::vllm_engine_client::VllmEngineClient;
use tonic::transport::Channel;

use crate::bench::{Bench, collect_one, expected, prompt, request, run};

/// How a request ends.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Served,
    Aborted,
    Dropped,
}

async fn live(client: VllmEngineClient<Channel>, number: u32, fate: Fate) -> usize {
    let mut client = client;
    let (name, text) = (format!("r{number}"), prompt(number));
    let output = 4 + number % 23;
    let call = client.generate(request(&name, &text, output)).await;
    let mut stream = call.unwrap().into_inner();
    if fate == Fate::Dropped {
        return 0;
    }
    if fate == Fate::Aborted {
        let request_ids = vec![name];
        client
            .abort(proto::AbortRequest { request_ids })
            .await
            .unwrap();
    }
    let story = collect_one(&mut stream).await;
    assert_eq!(
        story.tokens,
        expected(&text, story.tokens.len()),
        "of {number}"
    );
    match story.end().finish_reason.as_str() {
        "length" => assert_eq!(story.tokens.len(), output as usize),
        "abort" => assert!(fate == Fate::Aborted),
        other => panic!("{other}"),
    }
    story.tokens.len()
}

/// 1,000 streams, of which a tenth is aborted or dropped: each gets its own tokens, and nothing is left of any.
#[test]
fn a_thousand_streams_at_once_lose_nothing() {
    run(async {
        let bench = Bench::new("serve", Contract::Vllm);
        // As the gateway has it: one connection for all.
        let client = bench.vllm().await;
        let lives: Vec<_> = (0..1000)
            .map(|number| {
                let fate = match number % 20 {
                    7 => Fate::Aborted,
                    13 => Fate::Dropped,
                    _ => Fate::Served,
                };
                tokio::spawn(live(client.clone(), number, fate))
            })
            .collect();
        let mut tokens = 0;
        for life in lives {
            tokens += life.await.unwrap();
        }
        assert!(tokens > 900 * 4);
        bench.until_idle().await;
        let finished = |bench: &Bench| bench.service.stats()[0].scheduler.finished;
        bench
            .until("all ended", |bench| finished(bench) == 1000)
            .await;
        assert!(bench.service.flush(crate::bench::WATCHDOG));
        let free = |bench: &Bench| bench.service.stats()[0].scheduler.free_pages;
        let all = crate::driver::TOTAL_PAGES as usize;
        bench.until("free", |bench| free(bench) == all).await;
    });
}
