//! Messages that no client should send: whatever is wrong with one, it fails alone.

mod support;

use pie_frontends::sglang_zmq::{Outgoing, SglangFrontend};
use proptest::prelude::*;
use rmpv::Value;

use support::{ABORT, Kept, PARAMS, REQUEST, encoded, field, front, generate, message};

/// Stands for a value that no encoder without a loop can write.
const HOLE: &str = "\u{1}\u{2}\u{3}hole";

fn hole() -> Value {
    HOLE.into()
}

/// The bytes of a message, with others in the place of each hole.
fn filled(message: &Value, value: &[u8]) -> Vec<u8> {
    let (bytes, hole) = (encoded(message), encoded(&hole()));
    let mut filled = Vec::new();
    let mut rest = &bytes[..];
    while let Some(at) = rest.windows(hole.len()).position(|bytes| bytes == hole) {
        filled.extend_from_slice(&rest[..at]);
        filled.extend_from_slice(value);
        rest = &rest[at + hole.len()..];
    }
    filled.extend_from_slice(rest);
    filled
}

/// Lists or maps inside of each other.
fn nested(depth: usize, maps: bool) -> Vec<u8> {
    let level: &[u8] = if maps { &[0x81, 0xa1, b'a'] } else { &[0x91] };
    let mut bytes = level.repeat(depth);
    bytes.push(1);
    bytes
}

/// The requests that were answered, each with what it was told.
fn answered(outgoing: &Outgoing) -> Vec<(String, String)> {
    let messages = outgoing.to_detokenizer.iter();
    let told = messages.flat_map(|message| {
        let reasons = field(message, "finished_reasons");
        field(message, "rids").into_iter().zip(reasons)
    });
    told.map(|(rid, reason)| (rid.as_str().unwrap().to_owned(), reason.to_string()))
        .collect()
}

fn names(kept: &Kept, front: &SglangFrontend) -> usize {
    let arrivals = kept.arrivals.borrow().len();
    assert_eq!(front.open_requests(), arrivals);
    arrivals
}

/// A request to each side of a hostile one is served, in the same call.
fn between(hostile: &[u8]) -> Outgoing {
    let (front, kept) = (front(), Kept::default());
    let [before, after] = ["before", "after"].map(|rid| encoded(&generate(rid, &[1], &[], &[])));
    let wrong = encoded(&generate("wrong", &[1000], &[], &[]));
    let outgoing = front.receive(&kept, [&wrong[..], &before, hostile, &after]);
    assert!(names(&kept, &front) >= 2);
    let first = kept.arrivals.borrow()[0].prompt.clone();
    assert_eq!(first, [1]);
    // What was refused before it is answered, too.
    assert!(answered(&outgoing).iter().any(|(rid, _)| rid == "wrong"));
    outgoing
}

#[test]
fn depth_ends_no_process_and_no_neighbour() {
    let more: Vec<&str> = REQUEST
        .iter()
        .copied()
        .filter(|&name| name != "rid")
        .collect();
    for depth in [255, 256, 600, 100_000] {
        for maps in [false, true] {
            let deep = nested(depth, maps);
            let fields = PARAMS
                .iter()
                .map(|&name| generate("deep", &[1], &[], &[(name, hole())]));
            let fields = fields.chain(
                more.iter()
                    .map(|&name| generate("deep", &[1], &[(name, hole())], &[])),
            );
            let biases = Value::Map(vec![("5".into(), hole())]);
            let bias = generate("deep", &[1], &[], &[("logit_bias", biases)]);
            let tagged = message("Unknown", REQUEST, &[("rid", hole())]);
            for message in fields.chain([bias, tagged]) {
                between(&filled(&message, &deep));
            }
        }
    }
}

#[test]
fn a_message_that_is_cut_off_is_answered_by_its_name() {
    let whole = encoded(&generate("cut", &[1], &[], &[("temperature", 0.5.into())]));
    let outgoing = between(&whole[..whole.len() - 3]);
    let answered = answered(&outgoing);
    let (_, reason) = answered.iter().find(|(rid, _)| rid == "cut").unwrap();
    assert!(
        reason.contains("cut off") && reason.contains("400"),
        "{reason}"
    );
    // What has no name is for the log.
    for (bytes, words) in [
        (
            &b"\xdc"[..],
            "a message of 1 bytes cannot be read: it is no list",
        ),
        (b"", "0 bytes"),
        (b"\x93\xa8AbortReq\x05\xc0", "`rid` is 5, it must be a text"),
        (b"\x93\xa8AbortReq", "cut off"),
        (
            &encoded(&message("TokenizedGenerateReqInput", REQUEST, &[])),
            "`rid` is null",
        ),
    ] {
        let lines = between(bytes).unreadable;
        assert!(lines.len() == 1 && lines[0].contains(words), "{lines:?}");
    }
}

#[test]
fn one_bad_request_of_a_batch_fails_alone() {
    let good = |rid| generate(rid, &[1], &[], &[]);
    let bad = generate("c", &[1], &[], &[("temperature", "hot".into())]);
    let unnamed = message("TokenizedGenerateReqInput", REQUEST, &[]);
    let batch = |names: Value, batch: Value| {
        let set = [("rids", names), ("batch", batch)];
        encoded(&message(
            "BatchTokenizedGenerateReqInput",
            &["rids", "http_worker_ipcs", "batch"],
            &set,
        ))
    };
    let requests = vec![good("a"), 7.into(), bad, unnamed.clone(), good("e")];
    let named = Value::Array(["a", "b", "c", "d", "e"].map(Value::from).into());
    let (front, kept) = (front(), Kept::default());
    let outgoing = front.receive(&kept, [&batch(named.clone(), Value::Array(requests))[..]]);
    assert_eq!(names(&kept, &front), 2);
    let refused: Vec<_> = answered(&outgoing)
        .into_iter()
        .map(|(rid, _)| rid)
        .collect();
    assert_eq!(refused, ["b", "c", "d"]);
    // A batch that is none.
    let outgoing = between(&batch(named, 5.into()));
    assert_eq!(answered(&outgoing).len(), 1 + 5);
    // Names that are none.
    let outgoing = between(&batch(5.into(), Value::Array(vec![unnamed])));
    assert_eq!(outgoing.unreadable.len(), 1);
}

#[test]
fn an_abort_of_nobody_is_ignored() {
    let abort = |rid: Value| encoded(&message("AbortReq", ABORT, &[("rid", rid)]));
    for rid in [
        "nobody".into(),
        "".into(),
        Value::Nil,
        "x".repeat(1 << 20).into(),
    ] {
        let outgoing = between(&abort(rid));
        assert!(outgoing.unreadable.is_empty());
    }
}

/// Any value, some of them as deep as nothing that recurses bears.
fn any_value() -> impl Strategy<Value = Vec<u8>> {
    let leaf = prop_oneof![
        Just(Value::Nil),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i8>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
        prop::collection::vec(any::<u8>(), 0..24).prop_map(Value::Binary),
    ];
    let tree = leaf.prop_recursive(3, 48, 40, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..40).prop_map(Value::Array),
            prop::collection::vec((inner.clone(), inner), 0..4).prop_map(Value::Map),
        ]
    });
    let long = (1..30_000usize, any::<i16>()).prop_map(|(count, value)| {
        let values = (0..count as i64).map(|at| Value::from(at * i64::from(value)));
        encoded(&Value::Array(values.collect()))
    });
    prop_oneof![
        12 => tree.prop_map(|tree| encoded(&tree)),
        2 => (1..2000usize, any::<bool>()).prop_map(|(depth, maps)| nested(depth, maps)),
        1 => long,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever a client puts into the fields of a request, it is answered once or served, and so are those around it.
    #[test]
    fn each_request_is_served_or_answered_once(
        params in prop::collection::vec((0..PARAMS.len(), any_value()), 0..4),
        more in prop::collection::vec((0..REQUEST.len(), any_value()), 0..3),
    ) {
        let rid = |&(at, _): &(usize, Vec<u8>)| !["rid", "http_worker_ipc"].contains(&REQUEST[at]);
        let more: Vec<_> = more.into_iter().filter(rid).collect();
        // A hole of its own for each value.
        let mark = |index: usize| Value::from(format!("{HOLE}{index}"));
        let params_set: Vec<_> = params.iter().enumerate().map(|(index, (at, _))| (PARAMS[*at], mark(index))).collect();
        let more_set: Vec<_> =
            more.iter().enumerate().map(|(index, (at, _))| (REQUEST[*at], mark(index + 10))).collect();
        let mut bytes = encoded(&generate("a", &[1], &more_set, &params_set));
        let values = params.iter().map(|(_, value)| value).enumerate();
        let values = values.chain(more.iter().enumerate().map(|(index, (_, value))| (index + 10, value)));
        for (index, value) in values {
            let hole = encoded(&mark(index));
            if let Some(at) = bytes.windows(hole.len()).position(|found| found == hole) {
                bytes.splice(at..at + hole.len(), value.iter().copied());
            }
        }
        let next = encoded(&generate("b", &[1], &[], &[]));
        let (front, kept) = (front(), Kept::default());
        let outgoing = front.receive(&kept, [&bytes[..], &next]);
        prop_assert!(outgoing.unreadable.is_empty());
        let refused = answered(&outgoing).len();
        prop_assert!(answered(&outgoing).iter().all(|(rid, _)| rid == "a"));
        prop_assert_eq!(names(&kept, &front) + refused, 2);
    }

    /// A message that is cut or changed anywhere is one of these, and the next one is served.
    #[test]
    fn any_bytes_fail_alone(at in 0..400usize, byte: u8, cut in 0..400usize) {
        let request = generate("abc", &[1, 2, 3], &[("stream", true.into())], &[("stop_strs", Value::Array(vec!["x".into()]))]);
        let mut bytes = encoded(&request);
        let at = at % bytes.len();
        bytes[at] = byte;
        let cut = cut % bytes.len();
        let next = encoded(&generate("next", &[1], &[], &[]));
        for message in [&bytes[..], &bytes[..cut]] {
            let (front, kept) = (front(), Kept::default());
            let outgoing = front.receive(&kept, [message, &next]);
            let told = answered(&outgoing).len() + outgoing.unreadable.len() + outgoing.others.len();
            prop_assert_eq!(names(&kept, &front) + told, 2);
        }
    }
}
