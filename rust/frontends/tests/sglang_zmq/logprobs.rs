//! Columns of log-probabilities.

mod support;

use pie_engine::FinishReason;
use proptest::prelude::*;
use rmpv::Value;

use support::{Kept, delta, encoded, field, front, generate};

/// What a request asks of each position, and what a runtime brings: `width` words of a position, each different.
fn positions(count: usize, width: usize, first: u32) -> Vec<u32> {
    let words = (count * width) as u32;
    (0..words)
        .map(|word| ((first + word) as f32).to_bits())
        .collect()
}

fn floats(values: impl IntoIterator<Item = u32>) -> Value {
    let float = |value: u32| Value::F32(value as f32);
    Value::Array(values.into_iter().map(float).collect())
}

fn numbers(ids: impl IntoIterator<Item = u32>) -> Value {
    Value::Array(ids.into_iter().map(Value::from).collect())
}

proptest! {
    /// Columns are what a naive reading of the words gives, whatever parts they come in; those of the prompt are sent once.
    #[test]
    fn log_probabilities_fill_the_columns(
        prompt in 1_usize..6, start in 0_usize..7, top in 0_usize..3, given in prop::collection::vec(0_u32..9, 0..3),
        parts in prop::collection::vec(1_usize..3, 1..4),
    ) {
        let (front, kept) = (front(), Kept::default());
        let start = start.min(prompt);
        let tokens: Vec<i64> = (10..10 + prompt as i64).collect();
        let asked = [
            ("return_logprob", Value::from(true)),
            ("logprob_start_len", Value::from(start)),
            ("top_logprobs_num", Value::from(top)),
            ("token_ids_logprob", Value::Array(given.iter().map(|&id| id.into()).collect())),
            ("stream", Value::from(true)),
        ];
        let messages = [
            encoded(&generate("plain", &[5], &[("stream", Value::from(true))], &[])),
            encoded(&generate("asks", &tokens, &asked, &[])),
        ];
        front.receive(&kept, messages.iter().map(Vec::as_slice));
        let arrivals = kept.arrivals.borrow();
        let width = 1 + 2 * top + given.len();
        prop_assert!(arrivals[0].logprobs.is_none());
        let wanted = arrivals[1].logprobs.unwrap();
        prop_assert_eq!((wanted.words as usize, wanted.prompt_from), (width, Some(start as u32 + 1)));

        let of_prompt = prompt.saturating_sub(start + 1);
        let mut next = 1_000;
        for (number, &count) in parts.iter().enumerate() {
            let new: Vec<u32> = (0..count as u32).map(|at| 500 + next + at).collect();
            let mut own = delta(1, &new, None);
            own.logprobs = positions(count, width, next);
            if number == 0 {
                own.prompt_logprobs = positions(of_prompt, width, 0);
            }
            let outgoing = front.outputs(&[delta(0, &[7], None), own]);
            let [message] = &outgoing.to_detokenizer[..] else { panic!("{outgoing:?}") };
            let column = |name: &str| {
                let mut found = field(message, name);
                prop_assert_eq!(&found[0], &Value::Array(Vec::new()));
                Ok(found.remove(1))
            };
            for (side, ids, count, first) in [
                ("input", (10 + start as u32..10 + prompt as u32).collect(), of_prompt, 0),
                ("output", new, count, next),
            ] {
                let none = side == "input" && (number > 0 || start == prompt);
                let each = |from: usize, len: usize| {
                    let mut found: Vec<Value> = (0..count)
                        .map(|at| floats((0..len).map(|word| first + (at * width + from + word) as u32)))
                        .collect();
                    if side == "input" {
                        found.insert(0, Value::Nil);
                    }
                    Value::Array(if none || len == 0 { Vec::new() } else { found })
                };
                let single = |value: Value| match value {
                    Value::Array(values) => Value::Array(values.into_iter().map(|value| match value {
                        Value::Array(mut one) => one.remove(0),
                        other => other,
                    }).collect()),
                    other => other,
                };
                let named = |part: &str| format!("{side}_{part}");
                prop_assert_eq!(column(&named("token_logprobs_val"))?, single(each(0, 1)));
                prop_assert_eq!(column(&named("top_logprobs_val"))?, each(1 + top, top));
                prop_assert_eq!(column(&named("token_ids_logprobs_val"))?, each(1 + 2 * top, given.len()));
                let ids = if none { Vec::new() } else { ids };
                prop_assert_eq!(column(&named("token_logprobs_idx"))?, numbers(ids));
            }
            next += (count * width) as u32;
        }
    }
}

#[test]
fn a_request_for_no_token_has_one_log_probability() {
    let (front, kept) = (front(), Kept::default());
    let asked = [
        ("return_logprob", Value::from(true)),
        ("token_ids_logprob", Value::Array(vec![3.into()])),
    ];
    let message = generate(
        "score",
        &[10, 11],
        &asked,
        &[("max_new_tokens", Value::from(0))],
    );
    front.receive(&kept, [&encoded(&message)[..]]);
    let mut ended = delta(0, &[], Some(FinishReason::Length));
    ended.logprobs = positions(1, 2, 4);
    ended.scored = Some(77);
    let outgoing = front.outputs(&[ended]);
    let column = |name| field(&outgoing.to_detokenizer[0], name).remove(0);
    assert_eq!(column("completion_tokens"), Value::from(0));
    assert_eq!(column("output_token_logprobs_val"), floats([4]));
    assert_eq!(column("output_token_logprobs_idx"), numbers([77]));
    let given = column("output_token_ids_logprobs_val");
    assert_eq!(given, Value::Array(vec![floats([5])]));
    for name in ["input_token_logprobs_val", "output_top_logprobs_idx"] {
        assert_eq!(column(name), Value::Array(Vec::new()));
    }
}

#[test]
fn log_probabilities_that_there_are_not_are_refused() {
    let (front, kept) = (front(), Kept::default());
    for (field_name, value, text) in [
        (
            "logprob_start_len",
            Value::from(3),
            "logprob_start_len is 3",
        ),
        (
            "logprob_start_len",
            Value::from(-2),
            "logprob_start_len is -2",
        ),
        (
            "top_logprobs_num",
            Value::from(1001),
            "top_logprobs_num is 1001",
        ),
        (
            "token_ids_logprob",
            Value::Array(vec![1000.into()]),
            "token 1000 of `token_ids_logprob`",
        ),
        (
            "top_logprobs_num",
            Value::from("x"),
            "`top_logprobs_num` is \"x\", it must be an integer",
        ),
        (
            "token_ids_logprob",
            Value::Array(vec![Value::from(-1)]),
            "token -1 of `token_ids_logprob`",
        ),
    ] {
        let asked = [("return_logprob", Value::from(true)), (field_name, value)];
        let message = encoded(&generate("a", &[10, 11], &asked, &[]));
        let outgoing = front.receive(&kept, [&message[..]]);
        let answer = &outgoing.to_detokenizer[0];
        let reasons = field(answer, "finished_reasons");
        let reason = reasons[0].as_map().unwrap().iter();
        let mut reason = reason.filter(|(key, _)| key.as_str() == Some("message"));
        let reason = reason.next().unwrap().1.as_str().unwrap().to_owned();
        assert!(reason.contains(text), "{reason}");
        assert_eq!(
            field(answer, "input_top_logprobs_val"),
            [Value::Array(Vec::new())]
        );
    }
    assert!(kept.arrivals.borrow().is_empty());
}
