//! What is refused, and the status that failures have.

use pie_engine::{FinishReason, ValidationError};
use pie_frontends::sglang_zmq::{MessageClass, MessageField, SglangFrontend};
use rmpv::Value;

use crate::end_of;
use crate::support::{Kept, classes, delta, encoded, field, front, generate, settings};

pub(crate) fn refusal(request: &Value) -> String {
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
fn a_frontend_that_is_unavailable_says_why() {
    let (front, kept) = (front(), Kept::default());
    let ask = |name| front.receive(&kept, [&encoded(&generate(name, &[1], &[], &[]))[..]]);
    ask("a");
    front.set_unavailable(&kept, Some("asleep".to_owned()));
    assert_eq!(*kept.aborted.borrow(), [0]);
    let ended = front.outputs(&[delta(0, &[], Some(FinishReason::Aborted))]);
    for sent in [ended, ask("b")] {
        let end = field(&sent.to_detokenizer[0], "finished_reasons").remove(0);
        let end = end.to_string();
        assert!(end.contains("asleep") && end.contains("503"), "{end}");
    }
    front.set_unavailable(&kept, None);
    assert!(ask("c").to_detokenizer.is_empty());
    assert_eq!(kept.arrivals.borrow().len(), 2);
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
            plain(&[("beam_width", 4.into())]),
            "the parameter `beam_width` = 4 is not served by this server's scheduler: there is no beam search",
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

/// Why a request was refused, from the message to the detokenizer.
pub(crate) fn reason(bytes: &[u8]) -> String {
    let reason = field(bytes, "finished_reasons").remove(0);
    let entries = reason.as_map().unwrap();
    let found = entries
        .iter()
        .find(|(key, _)| key.as_str() == Some("message"));
    found.unwrap().1.as_str().unwrap().to_owned()
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
