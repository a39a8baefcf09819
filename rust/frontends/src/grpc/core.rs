//! Requests that have not ended, whichever contract they came by.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pie_engine::{
    Capabilities, FinishReason, OutputBatch, OutputDelta, Service, Timeline, Timelines,
    TraceParent, TracedRequest,
};
use pie_ingress::{StopTexts, one_line};
use rustc_hash::FxHashMap;
use tonic::Status;
use tonic::metadata::MetadataMap;

use crate::grpc::error::GatewayError;
use crate::grpc::events::{KvEventLog, Subscription};
use crate::grpc::generate_params::GenerateParams;
use crate::grpc::loads::{Loads, Throughput};
use crate::grpc::logprobs::Reader;
use crate::grpc::queue::OutputQueue;
use crate::grpc::reader::RequestReader;
use crate::grpc::settings::{self, GatewaySettings};
use crate::grpc::status::{SHUTTING_DOWN, refused, rejected, shut_down};
use crate::grpc::times;

/// A request that was handed in.
#[derive(Debug)]
pub(crate) struct SubmittedRequest {
    /// The service's name of it.
    pub(crate) id: u64,
    /// The gateway's.
    pub(crate) name: String,
    pub(crate) queue: Arc<OutputQueue>,
    pub(crate) prompt_tokens: u32,
    /// By which its end is named.
    pub(crate) stops: StopTexts,
    /// Reads its log-probabilities, where it wants some.
    pub(crate) logprobs: Option<Reader>,
}

/// What all calls share.
#[derive(Debug)]
pub(crate) struct Core {
    service: Arc<Service>,
    settings: GatewaySettings,
    capabilities: Capabilities,
    reader: RequestReader,
    open: Mutex<OpenRequests>,
    /// Where requests are traced.
    traced: Option<Timelines>,
    event_log: Arc<KvEventLog>,
    throughput: Mutex<Throughput>,
    is_closing: AtomicBool,
    /// Tokens of the prompts of requests that have no output yet.
    pending: AtomicU64,
    started: Instant,
    /// µs from then to the last request.
    last_request: AtomicU64,
}

#[derive(Debug, Default)]
struct OpenRequests {
    queues: FxHashMap<u64, Arc<OutputQueue>>,
    /// Of the requests that are traced.
    timelines: FxHashMap<u64, Timeline>,
    names: FxHashMap<String, u64>,
}

impl OpenRequests {
    /// Shows an output to its request's timeline, which is returned once it has ended.
    fn take(&mut self, delta: &OutputDelta) -> Option<Timeline> {
        let timeline = self.timelines.get_mut(&delta.request)?;
        timeline.update(delta);
        let has_ended = timeline.has_ended();
        has_ended.then(|| self.timelines.remove(&delta.request))?
    }
}

impl Core {
    pub(crate) fn new(
        service: Arc<Service>,
        settings: GatewaySettings,
    ) -> Result<Self, GatewayError> {
        let capabilities = service.capabilities().ok_or(GatewayError::NotReady)?;
        let reader =
            RequestReader::new(&settings, capabilities.vocab_size, capabilities.embed_size);
        Ok(Self {
            traced: settings
                .traces
                .then(|| Timelines::new(service.started_at())),
            event_log: Arc::new(KvEventLog::new(
                settings.event_history,
                capabilities.kv_page_size,
            )),
            service,
            settings,
            capabilities,
            reader,
            open: Mutex::default(),
            throughput: Mutex::default(),
            is_closing: AtomicBool::new(false),
            pending: AtomicU64::new(0),
            started: Instant::now(),
            last_request: AtomicU64::new(0),
        })
    }

    /// Hands a request in, whose call has this metadata. It stays until [`close`](Self::close).
    pub(crate) fn submit(
        &self,
        params: GenerateParams,
        metadata: &MetadataMap,
    ) -> Result<SubmittedRequest, Status> {
        let mut timeline = self.begin_timeline(&params, metadata);
        let submitted = self.enter(params, &mut timeline);
        if let (Err(status), Some(mut timeline)) = (&submitted, timeline) {
            timeline.refuse(status.message());
            self.keep_timeline(timeline);
        }
        submitted
    }

    /// What a trace gets of a request: of all of them without a parent, else of those that their parent's trace records.
    fn begin_timeline(&self, params: &GenerateParams, metadata: &MetadataMap) -> Option<Timeline> {
        self.traced.as_ref()?;
        let parent = metadata.get("traceparent");
        let parent = parent.and_then(|parent| TraceParent::parse(parent.as_bytes()));
        let is_wanted = parent.is_none_or(|parent| parent.is_sampled);
        let tokens = params.raw.prompt.len() as u32;
        let samples = u32::try_from(params.raw.n).unwrap_or(0);
        is_wanted.then(|| Timeline::begin(&params.raw.name, parent, tokens, samples))
    }

    fn keep_timeline(&self, timeline: Timeline) {
        if let Some(traced) = &self.traced {
            traced.push(timeline);
        }
    }

    /// Of requests that were traced and have ended since the last call, what happened when; and how many more there were than are
    /// kept.
    pub(crate) fn take_traced(&self) -> (Vec<TracedRequest>, u64) {
        self.traced
            .as_ref()
            .map(Timelines::take)
            .unwrap_or_default()
    }

    /// Hands a request in with its timeline, which stays where it is if the request is refused.
    fn enter(
        &self,
        params: GenerateParams,
        timeline: &mut Option<Timeline>,
    ) -> Result<SubmittedRequest, Status> {
        if self.is_closing() {
            return Err(shut_down());
        }
        let GenerateParams {
            raw,
            interval,
            sides,
        } = params;
        let name = raw.name.clone();
        let bind = |grammar: &_, after: &_| self.service.compile_grammar(grammar, after);
        let spec = self.reader.validate(raw, bind);
        let spec = spec.map_err(|refusal| refused(&refusal))?;
        let prompt_tokens = spec.prompt().len() as u32;
        let (samples, stops) = (spec.samples(), spec.stops().clone());
        let reader = spec.logprobs().cloned();
        let reader = reader.map(|rows| Reader::new(rows, sides));
        let queue = Arc::new(OutputQueue::new(samples, interval));
        // Its first output may come before `submit` returns; it waits for the lock.
        let mut open = self.lock();
        if open.names.contains_key(&name) {
            return Err(Status::already_exists(format!(
                "a request {name} has not ended: give each request another request_id"
            )));
        }
        let (arrival, deadline) = spec.into_request();
        let submitted = self.service.submit(arrival, deadline);
        let id = submitted.map_err(|error| rejected(&error))?;
        open.queues.insert(id, Arc::clone(&queue));
        open.names.insert(name.clone(), id);
        if let Some(timeline) = timeline.take() {
            open.timelines.insert(id, timeline);
        }
        drop(open);
        self.pending
            .fetch_add(prompt_tokens.into(), Ordering::Relaxed);
        let now = self.started.elapsed().as_micros() as u64;
        self.last_request.store(now, Ordering::Relaxed);
        Ok(SubmittedRequest {
            id,
            name,
            queue,
            prompt_tokens,
            stops,
            logprobs: reader,
        })
    }

    /// By which requests are read and validated.
    pub(crate) const fn reader(&self) -> &RequestReader {
        &self.reader
    }

    /// Ends a request by its name. Whether there was one.
    pub(crate) fn abort(&self, name: &str) -> bool {
        let found = self.lock().names.get(name).copied();
        if let Some(id) = found {
            self.service.abort(id);
        }
        found.is_some()
    }

    /// Forgets a request, which ends if it has not.
    pub(crate) fn close(&self, id: u64, name: &str, has_ended: bool) {
        let mut open = self.lock();
        open.queues.remove(&id);
        if let Some(mut timeline) = open.timelines.remove(&id) {
            timeline.abort();
            self.keep_timeline(timeline);
        }
        // Another request may have the name by now.
        if open.names.get(name) == Some(&id) {
            open.names.remove(name);
        }
        drop(open);
        if !has_ended {
            self.service.abort(id);
        }
    }

    /// Its first output has come, or it has ended without one.
    pub(crate) fn begun(&self, prompt_tokens: u32) {
        self.pending
            .fetch_sub(prompt_tokens.into(), Ordering::Relaxed);
    }

    /// Puts outputs where their clients find them, until the service is shut down.
    pub(crate) async fn deliver(&self) {
        let mut batch = OutputBatch::default();
        while std::future::poll_fn(|context| self.service.poll_batch(context, &mut batch)).await {
            let mut open = self.lock();
            for delta in batch.deltas.drain(..) {
                if let Some(timeline) = open.take(&delta) {
                    self.keep_timeline(timeline);
                }
                let Some(queue) = open.queues.get(&delta.request) else {
                    continue;
                };
                if let Some(waker) = queue.put(delta) {
                    waker.wake();
                }
            }
            drop(open);
            self.event_log.append(batch.events.drain(..));
        }
        // Every request has got its end by now, unless a replica has failed to give it.
        self.end_all();
    }

    /// Ends every request, and tells its client at once.
    pub(crate) fn end_all(&self) {
        let mut open = self.lock();
        for (_, mut timeline) in open.timelines.drain() {
            timeline.abort();
            self.keep_timeline(timeline);
        }
        for (&id, queue) in &open.queues {
            self.service.abort(id);
            for sample in 0..queue.samples() {
                if let Some(waker) =
                    queue.put(OutputDelta::finished(id, sample, FinishReason::Aborted))
                {
                    waker.wake();
                }
            }
        }
    }

    /// No request is taken from now on; those that end without an answer learn why.
    pub(crate) fn begin_close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
        self.event_log.close();
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed) || self.service.is_stopped()
    }

    /// Why no request can be served, if that is so.
    pub(crate) fn trouble(&self) -> Option<String> {
        if self.is_closing() {
            return Some(SHUTTING_DOWN.to_owned());
        }
        match self.service.wait_ready(Duration::ZERO) {
            Ok(true) => None,
            // It was ready once.
            Ok(false) => Some(SHUTTING_DOWN.to_owned()),
            Err(error) => Some(one_line(&error.to_string())),
        }
    }

    /// Empties the prefix index, once nothing runs or waits, or the time is over. Whether it was.
    pub(crate) async fn flush(self: &Arc<Self>, limit: Duration) -> bool {
        const STEP: Duration = Duration::from_millis(20);
        // Further away than the clock goes is for ever.
        let until = Instant::now().checked_add(limit);
        loop {
            let core = Arc::clone(self);
            let flush = move || core.service.flush(Duration::from_mins(1));
            let flushed = tokio::task::spawn_blocking(flush).await.unwrap_or(false);
            let is_over = until.is_some_and(|until| Instant::now() >= until);
            if flushed || is_over || self.is_closing() {
                return flushed;
            }
            tokio::time::sleep(STEP).await;
        }
    }

    /// How busy each replica is.
    pub(crate) fn loads(&self) -> Vec<Loads> {
        let replicas = self.service.stats();
        let tokens: Vec<u64> = replicas
            .iter()
            .map(|stats| stats.scheduler.output_tokens)
            .collect();
        let mut throughput = self
            .throughput
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let rates = throughput.rates(&tokens);
        let pending = self.pending.load(Ordering::Relaxed) / replicas.len().max(1) as u64;
        let all = replicas.iter().zip(rates);
        all.map(|(stats, rate)| {
            Loads::new(stats, &self.capabilities, self.max_running(), rate, pending)
        })
        .collect()
    }

    /// Requests that have not ended.
    pub(crate) fn open_requests(&self) -> usize {
        self.lock().queues.len()
    }

    /// Requests of one step at most.
    pub(crate) fn max_running(&self) -> u32 {
        let most = self.settings.max_running;
        most.map_or(self.capabilities.max_forward_requests, |most| most.max(1))
    }

    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    pub(crate) fn model(&self) -> &settings::ServedModel {
        &self.settings.model
    }

    pub(crate) fn replicas(&self) -> usize {
        self.service.stats().len()
    }

    /// Most tokens of a prompt and its output together.
    pub(crate) fn context_length(&self) -> u32 {
        let stats = self.service.stats();
        let pages = stats.iter().map(|stats| stats.total_pages).min();
        let pool = pages
            .unwrap_or(0)
            .saturating_mul(self.capabilities.kv_page_size);
        let limit = self.settings.model.context_length.unwrap_or(u32::MAX);
        self.capabilities.max_model_len.min(pool).min(limit)
    }

    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// When the last request came, or the server started, in seconds since 1970.
    pub(crate) fn last_request(&self) -> f64 {
        let after = Duration::from_micros(self.last_request.load(Ordering::Relaxed));
        times::ago(self.started.elapsed().saturating_sub(after))
    }

    /// Changes of the prefix index after batch number `cursor`.
    pub(crate) fn subscribe(&self, cursor: u64) -> Result<Subscription, Status> {
        if self.replicas() != 1 {
            return Err(Status::unimplemented(
                "events of the prefix index are published where each replica has a port of its own",
            ));
        }
        self.event_log.subscribe(cursor)
    }

    fn lock(&self) -> MutexGuard<'_, OpenRequests> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
