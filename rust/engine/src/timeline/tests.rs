use std::sync::Arc;
use std::thread;

use proptest::prelude::*;

use super::*;

const PARENT: &[u8] = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn delta(sample: u32, tokens: &[u32], finish: Option<FinishReason>) -> OutputDelta {
    OutputDelta {
        tokens: tokens.to_vec(),
        finish,
        ..OutputDelta::finished(1, sample, FinishReason::Aborted)
    }
}

/// What is fetched of one request.
fn fetched(timelines: &Timelines, timeline: Timeline) -> TracedRequest {
    timelines.push(timeline);
    let (mut requests, lost) = timelines.take();
    assert_eq!((requests.len(), lost), (1, 0));
    requests.remove(0)
}

#[test]
fn a_parent_is_what_the_standard_says() {
    let parent = TraceParent::parse(PARENT).unwrap();
    assert_eq!(parent.trace_id, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
    assert_eq!(
        (parent.span_id, parent.is_sampled),
        (0x00f0_67aa_0ba9_02b7, true)
    );
    let of = |text: &str| TraceParent::parse(text.as_bytes());
    let text = str::from_utf8(PARENT).unwrap();
    assert!(!of(&text.replace("-01", "-00")).unwrap().is_sampled);
    // A later version may say more.
    assert_eq!(of(&format!("cc{}-more", &text[2..])), Some(parent));
    for wrong in [
        "",
        "00",
        &text[..54],
        &format!("{text}-more"),
        &format!("ff{}", &text[2..]),
        &text.replace("4bf9", "4BF9"),
        &text.replace("00f067aa0ba902b7", "0000000000000000"),
        &text.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
    ] {
        assert_eq!(of(wrong), None, "{wrong}");
    }
}

#[test]
fn a_request_has_its_times_and_counts() {
    let started = Instant::now();
    let timelines = Timelines::new(started);
    let parent = TraceParent::parse(PARENT);
    let mut timeline = Timeline::begin("a", parent, 9, 1).with_priority(Some(3));
    thread::sleep(Duration::from_millis(2));
    let admitted = started.elapsed().as_micros() as u64;
    let running = OutputDelta {
        cached_tokens: 4,
        loaded_tokens: 1,
        admitted: Some(admitted),
        ..delta(0, &[], None)
    };
    timeline.update(&running);
    thread::sleep(Duration::from_millis(2));
    let first_token = Some(started.elapsed().as_micros() as u64);
    for (tokens, end) in [
        (&[5, 6][..], None),
        (&[7], Some(FinishReason::StopToken(7))),
    ] {
        thread::sleep(Duration::from_millis(2));
        timeline.update(&OutputDelta {
            tokens: tokens.to_vec(),
            finish: end,
            first_token,
            retractions: 1,
            ..running.clone()
        });
    }
    thread::sleep(Duration::from_millis(2));
    assert!(timeline.has_ended());
    let found = fetched(&timelines, timeline);
    assert_eq!(
        (&*found.name, found.parent, found.priority),
        ("a", parent, Some(3))
    );
    assert_eq!((found.prompt_tokens, found.output_tokens), (9, 3));
    assert_eq!(
        (found.cached_tokens, found.loaded_tokens, found.retractions),
        (4, 1, 1)
    );
    assert_eq!(
        (&found.finish_reasons[..], found.error),
        (&["stop"][..], None)
    );
    let times = [
        found.received_ns,
        found.admitted_ns.unwrap(),
        found.first_token_ns.unwrap(),
        found.ended_ns,
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_nanos() as u64,
    ];
    for pair in times.windows(2) {
        assert!(
            (1_000_000..60_000_000_000).contains(&(pair[1] - pair[0])),
            "{times:?}"
        );
    }
}

#[test]
fn a_request_of_several_sequences_ends_with_the_last() {
    let timelines = Timelines::new(Instant::now());
    let mut timeline = Timeline::begin("a", None, 1, 3);
    let late = OutputDelta {
        cached_tokens: 7,
        admitted: Some(0),
        ..delta(1, &[1], Some(FinishReason::Length))
    };
    timeline.update(&late);
    // What comes after an end, and of a sequence that there is not, is of no request.
    timeline.update(&delta(1, &[2], Some(FinishReason::Aborted)));
    timeline.update(&delta(3, &[3], None));
    assert!(!timeline.has_ended());
    timeline.update(&OutputDelta {
        cached_tokens: 2,
        admitted: Some(0),
        ..delta(0, &[4], None)
    });
    timeline.update(&delta(
        0,
        &[],
        Some(FinishReason::Failed(Arc::from("lost"))),
    ));
    timeline.abort();
    let found = fetched(&timelines, timeline);
    assert_eq!(found.finish_reasons, ["abort", "length", "abort"]);
    assert_eq!(found.error, Some(("failed", "lost".to_owned())));
    assert_eq!((found.output_tokens, found.cached_tokens), (2, 2));
    // It was admitted before it came, as two clocks say.
    assert_eq!(found.admitted_ns, Some(found.received_ns));
}

#[test]
fn a_request_that_is_refused_has_the_reason() {
    let timelines = Timelines::new(Instant::now());
    let mut timeline = Timeline::begin("a", None, 1, u32::MAX);
    timeline.refuse("too long");
    let found = fetched(&timelines, timeline);
    assert_eq!(found.finish_reasons, ["abort"]);
    assert_eq!(found.error, Some(("refused", "too long".to_owned())));
    assert_eq!((found.admitted_ns, found.first_token_ns), (None, None));
}

#[test]
fn what_finds_no_room_is_counted() {
    let timelines = Timelines::new(Instant::now());
    for number in 0..CAPACITY + 3 {
        timelines.push(Timeline::begin(&number.to_string(), None, 1, 1));
    }
    let (requests, lost) = timelines.take();
    assert_eq!((requests.len(), lost), (CAPACITY, 3));
    assert_eq!(
        (&*requests[0].name, &*requests[CAPACITY - 1].name),
        ("0", "4095")
    );
    assert_eq!(timelines.take(), (Vec::new(), 0));
}

proptest! {
    #[test]
    fn any_bytes_may_come_as_a_parent(bytes: Vec<u8>, index in 0..PARENT.len(), byte: u8) {
        let _ = TraceParent::parse(&bytes);
        let mut changed = PARENT.to_vec();
        changed[index] = byte;
        if let Some(parent) = TraceParent::parse(&changed) {
            prop_assert!(parent.trace_id != 0 && parent.span_id != 0);
        }
    }

    /// Whatever order moments have on two clocks, spans have a start that is not after their end.
    #[test]
    fn times_follow_each_other(
        admitted in prop::option::of(0..10_000_000u64),
        first_token in prop::option::of(0..10_000_000u64),
    ) {
        let timelines = Timelines::new(Instant::now());
        let mut timeline = Timeline::begin("a", None, 1, 1);
        timeline.update(&OutputDelta { admitted, first_token, ..delta(0, &[1], Some(FinishReason::Length)) });
        let found = fetched(&timelines, timeline);
        let times = [Some(found.received_ns), found.admitted_ns, found.first_token_ns, Some(found.ended_ns)];
        prop_assert!(times.iter().flatten().is_sorted(), "{times:?}");
    }
}
