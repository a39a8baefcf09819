//! Messages in, messages out: which requests are open, and what the front end gets of them.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pie_runtime::{Arrival, Delta, Draw, End, Refusal, Timelines, TracedRequest};

use crate::backend::Backend;
use crate::error::{FrontError, one_line};
use crate::media;
use crate::open::{Open, Pace};
use crate::output::{AbortEncoder, Entry, Finish, OutputEncoder};
use crate::request::{Decoder, GenerateRequest, Incoming};
use crate::session::Sessions;
use crate::table::{MessageClass, Template};
use crate::times::TimeStats;

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
        Ok(Self {
            decoder: Decoder::new(
                classes,
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

    /// Opens a session, whose requests go on from each other's tokens; false if there is one of that name.
    ///
    /// One that `streams` has one request at a time, which goes on from the last that ended well. One that is not used for
    /// longer than `patience` is closed.
    pub fn open_session(&self, id: &str, streams: bool, patience: Option<Duration>) -> bool {
        self.lock()
            .sessions
            .open(id, streams, patience, Instant::now())
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
        let known = self.look_up(&mut request);
        if settings.truncates {
            let longest = settings.max_prompt_tokens as usize;
            request.prompt.truncate(longest);
        }
        let mut refusal = request.refusal.take().or_else(|| self.unfit(&request));
        let pictures = media::open(backend, &mut request, &mut refusal);
        let unwanted = settings.refuses_priority && request.priority.is_some();
        let ends = self.ends(&request);
        let (priority, routing_key) = (request.priority, request.routing_key.take());
        let (namespace, sampling) = (
            request.extra_key.take(),
            mem::take(&mut request.params.sampling),
        );
        let (session, logprobs) = (request.session.take(), request.logprobs.clone());
        let constraint = match &refusal {
            None => self.bind(backend, &mut request),
            Some(_) => Ok(None),
        };
        let pace = Pace {
            stream: settings.stream_interval,
            other: settings.other_interval,
        };
        let (mut open, prompt) = Open::new(request, pace, !settings.think_end.is_empty());
        if unwanted {
            return Some((open, Finish::Abort(NO_PRIORITY.to_owned(), Some(503))));
        }
        let wrong = |reason: &str| Finish::Abort(one_line(reason), Some(400));
        let (draw, constraint) = match (refusal, sampling.draw(), constraint) {
            (None, Ok(draw), Ok(constraint)) => (draw, constraint),
            (Some(reason), ..) => return Some((open, wrong(&reason))),
            (_, Err(error), _) => return Some((open, wrong(&error.to_string()))),
            (.., Err(error)) => return Some((open, wrong(&error.to_string()))),
        };
        let max_tokens = ends.max_tokens;
        let turn = session
            .zip(known.turn)
            .map(|(session, turn)| (session.id, turn, prompt.clone()));
        let mut arrival = Arrival {
            ends,
            namespace: namespace.map(String::into_boxed_str),
            adapter: known.adapter,
            session: turn.as_ref().map(|(_, turn, _)| turn.number),
            priority,
            routing_key: routing_key.map(String::into_boxed_str),
            drafts: settings.speculates,
            constraint,
            ..Arrival::new(0, prompt, draw, max_tokens)
        };
        if let Some(params) = logprobs {
            params.ask(&mut arrival);
        }
        if let Some(pictures) = pictures {
            open.image_tokens = pictures.tokens();
            Draw::attach(pictures, &mut arrival);
        }
        // Its first output may come before `submit` returns; it waits for the lock.
        let mut state = self.lock();
        match backend.submit(arrival) {
            Ok(id) => {
                if let Some((name, turn, prompt)) = turn {
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
    let texts = open.params.stop_strs.texts();
    match end {
        End::Length => Finish::Length(open.tokens),
        End::StopToken(token) => Finish::StopToken(*token),
        End::StopString { index, .. } => {
            let text = texts.get(*index as usize).map_or(&[][..], |text| &**text);
            Finish::StopText(String::from_utf8_lossy(text).into_owned())
        }
        End::StopRegex { index } => {
            let regexes = open.params.stop_regexes.as_deref();
            let pattern = regexes.and_then(|regexes| regexes.patterns().nth(*index as usize));
            Finish::StopText(pattern.unwrap_or_default().to_owned())
        }
        End::Aborted => Finish::Abort("Aborted".to_owned(), None),
        // As SGLang says it.
        End::Unready => Finish::Abort("Aborted by AbortReq.".to_owned(), Some(400)),
        End::Deadline => {
            let what = if open.admitted.is_some() {
                "running"
            } else {
                "waiting"
            };
            Finish::Abort(format!("Request {what} timeout reached."), Some(503))
        }
        End::Refused(refusal) => {
            let status = match refusal {
                Refusal::QueueFull { .. } => 503,
                _ => 400,
            };
            Finish::Abort(one_line(&refusal.to_string()), Some(status))
        }
        End::Displaced => Finish::Abort(one_line(&end.reason().unwrap_or_default()), Some(503)),
        End::Grammar(reason) => Finish::Abort(one_line(reason), Some(400)),
        End::Failed(reason) => Finish::Abort(one_line(reason), Some(500)),
    }
}
