//! Messages in and out of a front end whose requests nothing computes.

mod embeddings;
mod images;
mod refusals;
mod sessions;
mod support;

use std::time::Instant;

use pie_engine::{FinishReason, Grammar, OutputDelta, Sampler, TraceParent};
use pie_frontends::sglang_zmq::{MessageField, SglangFrontend, SglangFrontendSettings};
use proptest::prelude::*;
use rmpv::Value;

use refusals::reason;
use support::{Kept, classes, delta, encoded, field, front, generate, ids, message, settings};

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
    let params = kept.arrivals.borrow()[0].sampling.clone();
    let extension = params.extension.unwrap();
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
pub(crate) fn end_of(params: &[(&str, Value)], end: FinishReason) -> Value {
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
