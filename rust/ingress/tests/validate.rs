//! What is refused, in which words, and what becomes of the rest.

use std::sync::Arc;
use std::time::Duration;

use pie_engine::Sampler;
use pie_engine::{Grammar, GrammarHandle, GrammarSetupError};
use pie_ingress::{
    EmbeddingInfo, Ingress, ModelInfo, PooledRow, RawEmbedding, RawLogprobs, RawRequest,
    RequestLimits,
};
use proptest::prelude::*;

const VOCAB: u32 = 1000;

fn ingress() -> Ingress {
    let model = ModelInfo {
        embeddings: None,
        vocab_size: VOCAB,
        eos_token_ids: vec![2],
        max_prompt_tokens: Some(20),
        context_length: Some(26),
        logit_processors: true,
        hidden_size: 8,
        embed_size: 4,
    };
    Ingress::new(RequestLimits::default(), model)
}

fn unbound(_: &Grammar, _: &[u32]) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError> {
    Err(GrammarSetupError::NoTokenizer)
}

fn raw() -> RawRequest {
    RawRequest::new("a".to_owned(), vec![1, 2, 3])
}

fn refusal(change: impl FnOnce(&mut RawRequest)) -> String {
    let mut raw = raw();
    change(&mut raw);
    ingress().validate(raw, unbound).unwrap_err().to_string()
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn each_wrong_value_has_one_line_with_the_value_the_limit_and_the_remedy() {
    let long = "x".repeat(5000);
    for (found, line) in [
        (
            refusal(|of| of.prompt.clear()),
            "the prompt is empty: give at least one token",
        ),
        (
            refusal(|of| of.prompt = vec![1; 21]),
            "the prompt has 21 tokens, 20 is the most (the context length, or the KV cache): shorten it",
        ),
        (
            refusal(|of| of.prompt[1] = 1000),
            "token 1000 of `input_ids` is not in the vocabulary, which has 1000: send ids below that",
        ),
        (
            refusal(|of| of.n = 2000),
            "`n` has 2000 sequences, 1024 is the most: send fewer, or raise the request limit `n`",
        ),
        (
            refusal(|of| of.n = -1),
            "n is -1, it must be from 1 to 65536",
        ),
        (
            refusal(|of| of.max_new_tokens = Some(-1)),
            "max_new_tokens is -1, it must be from 0 to 2147483647",
        ),
        (
            refusal(|of| {
                of.max_new_tokens = Some(3);
                of.min_new_tokens = i64::MAX;
            }),
            "at least 2147483647 tokens and at most 3 are asked for: min_new_tokens must not exceed max_new_tokens",
        ),
        (
            refusal(|of| of.priority = Some(1 << 40)),
            "priority is 1099511627776, it must be from -2147483648 to 2147483647",
        ),
        (
            refusal(|of| of.sampling.temperature = -1.0),
            "temperature is -1, it must be 0 or more",
        ),
        (
            refusal(|of| of.logit_bias = vec![(5, 1.0), (1000, 1.0)]),
            "token 1000 of `logit_bias` is not in the vocabulary, which has 1000: send ids below that",
        ),
        (
            refusal(|of| of.logit_bias = vec![(5, 1.0), (7, 1.0), (5, 2.0)]),
            "`logit_bias` has token 5 twice: send each token once",
        ),
        (
            refusal(|of| of.stop = vec!["x".to_owned(); 1025]),
            "`stop` has 1025 strings, 1024 is the most: send fewer, or raise the request limit `stop_strings`",
        ),
        (
            refusal(|of| of.stop = vec![long.clone()]),
            "`stop` has 5000 bytes, 4096 is the most: send fewer, or raise the request limit `stop_string_bytes`",
        ),
        (
            refusal(|of| of.stop = vec![long[..4000].to_owned(); 17]),
            "`stop` has 68000 bytes, 65536 is the most: send fewer, or raise the request limit `stop_total_bytes`",
        ),
        (
            refusal(|of| of.stop_token_ids = vec![1; 4097]),
            "`stop_token_ids` has 4097 tokens, 4096 is the most: send fewer, or raise the request limit `stop_token_ids`",
        ),
        (
            refusal(|of| of.stop_token_ids = vec![-1]),
            "token -1 of `stop_token_ids` is not in the vocabulary, which has 1000: send ids below that",
        ),
        (
            refusal(|of| of.stop_regex = vec!["a|b".to_owned(); 65]),
            "`stop_regex` has 65 expressions, 64 is the most: send fewer, or raise the request limit `stop_regexes`",
        ),
        (
            refusal(|of| of.stop_regex = vec![long.clone(), long.clone()]),
            "`stop_regex` has 10000 bytes, 8192 is the most: send fewer, or raise the request limit `stop_regex_bytes`",
        ),
        (
            refusal(|of| of.name = long[..1025].to_owned()),
            "`rid` has 1025 bytes, 1024 is the most: send fewer, or raise the request limit `name_bytes`",
        ),
        (
            refusal(|of| of.extra_key = Some(long.clone())),
            "`extra_key` has 5000 bytes, 1024 is the most: send fewer, or raise the request limit `name_bytes`",
        ),
        (
            refusal(|of| of.grammar = Some(Grammar::Regex("a".repeat(1 << 21).into()))),
            "`regular expression` has 2097152 bytes, 1048576 is the most: send fewer, or raise the request limit `grammar_bytes`",
        ),
        (
            refusal(|of| of.grammar = Some(Grammar::Regex("a".into()))),
            "regular expression: grammars need the text of tokens, and this server has no tokenizer: start it with one",
        ),
        (
            refusal(|of| {
                of.logprobs = Some(RawLogprobs {
                    top_logprobs_num: 1001,
                    ..RawLogprobs::default()
                });
            }),
            "top_logprobs_num is 1001, it must be from 0 to 1000",
        ),
        (
            refusal(|of| {
                of.logprobs = Some(RawLogprobs {
                    token_ids_logprob: vec![3, 1 << 40],
                    ..RawLogprobs::default()
                });
            }),
            "token 1099511627776 of `token_ids_logprob` is not in the vocabulary, which has 1000: send ids below that",
        ),
        (
            refusal(|of| {
                of.logprobs = Some(RawLogprobs {
                    logprob_start_len: 4,
                    ..RawLogprobs::default()
                });
            }),
            "logprob_start_len is 4, it must be from -1 to 3",
        ),
    ] {
        assert_eq!(found, line);
        assert!(!found.contains('\n'));
    }
}

#[test]
fn the_budget_of_hidden_states_is_that_of_all_sequences() {
    let mut limits = RequestLimits::default();
    // Two sequences of three prompt tokens and of one before the last, 8 float32 numbers each.
    limits.set("hidden_state_bytes", 2 * 4 * 32).unwrap();
    let model = ModelInfo {
        embeddings: None,
        vocab_size: VOCAB,
        eos_token_ids: Vec::new(),
        max_prompt_tokens: None,
        context_length: None,
        logit_processors: false,
        hidden_size: 8,
        embed_size: 4,
    };
    let ingress = Ingress::new(limits, model);
    let of = |n| RawRequest {
        hidden_states: true,
        max_new_tokens: Some(2),
        n,
        ..raw()
    };
    assert!(ingress.validate(of(2), unbound).is_ok());
    let refusal = ingress.validate(of(3), unbound).unwrap_err().to_string();
    assert!(refusal.contains("384 bytes, 256 is the most"), "{refusal}");
}

#[test]
fn a_limit_that_is_raised_is_the_limit() {
    let mut limits = RequestLimits::default();
    limits.set("stop_strings", 2000).unwrap();
    let raised = Ingress::new(limits, ingress().model().clone());
    let many = |count| RawRequest {
        stop: (0..count).map(|number| format!("{number}.")).collect(),
        ..raw()
    };
    assert!(raised.validate(many(2000), unbound).is_ok());
    let refusal = raised
        .validate(many(2001), unbound)
        .unwrap_err()
        .to_string();
    assert!(refusal.contains("2000 is the most"), "{refusal}");
}

#[test]
fn max_tokens_are_cut_to_the_context_length() {
    let cut = |min, max| {
        let raw = RawRequest {
            min_new_tokens: min,
            max_new_tokens: max,
            stop_token_ids: vec![7, i64::from(u32::MAX)],
            ..raw()
        };
        let (request, _) = ingress().validate(raw, unbound).unwrap().into_request();
        // One that the model does not have ends nothing.
        assert_eq!(request.stop.stop_tokens, [7, 2]);
        (request.stop.min_tokens, request.stop.max_tokens)
    };
    assert_eq!(cut(0, None), (0, 23));
    assert_eq!(cut(4, Some(9)), (4, 9));
    assert_eq!(cut(i64::MAX, Some(i64::MAX)), (23, 23));
    assert_eq!(cut(i64::from(u32::MAX), None), (23, 23));
}

#[test]
fn a_bias_of_every_token_of_a_large_vocabulary_is_served() {
    let model = ModelInfo {
        embeddings: None,
        vocab_size: 262_208,
        ..ingress().model().clone()
    };
    let ingress = Ingress::new(RequestLimits::default(), model);
    let mut raw = raw();
    raw.logit_bias = (0..262_208).rev().map(|token| (token, -1.0)).collect();
    let (request, _) = ingress.validate(raw, unbound).unwrap().into_request();
    assert_eq!(request.sampling.extension.unwrap().biases.len(), 262_208);
}

fn number() -> impl Strategy<Value = i64> {
    let edge = prop::sample::select(vec![
        i64::MIN,
        i64::from(i32::MIN) - 1,
        -2,
        -1,
        0,
        1,
        i64::from(i32::MAX),
        i64::from(u32::MAX),
        i64::from(u32::MAX) + 1,
        i64::MAX,
    ]);
    prop_oneof![4 => 0..30_i64, 2 => edge, 1 => any::<i64>()]
}

prop_compose! {
    fn any_raw()(
        prompt in prop::collection::vec(prop_oneof![30 => 0..VOCAB, 1 => any::<u32>()], 0..24),
        counts in (prop::option::of(number()), number(), number(), prop::option::of(number())),
        stops in prop::collection::vec(number(), 0..5),
        texts in prop::collection::vec(".{0,6}", 0..4),
        patterns in prop::collection::vec(".{0,6}", 0..3),
        reals in prop::array::uniform6(prop_oneof![4 => 0.0..2.0_f32, 1 => any::<f32>()]),
        top_k in number(),
        seed in prop::option::of(any::<u64>()),
        biases in prop::collection::vec((prop_oneof![9 => 0..i64::from(VOCAB), 1 => number()], any::<f32>()), 0..4),
        logprobs in prop::option::of((number(), prop::collection::vec(number(), 0..3), number())),
        deadline in prop::option::of(any::<u64>()),
        name in ".{0,20}",
    ) -> RawRequest {
        let [temperature, top_p, min_p, frequency_penalty, presence_penalty, repetition_penalty] = reals;
        let (max_new_tokens, min_new_tokens, n, priority) = counts;
        let mut raw = RawRequest {
            max_new_tokens, min_new_tokens, n, priority,
            stop_token_ids: stops,
            stop: texts,
            stop_regex: patterns,
            logprobs: logprobs.map(|(top_logprobs_num, token_ids_logprob, logprob_start_len)| RawLogprobs {
                top_logprobs_num, token_ids_logprob, logprob_start_len, original: false,
            }),
            deadline: deadline.map(Duration::from_secs),
            extra_key: Some(name.clone()),
            ..RawRequest::new(name, prompt)
        };
        raw.sampling.temperature = temperature;
        raw.sampling.top_k = top_k;
        raw.sampling.top_p = top_p;
        raw.sampling.min_p = min_p;
        raw.sampling.frequency_penalty = frequency_penalty;
        raw.sampling.presence_penalty = presence_penalty;
        raw.sampling.repetition_penalty = repetition_penalty;
        raw.sampling.seed = seed;
        raw.logit_bias = biases;
        raw
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever numbers come, a request is refused by one line, or is within its limits.
    #[test]
    fn any_request_is_rejected_or_within_its_limits(raw in any_raw()) {
        let (least, most) = (raw.min_new_tokens, raw.max_new_tokens);
        match ingress().validate(raw, unbound) {
            Err(refusal) => prop_assert!(!refusal.to_string().contains('\n'), "{}", refusal),
            Ok(spec) => {
                let prompt = spec.prompt().len() as u32;
                let (request, _) = spec.into_request();
                let ends = &request.stop;
                prop_assert!(ends.min_tokens <= ends.max_tokens);
                prop_assert!(ends.max_tokens <= 26 - prompt);
                prop_assert!(most.is_none_or(|most| i64::from(ends.max_tokens) <= most));
                prop_assert!(i64::from(ends.min_tokens) <= least);
                prop_assert!((1..=1024).contains(&request.samples));
                prop_assert!(ends.stop_tokens.iter().all(|&token| token < VOCAB));
                prop_assert!(request.prompt.iter().all(|&token| token < VOCAB));
                let biases = request.sampling.extension.map(|extension| extension.biases.clone());
                prop_assert!(biases.unwrap_or_default().windows(2).all(|pair| pair[0].0 < pair[1].0));
            }
        }
    }
}

#[test]
fn embeddings_are_of_models_that_return_some() {
    let info = EmbeddingInfo {
        size: 64,
        normalized: true,
    };
    let model = ModelInfo {
        embeddings: Some(info),
        ..ingress().model().clone()
    };
    let embeds = Ingress::new(RequestLimits::default(), model);
    let asked = |dimensions| RawRequest {
        embedding: Some(RawEmbedding { dimensions }),
        ..raw()
    };
    let spec = embeds.validate(asked(Some(8)), unbound).unwrap();
    let row = PooledRow {
        dimensions: 8,
        normalized: true,
    };
    assert_eq!(spec.embedding(), Some(row));
    let (request, _) = spec.into_request();
    assert_eq!(request.sampling.sampler, Sampler::Embedding);
    assert_eq!((request.stop.max_tokens, request.streams), (0, false));
    assert_eq!(request.logprobs.unwrap().words, 64);
    for (refused, line) in [
        (
            embeds.validate(asked(Some(65)), unbound),
            "dimensions is 65, it must be from 1 to 64",
        ),
        (
            embeds.validate(raw(), unbound),
            "the model returns embeddings and generates no text: use /v1/embeddings",
        ),
        (
            ingress().validate(asked(None), unbound),
            "the model generates text and returns no embeddings: start it with `--is-embedding`",
        ),
    ] {
        let refusal = refused.unwrap_err().to_string();
        assert!(refusal.starts_with(line), "{refusal}");
        assert_eq!(refusal.lines().count(), 1);
    }
    let long = RawRequest {
        embedding: Some(RawEmbedding::default()),
        ..RawRequest::new("a".to_owned(), vec![1; 21])
    };
    let refusal = embeds.validate(long, unbound).unwrap_err().to_string();
    assert!(refusal.starts_with("the prompt has 21 tokens, 20 is the most"));
}
