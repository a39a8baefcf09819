//! The open requests of `SGLang`'s HTTP server: messages of its tokenizer manager in, messages to it and to the detokenizer out.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pie_engine::{FinishReason, OutputDelta, Timelines, TracedRequest};
use pie_ingress::{EmbeddingInfo, Failure, Ingress, ModelInfo, Outcome, RequestLimits, outcome};

use crate::sglang_zmq::backend::Backend;
use crate::sglang_zmq::error::SglangFrontendError;
use crate::sglang_zmq::open_request::OpenRequest;
use crate::sglang_zmq::output::{AbortEncoder, OutputEncoder, OutputEntry, SglangFinish};
use crate::sglang_zmq::request::{Decoder, GenerateRequest, Incoming};
use crate::sglang_zmq::schema::{MessageClass, Template};
use crate::sglang_zmq::session::Sessions;
use crate::sglang_zmq::times::TimeStats;
use crate::sglang_zmq::weight_versions::WeightVersions;

mod submit;

/// Settings from the model and the server's flags.
#[derive(Debug, Clone)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a flag of the server"
)]
pub struct SglangFrontendSettings {
    /// End-of-sequence tokens; requests may ignore them.
    pub eos_tokens: Vec<u32>,
    /// The tokens that end reasoning; empty for models without.
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
    /// Pooled rows of the model; `None` for one that generates.
    pub embeddings: Option<EmbeddingInfo>,
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
    /// Requests may bring a custom logit processor.
    pub logit_processors: bool,
    /// Numbers of a hidden state; 0 where none are returned.
    pub hidden_size: u32,
    /// Numbers of an embedding of `input_embeds`; 0 where none are taken.
    pub embed_size: u32,
    /// Prefix of the ids of health checks.
    pub probe_prefix: String,
    /// Data-parallel rank of this replica.
    pub dp_rank: Option<u32>,
    /// How to send times of requests, where the server makes metrics of them.
    pub times: Option<TimeStats>,
    /// Start of the backend, where requests are traced.
    pub traces: Option<Instant>,
    /// The name of the weights that the backend starts with.
    pub weight_version: String,
}

/// Messages to send, in their order for each receiver.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outgoing {
    /// To the detokenizer.
    pub to_detokenizer: Vec<Vec<u8>>,
    /// To the tokenizer manager.
    pub to_tokenizer: Vec<Vec<u8>>,
    /// Of the messages that came, the indices of those that are not about requests.
    pub others: Vec<usize>,
    /// Sessions for the backend to end: closed ones whose last request has finished.
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

/// Most waiting times that are kept until they are fetched.
const MAX_WAITS: usize = 1 << 16;

/// The frontend of one HTTP server. Two threads may call it at once: one that receives, one that sends outputs.
#[derive(Debug)]
pub struct SglangFrontend {
    decoder: Decoder,
    outputs: OutputEncoder,
    aborts: AbortEncoder,
    probed: Template,
    settings: SglangFrontendSettings,
    ingress: Arc<Ingress>,
    state: Mutex<FrontendState>,
    traced: Option<Timelines>,
}

#[derive(Debug)]
struct FrontendState {
    open: HashMap<u64, OpenRequest>,
    names: BTreeMap<String, u64>,
    /// The backend's ids of adapters, by the tokenizer manager's names of them.
    adapters: HashMap<String, u64>,
    sessions: Sessions,
    /// Health checks that the next outputs answer.
    probes: usize,
    paused: bool,
    /// Why no request can be served.
    unavailable: Option<String>,
    /// Seconds that requests waited, and that their prompts took, since the last call.
    waits: Vec<(f64, f64)>,
    weight_versions: WeightVersions,
}

impl SglangFrontend {
    /// # Errors
    /// [`SglangFrontendError`] if the installed classes are not those that are served.
    pub fn new(
        classes: &[MessageClass],
        settings: SglangFrontendSettings,
    ) -> Result<Self, SglangFrontendError> {
        let model = ModelInfo {
            vocab_size: settings.vocab_size,
            embeddings: settings.embeddings,
            eos_token_ids: settings.eos_tokens.clone(),
            max_prompt_tokens: Some(settings.max_prompt_tokens),
            context_length: Some(settings.context_length),
            logit_processors: settings.logit_processors,
            hidden_size: settings.hidden_size,
            embed_size: settings.embed_size,
        };
        let ingress = Arc::new(Ingress::new(settings.limits.clone(), model));
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
            state: Mutex::new(FrontendState::new(&settings.weight_version)),
            settings,
            ingress,
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
        for (index, message) in messages.into_iter().enumerate() {
            match self.decoder.decode(message) {
                Incoming::Other => outgoing.others.push(index),
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
            let entries: Vec<OutputEntry<'_>> = refused
                .iter()
                .map(|(open, finish)| OutputEntry {
                    open,
                    finish: Some(finish.clone()),
                })
                .collect();
            outgoing.to_detokenizer.extend(self.outputs.encode(entries));
        }
        outgoing
    }

    /// One message with all outputs that are due, and the answers to health checks.
    pub fn outputs(&self, deltas: &[OutputDelta]) -> Outgoing {
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
                outgoing.ended_sessions.extend(state.update_session(delta));
            }
            if state.waits.len() < MAX_WAITS {
                state.waits.extend(waited);
            }
            if let Some(end) = &delta.finish {
                let closed = state.close(delta);
                let aborted = *end == FinishReason::Aborted;
                let unavailable = state.unavailable.clone().filter(|_| aborted);
                match (closed.map(|open| self.keep_timeline(open)), unavailable) {
                    (Some(open), Some(reason)) => {
                        ended.push((open, SglangFinish::Abort(reason, Some(503))));
                    }
                    (Some(open), None) if aborted && open.waits() => {
                        outgoing.to_tokenizer.push(self.aborts.encode(&open));
                    }
                    (Some(open), None) => {
                        let finish = finish(&open, end);
                        ended.push((open, finish));
                    }
                    (None, _) => {}
                }
            } else if due {
                running.push(delta.request);
            }
        }
        let due = running.iter().filter_map(|request| {
            let open = state.open.get(request)?;
            Some(OutputEntry { open, finish: None })
        });
        let over = ended.iter().map(|(open, finish)| OutputEntry {
            open,
            finish: Some(finish.clone()),
        });
        let entries: Vec<OutputEntry<'_>> = due.chain(over).collect();
        if !entries.is_empty() {
            outgoing.to_detokenizer.extend(self.outputs.encode(entries));
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

    /// Queue time and prefill time of each request that had its first token since the last call: seconds from its arrival to its
    /// admission, and from there to the token; their sum is the TTFT of the scheduler. None are kept without
    /// [`SglangFrontendSettings::times`].
    pub fn take_waits(&self) -> Vec<(f64, f64)> {
        mem::take(&mut self.lock().waits)
    }

    /// Of requests that were traced and have ended since the last call, what happened when; and how many more there were than are
    /// kept. None without [`SglangFrontendSettings::traces`].
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

    /// Opens a session, whose requests continue from each other's tokens; false if there is one of that name, or if the limits of
    /// requests allow no other one.
    ///
    /// One that `streams` has one request at a time, which continues from the last that ended well. One that is not used for
    /// longer than `patience` is closed.
    pub fn open_session(&self, id: &str, streams: bool, patience: Option<Duration>) -> bool {
        let limits = self.ingress.limits();
        let mut state = self.lock();
        let open = state.sessions.len() as u64;
        open < limits.sessions
            && id.len() as u64 <= limits.name_bytes
            && state.sessions.open(id, streams, patience, Instant::now())
    }

    /// Closes a session. Its requests that run continue; one that is not open is ignored.
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

    /// Names the weights that compute from now on; the same name again changes nothing.
    pub fn set_weight_version(&self, backend: &impl Backend, name: &str) {
        let mut state = self.lock();
        if let Some(version) = state.weight_versions.add(name) {
            backend.set_weight_version(version);
        }
    }

    /// Refuses requests with this reason and the status 503, and aborts the open ones; `None` serves them again.
    pub fn set_unavailable(&self, backend: &impl Backend, reason: Option<String>) {
        let mut state = self.lock();
        state.unavailable = reason;
        if state.unavailable.is_some() {
            state
                .open
                .keys()
                .for_each(|&request| backend.abort(request));
        }
    }

    /// Answers a health check with the next outputs; without open requests it is computed like a request.
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

    fn keep_timeline(&self, mut open: OpenRequest) -> OpenRequest {
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

    fn lock(&self) -> MutexGuard<'_, FrontendState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FrontendState {
    fn new(weight_version: &str) -> Self {
        Self {
            open: HashMap::new(),
            names: BTreeMap::new(),
            adapters: HashMap::new(),
            sessions: Sessions::default(),
            probes: 0,
            paused: false,
            unavailable: None,
            waits: Vec::new(),
            weight_versions: WeightVersions::new(weight_version),
        }
    }

    /// Adds an output to its session. Returns the session's number if it is closed and this was its last request.
    fn update_session(&mut self, delta: &OutputDelta) -> Option<u64> {
        let open = self.open.get(&delta.request)?;
        let (name, number) = open.session.as_ref()?;
        let sessions = &mut self.sessions;
        sessions.take(name, &open.rid, delta.request, &delta.tokens);
        let end = delta.finish.as_ref()?;
        let closed = sessions.end(name, &open.rid, delta.request, end.is_complete());
        // It may have been closed between the request's validation and its submission.
        closed.or_else(|| (!sessions.has(name, *number)).then_some(*number))
    }

    /// Takes a request out with its last output.
    fn close(&mut self, last: &OutputDelta) -> Option<OpenRequest> {
        let mut open = self.open.remove(&last.request)?;
        if self.names.get(&open.rid) == Some(&last.request) {
            self.names.remove(&open.rid);
        }
        open.weight_versions = self.weight_versions.spans(Some(last), open.tokens);
        Some(open)
    }
}

fn finish(open: &OpenRequest, end: &FinishReason) -> SglangFinish {
    match outcome(end, &open.stops) {
        Outcome::Length => SglangFinish::Length(open.tokens),
        Outcome::StopToken(token) => SglangFinish::StopToken(token),
        Outcome::StopString(text) | Outcome::StopRegex(text) => SglangFinish::StopText(text),
        Outcome::Aborted => SglangFinish::Abort("Aborted".to_owned(), None),
        // As SGLang says it.
        Outcome::AbortedUnready => {
            SglangFinish::Abort("Aborted by AbortReq.".to_owned(), Some(400))
        }
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
            SglangFinish::Abort(message, Some(status))
        }
    }
}
