//! The engine: replicas of a model, each a scheduler with a driver. Requests in, tokens out.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pie_grammar::Grammar;
use pie_scheduler::{GrammarHandle, NewRequest};

use crate::error::EngineError;
use crate::grammars::{GrammarSetupError, Grammars};
use crate::handshake::Capabilities;
use crate::output_collector::{OutputBatch, OutputDelta};
use crate::replica::{Command, Pause, Replica};
use crate::sampling::RowParams;
use crate::shared::{ReplicaStats, ServiceSettings, Shared};
use crate::trace::{StepTrace, TraceSettings, TraceSummary};

mod adapters;
mod routing;

/// Why a request cannot be submitted.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// Some driver is still being started.
    #[error("the drivers are not ready\n\nhint: wait for `wait_ready`")]
    NotReady,
    /// The service was shut down.
    #[error("the service is shut down")]
    Stopped,
    /// Every driver has failed for good.
    #[error("no driver is left: {0}")]
    Gone(Arc<EngineError>),
    /// [`EngineError::Forked`].
    #[error(transparent)]
    Forked(Arc<EngineError>),
}

/// Replicas of one model (data parallelism), among which requests are routed. Each has a thread of its own; methods block only where
/// they say so.
///
/// ```no_run
/// use std::time::Duration;
/// use pie_engine::{NewRequest, DriverSettings, Sampler, Service, ServiceSettings};
///
/// let driver = DriverSettings::new("python3", "models/qwen3");
/// let service = Service::start(&ServiceSettings::new(driver))?;
/// service.wait_ready(Duration::MAX)?;
/// let greedy = Sampler::TopP { temperature: 0.0, p: 1.0 };
/// let request = service.submit(NewRequest::new(0, vec![9707, 11], greedy, 64), None)?;
/// for output in service.poll(Duration::from_secs(10)) {
///     println!("{request}: {:?} {:?}", output.tokens, output.finish);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Service {
    shared: Arc<Shared>,
    replicas: Vec<ReplicaHandle>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    grammars: Grammars,
    next_request: AtomicU64,
    started: Instant,
    waiting_limit: Option<Duration>,
    /// The process that has the threads and drivers; a forked child has not.
    pid: u32,
}

/// A replica, as callers' threads see it.
#[derive(Debug)]
struct ReplicaHandle {
    commands: Sender<Command>,
    /// Sequences that have not ended.
    open: Arc<AtomicUsize>,
}

impl Service {
    /// Starts all drivers without waiting for them; [`wait_ready`](Self::wait_ready) must follow.
    ///
    /// # Errors
    /// [`EngineError::Thread`] if a thread cannot be started. Errors of drivers come from [`wait_ready`](Self::wait_ready).
    pub fn start(settings: &ServiceSettings) -> Result<Self, EngineError> {
        let started = Instant::now();
        let shared = Arc::new(Shared::new(settings.drivers.len()));
        let mut service = Self {
            shared: Arc::clone(&shared),
            replicas: Vec::new(),
            threads: Mutex::default(),
            grammars: Grammars::new(settings.grammars.clone(), &settings.log),
            next_request: AtomicU64::new(0),
            started,
            waiting_limit: settings.waiting_limit,
            pid: std::process::id(),
        };
        for number in 0..settings.drivers.len() {
            let (commands, inbox) = mpsc::channel();
            let open = Arc::<AtomicUsize>::default();
            let replica = Replica::new(
                settings,
                number,
                started,
                Arc::clone(&shared),
                inbox,
                Arc::clone(&open),
            );
            let thread = thread::Builder::new().name(format!("pie-replica-{number}"));
            let thread = thread.spawn(move || replica.run()).map_err(|source| {
                let what = "a replica's thread";
                EngineError::Thread { what, source }
            })?;
            service.replicas.push(ReplicaHandle { commands, open });
            service.threads().push(thread);
        }
        Ok(service)
    }

    /// Waits until every driver is ready; false after `limit`.
    ///
    /// # Errors
    /// Why a driver failed.
    pub fn wait_ready(&self, limit: Duration) -> Result<bool, Arc<EngineError>> {
        if self.is_forked() {
            return Err(Arc::new(EngineError::Forked));
        }
        let until = Instant::now().checked_add(limit);
        let mut states = self.shared.lock();
        loop {
            if let Some(error) = states.iter().find_map(|state| state.failed.as_ref()) {
                return Err(Arc::clone(error));
            }
            if states.iter().any(|state| state.stopping) {
                return Ok(false);
            }
            if states.iter().all(|state| state.caps.is_some()) {
                return Ok(true);
            }
            let left = until.map_or(Duration::MAX, |until| {
                until.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return Ok(false);
            }
            let waited = self.shared.changed.wait_timeout(states, left);
            (states, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Capabilities of the first driver, once it is ready.
    pub fn capabilities(&self) -> Option<Capabilities> {
        self.shared.lock().first()?.caps.clone()
    }

    /// Submits a request and returns its id, which replaces the one in `request`. The request ends after `deadline`, finished or not. One
    /// that cannot be served, because it is too long, for example, ends as [`FinishReason::Refused`](crate::FinishReason::Refused).
    ///
    /// It is routed to the replica with the fewest sequences; requests of one session, or with one routing key, to the same replica.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn submit(
        &self,
        request: NewRequest<impl Into<RowParams>>,
        deadline: Option<Duration>,
    ) -> Result<u64, SubmitError> {
        let alive = self.check_alive()?;
        let (replica, request) = self.assign(request, deadline, &alive);
        let (id, samples) = (request.id, request.samples);
        self.send([(replica, samples, Command::Submit(Box::new(request)))])?;
        Ok(id)
    }

    /// Submits several requests, each with its deadline, and returns their ids in order. No step is scheduled between them, so that
    /// those that do not stream fill whole steps. See [`submit`](Self::submit).
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn submit_all<S: Into<RowParams>>(
        &self,
        requests: impl IntoIterator<Item = (NewRequest<S>, Option<Duration>)>,
    ) -> Result<Vec<u64>, SubmitError> {
        let alive = self.check_alive()?;
        let mut shares = vec![Vec::new(); self.replicas.len()];
        let mut ids = Vec::new();
        for (request, deadline) in requests {
            let (replica, request) = self.assign(request, deadline, &alive);
            ids.push(request.id);
            shares[replica].push(request);
        }
        let shares = shares.into_iter().enumerate();
        let filled =
            shares.filter(|(_, share): &(usize, Vec<NewRequest<RowParams>>)| !share.is_empty());
        let commands: Vec<_> = filled
            .map(|(replica, share)| {
                let samples = share.iter().map(|request| request.samples).sum();
                (replica, samples, Command::SubmitAll(share))
            })
            .collect();
        self.send(commands)?;
        Ok(ids)
    }

    /// Sends commands with requests, and the number of sequences in each, to replicas: all of them, or none. Every request that is sent
    /// gets an answer, because a replica closes its inbox under the same lock and drains it afterwards.
    fn send<C>(&self, commands: C) -> Result<(), SubmitError>
    where
        C: AsRef<[(usize, u32, Command)]> + IntoIterator<Item = (usize, u32, Command)>,
    {
        let states = self.shared.lock();
        let is_closed = commands
            .as_ref()
            .iter()
            .any(|&(replica, ..)| states[replica].closed);
        let mut sent = Ok(());
        for (replica, samples, command) in commands {
            let handle = &self.replicas[replica];
            // A thread that panicked while it ended has not closed its inbox.
            if is_closed || handle.commands.send(command).is_err() {
                handle.open.fetch_sub(samples as usize, Ordering::Relaxed);
                sent = Err(SubmitError::Stopped);
            }
        }
        sent
    }

    /// Assigns id, deadlines and replica.
    fn assign(
        &self,
        request: NewRequest<impl Into<RowParams>>,
        deadline: Option<Duration>,
        alive: &[bool],
    ) -> (usize, NewRequest<RowParams>) {
        let mut request = request.map(Into::into);
        let replica = self.route(&request, alive);
        let number = self.next_request.fetch_add(1, Ordering::Relaxed);
        request.id = number * self.replicas.len() as u64 + replica as u64;
        let after = |limit| micros(self.started.elapsed().saturating_add(limit));
        request.deadline = deadline.map(after);
        request.admit_by = self.waiting_limit.map(after);
        request.namespace = routing::namespace(request.adapter, request.namespace);
        let samples = request.samples as usize;
        self.replicas[replica]
            .open
            .fetch_add(samples, Ordering::Relaxed);
        (replica, request)
    }

    /// Starts to compile a grammar for [`NewRequest::grammar`]. It applies from the start, or after the tokens `after`, as the end of
    /// reasoning. Does not block: requests with an invalid grammar end as [`FinishReason::Grammar`](crate::FinishReason::Grammar).
    ///
    /// # Errors
    /// [`GrammarSetupError`].
    pub fn compile_grammar(
        &self,
        grammar: &Grammar,
        after: &[u32],
    ) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError> {
        self.grammars.compile(grammar, after)
    }

    /// Which replicas accept requests.
    fn check_alive(&self) -> Result<Vec<bool>, SubmitError> {
        // Checked first: another thread may have held the lock when the process was forked.
        if self.is_forked() {
            return Err(SubmitError::Forked(Arc::new(EngineError::Forked)));
        }
        let states = self.shared.lock();
        if states.iter().any(|state| state.stopping) {
            return Err(SubmitError::Stopped);
        }
        let alive: Vec<bool> = states.iter().map(|state| state.failed.is_none()).collect();
        if alive.contains(&true) {
            let ready = states
                .iter()
                .all(|state| state.failed.is_some() || state.caps.is_some());
            return if ready {
                Ok(alive)
            } else {
                Err(SubmitError::NotReady)
            };
        }
        let failed = states.iter().find_map(|state| state.failed.clone());
        Err(failed.map_or(SubmitError::Stopped, SubmitError::Gone))
    }

    fn route(&self, request: &NewRequest<RowParams>, alive: &[bool]) -> usize {
        let alive = (0..alive.len()).filter(|&replica| alive[replica]);
        let key = request
            .session
            .or_else(|| request.routing_key.as_deref().map(routing::hash));
        let replica = match key {
            Some(key) => routing::replica_of(key, alive),
            None => {
                alive.min_by_key(|&replica| self.replicas[replica].open.load(Ordering::Relaxed))
            }
        };
        replica.unwrap_or(0)
    }

    /// Aborts a request; unknown and finished ones are ignored.
    pub fn abort(&self, request: u64) {
        self.send_command(request as usize % self.replicas.len().max(1), || {
            Command::Abort(request)
        });
    }

    /// Releases the KV of a session.
    pub fn end_session(&self, session: u64) {
        for replica in 0..self.replicas.len() {
            self.send_command(replica, || Command::EndSession(session));
        }
    }

    /// Numbers the weights that compute from now on, from 1; before they are version 0. Outputs say which versions their tokens are of
    /// ([`OutputDelta::weight_events`]).
    ///
    /// Call it once the service is ready, and paused if requests run: tokens of a step in flight count as the new version's.
    pub fn set_weight_version(&self, version: u32) {
        for replica in 0..self.replicas.len() {
            self.send_command(replica, || Command::WeightVersion(version));
        }
    }

    /// Pauses all steps, or resumes them with `None`. Meanwhile requests are queued and can be aborted, and deadlines hold.
    ///
    /// A pause waits for the steps in flight. Returns false where one is still in flight after `limit`.
    pub fn pause(&self, pause: Option<Pause>, limit: Duration) -> bool {
        let (sender, answers) = mpsc::channel();
        for replica in 0..self.replicas.len() {
            self.send_command(replica, || Command::Pause(pause, sender.clone()));
        }
        drop(sender);
        if pause.is_none() {
            return true;
        }
        let until = Instant::now() + limit;
        // A replica that has ended computes nothing: it drops its sender.
        self.replicas.iter().all(|_| {
            let left = until.saturating_duration_since(Instant::now());
            answers.recv_timeout(left) != Err(RecvTimeoutError::Timeout)
        })
    }

    /// Writes each step from now on to a Chrome trace file.
    ///
    /// # Errors
    /// [`EngineError::Tracing`] if steps are traced already, [`EngineError::File`] if a file cannot be made.
    pub fn start_trace(&self, settings: &TraceSettings) -> Result<(), EngineError> {
        let mut states = self.shared.lock();
        if states.iter().any(|state| state.tracing) {
            return Err(EngineError::Tracing);
        }
        states.iter_mut().for_each(|state| state.tracing = true);
        // Files are made without the lock, which every step takes.
        drop(states);
        let traces = (0..self.replicas.len()).map(|replica| StepTrace::create(settings, replica));
        let traces: Vec<StepTrace> = match traces.collect() {
            Ok(traces) => traces,
            Err(error) => {
                let mut states = self.shared.lock();
                states.iter_mut().for_each(|state| state.tracing = false);
                return Err(error);
            }
        };
        for (replica, trace) in traces.into_iter().enumerate() {
            self.send_command(replica, || Command::Trace(Box::new(trace)));
        }
        Ok(())
    }

    /// Ends a trace and returns a summary for each replica, also of one that ended by itself; none where there was no trace, or after
    /// `limit`.
    pub fn end_trace(&self, limit: Duration) -> Vec<TraceSummary> {
        let end = |replica| {
            let (sender, answer) = mpsc::channel();
            self.send_command(replica, || Command::EndTrace(sender));
            answer
        };
        let answers: Vec<_> = (0..self.replicas.len()).map(end).collect();
        let ends = answers
            .iter()
            .filter_map(|answer| answer.recv_timeout(limit).ok());
        ends.flatten().collect()
    }

    /// Empties the prefix indices of all replicas that serve. False where requests run or wait, whose index is kept, where none
    /// serves, or after `limit`.
    pub fn flush(&self, limit: Duration) -> bool {
        let (sender, answers) = mpsc::channel();
        for replica in 0..self.replicas.len() {
            self.send_command(replica, || Command::Flush(sender.clone()));
        }
        drop(sender);
        let until = Instant::now().checked_add(limit);
        let mut flushed = None;
        for _ in &self.replicas {
            let left = until.map_or(Duration::MAX, |until| {
                until.saturating_duration_since(Instant::now())
            });
            match answers.recv_timeout(left) {
                Ok(idle) => flushed = Some(idle && flushed.unwrap_or(true)),
                Err(RecvTimeoutError::Timeout) => return false,
                // One that has failed drops its sender.
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        flushed.unwrap_or(false)
    }

    /// Waits for outputs and returns all there are; none after `limit` or a shutdown. Outputs of one sequence since the last call are
    /// merged.
    pub fn poll(&self, limit: Duration) -> Vec<OutputDelta> {
        if self.is_forked() {
            return Vec::new();
        }
        self.shared.outputs.take(limit)
    }

    /// As [`poll`](Self::poll), for an async task: moves all outputs and prefix index events into `batch`, whose content is dropped. False
    /// after a shutdown, when nothing is left. Each output is returned once, so only one task or thread may poll.
    pub fn poll_batch(&self, context: &mut Context<'_>, batch: &mut OutputBatch) -> Poll<bool> {
        self.shared.outputs.poll(context, batch)
    }

    /// Whether it was shut down.
    pub fn is_stopped(&self) -> bool {
        self.is_forked() || self.shared.outputs.is_closed()
    }

    /// The start, from which [`OutputDelta::admitted`] counts.
    pub const fn started_at(&self) -> Instant {
        self.started
    }

    /// Statistics of each replica.
    pub fn stats(&self) -> Vec<ReplicaStats> {
        self.shared.lock().iter().map(|state| state.stats).collect()
    }

    /// Aborts all requests, stops the drivers and joins all threads. A second call does nothing.
    pub fn shutdown(&self) {
        if self.is_forked() {
            return;
        }
        for replica in 0..self.replicas.len() {
            let client = self.shared.update(replica, |state| {
                state.stopping = true;
                state.client.take()
            });
            self.send_command(replica, || Command::Stop);
            if let Some(client) = client {
                client.0.abort();
            }
        }
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            // It only fails by a panic.
            let _ = thread.join();
        }
        self.shared.outputs.close();
    }

    /// Whether this process is a forked child of the one that has the threads.
    fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    fn send_command(&self, replica: usize, command: impl FnOnce() -> Command) {
        if self.is_forked() {
            return;
        }
        // A replica that has ended has no requests.
        let _ = self.replicas[replica].commands.send(command());
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// A time in µs, saturating.
fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_beyond_all_clocks_is_the_last_one() {
        assert_eq!(micros(Duration::from_micros(7)), 7);
        assert_eq!(
            micros(Duration::from_secs(1).saturating_add(Duration::MAX)),
            u64::MAX
        );
        // A truncated one would lie in the past.
        assert_eq!(
            micros(Duration::from_micros(u64::MAX) + Duration::from_micros(2)),
            u64::MAX
        );
    }
}
