//! Messages in, messages out: which requests are open, and what the front end gets of them.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pie_engine::{Delta, End, Pictures, Timelines, TracedRequest};
use pie_ingress::{
    Failure, Ingress, ModelInfo, Outcome, RawRequest, Refusal, RequestLimits, RequestSpec,
    one_line, outcome,
};

use crate::sglang_zmq::backend::Backend;
use crate::sglang_zmq::error::FrontError;
use crate::sglang_zmq::logprobs::OpenLogprobs;
use crate::sglang_zmq::media;
use crate::sglang_zmq::open::{Open, Pace};
use crate::sglang_zmq::output::{AbortEncoder, Entry, Finish, OutputEncoder};
use crate::sglang_zmq::request::{Decoder, GenerateRequest, Incoming};
use crate::sglang_zmq::session::{Begun, Sessions};
use crate::sglang_zmq::table::{MessageClass, Template};
use crate::sglang_zmq::times::TimeStats;

mod entry;

/// What depends on the model and on the server's flags.
#[derive(Debug, Clone)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a flag of the server"
)]
pub struct FrontSettings {
    /// The tokens that end a request, unless it ignores them.
    pub eos_tokens: Vec<u32>,
    /// The tokens that end the model's thinking; empty where there is none.
    pub think_end: Vec<u32>,
    /// Tokens from one output of a stream to the next.
    pub stream_interval: u32,
    /// Tokens from one output to the next of requests that do not stream.
    pub other_interval: u32,
    /// Most tokens of a prompt.
    pub max_prompt_tokens: u32,
    /// Most tokens of a prompt and its answer together.
    pub context_length: u32,
    /// Cut longer prompts instead of refusing them.
    pub truncates: bool,
    /// Token ids are below it.
    pub vocab_size: u32,
    /// What a request may hold.
    pub limits: RequestLimits,
    /// The token that begins a text, which a turn of a session does not.
    pub bos_token: Option<u32>,
    /// Whether the driver may draft for requests.
    pub speculates: bool,
    /// Refuse requests that have a priority: the scheduler does not look at it.
    pub refuses_priority: bool,
    /// Log-probabilities are those before the temperature.
    pub original_logprobs: bool,
    /// How the names of probes begin.
    pub probe_prefix: String,
    /// Among several replicas, which one this is.
    pub dp_rank: Option<u32>,
    /// Where the front end makes metrics of the times of requests.
    pub times: Option<TimeStats>,
    /// The moment from which the backend counts, where requests are traced.
    pub traces: Option<Instant>,
}

/// Messages to send, in their order for each receiver.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outgoing {
    /// To the detokenizer.
    pub to_detokenizer: Vec<Vec<u8>>,
    /// To the tokenizer manager.
    pub to_tokenizer: Vec<Vec<u8>>,
    /// Of the messages that came, the places of those that are not about requests.
    pub others: Vec<usize>,
    /// Sessions that the backend is to end: they were closed, and their last request has ended.
    pub ended_sessions: Vec<u64>,
    /// Of the messages that came, what could not be read and has no name to be answered by: for the log, a line each.
    pub unreadable: Vec<String>,
}

impl Outgoing {
    fn note_unreadable(&mut self, message: &[u8], reason: &str) {
        let bytes = message.len();
        self.unreadable.push(format!(
            "a message of {bytes} bytes cannot be read: {reason}"
        ));
    }
}

const NO_PRIORITY: &str =
    "Using priority is disabled for this server. Please send a new request without a priority.";

/// Waits that are kept until they are asked for.
const MOST_WAITS: usize = 1 << 16;

/// The requests of one front end. Two threads may call it at once: one that receives, one that sends outputs.
#[derive(Debug)]
pub struct Front {
    decoder: Decoder,
    outputs: OutputEncoder,
    aborts: AbortEncoder,
    probed: Template,
    settings: FrontSettings,
    ingress: Arc<Ingress>,
    state: Mutex<State>,
    traced: Option<Timelines>,
}

#[derive(Debug, Default)]
struct State {
    open: HashMap<u64, Open>,
    names: BTreeMap<String, u64>,
    /// The backend's ids of adapters, by the tokenizer manager's names of them.
    adapters: HashMap<String, u64>,
    sessions: Sessions,
    /// Probes that the next outputs answer, by their workers.
    probes: usize,
    paused: bool,
    /// Seconds that requests waited, and that their prompts took, since they were asked for.
    waits: Vec<(f64, f64)>,
}

impl Front {
    /// # Errors
    /// [`FrontError`] if the installed classes are not those that are served.
    pub fn new(classes: &[MessageClass], settings: FrontSettings) -> Result<Self, FrontError> {
        let facts = ModelInfo {
            vocab_size: settings.vocab_size,
            eos_token_ids: settings.eos_tokens.clone(),
            max_prompt_tokens: Some(settings.max_prompt_tokens),
            context_length: Some(settings.context_length),
        };
        let ingress = Arc::new(Ingress::new(settings.limits.clone(), facts));
        Ok(Self {
            decoder: Decoder::new(
                classes,
                Arc::clone(&ingress),
                settings.original_logprobs,
                settings.traces.is_some(),
            )?,
            outputs: OutputEncoder::new(
                classes,
                settings.dp_rank,
                settings.speculates,
                settings.times.clone(),
            )?,
            aborts: AbortEncoder::new(classes)?,
            probed: Template::new(classes, "HealthCheckOutput", &[])?,
            traced: settings.traces.map(Timelines::new),
            settings,
            ingress,
            state: Mutex::default(),
        })
    }

    /// Takes messages. What is refused is answered at once. A message that cannot be read is refused by itself: it is answered, or
    /// is one of [`Outgoing::unreadable`].
    pub fn receive<'m>(
        &self,
        backend: &impl Backend,
        messages: impl IntoIterator<Item = &'m [u8]>,
    ) -> Outgoing {
        let mut outgoing = Outgoing::default();
        let mut refused = Vec::new();
        for (place, message) in messages.into_iter().enumerate() {
            match self.decoder.decode(message) {
                Incoming::Other => outgoing.others.push(place),
                Incoming::Unreadable(reason) => outgoing.note_unreadable(message, &reason),
                Incoming::Abort { rid, all } => self.abort(backend, &rid, all),
                Incoming::Generate(requests) => {
                    for request in requests {
                        let request = match request {
                            Ok(request) => request,
                            Err(reason) => {
                                outgoing.note_unreadable(message, &reason);
                                continue;
                            }
                        };
                        if self.answers_probe(&request, &mut outgoing) {
                            continue;
                        }
                        let request = self.submit(backend, request);
                        refused.extend(request.map(|(open, finish)| self.refuse(open, finish)));
                    }
                }
            }
        }
        if !refused.is_empty() {
            let entries: Vec<Entry<'_>> = refused
                .iter()
                .map(|(open, finish)| Entry {
                    open,
                    finish: Some(finish.clone()),
                })
                .collect();
            outgoing.to_detokenizer.push(self.outputs.encode(&entries));
        }
        outgoing
    }

    /// What is due of new outputs, as one message, and the answers to probes.
    pub fn outputs(&self, deltas: &[Delta]) -> Outgoing {
        let mut outgoing = Outgoing::default();
        let mut state = self.lock();
        if !deltas.is_empty() {
            for _ in 0..mem::take(&mut state.probes) {
                outgoing.to_tokenizer.push(self.probe_answer());
            }
        }
        let mut running = Vec::new();
        let mut ended = Vec::new();
        for delta in deltas {
            let Some(open) = state.open.get_mut(&delta.request) else {
                continue;
            };
            let is_first = open.computed.is_none();
            let due = open.take(delta, &self.settings.think_end);
            let waited = self.settings.times.as_ref().filter(|_| is_first);
            let waited = waited.and_then(|times| times.waited(open));
            if open.session.is_some() {
                outgoing.ended_sessions.extend(state.go_on(delta));
            }
            if state.waits.len() < MOST_WAITS {
                state.waits.extend(waited);
            }
            if let Some(end) = &delta.end {
                let closed = state.close(delta.request);
                match closed.map(|open| self.keep_timeline(open)) {
                    Some(open) if *end == End::Aborted && open.waits() => {
                        outgoing.to_tokenizer.push(self.aborts.encode(&open));
                    }
                    Some(open) => {
                        let finish = finish(&open, end);
                        ended.push((open, finish));
                    }
                    None => {}
                }
            } else if due {
                running.push(delta.request);
            }
        }
        let due = running.iter().filter_map(|request| {
            let open = state.open.get(request)?;
            Some(Entry { open, finish: None })
        });
        let over = ended.iter().map(|(open, finish)| Entry {
            open,
            finish: Some(finish.clone()),
        });
        let entries: Vec<Entry<'_>> = due.chain(over).collect();
        if !entries.is_empty() {
            outgoing.to_detokenizer.push(self.outputs.encode(&entries));
        }
        for request in running {
            if let Some(open) = state.open.get_mut(&request) {
                open.sent();
            }
        }
        outgoing
    }

    /// Requests that have not ended.
    pub fn open_requests(&self) -> usize {
        self.lock().open.len()
    }

    /// Of each request that had its first token since the last call: seconds from its arrival to its admission, and from there
    /// to the token. None are kept without [`FrontSettings::times`].
    pub fn take_waits(&self) -> Vec<(f64, f64)> {
        mem::take(&mut self.lock().waits)
    }

    /// Of requests that were traced and have ended since the last call, what happened when; and how many more there were than are
    /// kept. None without [`FrontSettings::traces`].
    pub fn take_traced(&self) -> (Vec<TracedRequest>, u64) {
        self.traced
            .as_ref()
            .map(Timelines::take)
            .unwrap_or_default()
    }

    /// Has requests that name an adapter computed with the one that the backend calls `id`; with none they are refused.
    pub fn set_adapter(&self, name: &str, id: Option<u64>) {
        let mut state = self.lock();
        match id {
            Some(id) => state.adapters.insert(name.to_owned(), id),
            None => state.adapters.remove(name),
        };
    }

    /// Opens a session, whose requests go on from each other's tokens; false if there is one of that name, or if the limits of
    /// requests allow no other one.
    ///
    /// One that `streams` has one request at a time, which goes on from the last that ended well. One that is not used for
    /// longer than `patience` is closed.
    pub fn open_session(&self, id: &str, streams: bool, patience: Option<Duration>) -> bool {
        let limits = self.ingress.limits();
        let mut state = self.lock();
        let open = state.sessions.len() as u64;
        open < limits.sessions
            && id.len() as u64 <= limits.name_bytes
            && state.sessions.open(id, streams, patience, Instant::now())
    }

    /// Closes a session. Its requests that run go on; one that is not open is ignored.
    pub fn close_session(&self, backend: &impl Backend, id: &str) {
        let closed = self.lock().sessions.close(id);
        if let Some(number) = closed {
            backend.end_session(number);
        }
    }

    /// Closes the sessions that were not used for too long.
    pub fn reap_sessions(&self, backend: &impl Backend) {
        let closed = self.lock().sessions.reap(Instant::now());
        for number in closed {
            backend.end_session(number);
        }
    }

    /// Sessions that are open.
    pub fn open_sessions(&self) -> usize {
        self.lock().sessions.len()
    }

    /// While nothing is computed, probes are answered at once.
    pub fn set_paused(&self, paused: bool) {
        self.lock().paused = paused;
    }

    /// A probe wants to know that outputs come. Where there are none it is a request of its own.
    fn answers_probe(&self, request: &GenerateRequest, outgoing: &mut Outgoing) -> bool {
        if !request.rid.starts_with(&self.settings.probe_prefix) {
            return false;
        }
        let mut state = self.lock();
        if state.paused {
            outgoing.to_tokenizer.push(self.probe_answer());
            return true;
        }
        let busy = !state.open.is_empty();
        state.probes += usize::from(busy);
        busy
    }

    fn probe_answer(&self) -> Vec<u8> {
        self.probed.encode(|_, _| false)
    }

    /// Hands a request on, or returns why not.
    fn submit(
        &self,
        backend: &impl Backend,
        mut request: GenerateRequest,
    ) -> Option<(Open, Finish)> {
        let settings = &self.settings;
        let pictures = media::open(backend, &mut request);
        let asked = mem::replace(&mut request.asked, Err(Refusal::Other(String::new())));
        let asked = asked.and_then(|mut raw| {
            let turn = self.look_up(&request, &mut raw)?;
            if settings.truncates {
                raw.prompt.truncate(settings.max_prompt_tokens as usize);
            }
            let name = request.session.as_ref().map(|session| session.id.clone());
            Ok((raw, name.zip(turn)))
        });
        let pace = Pace {
            stream: settings.stream_interval,
            other: settings.other_interval,
        };
        let prompt = asked.as_ref().map_or(&[][..], |(raw, _)| &raw.prompt[..]);
        let mut open = Open::new(&request, prompt, pace, !settings.think_end.is_empty());
        let priority = asked.as_ref().ok().and_then(|(raw, _)| raw.priority);
        open.set_priority(priority);
        if settings.refuses_priority && priority.is_some() {
            return Some((open, Finish::Abort(NO_PRIORITY.to_owned(), Some(503))));
        }
        let spec = asked.and_then(|(raw, turn)| {
            let spec = self.validate(backend, &request, raw, pictures?, &mut open)?;
            Ok((spec, turn))
        });
        match spec {
            Ok((spec, turn)) => self.hand_on(backend, open, spec, turn),
            Err(refusal) => Some((open, Finish::Abort(refusal.to_string(), Some(400)))),
        }
    }

    /// What the engine takes of a request.
    fn validate(
        &self,
        backend: &impl Backend,
        request: &GenerateRequest,
        mut raw: RawRequest,
        pictures: Option<Pictures>,
        open: &mut Open,
    ) -> Result<RequestSpec, Refusal> {
        let settings = &self.settings;
        if request.reasons {
            raw.grammar_after.clone_from(&settings.think_end);
        }
        raw.speculates = settings.speculates;
        open.image_tokens = pictures.as_ref().map_or(0, Pictures::tokens);
        raw.pictures = pictures;
        let spec = self
            .ingress
            .validate(raw, |grammar, after| backend.bind(grammar, after))?;
        open.logprobs = spec.logprobs().cloned().map(OpenLogprobs::new);
        open.stops = spec.stops().clone();
        Ok(spec)
    }

    fn hand_on(
        &self,
        backend: &impl Backend,
        mut open: Open,
        spec: RequestSpec,
        turn: Option<(String, Begun)>,
    ) -> Option<(Open, Finish)> {
        let prompt = turn.is_some().then(|| spec.prompt().to_vec());
        // Its first output may come before `submit` returns; it waits for the lock.
        let mut state = self.lock();
        match backend.submit(spec) {
            Ok(id) => {
                if let (Some((name, turn)), Some(prompt)) = (turn, prompt) {
                    open.session = Some((name.clone(), turn.number));
                    let replaced = state.sessions.start(&name, &open.rid, turn, (prompt, id));
                    for request in replaced {
                        backend.abort(request);
                    }
                }
                state.names.insert(open.rid.clone(), id);
                state.open.insert(id, open);
                None
            }
            Err(rejected) => {
                let reason = one_line(&rejected.to_string());
                Some((open, Finish::Abort(reason, Some(503))))
            }
        }
    }

    /// A request that was refused before the backend had it.
    fn refuse(&self, mut open: Open, finish: Finish) -> (Open, Finish) {
        if let (Some(timeline), Finish::Abort(reason, _)) = (&mut open.timeline, &finish) {
            timeline.refuse(reason);
        }
        (self.keep_timeline(open), finish)
    }

    fn keep_timeline(&self, mut open: Open) -> Open {
        if let (Some(traced), Some(timeline)) = (&self.traced, open.timeline.take()) {
            traced.push(*timeline);
        }
        open
    }

    fn abort(&self, backend: &impl Backend, rid: &str, all: bool) {
        let state = self.lock();
        if all {
            state
                .open
                .keys()
                .for_each(|&request| backend.abort(request));
            return;
        }
        // An empty name is the beginning of every one.
        if rid.is_empty() {
            return;
        }
        let from = (Bound::Included(rid), Bound::Unbounded);
        let named = state.names.range::<str, _>(from);
        for (_, &request) in named.take_while(|(name, _)| name.starts_with(rid)) {
            backend.abort(request);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Tells a session what is new of one of its requests. Returns the session's number if nothing is left of it.
    fn go_on(&mut self, delta: &Delta) -> Option<u64> {
        let open = self.open.get(&delta.request)?;
        let (name, number) = open.session.as_ref()?;
        let sessions = &mut self.sessions;
        sessions.take(name, &open.rid, delta.request, &delta.tokens);
        let end = delta.end.as_ref()?;
        let well = matches!(
            end,
            End::Length | End::StopToken(_) | End::StopString { .. }
        );
        let closed = sessions.end(name, &open.rid, delta.request, well);
        // Its pages were kept just now, whether the session still is or not.
        closed.or_else(|| (!sessions.has(name, *number)).then_some(*number))
    }

    fn close(&mut self, request: u64) -> Option<Open> {
        let open = self.open.remove(&request)?;
        if self.names.get(&open.rid) == Some(&request) {
            self.names.remove(&open.rid);
        }
        Some(open)
    }
}

fn finish(open: &Open, end: &End) -> Finish {
    match outcome(end, &open.stops) {
        Outcome::Length => Finish::Length(open.tokens),
        Outcome::StopToken(token) => Finish::StopToken(token),
        Outcome::StopString(text) | Outcome::StopRegex(text) => Finish::StopText(text),
        Outcome::Aborted => Finish::Abort("Aborted".to_owned(), None),
        // As SGLang says it.
        Outcome::AbortedUnready => Finish::Abort("Aborted by AbortReq.".to_owned(), Some(400)),
        Outcome::Failed { failure, message } => {
            let (message, status) = match failure {
                Failure::Invalid | Failure::Known => (message, 400),
                Failure::Busy => (message, 503),
                Failure::Deadline => {
                    let what = if open.admitted.is_some() {
                        "running"
                    } else {
                        "waiting"
                    };
                    (format!("Request {what} timeout reached."), 503)
                }
                Failure::Internal => (message, 500),
            };
            Finish::Abort(message, Some(status))
        }
    }
}
