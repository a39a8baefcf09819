//! What the prefix index holds, as a gateway learns it.

use std::collections::HashMap;

use pie_frontends::grpc::Contract;
use pie_frontends::grpc::contract::common::kv_cache_event::Data;
use pie_frontends::grpc::contract::common::{KvCacheTier, KvEventBatch, SubscribeKvEventsRequest};
use pie_frontends::grpc::contract::vllm::vllm_engine_client::VllmEngineClient;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

use crate::bench::{Bench, WATCHDOG, collect_one, prompt, request, run};
use crate::driver;

/// A gateway's image of one worker: blocks in each tier, with the text up to their ends.
#[derive(Default)]
struct PromptImage {
    blocks: HashMap<(i64, i32), Vec<u32>>,
    last: u64,
    clears: usize,
}

impl PromptImage {
    fn apply(&mut self, batch: &KvEventBatch) {
        assert!(
            self.last == 0 || batch.sequence_number == self.last + 1,
            "{batch:?}"
        );
        self.last = batch.sequence_number;
        assert!(batch.timestamp > 1e9);
        for event in &batch.events {
            match event.data.as_ref().unwrap() {
                Data::Cleared(_) => {
                    self.blocks.clear();
                    self.clears += 1;
                }
                Data::Removed(removed) => {
                    for &hash in &removed.block_hashes {
                        let block = self.blocks.remove(&(hash, removed.tier() as i32));
                        assert!(block.is_some(), "{hash} is not there");
                    }
                }
                Data::Stored(stored) => {
                    let parent = stored.parent_block_hash;
                    let of = |hash| {
                        let tiers = [KvCacheTier::Device, KvCacheTier::Host].into_iter();
                        let mut found =
                            tiers.filter_map(|tier| self.blocks.get(&(hash, tier as i32)));
                        found.next().expect("the block before is there").clone()
                    };
                    let mut text = parent.map_or(Vec::new(), of);
                    for block in &stored.blocks {
                        assert_eq!(block.block_size, driver::PAGE as i32);
                        assert_eq!(block.token_ids.len() as u32, driver::PAGE);
                        text.extend(&block.token_ids);
                        self.blocks
                            .insert((block.block_hash, stored.tier() as i32), text.clone());
                    }
                }
            }
        }
    }

    /// Takes batches until `text` is stored up to its last full block.
    async fn until_stored(&mut self, stream: &mut Streaming<KvEventBatch>, text: &[u32]) {
        let full = text.len() as u32 / driver::PAGE * driver::PAGE;
        while !self
            .blocks
            .values()
            .any(|block| *block == text[..full as usize])
        {
            let batch = tokio::time::timeout(WATCHDOG, stream.message()).await;
            self.apply(&batch.expect("no events come").unwrap().unwrap());
        }
    }
}

async fn subscribe(client: &mut VllmEngineClient<Channel>, cursor: u64) -> Streaming<KvEventBatch> {
    let asked = SubscribeKvEventsRequest {
        start_sequence_number: cursor,
        ..SubscribeKvEventsRequest::default()
    };
    client
        .subscribe_kv_events(asked)
        .await
        .unwrap()
        .into_inner()
}

async fn say(client: &mut VllmEngineClient<Channel>, number: u32) -> Vec<u32> {
    let asked = request(&number.to_string(), &prompt(number), 13);
    let response = client.generate(asked).await.unwrap();
    let story = collect_one(&mut response.into_inner()).await;
    // The last token is given out and not stored.
    [&prompt(number)[..], &story.tokens[..12]].concat()
}

#[test]
fn a_gateway_knows_what_is_cached() {
    run(async {
        let bench = Bench::new("serve", Contract::Vllm);
        let mut client = bench.vllm().await;
        let (mut image, mut stream) = (PromptImage::default(), subscribe(&mut client, 0).await);
        for number in 0..5 {
            let text = say(&mut client, number).await;
            image.until_stored(&mut stream, &text).await;
        }
        assert_eq!(image.clears, 1, "only the start of the index");
        // One that comes later gets all of it, too.
        let (mut late, mut other) = (PromptImage::default(), subscribe(&mut client, 0).await);
        while late.last < image.last {
            late.apply(&other.message().await.unwrap().unwrap());
        }
        assert_eq!(late.blocks, image.blocks);
        // And one that lost its connection the rest.
        let middle = image.last / 2;
        let mut rest = subscribe(&mut client, middle).await;
        assert_eq!(
            rest.message().await.unwrap().unwrap().sequence_number,
            middle + 1
        );
        let none = SubscribeKvEventsRequest {
            start_sequence_number: image.last + 1,
            ..SubscribeKvEventsRequest::default()
        };
        let status = client.subscribe_kv_events(none).await.unwrap_err();
        assert_eq!(status.code(), Code::OutOfRange, "{status}");
        bench.until_idle().await;
        assert!(bench.service.flush(WATCHDOG));
        while !image.blocks.is_empty() {
            image.apply(&stream.message().await.unwrap().unwrap());
        }
    });
}

#[test]
fn evictions_are_told() {
    run(async {
        let bench = Bench::new("serve", Contract::Vllm);
        let mut client = bench.vllm().await;
        let (mut image, mut stream) = (PromptImage::default(), subscribe(&mut client, 0).await);
        for number in 0..40 {
            let text = say(&mut client, 100 + number).await;
            image.until_stored(&mut stream, &text).await;
            // Both tiers have no more.
            assert!(image.blocks.len() <= (driver::TOTAL_PAGES + 12) as usize);
        }
    });
}

#[test]
fn a_driver_that_dies_clears_what_is_known() {
    run(async {
        let bench = Bench::new("die-at=20", Contract::Vllm);
        let mut client = bench.vllm().await;
        let (mut image, mut stream) = (PromptImage::default(), subscribe(&mut client, 0).await);
        for number in 0..4 {
            let text = say(&mut client, number).await;
            image.until_stored(&mut stream, &text).await;
        }
        assert_eq!(image.clears, 2);
        assert_eq!(bench.service.stats()[0].restarts, 1);
    });
}

#[test]
fn only_the_last_batches_are_kept() {
    run(async {
        let bench = Bench::with("serve", Contract::Vllm, &|_, server| {
            server.event_history = 3;
        });
        let mut client = bench.vllm().await;
        let mut live = subscribe(&mut client, 0).await;
        let mut image = PromptImage::default();
        for number in 0..6 {
            let text = say(&mut client, number).await;
            image.until_stored(&mut live, &text).await;
        }
        for cursor in [1, u64::MAX] {
            let gone = SubscribeKvEventsRequest {
                start_sequence_number: cursor,
                ..SubscribeKvEventsRequest::default()
            };
            let status = client.subscribe_kv_events(gone).await.unwrap_err();
            assert_eq!(status.code(), Code::OutOfRange, "{status}");
        }
        subscribe(&mut client, image.last - 1).await;
        // Without a cursor only what comes.
        let mut fresh = subscribe(&mut client, 0).await;
        let text = say(&mut client, 50).await;
        let first = fresh.message().await.unwrap().unwrap();
        assert!(first.sequence_number > image.last, "{first:?}");
        image.until_stored(&mut live, &text).await;
    });
}

#[test]
fn a_server_may_publish_none() {
    run(async {
        let bench = Bench::with("serve", Contract::Vllm, &|service, server| {
            service.scheduler.kv_events = false;
            server.event_history = 0;
        });
        let mut client = bench.vllm().await;
        say(&mut client, 1).await;
        let status = client
            .subscribe_kv_events(SubscribeKvEventsRequest::default())
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented, "{status}");
    });
}
