//! Messages in and out of a front end whose requests nothing computes.

mod support;

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use pie_engine::{
    FinishReason, Grammar, GrammarHandle, GrammarSetupError, OutputDelta, PromptImage,
    PromptImages, Sampler, SubmitError, TraceParent, ValidationError,
};
use pie_frontends::sglang_zmq::{
    Backend, MessageClass, MessageField, Outgoing, SglangFrontend, SglangFrontendSettings,
};
use pie_ingress::RequestSpec;
use proptest::prelude::*;
use rmpv::Value;

use support::{
    ABORT, Kept, classes, delta, encoded, field, front, generate, ids, message, settings,
};

#[test]
fn a_request_goes_in_and_its_tokens_come_out() {
    let (front, kept) = (front(), Kept::default());
    let params = [
        ("max_new_tokens", Value::from(7)),
        ("temperature", Value::from(1.0)),
        ("top_k", Value::from(1)),
        ("stop_strs", Value::Array(vec!["end".into()])),
        ("stop_token_ids", Value::Array(vec![5.into()])),
    ];
    let more = [
        ("stream", Value::from(true)),
        ("extra_key", "salt".into()),
        ("priority", 3.into()),
    ];
    let request = encoded(&generate("a", &[10, 11, 12, 13, 14, 15], &more, &params));
    let sent = front.receive(&kept, [&request[..]]);
    assert_eq!(sent, pie_frontends::sglang_zmq::Outgoing::default());
    let arrival = kept.arrivals.borrow()[0].clone();
    assert_eq!(arrival.prompt, [10, 11, 12, 13, 14, 15]);
    assert_eq!(
        (arrival.stop.max_tokens, arrival.stop.stop_tokens),
        (7, vec![5, 2])
    );
    assert_eq!(
        (arrival.namespace.as_deref(), arrival.priority),
        (Some("salt"), Some(3))
    );
    assert_eq!(&*arrival.stop.stop_strings.texts()[0], b"end");
    assert!(matches!(
        arrival.sampling.sampler,
        Sampler::TopP {
            temperature: 0.0,
            ..
        }
    ));

    let first = front.outputs(&[delta(0, &[40, 41], None)]);
    let [bytes] = &first.to_detokenizer[..] else {
        panic!("one message")
    };
    assert_eq!(field(bytes, "rids"), ["a".into()]);
    assert_eq!(
        field(bytes, "decode_ids"),
        [ids(&[11, 12, 13, 14, 15, 40, 41])]
    );
    assert_eq!(field(bytes, "output_ids"), [ids(&[40, 41])]);
    assert_eq!(
        (field(bytes, "read_offsets"), field(bytes, "prompt_tokens")),
        (vec![5.into()], vec![6.into()])
    );
    let last = front.outputs(&[delta(
        0,
        &[42],
        Some(FinishReason::StopString {
            index: 0,
            text_bytes: 9,
        }),
    )]);
    let bytes = &last.to_detokenizer[0];
    assert_eq!(field(bytes, "decode_ids"), [ids(&[42])]);
    assert_eq!(field(bytes, "completion_tokens"), [3.into()]);
    let reason = Value::Map(vec![
        ("type".into(), "stop".into()),
        ("matched".into(), "end".into()),
    ]);
    assert_eq!(field(bytes, "finished_reasons"), [reason]);
    assert_eq!(front.open_requests(), 0);
    // What comes afterwards is of no request.
    assert_eq!(
        front.outputs(&[delta(0, &[43], None)]).to_detokenizer.len(),
        0
    );
}

fn refusal(request: &Value) -> String {
    let (front, kept) = (front(), Kept::default());
    let sent = front.receive(&kept, [&encoded(request)[..]]);
    assert!(kept.arrivals.borrow().is_empty());
    assert_eq!(front.open_requests(), 0);
    let reasons = field(&sent.to_detokenizer[0], "finished_reasons");
    let reason = reasons[0].as_map().unwrap();
    let get = |name: &str| {
        &reason
            .iter()
            .find(|(key, _)| key.as_str() == Some(name))
            .unwrap()
            .1
    };
    assert_eq!(
        (get("type").as_str(), get("status_code").as_u64()),
        (Some("abort"), Some(400))
    );
    assert_eq!(get("err_type").as_str(), Some("BadRequestError"));
    get("message").as_str().unwrap().to_owned()
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn what_is_not_served_is_refused_by_name() {
    let plain = |params: &[(&str, Value)]| generate("a", &[1], &[], params);
    for (request, words) in [
        (
            plain(&[("repetition_penalty", Value::from(2.5))]),
            "repetition_penalty is 2.5",
        ),
        (
            plain(&[("logit_bias", Value::Map(vec![("1000".into(), 1.0.into())]))]),
            "token 1000 of `logit_bias`",
        ),
        (
            plain(&[("logit_bias", Value::Map(vec![("x".into(), 1.0.into())]))]),
            "token \"x\" of `logit_bias` is not in the vocabulary",
        ),
        (
            plain(&[("json_schema", "{}".into()), ("ebnf", "a".into())]),
            "`ebnf` is set, and another grammar is, too",
        ),
        (
            plain(&[("regex", "a+".into())]),
            "this server has no tokenizer",
        ),
        (
            plain(&[("stop_regex_strs", Value::Array(vec!["(".into()]))]),
            "the stop_regex \"(\" is not served: unclosed group",
        ),
        (
            plain(&[(
                "stop_regex_strs",
                Value::Array(vec![format!("({}", "a".repeat(8000)).into()]),
            )]),
            concat!(
                "the stop_regex \"(aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
                "\" is not served: unclosed group"
            ),
        ),
        (
            plain(&[("stop_token_ids", Value::Array(vec![Value::from(-1)]))]),
            "token -1 of `stop_token_ids` is not in the vocabulary",
        ),
        (
            generate("a", &[1], &[("return_sampling_mask", true.into())], &[]),
            "`return_sampling_mask`",
        ),
        (
            plain(&[("stop_strs", Value::Array(vec!["x".into(); 2000]))]),
            "`stop` has 2000 strings, 1024 is the most: send fewer, or raise the request limit `stop_strings`",
        ),
        (
            plain(&[("stop_token_ids", Value::Array(vec![1.into(); 5000]))]),
            "`stop_token_ids` has 5000 tokens, 4096 is the most",
        ),
        (
            plain(&[
                ("max_new_tokens", 4.into()),
                ("min_new_tokens", u64::MAX.into()),
            ]),
            "and at most 4 are asked for: min_new_tokens must not exceed max_new_tokens",
        ),
        (
            generate("a", &[1], &[("extra_key", "x".repeat(2000).into())], &[]),
            "`extra_key` has 2000 bytes, 1024 is the most",
        ),
        (
            generate("a", &[1], &[("priority", (1_i64 << 40).into())], &[]),
            "priority is 1099511627776, it must be from",
        ),
        (generate("a", &[], &[], &[]), "the prompt is empty"),
        (
            generate("a", &[1, 1000], &[], &[]),
            "token 1000 of `input_ids`",
        ),
        (generate("a", &[1, -5], &[], &[]), "token -5 of `input_ids`"),
        (
            generate("a", &[1; 21], &[], &[]),
            "the prompt has 21 tokens, 20 is the most",
        ),
    ] {
        let said = refusal(&request);
        assert!(said.contains(words), "{said}");
    }
    // What the tokenizer manager does not check.
    for (field, value, words) in [
        (
            "json_schema",
            Value::Map(vec![("type".into(), "object".into())]),
            "`json_schema` is a map of 1, it must be a text",
        ),
        (
            "sampling_seed",
            Value::from(2f64.powi(70)),
            "it must be an integer",
        ),
        (
            "max_new_tokens",
            Value::from(8.5),
            "`max_new_tokens` is 8.5, it must be an integer",
        ),
        (
            "ignore_eos",
            Value::from(1),
            "`ignore_eos` is 1, it must be true or false",
        ),
        (
            "temperature",
            Value::from(true),
            "`temperature` is true, it must be a number",
        ),
        (
            "stop_strs",
            Value::from(5),
            "`stop` is 5, it must be a list of texts",
        ),
    ] {
        let said = refusal(&plain(&[(field, value)]));
        assert!(said.contains(words), "{said}");
    }
    // Neutral values ask for nothing.
    let (front, kept) = (front(), Kept::default());
    let neutral = plain(&[
        ("repetition_penalty", 1.0.into()),
        ("logit_bias", Value::Map(Vec::new())),
    ]);
    front.receive(&kept, [&encoded(&neutral)[..]]);
    assert_eq!(kept.arrivals.borrow().len(), 1);
}

#[test]
fn penalties_and_biases_reach_the_runtime() {
    let (front, kept) = (front(), Kept::default());
    let asked = generate(
        "a",
        &[1],
        &[],
        &[
            ("frequency_penalty", 0.5.into()),
            ("presence_penalty", (-1).into()),
            ("repetition_penalty", 1.5.into()),
            ("min_p", 0.25.into()),
            ("top_k", 5.into()),
            ("sampling_seed", Value::from(-1)),
            (
                "logit_bias",
                Value::Map(vec![("7".into(), 1.into()), (8.into(), (-2.5).into())]),
            ),
        ],
    );
    front.receive(&kept, [&encoded(&asked)[..]]);
    let draw = kept.arrivals.borrow()[0].sampling.clone();
    let extension = draw.extension.unwrap();
    let penalties = &extension.penalties;
    assert_eq!(
        (
            penalties.frequency,
            penalties.presence,
            penalties.repetition
        ),
        (0.5, -1.0, 1.5)
    );
    let combined = extension.sampler.unwrap();
    assert_eq!(
        (combined.top_k, combined.min_p, combined.seed),
        (5, 0.25, Some(i64::MAX as u64))
    );
    assert_eq!(extension.biases, [(7, 1.0), (8, -2.5)]);
}

/// Why a request was refused, from the message to the detokenizer.
fn reason(bytes: &[u8]) -> String {
    let reason = field(bytes, "finished_reasons").remove(0);
    let entries = reason.as_map().unwrap();
    let found = entries
        .iter()
        .find(|(key, _)| key.as_str() == Some("message"));
    found.unwrap().1.as_str().unwrap().to_owned()
}

#[test]
fn an_adapter_is_found_by_the_tokenizer_managers_name() {
    let (front, kept) = (front(), Kept::default());
    front.set_adapter("ab12", Some(3));
    let ask = |rid, lora: &str| {
        let request = generate(rid, &[1], &[("lora_id", lora.into())], &[]);
        front.receive(&kept, [&encoded(&request)[..]])
    };
    assert_eq!(
        ask("a", "ab12"),
        pie_frontends::sglang_zmq::Outgoing::default()
    );
    assert_eq!(kept.arrivals.borrow()[0].adapter, Some(3));
    front.set_adapter("ab12", None);
    let refused = reason(&ask("b", "ab12").to_detokenizer[0]);
    assert!(
        refused.contains("adapter `ab12` is not loaded"),
        "{refused}"
    );
    let refused = reason(&ask("c", "a\n\n").to_detokenizer[0]);
    assert!(
        refused.contains(r"adapter `a\n\n` is not loaded"),
        "{refused}"
    );
    assert_eq!(kept.arrivals.borrow().len(), 1);
}

#[test]
fn a_session_goes_on_with_all_tokens() {
    let (front, kept) = (front(), Kept::default());
    assert!(front.open_session("s", false, None));
    let ask = |rid: &str, prompt: &[i64], parent: Option<&str>| {
        let parent = parent.map_or(Value::Nil, Value::from);
        let params = Value::Array(vec!["s".into(), parent]);
        let request = generate(rid, prompt, &[("session_params", params)], &[]);
        front.receive(&kept, [&encoded(&request)[..]])
    };
    ask("a", &[1, 30], None);
    front.outputs(&[delta(0, &[40], None)]);
    let early = reason(&ask("b", &[31], Some("a")).to_detokenizer[0]);
    assert!(early.contains("hasn't finished"), "{early}");
    front.outputs(&[delta(0, &[41], Some(FinishReason::Length))]);
    ask("b", &[1, 31], Some("a"));
    let arrivals = kept.arrivals.borrow();
    assert_eq!(arrivals[1].prompt, [1, 30, 40, 41, 31]);
    assert_eq!(
        (arrivals[0].session, arrivals[1].session),
        (Some(1), Some(1))
    );
    // A session that is closed while a request runs keeps nothing after it.
    front.close_session(&kept, "s");
    assert_eq!(
        (front.open_sessions(), kept.ended_sessions.take()),
        (0, vec![1])
    );
    let ended = front.outputs(&[delta(1, &[50], Some(FinishReason::Length))]);
    assert_eq!(field(&ended.to_detokenizer[0], "prompt_tokens"), [5.into()]);
    assert_eq!(ended.ended_sessions, [1]);
}

#[test]
fn sessions_hold_so_many_tokens_and_are_so_many() {
    let mut settings = settings();
    settings.limits.session_tokens = 150;
    settings.limits.sessions = 2;
    let (front, kept) = (
        SglangFrontend::new(&classes(), settings).unwrap(),
        Kept::default(),
    );
    for (name, opens) in [("s", true), ("s", false), ("t", true), ("u", false)] {
        assert_eq!(front.open_session(name, false, None), opens, "{name}");
    }
    let ask = |rid: &str| {
        let params = Value::Array(vec!["s".into()]);
        let request = generate(rid, &[1; 10], &[("session_params", params)], &[]);
        front.receive(&kept, [&encoded(&request)[..]])
    };
    for rid in ["a", "b"] {
        assert_eq!(ask(rid), Outgoing::default());
    }
    let refused = reason(&ask("c").to_detokenizer[0]);
    assert_eq!(ask("c").to_detokenizer.len(), 1);
    let words = "`session_params` has 158 tokens, 150 is the most: send fewer, or raise the request limit `session_tokens`";
    assert_eq!(refused, words);
    front.close_session(&kept, "t");
    assert!(front.open_session("u", false, None));
}

#[test]
fn aborts_take_the_beginning_of_names() {
    let (front, kept) = (front(), Kept::default());
    let batch: Vec<Value> = ["x", "req1", "req10", "req2"]
        .iter()
        .map(|rid| generate(rid, &[1], &[], &[]))
        .collect();
    let batch = message(
        "BatchTokenizedGenerateReqInput",
        &["rids", "http_worker_ipcs", "batch"],
        &[("batch", Value::Array(batch))],
    );
    front.receive(&kept, [&encoded(&batch)[..]]);
    let abort = |set: &[(&str, Value)]| encoded(&message("AbortReq", ABORT, set));
    front.receive(&kept, [&abort(&[("rid", "req1".into())])[..]]);
    assert_eq!(*kept.aborted.borrow(), [1, 2]);
    front.receive(&kept, [&abort(&[("rid", "".into())])[..]]);
    assert_eq!(kept.aborted.take(), [1, 2]);
    front.receive(
        &kept,
        [&abort(&[("rid", "".into()), ("abort_all", true.into())])[..]],
    );
    let mut all = kept.aborted.take();
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2, 3]);
    let ended = front.outputs(&[delta(1, &[7], Some(FinishReason::Aborted))]);
    assert_eq!(field(&ended.to_detokenizer[0], "rids"), ["req1".into()]);
    assert_eq!(front.open_requests(), 3);
}

/// The tokenizer manager has forgotten a request whose client went, and calls an output of it an error. `SGLang`'s scheduler sends
/// none for a request that waits.
#[test]
fn what_was_given_up_while_it_waited_ends_without_an_output() {
    let (front, kept) = (front(), Kept::default());
    for rid in ["waits", "begins", "runs", "fails"] {
        let request = encoded(&generate(
            rid,
            &[1],
            &[("http_worker_ipc", "w".into())],
            &[],
        ));
        front.receive(&kept, [&request[..]]);
    }
    let admitted = |delta| OutputDelta {
        admitted: Some(5),
        ..delta
    };
    front.outputs(&[admitted(delta(2, &[9], None))]);
    let ended = front.outputs(&[
        delta(0, &[], Some(FinishReason::Aborted)),
        admitted(delta(1, &[], Some(FinishReason::Aborted))),
        admitted(delta(2, &[], Some(FinishReason::Aborted))),
        delta(3, &[], Some(FinishReason::Failed("broken".into()))),
    ]);
    let set = [("rid", "waits".into()), ("http_worker_ipc", "w".into())];
    assert_eq!(
        ended.to_tokenizer,
        [encoded(&message("AbortReq", ABORT, &set))]
    );
    let rids = field(&ended.to_detokenizer[0], "rids");
    assert_eq!(rids, ["begins".into(), "runs".into(), "fails".into()]);
    assert_eq!(front.open_requests(), 0);
    // What comes later of them is not sent.
    let late = front.outputs(&[
        delta(0, &[3], None),
        delta(2, &[3], Some(FinishReason::Length)),
    ]);
    assert_eq!(late, Outgoing::default());
}

#[test]
fn a_probe_is_answered_by_outputs_or_is_a_request() {
    let (front, kept) = (front(), Kept::default());
    let probe = encoded(&generate("HEALTH_CHECK_1", &[1], &[], &[]));
    front.receive(&kept, [&probe[..]]);
    assert_eq!(kept.arrivals.borrow().len(), 1);
    // Now it is busy.
    front.receive(&kept, [&probe[..]]);
    assert_eq!(kept.arrivals.borrow().len(), 1);
    assert!(front.outputs(&[]).to_tokenizer.is_empty());
    let answered = front.outputs(&[delta(0, &[1], None)]);
    assert_eq!(
        answered.to_tokenizer,
        [encoded(&message("HealthCheckOutput", &["", ""], &[]))]
    );
    front.set_paused(true);
    assert_eq!(front.receive(&kept, [&probe[..]]).to_tokenizer.len(), 1);
}

#[test]
fn failures_have_a_status() {
    for (end, status) in [
        (
            FinishReason::Refused(ValidationError::QueueFull {
                waiting: 3,
                limit: 3,
            }),
            503,
        ),
        (FinishReason::Refused(ValidationError::Empty), 400),
        (FinishReason::Displaced, 503),
        (
            FinishReason::Busy("no compiler can be started: try again later".into()),
            503,
        ),
        (FinishReason::Failed("gone\n\nhint: wait".into()), 500),
    ] {
        let (front, kept) = (front(), Kept::default());
        front.receive(&kept, [&encoded(&generate("a", &[1], &[], &[]))[..]]);
        let sent = front.outputs(&[delta(0, &[], Some(end))]);
        let reason = field(&sent.to_detokenizer[0], "finished_reasons").remove(0);
        let found = reason
            .as_map()
            .unwrap()
            .iter()
            .find(|(key, _)| key.as_str() == Some("status_code"))
            .unwrap();
        assert_eq!(found.1.as_u64(), Some(status));
    }
}

#[test]
fn other_classes_are_refused_at_the_start() {
    let start = |change: &dyn Fn(&mut Vec<MessageClass>)| {
        let mut classes = classes();
        change(&mut classes);
        SglangFrontend::new(&classes, settings())
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    let lacks = start(&|classes| {
        classes.remove(5);
    });
    assert!(
        lacks.contains("no message class `HealthCheckOutput`"),
        "{lacks}"
    );
    assert!(
        start(&|classes| {
            classes[0].fields.remove(0);
        })
        .contains("has no field `rid`")
    );
    let new = MessageField {
        name: "news".into(),
        default: None,
    };
    assert!(start(&|classes| classes[4].fields.insert(3, new.clone())).contains("`news`"));
}

#[test]
fn positions_come_from_the_classes() {
    // A release puts a field in the middle.
    let mut moved = classes();
    moved[0].fields.insert(
        1,
        MessageField {
            name: "new".into(),
            default: Some(vec![0xc0]),
        },
    );
    moved[4].fields.insert(
        2,
        MessageField {
            name: "new".into(),
            default: Some(vec![0xc3]),
        },
    );
    let (front, kept) = (
        SglangFrontend::new(&moved, settings()).unwrap(),
        Kept::default(),
    );
    let Value::Array(mut request) = generate("a", &[7, 8], &[], &[]) else {
        unreachable!()
    };
    request.insert(2, Value::Nil);
    front.receive(&kept, [&encoded(&Value::Array(request))[..]]);
    assert_eq!(kept.arrivals.borrow()[0].prompt, [7, 8]);
    let sent = front.outputs(&[delta(0, &[1], Some(FinishReason::Length))]);
    let value = rmpv::decode::read_value(&mut &sent.to_detokenizer[0][..]).unwrap();
    assert_eq!(value.as_array().unwrap()[3], Value::from(true));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// However tokens are cut into outputs, the client gets each of them once, in order.
    #[test]
    fn every_token_is_sent_once(
        cuts in prop::collection::vec((0..4u64, prop::collection::vec(0..1000u32, 0..5), 0..2u32), 0..60),
        stream: bool,
        interval in 1..5u64,
    ) {
        let (front, kept) = (front(), Kept::default());
        let names = ["a", "b", "c", "d"];
        for rid in names {
            let more = [("stream", stream.into())];
            let request = generate(rid, &[1, 2], &more, &[("stream_interval", interval.into())]);
            front.receive(&kept, [&encoded(&request)[..]]);
        }
        let mut expected = vec![Vec::new(); 4];
        let mut found = vec![Vec::new(); 4];
        let mut take = |message: &[u8]| {
            let (rids, outputs) = (field(message, "rids"), field(message, "output_ids"));
            for (rid, output) in rids.iter().zip(&outputs) {
                let at = names.iter().position(|&name| rid.as_str() == Some(name)).unwrap();
                let bytes = output.as_array().unwrap()[1].as_slice().unwrap();
                let tokens = bytes.chunks(8).map(|token| i64::from_le_bytes(token.try_into().unwrap()));
                found[at].extend(tokens);
            }
        };
        for (request, tokens, held) in cuts {
            expected[request as usize].extend(tokens.iter().map(|&token| i64::from(token)));
            let mut output = delta(request, &tokens, None);
            output.held_bytes = held;
            front.outputs(&[output]).to_detokenizer.iter().for_each(|message| take(message));
        }
        let ends: Vec<OutputDelta> = (0..4).map(|request| delta(request, &[], Some(FinishReason::Length))).collect();
        front.outputs(&ends).to_detokenizer.iter().for_each(|message| take(message));
        prop_assert_eq!(found, expected);
    }
}

/// The reason of the only request's end.
fn end_of(params: &[(&str, Value)], end: FinishReason) -> Value {
    let (front, kept) = (front(), Kept::default());
    let request = encoded(&generate("a", &[10], &[], params));
    front.receive(&kept, [&request[..]]);
    let sent = front.outputs(&[delta(0, &[7], Some(end))]);
    field(&sent.to_detokenizer[0], "finished_reasons").remove(0)
}

#[test]
fn a_stop_expression_is_named_by_its_text() {
    let regexes = Value::Array(vec!["a+".into(), "[0-9]{3}".into()]);
    let reason = end_of(
        &[("stop_regex_strs", regexes)],
        FinishReason::StopRegex { index: 1 },
    );
    let expected = [("type", "stop"), ("matched", "[0-9]{3}")];
    assert_eq!(
        reason,
        Value::Map(expected.map(|(k, v)| (k.into(), v.into())).into())
    );
}

#[test]
fn a_wrong_grammar_and_an_abort_before_it_is_compiled_are_bad_requests() {
    for (end, words) in [
        (
            FinishReason::Grammar("the JSON schema is wrong: x".into()),
            "the JSON schema is wrong: x",
        ),
        (FinishReason::Unready, "Aborted by AbortReq."),
    ] {
        let reason = end_of(&[], end);
        let expected = [
            ("type", "abort".into()),
            ("message", words.into()),
            ("status_code", 400.into()),
            ("err_type", "BadRequestError".into()),
        ];
        assert_eq!(
            reason,
            Value::Map(expected.map(|(k, v)| (k.into(), v)).into())
        );
    }
}

#[test]
fn a_grammar_binds_after_the_thinking_of_requests_that_think() {
    let settings = SglangFrontendSettings {
        think_end: vec![60, 61],
        ..settings()
    };
    let (front, kept) = (
        SglangFrontend::new(&classes(), settings).unwrap(),
        Kept::default(),
    );
    let schema = [("json_schema", Value::from("{}"))];
    for more in [&[][..], &[("require_reasoning", true.into())]] {
        let request = encoded(&generate("a", &[10], more, &schema));
        front.receive(&kept, [&request[..]]);
    }
    let grammar = Grammar::JsonSchema("{}".into());
    let expected = [(grammar.clone(), vec![]), (grammar, vec![60, 61])];
    assert_eq!(*kept.bound.borrow(), expected);
}

/// A runtime that takes the images of one pickle, and counts those that it reads.
#[derive(Default)]
struct Sees(Kept, RefCell<usize>);

impl Backend for Sees {
    fn submit(&self, spec: RequestSpec) -> Result<u64, SubmitError> {
        self.0.submit(spec)
    }

    fn compile_grammar(
        &self,
        grammar: &Grammar,
        after: &[u32],
    ) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError> {
        self.0.compile_grammar(grammar, after)
    }

    fn abort(&self, request: u64) {
        self.0.abort(request);
    }

    fn end_session(&self, session: u64) {
        self.0.end_session(session);
    }

    fn images(&self, media: &[u8]) -> Result<PromptImages, String> {
        *self.1.borrow_mut() += 1;
        match media {
            b"image" => {
                let pixels = vec![1; 16].into();
                let image = PromptImage::new(1, 3, [1, 2, 6], pixels, Box::default());
                Ok(PromptImages::new(vec![image.unwrap()]).unwrap())
            }
            b"nothing" => Ok(PromptImages::new(Vec::new()).unwrap()),
            _ => Err("`video_data` is not served".to_owned()),
        }
    }
}

fn media(pickle: &[u8]) -> (&'static str, Value) {
    let wrapper = ["PickleWrapper".into(), Value::Binary(pickle.into())];
    ("mm_inputs", Value::Array(wrapper.into()))
}

#[test]
fn images_reach_the_runtime_by_other_names_than_tokens() {
    let (front, sees) = (front(), Sees::default());
    let request = generate("a", &[10, 296, 296, 296, 11], &[media(b"image")], &[]);
    let sent = front.receive(&sees, [&encoded(&request)[..]]);
    assert_eq!(sent, pie_frontends::sglang_zmq::Outgoing::default());
    let arrival = sees.0.arrivals.borrow()[0].clone();
    assert_eq!((arrival.prompt[0], arrival.prompt[4]), (10, 11));
    assert!(arrival.prompt[1..4].iter().all(|&name| name >= 1 << 31));
    assert_eq!((arrival.images[0].start, arrival.images[0].tokens), (1, 3));
    assert!(arrival.sampling.images.is_some());
    let first = front.outputs(&[delta(0, &[40], Some(FinishReason::Length))]);
    let bytes = &first.to_detokenizer[0];
    // The text around is the client's.
    assert_eq!(
        field(bytes, "decode_ids"),
        [ids(&[10, 296, 296, 296, 11, 40])]
    );
    assert_eq!(field(bytes, "image_tokens"), [3.into()]);

    let plain = generate("b", &[10, 11], &[media(b"nothing")], &[]);
    front.receive(&sees, [&encoded(&plain)[..]]);
    let arrival = sees.0.arrivals.borrow()[1].clone();
    assert!(arrival.images.is_empty() && arrival.sampling.images.is_none());
}

#[test]
fn what_is_no_image_is_refused_and_let_go() {
    let session = ("session_params", Value::Array(vec!["s".into()]));
    for (more, words) in [
        (vec![media(b"video")], "`video_data` is not served"),
        (vec![media(b"image"), session], "session"),
        // It is read all the same, for it lies in memory that others see.
        (
            vec![media(b"image"), ("return_hidden_states", true.into())],
            "return_hidden_states",
        ),
    ] {
        let (front, sees) = (front(), Sees::default());
        front.open_session("s", false, None);
        let request = generate("a", &[10, 296, 296, 296, 11], &more, &[]);
        let sent = front.receive(&sees, [&encoded(&request)[..]]);
        let reason = field(&sent.to_detokenizer[0], "finished_reasons")[0].to_string();
        assert!(reason.contains(words), "{reason}");
        assert!(reason.contains("400"), "{reason}");
        assert_eq!(*sees.1.borrow(), 1);
        assert!(sees.0.arrivals.borrow().is_empty());
    }
    let reason = refusal(&generate("a", &[1], &[media(b"image")], &[]));
    assert!(reason.contains("`mm_inputs` is not served"), "{reason}");
}

#[test]
fn requests_that_the_front_end_traces_are_kept_when_they_end() {
    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let pickle = [b"traceparent\x94\x8c\x37", PARENT.as_bytes()].concat();
    let stats = Value::Array(vec!["PickleWrapper".into(), Value::Binary(pickle)]);
    let traced = [("time_stats", stats), ("priority", 3.into())];
    let began = Instant::now();
    for traces in [Some(began), None] {
        let settings = SglangFrontendSettings {
            traces,
            ..settings()
        };
        let (front, kept) = (
            SglangFrontend::new(&classes(), settings).unwrap(),
            Kept::default(),
        );
        for (rid, prompt, more) in [
            ("a", &[10, 11][..], &traced[..]),
            ("b", &[10], &[]),
            ("wrong", &[1000], &traced),
        ] {
            let request = encoded(&generate(rid, prompt, more, &[]));
            front.receive(&kept, [&request[..]]);
        }
        let first = OutputDelta {
            admitted: Some(began.elapsed().as_micros() as u64),
            first_token: Some(began.elapsed().as_micros() as u64),
            loaded_tokens: 1,
            retractions: 2,
            ..delta(0, &[40, 41], None)
        };
        let last = |request| OutputDelta {
            request,
            tokens: vec![42],
            finish: Some(FinishReason::Length),
            ..first.clone()
        };
        front.outputs(&[first.clone(), last(0), last(1)]);
        let (found, lost) = front.take_traced();
        assert_eq!(lost, 0);
        if traces.is_none() {
            assert_eq!(found, []);
            continue;
        }
        // The one that is refused ends first.
        let names: Vec<_> = found.iter().map(|request| &*request.name).collect();
        assert_eq!(names, ["wrong", "a"]);
        let [wrong, served] = &found[..] else {
            unreachable!()
        };
        let (kind, reason) = wrong.error.as_ref().unwrap();
        assert_eq!(*kind, "refused");
        assert!(reason.contains("token 1000 of `input_ids`"), "{reason}");
        assert_eq!(served.parent, TraceParent::parse(PARENT.as_bytes()));
        assert_eq!((served.prompt_tokens, served.output_tokens), (2, 3));
        assert_eq!((served.cached_tokens, served.loaded_tokens), (1, 1));
        assert_eq!((served.retractions, served.priority), (2, Some(3)));
        assert_eq!(served.finish_reasons, ["length"]);
        assert!(served.received_ns <= served.admitted_ns.unwrap());
        assert!(served.first_token_ns.unwrap() <= served.ended_ns);
    }
}

#[test]
fn prompt_and_answer_fit_the_context() {
    let (front, kept) = (front(), Kept::default());
    let context = settings().context_length;
    for (name, asked, given) in [
        ("no limit", Value::Nil, context - 3),
        ("all there is", Value::from(context - 3), context - 3),
        ("more", Value::from(u32::MAX), context - 3),
        ("less", Value::from(4), 4),
    ] {
        let request = generate(name, &[10, 11, 12], &[], &[("max_new_tokens", asked)]);
        front.receive(&kept, [&encoded(&request)[..]]);
        let ends = kept.arrivals.borrow().last().unwrap().stop.clone();
        assert_eq!(ends.max_tokens, given, "{name}");
    }
}
