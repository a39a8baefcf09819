//! One replica: its scheduler, its driver, and the thread that goes between them.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use pie_ring::RegionLayout;
use pie_scheduler::{Config, Finish, Limits, NewRequest, Outputs, Scheduler, TokenBytes};

use crate::error::RuntimeError;
use crate::frame::bytes::{frame_bytes, params_bytes};
use crate::handshake::Capabilities;
use crate::log::LogSink;
use crate::logprobs;
use crate::outbox::{Delta, End};
use crate::sampling::Draw;
use crate::settings::DriverSettings;
use crate::shared::{ServiceLog, ServiceSettings, Shared};
use crate::times::Times;
use crate::trace::{StepTrace, TraceEnd};

/// How often a driver that starts, or has nothing to do, is looked at.
pub(crate) const WATCH: Duration = Duration::from_millis(50);
/// As `WATCH`, while a request waits for its constraint.
const COMPILING: Duration = Duration::from_millis(1);
/// How old counts may be.
const STATS: Duration = Duration::from_millis(20);

/// A message to a replica.
pub(crate) enum Command {
    Submit(Box<NewRequest<Draw>>),
    SubmitAll(Vec<NewRequest<Draw>>),
    Abort(u64),
    EndSession(u64),
    /// Answered with whether the prefix index was emptied.
    Flush(Sender<bool>),
    Pause(Option<Pause>),
    Trace(Box<StepTrace>),
    /// Answered with what became of the trace, if there was one.
    EndTrace(Sender<Option<TraceEnd>>),
    Stop,
}

/// How a service pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// Requests keep what was computed.
    InPlace,
    /// They give it back, and are computed again afterwards.
    Retract,
}

/// The thread's own things.
pub(crate) struct Replica {
    pub(crate) number: usize,
    pub(crate) driver: DriverSettings,
    config: Config,
    max_pages: Option<u32>,
    max_image_bytes: u32,
    text: Option<Arc<dyn TokenBytes>>,
    pub(crate) max_restarts: u32,
    log: ServiceLog,
    begin: Instant,
    pub(crate) shared: Arc<Shared>,
    inbox: Receiver<Command>,
    /// How many sequences have not ended, those among them that are still in the inbox.
    open: Arc<AtomicUsize>,
    /// Those that the scheduler has: request and sample.
    sequences: HashSet<(u64, u32)>,
    /// Made when the first driver has said what it can.
    pub(crate) scheduler: Option<Scheduler<Draw>>,
    outputs: Outputs,
    /// No step is laid out while it is set.
    pub(crate) pause: Option<Pause>,
    /// From an answer seen to the next request made.
    pub(crate) gaps: Times,
    /// From a request made to its answer seen, of all steps.
    pub(crate) driver_ns: u64,
    counted: Instant,
    pub(crate) trace: Option<Box<StepTrace>>,
    /// Of a trace that ended by itself.
    traced: Option<TraceEnd>,
}

/// Why a replica does not go on as it did.
pub(crate) enum Halt {
    /// It has to stop.
    Stop,
    /// The driver cannot serve.
    Lost(RuntimeError),
}

impl From<RuntimeError> for Halt {
    fn from(error: RuntimeError) -> Self {
        Self::Lost(error)
    }
}

impl Replica {
    pub(crate) fn new(
        settings: &ServiceSettings,
        number: usize,
        begin: Instant,
        shared: Arc<Shared>,
        inbox: Receiver<Command>,
        open: Arc<AtomicUsize>,
    ) -> Self {
        Self {
            number,
            driver: settings.drivers[number].clone(),
            config: settings.scheduler.clone(),
            max_pages: settings.max_pages,
            max_image_bytes: settings.max_image_bytes,
            text: settings.text.clone(),
            max_restarts: settings.max_restarts,
            log: Arc::clone(&settings.log),
            begin,
            shared,
            inbox,
            open,
            sequences: HashSet::new(),
            scheduler: None,
            outputs: Outputs::default(),
            pause: None,
            gaps: Times::default(),
            driver_ns: 0,
            counted: begin,
            trace: None,
            traced: None,
        }
    }

    /// Makes the scheduler by what the first driver can, whose frames lie in slots like this, and holds every later one to it.
    pub(crate) fn prepare(
        &mut self,
        caps: &Capabilities,
        slot: &RegionLayout,
    ) -> Result<(), RuntimeError> {
        let limits = self.limits(caps, slot);
        if self.scheduler.is_some() {
            let first = self.shared.update(self.number, |state| state.caps.clone());
            let first = first.map(|caps| self.limits(&caps, slot));
            return match first.and_then(|first| shortfall(&first, &limits)) {
                None => Ok(()),
                Some((what, needed, found)) => Err(RuntimeError::Shrunk {
                    what,
                    needed,
                    found,
                }),
            };
        }
        let mut config = self.config.clone();
        if config.max_running == 0 {
            config.max_running = limits.max_forward_requests;
        }
        let max_running = config.max_running;
        let scheduler = Scheduler::new(config, limits, self.text.clone())?;
        self.scheduler = Some(scheduler);
        self.shared.update(self.number, |state| {
            state.stats.total_pages = limits.total_pages;
            state.stats.host_pages = limits.host_pages;
            state.stats.page_size = limits.page_size;
            state.stats.max_running = max_running;
            state.stats.max_model_len = limits.max_model_len;
        });
        Ok(())
    }

    fn limits(&self, caps: &Capabilities, slot: &RegionLayout) -> Limits {
        Limits {
            total_pages: caps.total_pages.min(self.max_pages.unwrap_or(u32::MAX)),
            host_pages: caps.swap_pool_size,
            page_size: caps.kv_page_size,
            max_forward_tokens: caps.max_forward_tokens,
            max_forward_requests: caps.max_forward_requests,
            max_page_refs: caps.max_page_refs,
            max_image_bytes: self.max_image_bytes,
            max_model_len: caps.max_model_len,
            vocab_size: caps.vocab_size,
            max_logprob_words: logprobs::room(caps, slot.response_capacity()),
            frame: frame_bytes(
                caps.vocab_size,
                slot.request_capacity(),
                self.max_image_bytes,
            ),
        }
    }

    /// Does what was asked for since the last call.
    pub(crate) fn take_commands(&mut self) -> Result<(), Halt> {
        loop {
            match self.inbox.try_recv() {
                Ok(command) => self.obey(command)?,
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => return Err(Halt::Stop),
            }
        }
    }

    /// Waits until something is asked for, or a deadline passes, or the driver wants to be looked at.
    pub(crate) fn wait_command(&mut self) -> Result<(), Halt> {
        let deadline = self.scheduler.as_ref().and_then(Scheduler::next_deadline);
        let left = deadline.map_or(WATCH, |deadline| {
            Duration::from_micros(deadline.saturating_sub(self.now()))
        });
        // A grammar that is compiled now makes no sound.
        let awaits = |scheduler: &Scheduler<_>| scheduler.awaits_grammar();
        let watch = if self.scheduler.as_ref().is_some_and(awaits) {
            COMPILING
        } else {
            WATCH
        };
        match self.inbox.recv_timeout(left.min(watch)) {
            Ok(command) => self.obey(command),
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => Err(Halt::Stop),
        }
    }

    fn obey(&mut self, command: Command) -> Result<(), Halt> {
        match (command, &mut self.scheduler) {
            (Command::Stop, _) => return Err(Halt::Stop),
            (Command::Submit(arrival), _) => self.submit(*arrival),
            (Command::SubmitAll(arrivals), _) => self.submit_all(arrivals),
            (Command::Abort(request), Some(scheduler)) => {
                scheduler.abort(request);
            }
            (Command::EndSession(session), Some(scheduler)) => {
                scheduler.end_session(session);
            }
            (Command::Flush(sender), Some(scheduler)) => {
                let idle = scheduler.is_idle();
                if idle {
                    scheduler.flush();
                }
                // The caller may have gone.
                let _ = sender.send(idle);
            }
            (Command::Pause(pause), _) => self.pause = pause,
            (Command::Trace(trace), _) => {
                self.traced = None;
                self.trace = Some(trace);
            }
            (Command::EndTrace(sender), _) => {
                self.end_trace();
                // The caller may have gone.
                let _ = sender.send(self.traced.take());
            }
            (Command::Abort(_) | Command::EndSession(_) | Command::Flush(_), None) => {}
        }
        Ok(())
    }

    fn submit_all(&mut self, arrivals: Vec<NewRequest<Draw>>) {
        for arrival in arrivals {
            self.submit(arrival);
        }
    }

    fn submit(&mut self, mut arrival: NewRequest<Draw>) {
        if let Some(asked) = &mut arrival.sampling.extension {
            // What comes after the prompt counts.
            Arc::make_mut(asked).penalties.counted_from = arrival.prompt.len() as u32;
        }
        arrival.params_bytes = params_bytes(&arrival.sampling);
        let (id, samples) = (arrival.id, arrival.samples);
        let Some(scheduler) = &mut self.scheduler else {
            return self.refuse(id, samples, &End::Aborted);
        };
        match scheduler.submit(arrival) {
            Ok(()) => self
                .sequences
                .extend((0..samples).map(|sample| (id, sample))),
            Err(refusal) => self.refuse(id, samples, &End::Refused(refusal)),
        }
    }

    /// Closes the trace, if there is one.
    pub(crate) fn end_trace(&mut self) {
        if let Some(trace) = self.trace.take() {
            let end = trace.close();
            if let Some(failure) = &end.failure {
                self.note(&format!(
                    "pie-engine: the trace {} ends early: {failure}",
                    end.path.display()
                ));
            }
            self.traced = Some(end);
        }
        self.shared
            .update(self.number, |state| state.tracing = false);
    }

    /// Ends requests whose deadline has passed; for the time in which no step does so, because there is no driver, or the service
    /// is paused.
    pub(crate) fn expire(&mut self) {
        let now = self.now();
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.expire(now);
        }
    }

    /// Answers a request that no scheduler has.
    fn refuse(&self, id: u64, samples: u32, end: &End) {
        for sample in 0..samples.clamp(1, 1024) {
            self.shared
                .outbox
                .push(Delta::ended(id, sample, end.clone()));
        }
        self.open.fetch_sub(samples as usize, Ordering::Relaxed);
    }

    /// Gives out what is new.
    pub(crate) fn publish(&mut self) {
        self.publish_as(|finish, reason| match finish {
            Finish::Length => End::Length,
            Finish::StopToken(token) => End::StopToken(token),
            Finish::StopString { index, text_bytes } => End::StopString { index, text_bytes },
            Finish::StopRegex { index } => End::StopRegex { index },
            Finish::Aborted => End::Aborted,
            Finish::Unready => End::Unready,
            Finish::Deadline => End::Deadline,
            Finish::Displaced => End::Displaced,
            Finish::Grammar => End::Grammar(reason.unwrap_or_default().into()),
            Finish::Busy => End::Busy(reason.unwrap_or_default().into()),
            Finish::Failed => {
                let why = reason.unwrap_or("the driver gave it no token\n\nhint: its log says why");
                End::Failed(why.into())
            }
        });
    }

    fn publish_as(&mut self, end: impl Fn(Finish, Option<&str>) -> End) {
        let Some(scheduler) = &mut self.scheduler else {
            return;
        };
        scheduler.outputs(&mut self.outputs);
        let events = scheduler.take_kv_events();
        if !events.is_empty() {
            self.shared.outbox.record(self.number, events);
        }
        if !self.outputs.is_empty() {
            for output in self.outputs.iter().filter(|output| output.finish.is_some()) {
                if self.sequences.remove(&(output.id, output.sample)) {
                    self.open.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
        // The receiver of the last output finds it counted.
        if self.counted.elapsed() >= STATS || self.sequences.is_empty() && !self.outputs.is_empty()
        {
            self.count();
        }
        self.shared.outbox.extend(self.outputs.iter(), end);
    }

    /// Tells how things stand.
    pub(crate) fn count(&mut self) {
        if let Some(scheduler) = &self.scheduler {
            let scheduler = scheduler.stats();
            let gaps_ns = [0.5, 0.99].map(|share| self.gaps.quantile(share));
            let (host_ns, driver_ns) = (self.gaps.sum(), self.driver_ns);
            self.shared.update(self.number, |state| {
                state.stats.scheduler = scheduler;
                state.stats.gaps_ns = gaps_ns;
                (state.stats.host_ns, state.stats.driver_ns) = (host_ns, driver_ns);
            });
            self.counted = Instant::now();
        }
    }

    /// Says that there will be no driver any more, and answers all that comes.
    pub(crate) fn give_up(&mut self, error: RuntimeError) {
        self.note(&error.to_string());
        let reason: Arc<str> = error.to_string().into();
        let error = Arc::new(error);
        self.shared
            .update(self.number, |state| state.failed = Some(Arc::clone(&error)));
        let failed = End::Failed(reason);
        // What has finished did not fail.
        self.publish();
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.abort_all();
        }
        self.publish_as(|_, _| failed.clone());
        self.count();
        for (id, sample) in self.sequences.drain() {
            let ended = Delta::ended(id, sample, failed.clone());
            self.shared.outbox.push(ended);
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
        while let Ok(command) = self.inbox.recv() {
            match command {
                Command::Stop => return,
                Command::Submit(arrival) => self.refuse(arrival.id, arrival.samples, &failed),
                Command::SubmitAll(arrivals) => {
                    for arrival in arrivals {
                        self.refuse(arrival.id, arrival.samples, &failed);
                    }
                }
                Command::Abort(_)
                | Command::EndSession(_)
                | Command::Flush(_)
                | Command::Trace(_)
                | Command::EndTrace(_)
                | Command::Pause(_) => {}
            }
        }
    }

    /// Ends what there is.
    pub(crate) fn leave(&mut self) {
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.abort_all();
        }
        self.end_trace();
        self.publish();
        self.count();
        self.scheduler = None;
        // Nothing is handed in from here on. What was before is in the inbox, and answered like the rest.
        self.shared.update(self.number, |state| state.closed = true);
        while let Ok(command) = self.inbox.try_recv() {
            match command {
                Command::Submit(arrival) => self.submit(*arrival),
                Command::SubmitAll(arrivals) => self.submit_all(arrivals),
                _ => {}
            }
        }
    }

    /// µs since the service began.
    pub(crate) fn now(&self) -> u64 {
        self.begin.elapsed().as_micros() as u64
    }

    /// Writes to the log.
    pub(crate) fn note(&self, text: &str) {
        for line in text.lines() {
            (self.log)(self.number, line);
        }
    }

    pub(crate) fn sink(&self) -> LogSink {
        let (log, number) = (Arc::clone(&self.log), self.number);
        Arc::new(move |line: &str| log(number, line))
    }
}

/// What a driver has less of than the first one had.
fn shortfall(first: &Limits, now: &Limits) -> Option<(&'static str, u32, u32)> {
    let pairs = [
        ("pages", first.total_pages, now.total_pages),
        ("host pages", first.host_pages, now.host_pages),
        (
            "tokens in a frame",
            first.max_forward_tokens,
            now.max_forward_tokens,
        ),
        (
            "requests in a frame",
            first.max_forward_requests,
            now.max_forward_requests,
        ),
        (
            "page references in a frame",
            first.max_page_refs,
            now.max_page_refs,
        ),
        ("bytes in a frame", first.frame.max, now.frame.max),
        ("positions", first.max_model_len, now.max_model_len),
    ];
    let mut pairs = pairs.into_iter();
    pairs.find(|&(_, needed, found)| found < needed)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::handshake::Handshake;

    /// A replica that has a scheduler, and no driver.
    fn replica() -> (Replica, Sender<Command>) {
        let settings = ServiceSettings::new(DriverSettings::new("python3", "model"));
        let (commands, inbox) = mpsc::channel();
        let (shared, open) = (Arc::new(Shared::new(1)), Arc::default());
        let mut replica = Replica::new(&settings, 0, Instant::now(), shared, inbox, open);
        let caps = r#"{"total_pages":9,"kv_page_size":16,"max_forward_tokens":100,"max_forward_requests":4,
            "max_page_refs":50,"max_model_len":64,"vocab_size":7,"arch_name":"qwen3","swap_pool_size":5}"#;
        let line = format!(r#"{{"group_id":3,"shmem_name":"/pie_shmem_g3","caps":{caps}}}"#);
        let mut handshake = Handshake::new(3);
        assert!(handshake.line(&line.replace('\n', " ")).unwrap().is_none());
        let caps = handshake.line(r#"{"ready":true}"#).unwrap().unwrap();
        let slot = RegionLayout::new(1, 1 << 16, 1 << 16).unwrap();
        replica.prepare(&caps, &slot).unwrap();
        (replica, commands)
    }

    fn arrival(id: u64) -> NewRequest<Draw> {
        let greedy = pie_wire::Sampler::TopP {
            temperature: 0.0,
            p: 1.0,
        };
        NewRequest::new(id, vec![1, 2, 3], greedy, 4).map(Into::into)
    }

    #[test]
    fn what_has_finished_when_the_driver_is_given_up_did_not_fail() {
        let (mut replica, commands) = replica();
        let late = NewRequest {
            deadline: Some(0),
            ..arrival(1)
        };
        replica.submit_all(vec![late, arrival(2)]);
        replica.expire();
        commands.send(Command::Stop).unwrap();
        replica.give_up(RuntimeError::Panicked);
        let ends = replica.shared.outbox.take(Duration::ZERO);
        let ends: Vec<_> = ends
            .into_iter()
            .map(|delta| (delta.request, delta.end))
            .collect();
        let failed = End::Failed(RuntimeError::Panicked.to_string().into());
        assert_eq!(ends, [(1, Some(End::Deadline)), (2, Some(failed))]);
    }
}
