//! One replica: its scheduler, and the state of its thread.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use pie_ring::RegionLayout;
use pie_scheduler::{Config, Finish, Limits, Outputs, Scheduler, TokenBytes};

use crate::error::EngineError;
use crate::frame::bytes::frame_bytes;
use crate::handshake::Capabilities;
use crate::histogram::Histogram;
use crate::link::StepTiming;
use crate::log::{LogSink, ServiceLog};
use crate::logprobs;
use crate::output_collector::{FinishReason, OutputDelta};
use crate::sampling::RowParams;
use crate::settings::DriverSettings;
use crate::shared::{ServiceSettings, Shared};
use crate::trace::{StepTrace, TraceSummary};

mod commands;

pub(crate) use self::commands::Command;

/// How often the process of a driver that starts or is idle is polled.
pub(crate) const POLL: Duration = Duration::from_millis(50);
/// Longest time between two updates of the statistics.
const STATS_INTERVAL: Duration = Duration::from_millis(20);

/// How a service pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// Requests keep their KV.
    InPlace,
    /// Requests are retracted: their KV is freed, and computed again afterwards.
    Retract,
}

/// State of a replica's thread.
pub(crate) struct Replica {
    pub(crate) number: usize,
    pub(crate) driver: DriverSettings,
    config: Config,
    max_pages: Option<u32>,
    max_image_bytes: u32,
    token_bytes: Option<Arc<dyn TokenBytes>>,
    pub(crate) max_restarts: u32,
    log_sink: ServiceLog,
    started: Instant,
    pub(crate) shared: Arc<Shared>,
    inbox: Receiver<Command>,
    /// Number of unfinished sequences, with those that are still in the inbox.
    open: Arc<AtomicUsize>,
    /// Sequences of the scheduler: request and sample.
    sequences: HashSet<(u64, u32)>,
    /// Made from the capabilities of the first driver.
    pub(crate) scheduler: Option<Scheduler<RowParams>>,
    outputs: Outputs,
    /// No step is scheduled while it is set.
    pub(crate) pause: Option<Pause>,
    /// Callers of a pause, which wait for the step in flight.
    pub(crate) pause_answers: Vec<Sender<()>>,
    /// Times from a reply to the next frame.
    host_gaps: Histogram,
    /// Time from a frame to its reply, of all steps.
    driver_ns: u64,
    stats_updated: Instant,
    pub(crate) trace: Option<Box<StepTrace>>,
    /// The last trace, if it has ended.
    ended_trace: Option<TraceSummary>,
}

/// Why a replica's step loop ends.
pub(crate) enum Halt {
    /// The service shuts down.
    Stop,
    /// The driver failed.
    Lost(EngineError),
}

impl From<EngineError> for Halt {
    fn from(error: EngineError) -> Self {
        Self::Lost(error)
    }
}

impl Replica {
    pub(crate) fn new(
        settings: &ServiceSettings,
        number: usize,
        started: Instant,
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
            token_bytes: settings.token_bytes.clone(),
            max_restarts: settings.max_restarts,
            log_sink: Arc::clone(&settings.log),
            started,
            shared,
            inbox,
            open,
            sequences: HashSet::new(),
            scheduler: None,
            outputs: Outputs::default(),
            pause: None,
            pause_answers: Vec::new(),
            host_gaps: Histogram::default(),
            driver_ns: 0,
            stats_updated: started,
            trace: None,
            ended_trace: None,
        }
    }

    /// Makes the scheduler from the first driver's capabilities, and checks that later drivers have no less.
    pub(crate) fn prepare(
        &mut self,
        caps: &Capabilities,
        slot: &RegionLayout,
    ) -> Result<(), EngineError> {
        let limits = self.limits(caps, slot);
        if self.scheduler.is_some() {
            let first = self.shared.update(self.number, |state| state.caps.clone());
            let first = first.map(|caps| self.limits(&caps, slot));
            return match first.and_then(|first| shortfall(&first, &limits)) {
                None => Ok(()),
                Some((what, needed, found)) => Err(EngineError::Shrunk {
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
        let scheduler = Scheduler::new(config, limits, self.token_bytes.clone())?;
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
            max_logprob_words: logprobs::max_logprob_words(caps, slot.response_capacity()),
            frame: frame_bytes(
                caps.vocab_size,
                slot.request_capacity(),
                self.max_image_bytes,
            ),
        }
    }

    /// Ends requests whose deadline has passed, while no step does so.
    pub(crate) fn expire(&mut self) {
        let now = self.now();
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.expire(now);
        }
    }

    /// Ends a request that the scheduler does not have.
    pub(crate) fn reject(&self, id: u64, samples: u32, end: &FinishReason) {
        for sample in 0..samples.clamp(1, 1024) {
            self.shared
                .outputs
                .push(OutputDelta::finished(id, sample, end.clone()));
        }
        self.open.fetch_sub(samples as usize, Ordering::Relaxed);
    }

    /// Tells the callers of a pause that no step is in flight.
    pub(crate) fn answer_pauses(&mut self) {
        for sender in self.pause_answers.drain(..) {
            // The caller may have gone.
            let _ = sender.send(());
        }
    }

    /// Publishes new outputs.
    pub(crate) fn publish(&mut self) {
        self.publish_as(|finish, reason| match finish {
            Finish::Length => FinishReason::Length,
            Finish::StopToken(token) => FinishReason::StopToken(token),
            Finish::StopString { index, text_bytes } => {
                FinishReason::StopString { index, text_bytes }
            }
            Finish::StopRegex { index } => FinishReason::StopRegex { index },
            Finish::Aborted => FinishReason::Aborted,
            Finish::Unready => FinishReason::Unready,
            Finish::Deadline => FinishReason::Deadline,
            Finish::Displaced => FinishReason::Displaced,
            Finish::Grammar => FinishReason::Grammar(reason.unwrap_or_default().into()),
            Finish::Processor => FinishReason::Processor(reason.unwrap_or_default().into()),
            Finish::Busy => FinishReason::Busy(reason.unwrap_or_default().into()),
            Finish::Failed => {
                let why = reason.unwrap_or("the driver gave it no token\n\nhint: its log says why");
                FinishReason::Failed(why.into())
            }
        });
    }

    fn publish_as(&mut self, end: impl Fn(Finish, Option<&str>) -> FinishReason) {
        let Some(scheduler) = &mut self.scheduler else {
            return;
        };
        scheduler.outputs(&mut self.outputs);
        let events = scheduler.take_kv_events();
        if !events.is_empty() {
            self.shared.outputs.push_events(self.number, events);
        }
        if !self.outputs.is_empty() {
            for output in self.outputs.iter().filter(|output| output.finish.is_some()) {
                if self.sequences.remove(&(output.id, output.sample)) {
                    self.open.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
        // Whoever receives the last output finds it counted.
        if self.stats_updated.elapsed() >= STATS_INTERVAL
            || self.sequences.is_empty() && !self.outputs.is_empty()
        {
            self.update_stats();
        }
        self.shared.outputs.extend(self.outputs.iter(), end);
    }

    /// Updates the statistics that callers read.
    pub(crate) fn update_stats(&mut self) {
        if let Some(scheduler) = &self.scheduler {
            let scheduler = scheduler.stats();
            let gaps_ns = [0.5, 0.99].map(|share| self.host_gaps.quantile(share));
            let (host_ns, driver_ns) = (self.host_gaps.sum(), self.driver_ns);
            self.shared.update(self.number, |state| {
                state.stats.scheduler = scheduler;
                state.stats.gaps_ns = gaps_ns;
                (state.stats.host_ns, state.stats.driver_ns) = (host_ns, driver_ns);
            });
            self.stats_updated = Instant::now();
        }
    }

    /// Fails all requests, and those that are still submitted, for good.
    pub(crate) fn fail_all(&mut self, error: EngineError) {
        self.log(&error.to_string());
        let reason: Arc<str> = error.to_string().into();
        let error = Arc::new(error);
        self.shared
            .update(self.number, |state| state.failed = Some(Arc::clone(&error)));
        let failed = FinishReason::Failed(reason);
        // Finished requests did not fail.
        self.publish();
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.abort_all();
        }
        self.publish_as(|_, _| failed.clone());
        self.update_stats();
        for (id, sample) in self.sequences.drain() {
            let ended = OutputDelta::finished(id, sample, failed.clone());
            self.shared.outputs.push(ended);
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
        self.reject_until_stop(&failed);
    }

    /// Aborts all requests, and closes the inbox.
    pub(crate) fn close(&mut self) {
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.abort_all();
        }
        self.end_trace();
        self.publish();
        self.update_stats();
        self.scheduler = None;
        // Nothing is sent from here on; what was sent before gets its answer.
        self.shared.update(self.number, |state| state.closed = true);
        self.drain_inbox();
    }

    /// Closes the trace, if there is one.
    fn end_trace(&mut self) {
        if let Some(trace) = self.trace.take() {
            let end = trace.close();
            if let Some(failure) = &end.failure {
                self.log(&format!(
                    "pie-engine: the trace {} ends early: {failure}",
                    end.path.display()
                ));
            }
            self.ended_trace = Some(end);
        }
        self.shared
            .update(self.number, |state| state.tracing = false);
    }

    /// Adds a step to times and trace.
    pub(crate) fn record_step(&mut self, timing: &StepTiming) {
        self.driver_ns += timing.round_trip_ns;
        if timing.client_ns > 0 {
            self.host_gaps.add(timing.client_ns);
        }
        let number = self.number;
        if let Some(trace) = &mut self.trace
            && !trace.step(number, timing)
        {
            self.end_trace();
        }
    }

    /// µs since the service started.
    pub(crate) fn now(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    pub(crate) fn log(&self, text: &str) {
        for line in text.lines() {
            (self.log_sink)(self.number, line);
        }
    }

    /// The sink of a driver's log.
    pub(crate) fn sink(&self) -> LogSink {
        let (log, number) = (Arc::clone(&self.log_sink), self.number);
        Arc::new(move |line: &str| log(number, line))
    }
}

/// The first capacity of which a driver has less than the first one.
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
    use std::sync::mpsc::{self, Sender};

    use pie_scheduler::NewRequest;

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

    fn request(id: u64) -> NewRequest<RowParams> {
        let greedy = pie_wire::Sampler::TopP {
            temperature: 0.0,
            p: 1.0,
        };
        NewRequest::new(id, vec![1, 2, 3], greedy, 4).map(Into::into)
    }

    #[test]
    fn requests_that_finished_before_the_driver_failed_did_not_fail() {
        let (mut replica, commands) = replica();
        let late = NewRequest {
            deadline: Some(0),
            ..request(1)
        };
        replica.submit_all(vec![late, request(2)]);
        replica.expire();
        commands.send(Command::Stop).unwrap();
        replica.fail_all(EngineError::Panicked);
        let ends = replica.shared.outputs.take(Duration::ZERO);
        let ends: Vec<_> = ends
            .into_iter()
            .map(|delta| (delta.request, delta.finish))
            .collect();
        let failed = FinishReason::Failed(EngineError::Panicked.to_string().into());
        assert_eq!(ends, [(1, Some(FinishReason::Deadline)), (2, Some(failed))]);
    }
}
