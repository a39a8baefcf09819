//! Counters.

use std::sync::Arc;
use std::thread;

use pie_driver::{Counts, DeviceTimes, Event, Job};
use pie_planner::Layout;
use pie_wire::Payload;

use crate::adapters::with_adapters;
use crate::common::{Answer, LIMITS, call, decode, encode, forward, next_batch, run, sample};

#[test]
fn what_was_served_is_counted() {
    let (mut ring, client, responder) = with_adapters();
    let started = responder.counts();
    assert_eq!(started.since(&started), started);
    assert_eq!(started.since(&Counts::default()), started);
    assert_eq!((started.steps(), started.requests), (0, 0));
    let mut drafted = forward(&[1, 16, 1]);
    drafted.spec_token_ids = vec![7, 8, 9];
    drafted.spec_position_ids = vec![1, 2, 3];
    drafted.spec_indptr = vec![0, 3, 3, 3];
    drafted.kv_last_page_lens[0] = 4;
    drafted.context_ids = vec![11, 12, 13];
    // No page has this number, so the third request is refused.
    drafted.kv_page_indices = vec![1, 1, 99];
    let answer = call(&client, encode(Payload::Forward(drafted)));
    let mut batch = next_batch(&mut ring, &responder);
    let mut block = vec![0_u64; Layout::new(&LIMITS).bytes().div_ceil(8)];
    let block = bytemuck::cast_slice_mut(&mut block);
    while batch.stage(block).unwrap().is_some() {
        sample(&mut batch, block);
    }
    let log_lines = batch.commit(DeviceTimes::default());
    assert!(
        log_lines[0]
            .text
            .starts_with("request 2 of context 13 rejected: "),
        "{log_lines:?}"
    );
    // The first of three drafts came true.
    let expected = Answer::Tokens(vec![vec![7, 7], vec![7], vec![]]);
    assert_eq!(answer.join().unwrap(), expected);
    let first = responder.counts();
    assert_eq!((first.graph_steps, first.python_steps), (0, 1));
    assert_eq!((first.requests, first.last_requests), (3, 3));
    assert_eq!((first.computed_tokens, first.prompt_tokens), (20, 16));
    assert_eq!(first.generated_tokens, 3);
    assert_eq!((first.drafts, first.accepted_drafts), (3, 1));
    assert_eq!(first.used_pages, 1, "a page that two requests name");
    assert_eq!(first.refused, [("page-id", 1)].into());
    assert_eq!((first.host.count(), first.step.count()), (1, 1));
    assert!(first.host.sum_ns() <= first.step.sum_ns());

    // A batch that fails, a batch that needs no model, and one that none of these is.
    let lost = call(&client, encode(Payload::Forward(forward(&[1]))));
    drop(next_batch(&mut ring, &responder));
    assert_eq!(lost.join().unwrap(), Answer::Aborted);
    let served = thread::spawn({
        let client = Arc::clone(&client);
        move || {
            let idle = encode(Payload::Forward(forward(&[0])));
            client.call(&idle, decode).unwrap();
            let broken = [0xA5; 100];
            client.call(&broken, decode).unwrap();
            let next = encode(Payload::Forward(forward(&[1, 1])));
            client.call(&next, decode).unwrap()
        }
    });
    let mut batch = loop {
        match responder.next(&mut ring).unwrap() {
            Event::Job(Job::Batch(batch)) => break batch,
            Event::LogLines(log_lines) => assert_eq!(log_lines[0].kind, "malformed"),
            _ => panic!("a batch"),
        }
    };
    run(&mut batch);
    batch.commit(DeviceTimes::default());
    assert_eq!(served.join().unwrap(), Answer::Tokens(vec![vec![7]; 2]));
    let now = responder.counts().since(&first);
    assert_eq!((now.steps(), now.requests, now.generated_tokens), (1, 2, 2));
    assert_eq!((now.aborted_batches, now.abandoned), (1, 0));
    assert_eq!(now.refused, [("malformed", 1)].into());
    assert_eq!(now.prompt_tokens, 0, "decodes");
}
