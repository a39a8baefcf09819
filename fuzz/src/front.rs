//! Messages of `SGLang`'s frontend: whatever they say, each request has one answer, and what came with it is served.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use arbitrary::{Arbitrary, Unstructured};
use pie_engine::{
    FinishReason, Grammar, GrammarHandle, GrammarSetupError, OutputDelta, SubmitError,
};
use pie_frontends::sglang_zmq::{Backend, Outgoing, SglangFrontend};
use pie_ingress::{LogprobRows, RequestSpec};
use rmpv::Value;

use crate::front_messages::{self as messages, ABORT, PARAMS, REQUEST, SESSION};
use crate::memory;

/// Bytes of a refusal, with all else that its message says.
const MOST_REFUSAL: usize = 4096;
/// Values that one short description makes: copies of copies have no other end.
const MOST_VALUES: usize = 2048;
/// Bytes that a request's stop expressions take while they are read, however short they are.
const MOST_REGEXES: usize = 1 << 20;
/// The request that comes with each message.
const NEIGHBOUR: &str = "neighbour";

/// Messages to one front end.
#[derive(Debug, Arbitrary)]
struct Case {
    truncates: bool,
    messages: Vec<Message>,
}

#[derive(Debug, Arbitrary)]
enum Message {
    Request(Request),
    Batch(Vec<Request>),
    Abort {
        fields: Vec<(u8, Field)>,
    },
    /// Fields without a meaning, after any tag.
    Other(u8, Vec<Field>),
    Bytes(Vec<u8>),
    /// Changes of a message's bytes.
    Damaged(Request, Vec<(u16, u8)>),
    /// Tokens, or the end, of the requests that there are.
    Output {
        which: u8,
        tokens: Vec<u16>,
        ends: bool,
    },
    Session {
        open: bool,
        name: u8,
        streams: bool,
    },
}

/// A request for three tokens, and what is changed of it.
#[derive(Debug, Arbitrary)]
struct Request {
    name: u8,
    fields: Vec<(u8, Field)>,
    params: Vec<(u8, Field)>,
    session: Option<Vec<(u8, Field)>>,
}

/// A value, from a short description.
#[derive(Debug, Clone, Arbitrary)]
enum Field {
    Nil,
    Flag(bool),
    Small(u8),
    Whole(i64),
    Large(u64),
    Real(f64),
    Text(String),
    Name(u8),
    Bytes(Vec<u8>),
    /// Python's `array("q")`.
    Tokens(Vec<i64>),
    List(Vec<Field>),
    Map(Vec<(Field, Field)>),
    /// In itself, so often.
    Nested(u16, bool),
    /// So many of them.
    Many(u16, Box<Field>),
}

impl Field {
    fn value(&self) -> Value {
        match self {
            Self::Nil => Value::Nil,
            Self::Flag(flag) => (*flag).into(),
            Self::Small(number) => (*number).into(),
            Self::Whole(number) => (*number).into(),
            Self::Large(number) => (*number).into(),
            Self::Real(number) => (*number).into(),
            Self::Text(text) => text.as_str().into(),
            Self::Name(name) => named(*name).into(),
            Self::Bytes(bytes) => Value::Binary(bytes.clone()),
            Self::Tokens(tokens) => messages::ids(tokens),
            Self::List(values) => values.iter().map(Self::value).collect::<Vec<_>>().into(),
            Self::Map(entries) => {
                let entry = |(key, value): &(Self, Self)| (key.value(), value.value());
                Value::Map(entries.iter().map(entry).collect())
            }
            // `Value` is dropped recursively: what is deeper comes as bytes, see `deep`.
            Self::Nested(depth, is_map) => nested(*depth % 900, *is_map),
            Self::Many(count, field) => {
                let value = field.value();
                let most = MOST_VALUES / values(&value);
                vec![value; usize::from(*count % 512).min(most)].into()
            }
        }
    }
}

/// Values in a value, with itself.
fn values(value: &Value) -> usize {
    1 + match value {
        Value::Array(inner) => inner.iter().map(values).sum::<usize>(),
        Value::Map(entries) => entries
            .iter()
            .map(|(key, value)| values(key) + values(value))
            .sum(),
        _ => 0,
    }
}

fn nested(depth: u16, is_map: bool) -> Value {
    (0..depth).fold(Value::Nil, |inner, _| {
        if is_map {
            Value::Map(vec![("a".into(), inner)])
        } else {
            vec![inner].into()
        }
    })
}

fn named(name: u8) -> String {
    ["a", "ab", "abc", "b", "HEALTH_CHECK_1", ""][usize::from(name) % 6].to_owned()
}

/// The fields of a class by their numbers; names stay with their requests.
fn fields<'f>(known: &[&'f str], set: &[(u8, Field)]) -> Vec<(&'f str, Value)> {
    let set = set
        .iter()
        .map(|(at, field)| (known[usize::from(*at) % known.len()], field));
    set.map(|(name, field)| (name, field.value())).collect()
}

impl Request {
    fn value(&self) -> Value {
        let mut more = fields(REQUEST, &self.fields);
        if let Some(session) = &self.session {
            let Value::Array(mut session) =
                messages::message("", SESSION, &fields(SESSION, session))
            else {
                unreachable!("a message is a list")
            };
            session.remove(0);
            more.insert(0, ("session_params", session.into()));
        }
        let mut params = fields(PARAMS, &self.params);
        params.push(("max_new_tokens", 3.into()));
        messages::generate(&named(self.name), &[1, 2], &more, &params)
    }
}

/// A request that has not ended.
#[derive(Clone)]
struct Running {
    /// How many answers it has to have.
    samples: u32,
    logprobs: Option<LogprobRows>,
    /// Whether it has had tokens.
    computed: bool,
}

impl Running {
    /// An output of one of its samples, with the log-probabilities that it wants.
    fn delta(
        &self,
        request: u64,
        sample: u32,
        tokens: &[u32],
        end: Option<FinishReason>,
    ) -> OutputDelta {
        let mut delta = messages::delta(request, tokens, end);
        delta.sample = sample;
        if let Some(rows) = &self.logprobs {
            let words = rows.params().shape().words();
            delta.logprobs = vec![0; words * tokens.len()];
            if !self.computed && !tokens.is_empty() {
                // Nothing comes before the first token.
                delta.prompt_logprobs = vec![0; words * rows.prompt().len().saturating_sub(1)];
            }
        }
        delta
    }
}

/// A runtime that keeps what it is given.
#[derive(Default)]
struct Runtime {
    next: Cell<u64>,
    running: RefCell<BTreeMap<u64, Running>>,
    aborted: RefCell<Vec<u64>>,
}

impl Backend for Runtime {
    fn submit(&self, spec: RequestSpec) -> Result<u64, SubmitError> {
        let id = self.next.replace(self.next.get() + 1);
        let running = Running {
            samples: spec.samples(),
            logprobs: spec.logprobs().cloned(),
            computed: false,
        };
        self.running.borrow_mut().insert(id, running);
        Ok(id)
    }

    fn compile_grammar(
        &self,
        _: &Grammar,
        _: &[u32],
    ) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError> {
        Err(GrammarSetupError::NoTokenizer)
    }

    fn abort(&self, request: u64) {
        self.aborted.borrow_mut().push(request);
    }

    fn end_session(&self, _: u64) {}

    fn set_weight_version(&self, _: u32) {}
}

/// What the detokenizer and the tokenizer manager were sent of ends, by names.
#[derive(Default)]
struct Seen {
    ended: usize,
    neighbours: usize,
}

impl Seen {
    fn take(&mut self, sent: &Outgoing) {
        for bytes in &sent.to_detokenizer {
            let names = messages::field(bytes, "rids");
            let reasons = messages::field(bytes, "finished_reasons");
            assert_eq!(names.len(), reasons.len());
            for (name, reason) in names.iter().zip(&reasons) {
                if reason.is_nil() {
                    continue;
                }
                self.ended += 1;
                self.neighbours += usize::from(name.as_str() == Some(NEIGHBOUR));
                check_reason(reason);
            }
        }
        // Each is the end of a request that had no output; answers to probes are of no request.
        for name in sent.to_tokenizer.iter().filter_map(|bytes| aborted(bytes)) {
            self.ended += 1;
            self.neighbours += usize::from(name == NEIGHBOUR);
        }
    }
}

/// The name in an `AbortReq`.
fn aborted(bytes: &[u8]) -> Option<String> {
    let value = rmpv::decode::read_value(&mut &*bytes).ok()?;
    let [tag, name, ..] = &value.as_array()?[..] else {
        return None;
    };
    (tag.as_str() == Some("AbortReq")).then(|| name.as_str().map(str::to_owned))?
}

/// A refusal is one line, which does not send back what was sent.
fn check_reason(reason: &Value) {
    let entries = reason.as_map().expect("a reason is a map");
    let message = entries
        .iter()
        .find(|(key, _)| key.as_str() == Some("message"));
    if let Some(text) = message.and_then(|(_, text)| text.as_str()) {
        assert!(
            text.len() <= MOST_REFUSAL,
            "{} bytes: {text:.200}",
            text.len()
        );
        assert!(!text.contains('\n'), "{text:?}");
        assert!(!text.is_empty());
    }
}

static NEIGHBOURS: LazyLock<Vec<u8>> =
    LazyLock::new(|| messages::encoded(&messages::generate(NEIGHBOUR, &[1], &[], &[])));

/// Bytes of a [`Case`].
pub(crate) fn check(data: &[u8]) {
    let Ok(case) = Case::arbitrary(&mut Unstructured::new(data)) else {
        return;
    };
    let settings = pie_frontends::sglang_zmq::SglangFrontendSettings {
        truncates: case.truncates,
        ..messages::settings()
    };
    let front =
        SglangFrontend::new(&messages::classes(), settings).expect("the classes are served");
    let (runtime, mut seen) = (Runtime::default(), Seen::default());
    let mut sent = 0;
    for message in &case.messages {
        match message {
            Message::Session {
                open: true,
                name,
                streams,
            } => {
                front.open_session(&named(*name), *streams, None);
            }
            Message::Session { name, .. } => {
                front.close_session(&runtime, &named(*name));
            }
            Message::Output {
                which,
                tokens,
                ends,
            } => {
                let request = u64::from(*which) % (runtime.next.get() + 1);
                give(&front, &runtime, &mut seen, request, tokens, *ends);
            }
            other => {
                sent += 1;
                receive(
                    &front,
                    &runtime,
                    &mut seen,
                    &bytes_of(other),
                    requests_of(other),
                );
            }
        }
        end_aborted(&front, &runtime, &mut seen);
    }
    let left: Vec<u64> = runtime.running.borrow().keys().copied().collect();
    for request in left {
        give(&front, &runtime, &mut seen, request, &[7], true);
    }
    assert_eq!(front.open_requests(), 0, "a request has no end");
    assert_eq!(seen.neighbours, sent, "a neighbour has not its one answer");
}

/// One message, and another client's request in the same turn.
fn receive(
    front: &SglangFrontend,
    runtime: &Runtime,
    seen: &mut Seen,
    bytes: &[u8],
    requests: Option<usize>,
) {
    let before = (runtime.next.get(), seen.ended, seen.neighbours);
    let together = [bytes, &NEIGHBOURS[..]];
    let (sent, peak) = memory::peak(|| front.receive(runtime, together));
    // A token of one byte takes tens of them once it is read, one of a stop string hundreds.
    let most = (1 << 16) + 256 * bytes.len() + MOST_REGEXES * requests.unwrap_or(1);
    assert!(peak <= most, "{peak} bytes for {}", bytes.len());
    for line in &sent.unreadable {
        assert!(
            line.len() <= MOST_REFUSAL && !line.contains('\n'),
            "{line:?}"
        );
    }
    seen.take(&sent);
    let is_taken = runtime.next.get() > before.0;
    assert!(
        is_taken || seen.neighbours > before.2,
        "a neighbour was not served"
    );
    if let Some(requests) = requests {
        let found = (runtime.next.get() - before.0) as usize + seen.ended - before.1;
        assert_eq!(
            found,
            requests + 1,
            "each request is taken or refused, once"
        );
    }
}

/// Requests of a message, where that is known: a probe is answered with the next output, or refused at once.
fn requests_of(message: &Message) -> Option<usize> {
    let count = |requests: &[Request]| {
        let mut names = requests.iter().map(|request| named(request.name));
        let probes = names.any(|name| name.starts_with("HEALTH_CHECK"));
        (!probes).then_some(requests.len())
    };
    match message {
        Message::Request(request) => count(std::slice::from_ref(request)),
        Message::Batch(requests) => count(requests),
        Message::Abort { .. } => Some(0),
        _ => None,
    }
}

/// Ends those that were aborted, as the runtime does.
fn end_aborted(front: &SglangFrontend, runtime: &Runtime, seen: &mut Seen) {
    for request in runtime.aborted.take() {
        if let Some(running) = runtime.running.borrow_mut().remove(&request) {
            for sample in 0..running.samples.max(1) {
                let delta = running.delta(request, sample, &[], Some(FinishReason::Aborted));
                seen.take(&front.outputs(&[delta]));
            }
        }
    }
}

fn give(
    front: &SglangFrontend,
    runtime: &Runtime,
    seen: &mut Seen,
    request: u64,
    tokens: &[u16],
    ends: bool,
) {
    let Some(mut running) = runtime.running.borrow_mut().remove(&request) else {
        return;
    };
    let tokens: Vec<u32> = tokens
        .iter()
        .map(|&token| u32::from(token) % 1000)
        .collect();
    for sample in 0..running.samples.max(1) {
        let delta = running.delta(
            request,
            sample,
            &tokens,
            ends.then_some(FinishReason::Length),
        );
        let ended = seen.ended;
        seen.take(&front.outputs(&[delta]));
        assert_eq!(
            seen.ended - ended,
            usize::from(ends),
            "one end to each request"
        );
    }
    if !ends {
        running.computed |= !tokens.is_empty();
        runtime.running.borrow_mut().insert(request, running);
    }
}

fn bytes_of(message: &Message) -> Vec<u8> {
    let value = match message {
        Message::Request(request) => request.value(),
        Message::Batch(requests) => messages::message(
            "BatchTokenizedGenerateReqInput",
            &["rids", "http_worker_ipcs", "batch"],
            &[(
                "batch",
                requests
                    .iter()
                    .map(Request::value)
                    .collect::<Vec<_>>()
                    .into(),
            )],
        ),
        Message::Abort { fields: set } => messages::message("AbortReq", ABORT, &fields(ABORT, set)),
        Message::Other(tag, values) => {
            let tags = [
                "TokenizedGenerateReqInput",
                "BatchTokenizedGenerateReqInput",
                "AbortReq",
                "Other",
            ];
            let mut parts = vec![Value::from(tags[usize::from(*tag) % tags.len()])];
            parts.extend(values.iter().map(Field::value));
            parts.into()
        }
        Message::Bytes(bytes) => return bytes.clone(),
        Message::Damaged(request, damage) => {
            let mut bytes = messages::encoded(&request.value());
            for (at, byte) in damage {
                let at = usize::from(*at) % bytes.len();
                bytes[at] = *byte;
            }
            return bytes;
        }
        Message::Output { .. } | Message::Session { .. } => unreachable!("it is no message"),
    };
    messages::encoded(&value)
}
