//! Sessions, and aborts of requests.

use pie_engine::{FinishReason, OutputDelta};
use pie_frontends::sglang_zmq::{Outgoing, SglangFrontend};
use rmpv::Value;

use crate::refusals::reason;
use crate::support::{
    ABORT, Kept, classes, delta, encoded, field, front, generate, message, settings,
};

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
fn a_stop_criterion_of_any_kind_completes_a_turn_of_a_session_that_streams() {
    let (front, kept) = (front(), Kept::default());
    assert!(front.open_session("s", true, None));
    let ends = [
        FinishReason::Length,
        FinishReason::StopToken(40),
        FinishReason::StopRegex { index: 0 },
        FinishReason::Aborted,
    ];
    for (number, end) in (0..).zip(ends) {
        let params = Value::Array(vec!["s".into()]);
        let request = generate(
            &format!("r{number}"),
            &[30],
            &[("session_params", params)],
            &[],
        );
        front.receive(&kept, [&encoded(&request)[..]]);
        front.outputs(&[delta(number, &[40], Some(end))]);
    }
    let params = Value::Array(vec!["s".into()]);
    let request = generate("last", &[31], &[("session_params", params)], &[]);
    front.receive(&kept, [&encoded(&request)[..]]);
    let arrivals = kept.arrivals.borrow();
    // Of all but the aborted one.
    assert_eq!(arrivals[4].prompt, [30, 40, 30, 40, 30, 40, 31]);
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
