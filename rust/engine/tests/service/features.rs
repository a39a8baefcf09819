//! Stop tokens, drafts, log-probabilities, adapters, and slots that are too small.

use crate::bench::{Bench, GREEDY, expected, expected_by, prompts};
use crate::driver;
use pie_engine::{
    FinishReason, LogprobParams, NewRequest, PromptImage, PromptImages, RowParams, SamplingParams,
    StopCriteria,
};

/// Rows that do not fit a frame wait for a later step; no frame is larger than a ring slot.
#[test]
fn frames_of_small_slots_have_few_rows() {
    let bench = Bench::ready("slot-bytes=2048");
    let all: Vec<_> = (0..8).flat_map(|_| prompts(23)).collect();
    let submit = |(index, (prompt, output)): (usize, &(Vec<u32>, u32))| {
        let mut arrival = NewRequest::new(0, prompt.clone(), GREEDY, *output);
        if index % 8 == 7 {
            arrival.stop.min_tokens = *output;
            arrival.stop.stop_tokens = (200..600).rev().collect();
        }
        bench.service.submit(arrival, None).unwrap()
    };
    let ids: Vec<u64> = all.iter().enumerate().map(submit).collect();
    let stories = bench.collect(ids.len());
    let log = bench.log();
    assert!(!log.contains("a step failed"), "{log}");
    assert!(!log.contains("is wrong") && bench.restarts() == 0, "{log}");
    for (id, (prompt, output)) in ids.iter().zip(&all) {
        let story = &stories[&(*id, 0)];
        assert_eq!(story.tokens, expected(prompt, *output), "of {prompt:?}");
        assert_eq!(story.end, Some(FinishReason::Length));
    }
    // More biases than a slot has bytes.
    let sampling = SamplingParams {
        logit_bias: (0..300).map(|token| (token % 97, 1.0)).collect(),
        ..SamplingParams::default()
    };
    let arrival = NewRequest::new(0, vec![1, 2], sampling.row_params().unwrap(), 3);
    let id = bench.service.submit(arrival, None).unwrap();
    let end = format!("{:?}", bench.collect(1)[&(id, 0)].end);
    assert!(end.contains("RowBytes"), "{end}");
}

/// An image that brings more bytes than was said of it, which only a caller's mistake does.
#[test]
fn a_frame_that_does_not_fit_its_slot_fails_the_request_that_is_too_large() {
    let bench = Bench::start("slot-bytes=8192", |settings| {
        settings.max_image_bytes = 1000;
    });
    bench.wait_ready();
    let pixels = vec![1; 9000].into();
    let picture = PromptImage::new(1, 4, [1, 2, 2], pixels, [].into()).unwrap();
    let mut arrival = NewRequest::new(0, vec![1; 6], GREEDY.into(), 5);
    RowParams::attach(PromptImages::new(vec![picture]).unwrap(), &mut arrival);
    arrival.images[0].bytes = 1;
    let others = prompts(8);
    let ids: Vec<u64> = others
        .iter()
        .map(|(prompt, output)| bench.submit(prompt, *output))
        .collect();
    let large = bench.service.submit(arrival, None).unwrap();
    let stories = bench.collect(ids.len() + 1);
    let log = bench.log();
    assert!(
        matches!(stories[&(large, 0)].end, Some(FinishReason::Failed(_))),
        "{log}"
    );
    assert!(
        log.contains("a step failed") && log.contains("bytes"),
        "{log}"
    );
    for (id, (prompt, output)) in ids.iter().zip(&others) {
        let story = &stories[&(*id, 0)];
        assert_eq!(story.end, Some(FinishReason::Length), "{log}");
        assert_eq!(story.tokens, expected(prompt, *output), "of {prompt:?}");
    }
    assert_eq!(bench.restarts(), 0);
}

#[test]
fn stop_tokens_minimum_lengths_and_samples() {
    let bench = Bench::ready("serve");
    let whole = expected(&[9, 8, 7], 40);
    let stop = whole[12];
    let first = whole.iter().position(|&token| token == stop).unwrap();
    let arrival = |min_tokens, samples| NewRequest {
        stop: StopCriteria {
            max_tokens: 40,
            min_tokens,
            stop_tokens: vec![stop],
            ..StopCriteria::default()
        },
        samples,
        ..NewRequest::new(0, vec![9, 8, 7], GREEDY, 40)
    };
    let plain = bench.service.submit(arrival(0, 1), None).unwrap();
    let several = bench.service.submit(arrival(0, 3), None).unwrap();
    let long = bench.service.submit(arrival(30, 1), None).unwrap();
    let stories = bench.collect(5);
    for key in [(plain, 0), (several, 0), (several, 1), (several, 2)] {
        assert_eq!(stories[&key].tokens, whole[..=first]);
        assert_eq!(stories[&key].end, Some(FinishReason::StopToken(stop)));
    }
    // As long as the stop token may not come, the driver draws the one after it.
    let tokens = &stories[&(long, 0)].tokens;
    let mut text = vec![9, 8, 7];
    for (count, &token) in tokens.iter().enumerate() {
        let free = driver::next(&text);
        let forbidden = free == stop && count < 30;
        let wanted = if forbidden {
            (stop + 1) % driver::VOCABULARY
        } else {
            free
        };
        assert_eq!(token, wanted, "token {count}");
        text.push(token);
    }
    assert!(tokens.len() >= 30);
}

#[test]
fn drafts_change_no_token() {
    let bench = Bench::ready("serve");
    let all = prompts(12);
    let arrival = |prompt: &[u32], output| NewRequest {
        drafts: true,
        ..NewRequest::new(0, prompt.to_vec(), GREEDY, output)
    };
    let submit = |(prompt, output): &(Vec<u32>, u32)| {
        bench
            .service
            .submit(arrival(prompt, *output), None)
            .unwrap()
    };
    let ids: Vec<u64> = all.iter().map(submit).collect();
    let stories = bench.collect(ids.len());
    for (id, (prompt, output)) in ids.iter().zip(&all) {
        assert_eq!(
            stories[&(*id, 0)].tokens,
            expected(prompt, *output),
            "of {prompt:?}"
        );
    }
    bench.service.shutdown();
    let stats = bench.service.stats()[0].scheduler;
    assert!(
        stats.accepted > 0 && stats.accepted < stats.drafts,
        "{stats:?}"
    );
}

/// Every token has its log-probabilities, and every one of the prompt that is asked for, each once: with prompts in parts, drafts,
/// prefixes that are cached, and when drivers die.
#[test]
fn log_probabilities_belong_to_their_tokens() {
    for behaviour in ["serve", "die-at=9"] {
        let bench = Bench::ready(behaviour);
        let given = [3, 40];
        let submit = |(index, (prompt, output)): (usize, &(Vec<u32>, u32))| {
            let mut arrival = NewRequest {
                drafts: index.is_multiple_of(3),
                streams: !index.is_multiple_of(2),
                ..NewRequest::new(0, prompt.clone(), GREEDY.into(), *output)
            };
            if index.is_multiple_of(5) {
                arrival.stop.max_tokens = 0;
            }
            let params = LogprobParams {
                hidden: 0,
                top_logprobs_num: index as u32 % 3,
                token_ids_logprob: given[..index % 2].to_vec(),
                logprob_start_len: (!index.is_multiple_of(4)).then_some(index as u32 % 7),
                original: false,
            };
            params.apply(&mut arrival);
            bench.service.submit(arrival, None).unwrap()
        };
        let all = prompts(40);
        let ids: Vec<u64> = all.iter().enumerate().map(submit).collect();
        let stories = bench.collect(ids.len());
        for (index, (id, (prompt, output))) in ids.iter().zip(&all).enumerate() {
            let story = &stories[&(*id, 0)];
            assert_eq!(story.end, Some(FinishReason::Length), "{}", bench.log());
            let text = [&prompt[..], &expected(prompt, *output)].concat();
            let words = |range: std::ops::Range<usize>| {
                let (top, given) = (index as u32 % 3, &given[..index % 2]);
                let of = |at: usize| driver::position_words(&text[..at], text[at], top, given);
                range.flat_map(of).collect::<Vec<u32>>()
            };
            let only_scores = index.is_multiple_of(5);
            let produced = if only_scores { 0 } else { *output as usize };
            assert_eq!(story.tokens, text[prompt.len()..][..produced]);
            let scored = produced.max(1);
            assert_eq!(story.logprobs, words(prompt.len()..prompt.len() + scored));
            let from = match index % 4 {
                0 => prompt.len(),
                _ => (index % 7 + 1).min(prompt.len()),
            };
            assert_eq!(story.prompt_logprobs, words(from..prompt.len()), "{index}");
        }
        let stats = bench.service.stats()[0].scheduler;
        assert!(stats.accepted > 0 && stats.cached_tokens > 0, "{stats:?}");
    }
}

#[test]
fn adapters_share_no_prefix_and_survive_a_driver() {
    let bench = Bench::ready("die-at=12");
    bench.service.load_adapter(3, "/adapters/three").unwrap();
    bench.service.load_adapter(5, "/adapters/five").unwrap();
    let why = bench.service.load_adapter(6, "/adapters/broken");
    let why = why.unwrap_err().to_string();
    assert!(
        why == "the adapter /adapters/broken cannot be loaded: it is broken\n\nhint: mend it",
        "{why}"
    );
    bench.service.load_adapter(7, "/adapters/seven").unwrap();
    bench.service.unload_adapter(7);
    // A name that a caller may give is no adapter's.
    let named = |adapter: i64, index: usize| match (adapter, index % 3) {
        (_, 0) => None,
        (-1, 1) => Some("\0adapter 3".into()),
        (-1, _) => Some("\0adapter 3:x".into()),
        (..) => Some("x".into()),
    };
    let all = prompts(12);
    let mut asked = Vec::new();
    for adapter in [-1, 3, 5] {
        for (index, (prompt, output)) in all.iter().enumerate() {
            let arrival = NewRequest {
                adapter: u64::try_from(adapter).ok(),
                namespace: named(adapter, index),
                drafts: index % 2 == 0,
                ..NewRequest::new(0, prompt.clone(), GREEDY, *output)
            };
            let id = bench.service.submit(arrival, None).unwrap();
            asked.push((id, expected_by(adapter, prompt, *output)));
        }
    }
    let lost = NewRequest {
        adapter: Some(6),
        ..NewRequest::new(0, vec![1, 2], GREEDY, 4)
    };
    let lost = bench.service.submit(lost, None).unwrap();
    let stories = bench.collect(asked.len() + 1);
    for (id, tokens) in asked {
        let story = &stories[&(id, 0)];
        assert_eq!(story.end, Some(FinishReason::Length), "{}", bench.log());
        assert_eq!(story.tokens, tokens);
    }
    assert!(matches!(
        stories[&(lost, 0)].end,
        Some(FinishReason::Failed(_))
    ));
    assert_eq!(bench.restarts(), 1);
    let log = bench.log();
    for line in [
        "adapter 3 of /adapters/three: 0",
        "adapter 5 of /adapters/five: 0",
    ] {
        // Once for each start; the log of the first ends with it, too.
        assert!(log.matches(line).count() >= 2, "{log}");
    }
    assert!(!log.contains("is wrong"), "{log}");
    let ready = log.rfind("ready, start 2").unwrap();
    for gone in ["adapter 6 of", "adapter 7 of"] {
        assert!(!log[ready..].contains(gone), "{log}");
    }
}
