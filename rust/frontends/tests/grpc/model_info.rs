//! What the gateway asks `VllmEngine` besides requests.

use std::fmt::Write;
use std::fs;
use std::io::{Cursor, Read};

use pie_frontends::grpc::Contract;
use pie_frontends::grpc::contract::common::{FlushCacheRequest, GetTokenizerRequest};
use pie_frontends::grpc::contract::vllm as proto;
use sha2::{Digest, Sha256};
use tonic::Code;
use zip::ZipArchive;

use crate::bench::{Bench, prompt, request, run};

#[test]
fn model_info_and_loads_have_what_the_gateway_reads() {
    run(async {
        let bench = Bench::with("serve slow=5", Contract::Vllm, &|service, server| {
            server.model.eos_tokens = vec![4];
            server.model.context_length = Some(100);
            service.scheduler.max_running = 2;
            server.max_running = Some(2);
        });
        let mut client = bench.vllm().await;
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
        assert_eq!((model.max_context_length, model.vocab_size), (100, 97));
        assert_eq!(model.architectures, ["StandIn"]);
        let mut streams = Vec::new();
        for (number, name) in ["a", "b"].into_iter().enumerate() {
            let asked = request(name, &prompt(number as u32), 80);
            streams.push(client.generate(asked).await.unwrap());
        }
        // It gets no place, and so no answer.
        let mut other = bench.vllm().await;
        let waiting =
            tokio::spawn(async move { other.generate(request("c", &prompt(9), 3)).await });
        bench
            .until("waiting", |bench| {
                bench.service.stats()[0].scheduler.waiting == 1
            })
            .await;
        let loads = client
            .get_loads(proto::GetLoadsRequest::default())
            .await
            .unwrap();
        let load = loads.into_inner().loads[0];
        assert_eq!((load.num_running_reqs, load.num_waiting_reqs), (2, 1));
        assert_eq!((load.max_running_requests, load.utilization), (2, 1.0));
        assert_eq!(load.num_waiting_uncached_tokens as usize, prompt(9).len());
        assert!(load.token_usage > 0.0);
        let server = client
            .get_server_info(proto::GetServerInfoRequest {})
            .await
            .unwrap();
        let server = server.into_inner();
        assert_eq!(
            (
                server.active_requests,
                server.max_num_seqs,
                server.block_size
            ),
            (3, 2, 4)
        );
        assert!(server.last_receive_timestamp > 1e9);
        drop(streams);
        waiting.await.unwrap().unwrap();
        bench.until_idle().await;
        let flushed = client
            // Further away than any clock goes.
            .flush_cache(FlushCacheRequest { timeout_s: 1e19 })
            .await
            .unwrap();
        assert!(flushed.into_inner().success);
    });
}

#[test]
fn a_tokenizer_comes_as_an_archive() {
    run(async {
        let bench = Bench::new("serve", Contract::Vllm);
        let mut client = bench.vllm().await;
        let status = client
            .get_tokenizer(GetTokenizerRequest {})
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::NotFound, "{status}");
        // More than one message has.
        let text = "token ".repeat(40_000);
        fs::write(bench.folder.path().join("tokenizer.json"), &text).unwrap();
        fs::write(
            bench.folder.path().join("chat_template.jinja"),
            "{{ messages }}",
        )
        .unwrap();
        let response = client.get_tokenizer(GetTokenizerRequest {}).await.unwrap();
        let mut stream = response.into_inner();
        let (mut bytes, mut digests) = (Vec::new(), Vec::new());
        while let Some(chunk) = stream.message().await.unwrap() {
            assert!(chunk.data.len() <= 64 << 10);
            bytes.extend(chunk.data);
            digests.push(chunk.sha256);
        }
        let mut digest = String::new();
        for byte in Sha256::digest(&bytes) {
            write!(digest, "{byte:02x}").unwrap();
        }
        assert_eq!(digests.pop(), Some(digest));
        assert!(digests.len() > 2 && digests.iter().all(String::is_empty));
        let mut archive = ZipArchive::new(Cursor::new(bytes)).unwrap();
        let mut names: Vec<_> = archive.file_names().map(str::to_owned).collect();
        names.sort();
        assert_eq!(names, ["chat_template.jinja", "tokenizer.json"]);
        let mut found = String::new();
        let mut file = archive.by_name("tokenizer.json").unwrap();
        file.read_to_string(&mut found).unwrap();
        assert_eq!(found, text);
    });
}
