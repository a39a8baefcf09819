//! Requests of any content: each is answered or refused, and nothing is left of it.

use std::cell::Cell;
use std::fmt::Debug;

use pie_frontends::grpc::Contract;
use pie_frontends::grpc::contract::{sglang, vllm};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;
use tonic::{Code, Status};

use crate::bench::{self, Bench, WATCHDOG, collect, collect_one, expected, prompt};
use crate::driver::{POSITIONS, TOTAL_PAGES, VOCABULARY};

/// Requests of each contract.
const CASES: u32 = 300;

/// What an answered request asked for, and how many tokens each sequence has.
struct Answer {
    samples: u32,
    limit: Option<u32>,
    lengths: Vec<usize>,
}

/// Neutral values, and whatever else a client can write.
fn number() -> impl Strategy<Value = f32> {
    prop_oneof![30 => select(vec![0.0, 1.0]), 2 => 0.0..2.0f32, 1 => any::<f32>()]
}

/// Few, and numbers around each limit.
fn count() -> impl Strategy<Value = u32> {
    let limits = prop_oneof![
        VOCABULARY - 2..VOCABULARY + 2,
        POSITIONS - 4..POSITIONS + 2,
        1023..1026u32,
        (0..3u32).prop_map(|less| u32::MAX - less)
    ];
    prop_oneof![30 => 0..4u32, 1 => limits, 1 => any::<u32>()]
}

/// Fewest tokens: few, or any number.
fn least() -> impl Strategy<Value = u32> {
    prop_oneof![30 => 0..2u32, 2 => count()]
}

fn signed() -> impl Strategy<Value = i32> {
    prop_oneof![30 => 1..4i32, 1 => -2..1i32, 1 => count().prop_map(u32::cast_signed)]
}

/// A field that few requests have.
fn rare<S: Strategy>(value: S) -> impl Strategy<Value = Option<S::Value>> {
    prop::option::weighted(0.1, value)
}

fn tokens() -> impl Strategy<Value = Vec<u32>> {
    let token = prop_oneof![300 => 0..VOCABULARY, 1 => any::<u32>()];
    let long = prop::collection::vec(0..VOCABULARY, 100..140);
    prop_oneof![20 => prop::collection::vec(token, 1..20), 1 => long, 1 => Just(Vec::new())]
}

/// Grammars, pieces of them, and text.
fn text() -> impl Strategy<Value = String> {
    let written = [
        "",
        "(",
        "[0-9 ]{1,30}",
        "(a{1000}){1000}",
        r"(?=a)\1",
        "{}",
        r#"{"type":"object","properties":{"a":{"$ref":"\#"}},"required":["a"]}"#,
        r#"{"type":"integer","minimum":1e99}"#,
        r#"{"type":[],"enum":[]}"#,
        r#"root ::= "1 " root | "2 ""#,
        "root ::= root",
        r#"{"type":"structural_tag","structures":[],"triggers":[]}"#,
        "5 ",
        "\u{10ffff}",
    ];
    prop_oneof![4 => select(written.map(str::to_owned).to_vec()), 1 => ".{0,12}"]
}

fn texts() -> impl Strategy<Value = Vec<String>> {
    prop_oneof![9 => Just(Vec::new()), 1 => prop::collection::vec(text(), 1..4)]
}

prop_compose! {
    fn vllm_constraint()(
        kind in 0..6u8, text in text(), choices in prop::collection::vec(text(), 0..3)
    ) -> vllm::sampling_params::Constraint {
        use vllm::sampling_params::Constraint;
        match kind {
            0 => Constraint::JsonSchema(text),
            1 => Constraint::Regex(text),
            2 => Constraint::Grammar(text),
            3 => Constraint::StructuralTag(text),
            4 => Constraint::JsonObject(text.is_empty()),
            _ => Constraint::Choice(vllm::ChoiceConstraint { choices }),
        }
    }
}

prop_compose! {
    fn vllm_params()(
        numbers in prop::array::uniform6(number()),
        (counts, least) in (prop::array::uniform2(count()), least()),
        limits in (prop::option::of(count()), rare(signed()), rare(signed())),
        lists in (texts(), tokens()),
        more in (any::<bool>(), rare(signed()), rare(signed())),
        bias in rare((signed(), number())),
        constraint in prop::option::weighted(0.3, vllm_constraint()),
    ) -> vllm::SamplingParams {
        let [temperature, top_p, min_p, frequency_penalty, presence_penalty, repetition_penalty] = numbers;
        vllm::SamplingParams {
            temperature: Some(temperature),
            top_p,
            top_k: counts[0],
            min_p,
            frequency_penalty,
            presence_penalty,
            repetition_penalty,
            max_tokens: limits.0,
            min_tokens: least,
            stop: lists.0,
            stop_token_ids: lists.1,
            ignore_eos: more.0,
            n: counts[1],
            logprobs: limits.1,
            prompt_logprobs: limits.2,
            seed: more.1,
            logit_bias: bias.into_iter().collect(),
            truncate_prompt_tokens: more.2,
            constraint,
            ..vllm::SamplingParams::default()
        }
    }
}

prop_compose! {
    fn vllm_request()(
        request_id in prop_oneof![30 => "[a-c]{1,3}", 1 => ""],
        tokens in tokens(),
        params in prop::option::weighted(0.95, vllm_params()),
        stream in any::<bool>(),
        rank in prop::option::weighted(0.02, signed()),
        is_text in prop::bool::weighted(0.02),
    ) -> vllm::GenerateRequest {
        let mut request = bench::request(&request_id, &tokens, 1);
        request.sampling_params = params;
        request.stream = stream;
        request.data_parallel_rank = rank;
        if is_text {
            request.input = Some(vllm::generate_request::Input::Text("5 7".to_owned()));
        }
        request
    }
}

prop_compose! {
    fn sglang_params()(
        numbers in prop::array::uniform5(number()),
        repetition_penalty in prop_oneof![30 => Just(1.0), 1 => number()],
        (n, least) in (count(), least()),
        limits in (prop::option::of(count()), signed(), rare(signed())),
        lists in (texts(), tokens()),
        ignore_eos in any::<bool>(),
        bias in rare(("[0-9]|.{0,2}", number())),
        constraint in prop::option::weighted(0.3, (0..4u8, text())),
    ) -> sglang::SamplingParams {
        use sglang::sampling_params::Constraint;
        let [temperature, top_p, min_p, frequency_penalty, presence_penalty] = numbers;
        sglang::SamplingParams {
            temperature,
            top_p,
            top_k: limits.1,
            min_p,
            frequency_penalty,
            presence_penalty,
            repetition_penalty,
            max_new_tokens: limits.0,
            stop: lists.0,
            stop_token_ids: lists.1,
            n,
            min_new_tokens: least,
            ignore_eos,
            stream_interval: limits.2,
            logit_bias: bias.into_iter().collect(),
            constraint: constraint.map(|(kind, text)| match kind {
                0 => Constraint::Regex(text),
                1 => Constraint::JsonSchema(text),
                2 => Constraint::EbnfGrammar(text),
                _ => Constraint::StructuralTag(text),
            }),
            ..sglang::SamplingParams::default()
        }
    }
}

prop_compose! {
    fn sglang_request()(
        request_id in prop_oneof![30 => "[a-c]{1,3}", 1 => ""],
        input_ids in tokens(),
        params in prop::option::weighted(0.95, sglang_params()),
        flags in prop::array::uniform2(any::<bool>()),
        numbers in prop::array::uniform2(signed()),
        words in rare(tokens()),
    ) -> sglang::GenerateRequest {
        sglang::GenerateRequest {
            request_id,
            tokenized: Some(sglang::TokenizedInput { input_ids, ..sglang::TokenizedInput::default() }),
            sampling_params: params,
            return_logprob: flags[0],
            logprob_start_len: numbers[0],
            top_logprobs_num: numbers[1],
            token_ids_logprob: words.unwrap_or_default(),
            stream: flags[1],
            ..sglang::GenerateRequest::default()
        }
    }
}

/// Sends one request after the other; then the service serves as before, and all pages are free.
fn attack<R: Debug>(
    contract: Contract,
    requests: &impl Strategy<Value = R>,
    send: &impl AsyncFn(&Bench, R) -> Result<Answer, Status>,
    serves: &impl AsyncFn(&Bench),
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let bench = Bench::with_grammars(contract);
    let answered = Cell::new(0);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(CASES));
    let found = runner.run(requests, |request| {
        let answer = runtime.block_on(async {
            let answer = tokio::time::timeout(WATCHDOG, send(&bench, request)).await;
            bench.until_idle().await;
            answer
        });
        match answer.expect("it hangs") {
            Ok(answer) => {
                answered.set(answered.get() + 1);
                let most = answer.limit.unwrap_or(POSITIONS).min(POSITIONS) as usize;
                prop_assert_eq!(answer.lengths.len(), answer.samples.max(1) as usize);
                prop_assert!(answer.lengths.iter().all(|&length| length <= most));
            }
            Err(status) => {
                let refused = [Code::InvalidArgument, Code::Unimplemented];
                prop_assert!(refused.contains(&status.code()), "{}", status);
                prop_assert!(!status.message().is_empty());
            }
        }
        Ok(())
    });
    if let Err(error) = found {
        panic!("{error}; {}", bench.log());
    }
    // Or the requests would test refusals alone.
    assert!(answered.get() > CASES / 6, "{}", answered.get());
    runtime.block_on(async {
        serves(&bench).await;
        bench.until_idle().await;
        assert!(bench.service.flush(WATCHDOG));
        let free = |bench: &Bench| bench.service.stats()[0].scheduler.free_pages;
        let is_free = |bench: &Bench| free(bench) == TOTAL_PAGES as usize;
        bench.until("free", is_free).await;
    });
}

#[test]
fn any_request_by_vllms_contract() {
    let send = async |bench: &Bench, request: vllm::GenerateRequest| {
        let params = request.sampling_params.clone().unwrap_or_default();
        let call = bench.vllm().await.generate(request).await?;
        let stories = collect(&mut call.into_inner()).await?;
        let length = |story: &bench::Story| story.end().completion_tokens as usize;
        Ok(Answer {
            samples: params.n,
            limit: params.max_tokens,
            lengths: stories.values().map(length).collect(),
        })
    };
    let serves = async |bench: &Bench| {
        let asked = bench::request("next", &prompt(3), 20);
        let call = bench.vllm().await.generate(asked).await.unwrap();
        let story = collect_one(&mut call.into_inner()).await;
        assert_eq!(story.tokens, expected(&prompt(3), 20));
    };
    attack(Contract::Vllm, &vllm_request(), &send, &serves);
}

#[test]
fn any_request_by_sglangs_contract() {
    use sglang::generate_response::Response;

    let send = async |bench: &Bench, request: sglang::GenerateRequest| {
        let params = request.sampling_params.clone().unwrap_or_default();
        let mut client = crate::sglang::client(bench).await;
        let mut stream = client.generate(request).await?.into_inner();
        let mut lengths = Vec::new();
        while let Some(message) = stream.message().await? {
            if let Some(Response::Complete(complete)) = message.response {
                lengths.push(complete.completion_tokens as usize);
            }
        }
        Ok(Answer {
            samples: params.n,
            limit: params.max_new_tokens,
            lengths,
        })
    };
    let serves = async |bench: &Bench| {
        let asked = crate::sglang::request("next", &prompt(3), 20);
        let mut client = crate::sglang::client(bench).await;
        let mut stream = client.generate(asked).await.unwrap().into_inner();
        let mut tokens = Vec::new();
        while let Some(message) = stream.message().await.unwrap() {
            if let Some(Response::Chunk(chunk)) = message.response {
                tokens.extend(chunk.token_ids);
            }
        }
        assert_eq!(tokens, expected(&prompt(3), 20));
    };
    attack(Contract::Sglang, &sglang_request(), &send, &serves);
}
