//! Loads of adapters.

use std::sync::Arc;

use pie_driver::{DeviceTimes, Event, Job, Responder, status};
use pie_planner::{Layout, Planner, WARM_UP_ADAPTER};
use pie_ring::{Client, ClientConfig, ExitGuard, RegionLayout, Server, Wait};
use pie_wire::{AdapterOp, AdapterRequest, Payload};

use crate::common::{
    Answer, LIMITS, bound, call, config, converse_by, converse_with, encode, must_not_be_called,
    next_batch, run, sample,
};

pub(crate) fn adapter(op: AdapterOp, adapter_id: u64, path: &str) -> Vec<u8> {
    encode(Payload::Adapter(AdapterRequest {
        op,
        adapter_id,
        path: path.to_owned(),
    }))
}

/// Sends requests to an engine with room for two adapters: a load fails that asks for `broken`, one is dropped that
/// asks for `lost`, and adapter 3 is lost whenever it is needed.
fn converse_adapters(requests: &[Vec<u8>]) -> (Vec<Answer>, Vec<String>) {
    let planner = Planner::new(LIMITS, 1).with_adapters(2.try_into().unwrap());
    let (answers, log_lines) = converse_by(planner, 0, requests, |job| match job {
        Job::Load(mut load) => {
            assert!((1..i64::MAX).contains(&load.id()));
            match load.path() {
                "lost" => {}
                "broken" => assert_eq!(load.commit(status::FAILED, "it has no weights"), None),
                _ => assert_eq!(load.commit(status::OK, ""), None),
            }
        }
        Job::Batch(mut batch) => {
            if batch.next_adapters().contains(&3) {
                batch.drop_adapter(3, "it is gone").unwrap();
            }
            run(&mut batch);
            let texts = batch.commit(DeviceTimes::default());
            assert!(
                texts
                    .iter()
                    .all(|log_line| log_line.kind.starts_with("adapter"))
            );
        }
        Job::Copy(_) => panic!("there is no copy"),
    });
    (
        answers,
        log_lines
            .into_iter()
            .map(|log_line| log_line.text)
            .collect(),
    )
}

#[test]
fn adapters_can_be_bound_once_they_are_loaded() {
    let requests = [
        bound(&[1, -1]),
        adapter(AdapterOp::Load, 1, "broken"),
        adapter(AdapterOp::Load, 1, "lost"),
        bound(&[1, -1]),
        adapter(AdapterOp::Load, 1, "a"),
        bound(&[1, -1]),
        adapter(AdapterOp::Load, 1, "broken"),
        adapter(AdapterOp::Load, i64::MAX as u64 - 1, "b"),
        adapter(AdapterOp::Load, 3, "c"),
        bound(&[3, 1, i64::MAX - 1, 2, i64::MAX, -1, 0]),
    ];
    let (answers, _) = converse_adapters(&requests);
    let sevens = |counts: &[usize]| Answer::Tokens(counts.iter().map(|&n| vec![7; n]).collect());
    let expected = [
        sevens(&[0, 1]),
        Answer::Status(status::FAILED),
        Answer::Aborted,
        sevens(&[0, 1]),
        Answer::Status(status::OK),
        sevens(&[1, 1]),
        Answer::Status(status::FAILED),
        Answer::Status(status::OK),
        Answer::Status(status::OK),
        sevens(&[0, 1, 1, 0, 0, 1, 0]),
    ];
    assert_eq!(answers, expected);
}

/// A ring with two slots, and a responder for an engine with adapters.
pub(crate) fn with_adapters() -> (Server, Arc<Client>, Responder) {
    let mut config = config();
    config.layout = RegionLayout::new(2, 1 << 16, 1 << 16).unwrap();
    let ring = Server::create(&config, &ExitGuard::inert()).unwrap();
    let client = Client::open(&config.name, pie_wire::SCHEMA_HASH, ClientConfig::default());
    let planner = Planner::new(LIMITS, 1).with_adapters(2.try_into().unwrap());
    let responder = Responder::new(planner, 0, Wait::Park);
    (ring, Arc::new(client.unwrap()), responder)
}

/// While an adapter is read the engine serves others, and may answer the load at any time.
#[test]
fn a_load_that_ends_within_a_batch_is_known_behind_it() {
    let (mut ring, client, responder) = with_adapters();
    let loading = call(&client, adapter(AdapterOp::Load, 1, "a"));
    let Event::Job(Job::Load(mut load)) = responder.next(&mut ring).unwrap() else {
        panic!("a load")
    };
    let early = call(&client, bound(&[1, -1]));
    let mut batch = next_batch(&mut ring, &responder);
    assert_eq!(load.commit(status::OK, ""), None);
    assert_eq!(loading.join().unwrap(), Answer::Status(status::OK));
    run(&mut batch);
    let log_lines = batch.commit(DeviceTimes::default());
    assert_eq!(log_lines.len(), 1, "what was planned before is not bound");
    assert_eq!(early.join().unwrap(), Answer::Tokens(vec![vec![], vec![7]]));
    let late = call(&client, bound(&[1, -1]));
    let mut batch = next_batch(&mut ring, &responder);
    assert_eq!(batch.next_adapters(), [1]);
    run(&mut batch);
    assert_eq!(batch.commit(DeviceTimes::default()), []);
    assert_eq!(late.join().unwrap(), Answer::Tokens(vec![vec![7]; 2]));
}

/// The same of a batch that fails, and of one that is dropped.
#[test]
fn a_load_that_ends_within_a_lost_batch_is_known_behind_it() {
    let (mut ring, client, responder) = with_adapters();
    for id in [1, 2] {
        let loading = call(&client, adapter(AdapterOp::Load, id, "a"));
        let Event::Job(Job::Load(mut load)) = responder.next(&mut ring).unwrap() else {
            panic!("a load")
        };
        let lost = call(&client, bound(&[-1]));
        let mut batch = next_batch(&mut ring, &responder);
        assert_eq!(load.commit(status::OK, ""), None);
        if id == 1 {
            batch.fail();
        }
        drop(batch);
        assert_eq!(lost.join().unwrap(), Answer::Aborted);
        assert_eq!(loading.join().unwrap(), Answer::Status(status::OK));
        let served = call(&client, bound(&[id as i64]));
        let batch = next_batch(&mut ring, &responder);
        assert_eq!(batch.next_adapters(), [id as i64]);
        drop(batch);
        served.join().unwrap();
    }
}

#[test]
fn adapter_operations_that_ask_for_nothing_are_refused() {
    let load = |id, path| adapter(AdapterOp::Load, id, path);
    let requests = [
        load(0, "a"),
        load(i64::MAX as u64, "a"),
        load(u64::MAX, "a"),
        load(1, ""),
        load(1, "a\0b"),
        adapter(AdapterOp::Save, 1, "a"),
        adapter(AdapterOp::ZoInit, 1, ""),
        adapter(AdapterOp::ZoUpdate, 0, ""),
        adapter(AdapterOp::GenerateAudio, 0, "{}"),
    ];
    let (answers, texts) = converse_adapters(&requests);
    let codes = [2, 2, 2, 2, 2, 4, 4, 4, -1].map(Answer::Status);
    assert_eq!(answers, codes);
    assert_eq!(texts.len(), codes.len());
    let (answers, texts) = converse_with((0, 0), &[load(1, "a"), load(0, "")], must_not_be_called);
    assert_eq!(answers, [4, 4].map(Answer::Status));
    assert!(
        texts
            .iter()
            .all(|log_line| log_line.text.contains("enable_lora"))
    );
}

/// Only warm-up may bind an adapter that was not loaded.
#[test]
fn warm_ups_have_an_adapter_of_their_own() {
    let planner = Planner::new(LIMITS, 1).with_adapters(2.try_into().unwrap());
    let responder = Responder::new(planner, 0, Wait::Park);
    let mut batch = responder.warm_up(&bound(&[WARM_UP_ADAPTER, -1])).unwrap();
    assert_eq!(batch.next_adapters(), [WARM_UP_ADAPTER]);
    let mut block = vec![0_u64; Layout::new(&LIMITS).bytes().div_ceil(8)];
    let block = bytemuck::cast_slice_mut(&mut block);
    batch.stage(block).unwrap().expect("one pass");
    assert_eq!(batch.pass_adapters(), Some(vec![WARM_UP_ADAPTER, -1]));
    sample(&mut batch, block);
    run(&mut batch);
    assert_eq!(batch.commit(DeviceTimes::default()), []);
    assert!(batch.next_adapters().is_empty());
}
