//! Requests in, tokens out: a scheduler with a driver, or several of both.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pie_grammar::Grammar;
use pie_ring::{CallError, Client};
use pie_scheduler::{GrammarHandle, NewRequest};

use crate::error::RuntimeError;
use crate::grammars::{Grammars, Unbindable};
use crate::handshake::Capabilities;
use crate::link;
use crate::outbox::{Batch, Delta};
use crate::replica::{Command, Pause, Replica};
use crate::sampling::Draw;
use crate::shared::{ReplicaStats, ServiceSettings, Shared};
use crate::trace::{StepTrace, TraceEnd, TraceSettings};

/// Why a request was not taken.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Rejected {
    /// Some driver is still being started.
    #[error("the drivers are not ready\n\nhint: wait for `wait_ready`")]
    NotReady,
    /// The service was shut down.
    #[error("the service is shut down")]
    Stopped,
    /// Every driver is gone for good.
    #[error("no driver is left: {0}")]
    Gone(Arc<RuntimeError>),
    /// [`RuntimeError::Forked`].
    #[error(transparent)]
    Forked(Arc<RuntimeError>),
}

/// Replicas of one model, which share the requests. All work is done by a thread for each; calls only wait where they say so.
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
///     println!("{request}: {:?} {:?}", output.tokens, output.end);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Service {
    shared: Arc<Shared>,
    replicas: Vec<Handle>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    grammars: Grammars,
    /// Requests so far.
    requests: AtomicU64,
    begin: Instant,
    waiting_limit: Option<Duration>,
    /// A forked child has no threads, and no drivers of its own.
    process: u32,
}

/// What the callers' threads need of a replica.
#[derive(Debug)]
struct Handle {
    commands: Sender<Command>,
    /// Sequences that have not ended.
    open: Arc<AtomicUsize>,
}

impl Service {
    /// Starts every driver and returns at once; [`wait_ready`](Self::wait_ready) must follow.
    ///
    /// # Errors
    /// [`RuntimeError::Thread`] if a thread cannot be started. What is wrong with a driver
    /// [`wait_ready`](Self::wait_ready) says.
    pub fn start(settings: &ServiceSettings) -> Result<Self, RuntimeError> {
        let begin = Instant::now();
        let shared = Arc::new(Shared::new(settings.drivers.len()));
        let mut service = Self {
            shared: Arc::clone(&shared),
            replicas: Vec::new(),
            threads: Mutex::default(),
            grammars: Grammars::new(settings.grammars.clone()),
            requests: AtomicU64::new(0),
            begin,
            waiting_limit: settings.waiting_limit,
            process: std::process::id(),
        };
        for number in 0..settings.drivers.len() {
            let (commands, inbox) = mpsc::channel();
            let open = Arc::<AtomicUsize>::default();
            let replica = Replica::new(
                settings,
                number,
                begin,
                Arc::clone(&shared),
                inbox,
                Arc::clone(&open),
            );
            let thread = thread::Builder::new().name(format!("pie-replica-{number}"));
            let thread = thread.spawn(move || replica.run()).map_err(|source| {
                let what = "a replica's thread";
                RuntimeError::Thread { what, source }
            })?;
            service.replicas.push(Handle { commands, open });
            service.threads().push(thread);
        }
        Ok(service)
    }

    /// Waits until every driver serves; false when the time is over.
    ///
    /// # Errors
    /// Why a driver cannot serve.
    pub fn wait_ready(&self, limit: Duration) -> Result<bool, Arc<RuntimeError>> {
        if self.is_forked() {
            return Err(Arc::new(RuntimeError::Forked));
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

    /// What the first driver can, once it is ready.
    pub fn capabilities(&self) -> Option<Capabilities> {
        self.shared.lock().first()?.caps.clone()
    }

    /// Hands a request in, and returns its id at once, which takes the place of the one that it has. It ends after
    /// `deadline`, finished or not. A request that cannot be served, because it is too long, for example, ends as
    /// [`End::Refused`](crate::End::Refused).
    ///
    /// Of several replicas the one with the fewest sequences gets it; requests of one session, or with one routing key, get
    /// the same.
    ///
    /// # Errors
    /// [`Rejected`].
    pub fn submit(
        &self,
        arrival: NewRequest<impl Into<Draw>>,
        deadline: Option<Duration>,
    ) -> Result<u64, Rejected> {
        let alive = self.check_alive()?;
        let (replica, arrival) = self.accept(arrival, deadline, &alive);
        let (id, samples) = (arrival.id, arrival.samples);
        self.send([(replica, samples, Command::Submit(Box::new(arrival)))])?;
        Ok(id)
    }

    /// Hands several requests in, each with its deadline, so that no step is laid out between them: those of a call that do not
    /// stream then fill steps as large as can be. Returns their ids in order; see [`submit`](Self::submit).
    ///
    /// # Errors
    /// [`Rejected`].
    pub fn submit_all<S: Into<Draw>>(
        &self,
        arrivals: impl IntoIterator<Item = (NewRequest<S>, Option<Duration>)>,
    ) -> Result<Vec<u64>, Rejected> {
        let alive = self.check_alive()?;
        let mut shares = vec![Vec::new(); self.replicas.len()];
        let mut ids = Vec::new();
        for (arrival, deadline) in arrivals {
            let (replica, arrival) = self.accept(arrival, deadline, &alive);
            ids.push(arrival.id);
            shares[replica].push(arrival);
        }
        let shares = shares.into_iter().enumerate();
        let filled = shares.filter(|(_, share): &(usize, Vec<NewRequest<Draw>>)| !share.is_empty());
        let commands: Vec<_> = filled
            .map(|(replica, share)| {
                let samples = share.iter().map(|arrival| arrival.samples).sum();
                (replica, samples, Command::SubmitAll(share))
            })
            .collect();
        self.send(commands)?;
        Ok(ids)
    }

    /// Sends requests to replicas, with the number of sequences in each command: all of them, or none. A request that was sent is
    /// answered: a thread that ends says so first, and then answers what is in its inbox.
    fn send<C>(&self, commands: C) -> Result<(), Rejected>
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
                sent = Err(Rejected::Stopped);
            }
        }
        sent
    }

    /// Names a request, and chooses the replica that gets it, whose it is from here on.
    fn accept(
        &self,
        arrival: NewRequest<impl Into<Draw>>,
        deadline: Option<Duration>,
        alive: &[bool],
    ) -> (usize, NewRequest<Draw>) {
        let mut arrival = arrival.map(Into::into);
        let replica = self.choose(&arrival, alive);
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        arrival.id = number * self.replicas.len() as u64 + replica as u64;
        let after = |limit| micros(self.begin.elapsed().saturating_add(limit));
        arrival.deadline = deadline.map(after);
        arrival.admit_by = self.waiting_limit.map(after);
        arrival.namespace = namespace(arrival.adapter, arrival.namespace);
        let samples = arrival.samples as usize;
        self.replicas[replica]
            .open
            .fetch_add(samples, Ordering::Relaxed);
        (replica, arrival)
    }

    /// Asks for a grammar and returns at once what binds requests to it, as [`NewRequest::constraint`]: from their start on, or after
    /// the tokens `after`, where a model thinks before it answers. A wrong grammar ends its requests as
    /// [`End::Grammar`](crate::End::Grammar).
    ///
    /// # Errors
    /// [`Unbindable`].
    pub fn bind(
        &self,
        grammar: &Grammar,
        after: &[u32],
    ) -> Result<Arc<dyn GrammarHandle>, Unbindable> {
        self.grammars.bind(grammar, after)
    }

    /// Which replicas can take requests.
    fn check_alive(&self) -> Result<Vec<bool>, Rejected> {
        // Checked first: another thread may have held the lock when the process was forked.
        if self.is_forked() {
            return Err(Rejected::Forked(Arc::new(RuntimeError::Forked)));
        }
        let states = self.shared.lock();
        if states.iter().any(|state| state.stopping) {
            return Err(Rejected::Stopped);
        }
        let alive: Vec<bool> = states.iter().map(|state| state.failed.is_none()).collect();
        if alive.contains(&true) {
            let ready = states
                .iter()
                .all(|state| state.failed.is_some() || state.caps.is_some());
            return if ready {
                Ok(alive)
            } else {
                Err(Rejected::NotReady)
            };
        }
        let failed = states.iter().find_map(|state| state.failed.clone());
        Err(failed.map_or(Rejected::Stopped, Rejected::Gone))
    }

    fn choose(&self, arrival: &NewRequest<Draw>, alive: &[bool]) -> usize {
        let living = (0..alive.len()).filter(|&replica| alive[replica]);
        let key = arrival
            .session
            .or_else(|| arrival.routing_key.as_deref().map(hash));
        let found = match key {
            Some(key) => {
                let living: Vec<usize> = living.collect();
                living.get(key as usize % living.len().max(1)).copied()
            }
            None => {
                living.min_by_key(|&replica| self.replicas[replica].open.load(Ordering::Relaxed))
            }
        };
        found.unwrap_or(0)
    }

    /// Has every driver read an adapter, and waits until requests may name it as [`NewRequest::adapter`]; those of others are
    /// computed meanwhile. A driver that is started again reads it again. An id that was loaded before gets the new files:
    /// only do so while no request has it.
    ///
    /// # Errors
    /// [`RuntimeError::Adapter`] if a driver does not take it; then it counts as not loaded. Others, if there is no driver.
    pub fn load_adapter(&self, id: u64, path: &str) -> Result<(), Arc<RuntimeError>> {
        if self.is_forked() {
            return Err(Arc::new(RuntimeError::Forked));
        }
        let mut replicas = 0..self.replicas.len();
        for replica in replicas.clone() {
            self.shared
                .update(replica, |state| state.adapters.insert(id, path.to_owned()));
        }
        let loaded = replicas.try_for_each(|replica| {
            let client = self.wait_client(replica)?;
            Ok(link::load_adapter(&client, id, path)?)
        });
        if loaded.is_err() {
            self.unload_adapter(id);
        }
        loaded
    }

    /// Forgets an adapter: a driver that is started again does not read it. One that has it drops it when it needs the room.
    /// Only do so while no request has it; an id that is not loaded is ignored.
    pub fn unload_adapter(&self, id: u64) {
        for replica in 0..self.replicas.len() {
            self.shared
                .update(replica, |state| state.adapters.remove(&id));
        }
    }

    /// By which a driver is called; waits for one that is being started again.
    fn wait_client(&self, replica: usize) -> Result<Arc<Client>, Arc<RuntimeError>> {
        let mut states = self.shared.lock();
        loop {
            let state = &states[replica];
            if let Some(error) = &state.failed {
                return Err(Arc::clone(error));
            }
            if state.stopping {
                return Err(Arc::new(CallError::Aborted.into()));
            }
            if let Some(client) = &state.client {
                return Ok(Arc::clone(&client.0));
            }
            let waited = self.shared.changed.wait(states);
            states = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends a request. One that has ended, or never was, is ignored.
    pub fn abort(&self, request: u64) {
        self.tell(request as usize % self.replicas.len().max(1), || {
            Command::Abort(request)
        });
    }

    /// Lets the pages of a session go, with all replicas.
    pub fn end_session(&self, session: u64) {
        for replica in 0..self.replicas.len() {
            self.tell(replica, || Command::EndSession(session));
        }
    }

    /// Computes nothing more, until it goes on with `None`. Requests are still taken, aborts obeyed, and late requests ended.
    pub fn pause(&self, pause: Option<Pause>) {
        for replica in 0..self.replicas.len() {
            self.tell(replica, || Command::Pause(pause));
        }
    }

    /// Writes each step from now on into a file, for a trace viewer.
    ///
    /// # Errors
    /// [`RuntimeError::Tracing`] if steps are traced already, [`RuntimeError::File`] if a file cannot be made.
    pub fn start_trace(&self, settings: &TraceSettings) -> Result<(), RuntimeError> {
        let mut states = self.shared.lock();
        if states.iter().any(|state| state.tracing) {
            return Err(RuntimeError::Tracing);
        }
        let traces = (0..self.replicas.len()).map(|replica| StepTrace::create(settings, replica));
        let traces: Vec<StepTrace> = traces.collect::<Result<_, _>>()?;
        for (replica, trace) in traces.into_iter().enumerate() {
            states[replica].tracing = true;
            self.tell(replica, || Command::Trace(Box::new(trace)));
        }
        Ok(())
    }

    /// Ends a trace and returns what became of it, also of one that ended by itself; one entry for each replica. None where
    /// there was no trace, or when the time is over.
    pub fn end_trace(&self, limit: Duration) -> Vec<TraceEnd> {
        let ask = |replica| {
            let (sender, answer) = mpsc::channel();
            self.tell(replica, || Command::EndTrace(sender));
            answer
        };
        let answers: Vec<_> = (0..self.replicas.len()).map(ask).collect();
        let ends = answers
            .iter()
            .filter_map(|answer| answer.recv_timeout(limit).ok());
        ends.flatten().collect()
    }

    /// Empties the prefix indices. False, with nothing done where requests run or wait, or when the time is over.
    pub fn flush(&self, limit: Duration) -> bool {
        let (sender, answers) = mpsc::channel();
        for replica in 0..self.replicas.len() {
            self.tell(replica, || Command::Flush(sender.clone()));
        }
        drop(sender);
        let until = Instant::now().checked_add(limit);
        let mut flushed = true;
        for _ in &self.replicas {
            let left = until.map_or(Duration::MAX, |until| {
                until.saturating_duration_since(Instant::now())
            });
            flushed &= answers.recv_timeout(left).unwrap_or(false);
        }
        flushed
    }

    /// Waits for outputs and returns all there are; none when the time is over, or after a shutdown. Outputs of one
    /// sequence that were not fetched yet are one.
    pub fn poll(&self, limit: Duration) -> Vec<Delta> {
        if self.is_forked() {
            return Vec::new();
        }
        self.shared.outbox.take(limit)
    }

    /// As [`poll`](Self::poll), for a task: moves everything there is into `batch`, whose content is dropped, with the changes of
    /// the prefix indices. While there is nothing, the task of the last call is woken by what comes. False after a shutdown, when
    /// nothing is left. Only one caller gets an output, so a program has one task that calls this, or one thread that calls
    /// `poll`.
    pub fn poll_batch(&self, context: &mut Context<'_>, batch: &mut Batch) -> Poll<bool> {
        self.shared.outbox.poll(context, batch)
    }

    /// Whether it was shut down.
    pub fn is_stopped(&self) -> bool {
        self.is_forked() || self.shared.outbox.is_closed()
    }

    /// The moment from which [`Delta::admitted`] counts.
    pub const fn began(&self) -> Instant {
        self.begin
    }

    /// How the replicas stand.
    pub fn stats(&self) -> Vec<ReplicaStats> {
        self.shared.lock().iter().map(|state| state.stats).collect()
    }

    /// Ends every request, stops the drivers and waits for all threads. A second call does nothing.
    pub fn shutdown(&self) {
        if self.is_forked() {
            return;
        }
        for replica in 0..self.replicas.len() {
            let client = self.shared.update(replica, |state| {
                state.stopping = true;
                state.client.take()
            });
            self.tell(replica, || Command::Stop);
            if let Some(client) = client {
                client.0.abort();
            }
        }
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            // It only fails by a panic.
            let _ = thread.join();
        }
        self.shared.outbox.close();
    }

    /// Whether this process is a forked child of the one that has the threads.
    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    fn tell(&self, replica: usize, command: impl FnOnce() -> Command) {
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

/// A time in µs; one that is longer than the count goes is the longest.
fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// What keeps KV apart: what one adapter has computed is of no use to another. Different arguments give different results.
fn namespace(adapter: Option<u64>, name: Option<Box<str>>) -> Option<Box<str>> {
    match (adapter, name) {
        (Some(id), name) => Some(match name {
            Some(name) => format!("\0adapter {id}:{name}").into(),
            None => format!("\0adapter {id}").into(),
        }),
        (None, Some(name)) if name.starts_with('\0') => Some(format!("\0{name}").into()),
        (None, name) => name,
    }
}

/// The same in every process, as a router before several services may want it.
fn hash(key: &str) -> u64 {
    // FNV-1a.
    key.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
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
