//! What is refused, in which words, what ends a sequence, and what allocates nothing.

use std::sync::Arc;

use allocation_counter::measure;
use pie_scheduler::{
    Config, Finish, FrameBytes, Image, Limits, Logprobs, NewRequest, Outputs, Policy, Scheduler,
    SchedulerError, StepOutput, StopStrings, TokenBytes, WeightVersionEvent,
};

const LIMITS: Limits = Limits {
    total_pages: 8192,
    host_pages: 0,
    page_size: 16,
    max_forward_tokens: 8192,
    max_forward_requests: 256,
    max_page_refs: 100_000,
    max_image_bytes: 0,
    max_model_len: 4096,
    vocab_size: 1000,
    max_logprob_words: 1 << 16,
    frame: FrameBytes::UNLIMITED,
};

fn scheduler(config: Config, limits: Limits) -> Scheduler<()> {
    Scheduler::new(config, limits, None).expect("valid settings")
}

fn refusal(scheduler: &mut Scheduler<()>, request: NewRequest<()>) -> String {
    let refusal = scheduler.submit(request).expect_err("it must be refused");
    refusal.to_string()
}

#[test]
fn an_error_names_value_limit_and_remedy() {
    let config = Config {
        max_queued: Some(2),
        ..Config::default()
    };
    let mut scheduler = scheduler(config, LIMITS);
    let request = |id| NewRequest::new(id, vec![1; 10], (), 5);
    scheduler.submit(request(1)).expect("the first");
    let cases = [
        (request(1), "request 1 is there already"),
        (NewRequest::new(2, Vec::new(), (), 5), "the prompt is empty"),
        (
            NewRequest::new(2, vec![7, 1000], (), 5),
            "token 1000 at 1 is not below the vocabulary's 1000",
        ),
        (
            NewRequest::new(2, vec![7; 4097], (), 5),
            "the prompt has 4097 tokens, 4096 is the most (the model's length)",
        ),
        (
            NewRequest {
                samples: 0,
                ..request(2)
            },
            "0 samples are asked for: it must be from 1 to 65536",
        ),
        (
            NewRequest {
                samples: 2,
                ..request(2)
            },
            "1 sequences wait, 2 may",
        ),
    ];
    for (request, words) in cases {
        let text = refusal(&mut scheduler, request);
        assert!(text.starts_with(words), "{text}");
    }
    let mut least = request(2);
    least.stop.min_tokens = 6;
    let text = refusal(&mut scheduler, least);
    assert!(text.contains("at least 6 tokens and at most 5"), "{text}");
    let mut strings = request(2);
    strings.stop.stop_strings = StopStrings::new([&b"x"[..]]).unwrap();
    let text = refusal(&mut scheduler, strings);
    assert!(
        text.contains("this scheduler was made without them"),
        "{text}"
    );
    assert_eq!(scheduler.stats().waiting, 1);
}

#[test]
fn stop_tokens_are_forbidden_until_any_min_tokens() {
    let mut scheduler = scheduler(Config::default(), LIMITS);
    let mut request = NewRequest::new(1, vec![1; 10], (), u32::MAX);
    request.stop.min_tokens = u32::MAX;
    request.stop.stop_tokens = vec![7];
    scheduler
        .submit(request)
        .expect("as many as there is room for");
    let step = scheduler
        .schedule(0)
        .expect("consistent bookkeeping")
        .expect("a step");
    let row = step.rows().next().expect("a row");
    assert_eq!(row.forbidden, [7]);
}

#[test]
fn images_that_fit_no_step_are_rejected() {
    let limits = Limits {
        max_image_bytes: 100,
        max_forward_tokens: 300,
        ..LIMITS
    };
    let mut scheduler = scheduler(Config::default(), limits);
    let image = |start, tokens, bytes| Image {
        start,
        tokens,
        bytes,
    };
    let cases = [
        (
            vec![image(0, 46, 7)],
            "image 0 has 46 tokens and 7 bytes; a step takes images of 45 tokens and 100 bytes",
        ),
        (
            vec![image(0, 4, 8), image(4, 4, 101)],
            "image 1 has 4 tokens and 101 bytes",
        ),
        (
            vec![image(3, 4, 8), image(6, 4, 8)],
            "image 1 is not in the prompt after the one before it",
        ),
        (vec![image(58, 4, 8)], "image 0 is not in the prompt"),
        (vec![image(5, 0, 8)], "image 0 is not in the prompt"),
        (
            vec![image(5, 30, 8)],
            "log-probabilities of the prompt are asked for from token 34 on: with images or `input_embeds` they begin \
             after the last of them, at token 35 or later",
        ),
    ];
    for (images, words) in cases {
        let mut request = NewRequest::new(1, vec![1_000_000; 60], (), 5);
        request.images = images.into();
        request.logprobs = Some(Logprobs {
            uncached: false,
            words: 2,
            prompt_from: Some(34),
        });
        let text = refusal(&mut scheduler, request);
        assert!(text.starts_with(words), "{text}");
    }
    // Tokens of images are names of what they show; those around them are the model's.
    let mut request = NewRequest::new(1, vec![1_000_000; 60], (), 5);
    request.prompt[40..].fill(1);
    request.prompt[..2].fill(1);
    request.images = [image(2, 38, 9)].into();
    request.prompt[41] = 1000;
    let text = refusal(&mut scheduler, request.clone());
    assert!(text.starts_with("token 1000 at 41 is not below"), "{text}");
    request.prompt[41] = 999;
    scheduler.submit(request).expect("it can be served");
}

#[test]
fn a_setting_out_of_range_is_refused() {
    let refused = |config, limits| match Scheduler::<()>::new(config, limits, None) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("it must be refused"),
    };
    let text = refused(
        Config {
            chunk_tokens: 0,
            ..Config::default()
        },
        LIMITS,
    );
    assert_eq!(text, "chunked_prefill_size is 0, it must be at least 1");
    let text = refused(
        Config {
            policy: Policy::Lpm,
            priority: true,
            ..Config::default()
        },
        LIMITS,
    );
    assert!(text.contains("fcfs or lof with priorities"), "{text}");
    let text = refused(
        Config::default(),
        Limits {
            page_size: 1025,
            ..LIMITS
        },
    );
    assert_eq!(text, "kv_page_size is 1025, it must be from 1 to 1024");
    assert_eq!("dfs-weight".parse(), Ok(Policy::DfsWeight));
    let text = "sjf".parse::<Policy>().expect_err("unknown").to_string();
    assert!(
        text.starts_with("`sjf` is not a scheduling policy"),
        "{text}"
    );
}

#[test]
fn outputs_must_fit_their_step() {
    let mut scheduler = scheduler(Config::default(), LIMITS);
    let nothing = StepOutput::default();
    assert_eq!(
        scheduler.process_output(1, &nothing),
        Err(SchedulerError::NoStep)
    );
    scheduler
        .submit(NewRequest::new(1, vec![1; 10], (), 5))
        .expect("room");
    scheduler
        .schedule(1)
        .expect("consistent bookkeeping")
        .expect("a prompt");
    let two = StepOutput {
        tokens: &[1, 2],
        token_ends: &[0, 1, 2],
        ..StepOutput::default()
    };
    let wrong = SchedulerError::Rows {
        answered: 2,
        rows: 1,
    };
    assert_eq!(scheduler.process_output(1, &two), Err(wrong));
    let crooked = StepOutput {
        tokens: &[1, 2],
        token_ends: &[0, 1],
        ..StepOutput::default()
    };
    let wrong = SchedulerError::StepOutput { name: "tokens" };
    assert_eq!(scheduler.process_output(1, &crooked), Err(wrong));
    // The step is still out.
    let right = StepOutput {
        tokens: &[1],
        token_ends: &[0, 1],
        ..StepOutput::default()
    };
    assert_eq!(scheduler.process_output(1, &right), Ok(()));
}

#[test]
fn a_prompt_without_output_is_prefilled_and_cached() {
    let mut scheduler = scheduler(Config::default(), LIMITS);
    let mut outputs = Outputs::default();
    for (id, cached) in [(1, 0), (2, 32)] {
        scheduler
            .submit(NewRequest::new(id, vec![5; 40], (), 0))
            .expect("room");
        let step = scheduler
            .schedule(1)
            .expect("consistent bookkeeping")
            .expect("a prompt");
        assert!(step.rows().all(|row| row.sampling.is_none()));
        let answer = StepOutput {
            token_ends: &[0, 0],
            ..StepOutput::default()
        };
        scheduler.process_output(2, &answer).expect("its step");
        scheduler.outputs(&mut outputs);
        let output = outputs.iter().next().expect("an end");
        assert_eq!(
            (output.finish, output.tokens),
            (Some(Finish::Length), &[][..])
        );
        assert_eq!(output.cached_tokens, cached);
    }
}

/// A step that samples this token for its only row.
fn sample(scheduler: &mut Scheduler<()>, token: u32) {
    let step = scheduler.schedule(1).expect("consistent bookkeeping");
    step.expect("a row");
    let answer = StepOutput {
        tokens: &[token],
        token_ends: &[0, 1],
        ..StepOutput::default()
    };
    scheduler.process_output(2, &answer).expect("its step");
}

/// The tokens and the end of a sequence.
type Ended = (Vec<u32>, Option<Finish>);

fn ended(scheduler: &mut Scheduler<()>) -> Ended {
    let mut outputs = Outputs::default();
    scheduler.outputs(&mut outputs);
    let output = outputs.iter().next().expect("an end");
    (output.tokens.to_vec(), output.finish)
}

#[test]
fn a_stop_in_the_last_token_is_a_stop_or_the_length() {
    let letters: Vec<Box<[u8]>> = (0..1000).map(|token| [token as u8].into()).collect();
    let text: Arc<dyn TokenBytes> = Arc::new(letters);
    let string = Finish::StopString {
        index: 0,
        text_bytes: 1,
    };
    for (last, stop) in [(7, Finish::StopToken(7)), (b'x'.into(), string)] {
        for (stop_before_length, finish) in [(false, Finish::Length), (true, stop)] {
            let config = Config {
                stop_before_length,
                ..Config::default()
            };
            let mut scheduler = Scheduler::new(config, LIMITS, Some(text.clone())).expect("valid");
            let mut request = NewRequest::new(1, vec![1; 10], (), 2);
            request.stop.stop_tokens = vec![7];
            request.stop.stop_strings = StopStrings::new([&b"x"[..]]).unwrap();
            request.streams = false;
            scheduler.submit(request).expect("room");
            sample(&mut scheduler, 5);
            sample(&mut scheduler, last);
            assert_eq!(ended(&mut scheduler), (vec![5, last], Some(finish)));
        }
    }
}

#[test]
fn the_last_output_has_the_changes_of_the_weights() {
    let mut scheduler = scheduler(Config::default(), LIMITS);
    let mut request = NewRequest::new(1, vec![1; 10], (), 4);
    request.streams = false;
    scheduler.submit(request).expect("room");
    // Before its first token it is no change for the request.
    scheduler.set_weight_version(1);
    sample(&mut scheduler, 5);
    sample(&mut scheduler, 6);
    scheduler.set_weight_version(2);
    scheduler.set_weight_version(2);
    sample(&mut scheduler, 7);
    // Its tokens stay, and so do the versions that they are of.
    scheduler.driver_lost();
    scheduler.set_weight_version(3);
    sample(&mut scheduler, 8);
    let mut outputs = Outputs::default();
    scheduler.outputs(&mut outputs);
    let output = outputs.iter().next().expect("an end");
    let event = |old_version, num_output_tokens| WeightVersionEvent {
        old_version,
        num_output_tokens,
    };
    assert_eq!(output.weight_events, [event(1, 2), event(2, 3)]);
    assert_eq!((output.weight_version, output.tokens.len()), (3, 4));
}

/// Decodes of many requests, one step ahead, as a server does them.
#[test]
fn decodes_allocate_nothing() {
    let mut scheduler = scheduler(Config::default(), LIMITS);
    for id in 0..64 {
        scheduler
            .submit(NewRequest::new(id, vec![id as u32; 100], (), 500))
            .expect("room");
    }
    let mut outputs = Outputs::default();
    let tokens = vec![1; 256];
    let ends: Vec<u32> = (0..=256).collect();
    let mut pages = 0;
    let mut round = |scheduler: &mut Scheduler<()>, now| {
        let rows = scheduler.stats().rows;
        let step = scheduler
            .schedule(now)
            .expect("consistent bookkeeping")
            .expect("work");
        pages += step.rows().map(|row| row.pages.len()).sum::<usize>();
        let answer = StepOutput {
            tokens: &tokens[..rows],
            token_ends: &ends[..=rows],
            ..StepOutput::default()
        };
        scheduler.process_output(now, &answer).expect("its step");
        scheduler.outputs(&mut outputs);
    };
    scheduler
        .schedule(0)
        .expect("consistent bookkeeping")
        .expect("prompts");
    for now in 1..50 {
        round(&mut scheduler, now);
    }
    let counted = measure(|| (50..100).for_each(|now| round(&mut scheduler, now)));
    assert_eq!(counted.count_total, 0);
    assert!(pages > 64 * 6 * 99);
}
