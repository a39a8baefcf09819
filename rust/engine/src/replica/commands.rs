//! Commands from callers' threads to a replica's thread.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, TryRecvError};
use std::time::Duration;

use pie_scheduler::{NewRequest, Scheduler};

use super::{Halt, POLL, Pause, Replica};
use crate::frame::bytes::params_bytes;
use crate::output_collector::FinishReason;
use crate::sampling::RowParams;
use crate::trace::{StepTrace, TraceSummary};

/// As [`POLL`], while a request waits for its grammar.
const POLL_GRAMMAR: Duration = Duration::from_millis(1);

/// A command to a replica.
pub(crate) enum Command {
    Submit(Box<NewRequest<RowParams>>),
    SubmitAll(Vec<NewRequest<RowParams>>),
    Abort(u64),
    EndSession(u64),
    WeightVersion(u32),
    /// Responds with whether the prefix index was flushed.
    Flush(Sender<bool>),
    /// Responds once no step is in flight, and retracted requests have given back their pages.
    Pause(Option<Pause>, Sender<()>),
    Trace(Box<StepTrace>),
    /// Responds with the trace, if there was one.
    EndTrace(Sender<Option<TraceSummary>>),
    Stop,
}

impl Replica {
    /// Handles all commands in the inbox.
    pub(crate) fn handle_commands(&mut self) -> Result<(), Halt> {
        loop {
            match self.inbox.try_recv() {
                Ok(command) => self.handle(command)?,
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => return Err(Halt::Stop),
            }
        }
    }

    /// Waits for a command, or the next deadline, or the next poll of the driver, and handles the command.
    pub(crate) fn wait_command(&mut self) -> Result<(), Halt> {
        let deadline = self.scheduler.as_ref().and_then(Scheduler::next_deadline);
        let left = deadline.map_or(POLL, |deadline| {
            Duration::from_micros(deadline.saturating_sub(self.now()))
        });
        // A compiled grammar does not notify this thread.
        let awaits = |scheduler: &Scheduler<_>| scheduler.awaits_grammar();
        let poll = if self.scheduler.as_ref().is_some_and(awaits) {
            POLL_GRAMMAR
        } else {
            POLL
        };
        match self.inbox.recv_timeout(left.min(poll)) {
            Ok(command) => self.handle(command),
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => Err(Halt::Stop),
        }
    }

    fn handle(&mut self, command: Command) -> Result<(), Halt> {
        match (command, &mut self.scheduler) {
            (Command::Stop, _) => return Err(Halt::Stop),
            (Command::Submit(request), _) => self.submit(*request),
            (Command::SubmitAll(requests), _) => self.submit_all(requests),
            (Command::Abort(request), Some(scheduler)) => {
                scheduler.abort(request);
            }
            (Command::EndSession(session), Some(scheduler)) => {
                scheduler.end_session(session);
            }
            (Command::WeightVersion(version), Some(scheduler)) => {
                scheduler.set_weight_version(version);
            }
            (Command::Flush(sender), Some(scheduler)) => {
                let idle = scheduler.is_idle();
                if idle {
                    scheduler.flush();
                }
                // The caller may have gone.
                let _ = sender.send(idle);
            }
            (Command::Pause(pause, sender), _) => {
                self.pause = pause;
                self.pause_answers.push(sender);
            }
            (Command::Trace(trace), _) => {
                self.ended_trace = None;
                self.trace = Some(trace);
            }
            (Command::EndTrace(sender), _) => {
                self.end_trace();
                // The caller may have gone.
                let _ = sender.send(self.ended_trace.take());
            }
            (
                Command::Abort(_)
                | Command::EndSession(_)
                | Command::WeightVersion(_)
                | Command::Flush(_),
                None,
            ) => {}
        }
        Ok(())
    }

    pub(super) fn submit_all(&mut self, requests: Vec<NewRequest<RowParams>>) {
        for request in requests {
            self.submit(request);
        }
    }

    fn submit(&mut self, mut request: NewRequest<RowParams>) {
        if let Some(params) = &mut request.sampling.extension {
            // Penalties count what comes after the prompt.
            Arc::make_mut(params).penalties.counted_from = request.prompt.len() as u32;
        }
        request.params_bytes = params_bytes(&request.sampling);
        let (id, samples) = (request.id, request.samples);
        let Some(scheduler) = &mut self.scheduler else {
            return self.reject(id, samples, &FinishReason::Aborted);
        };
        match scheduler.submit(request) {
            Ok(()) => self
                .sequences
                .extend((0..samples).map(|sample| (id, sample))),
            Err(refusal) => self.reject(id, samples, &FinishReason::Refused(refusal)),
        }
    }

    /// Handles what was sent before the inbox was closed; only requests get an answer.
    pub(super) fn drain_inbox(&mut self) {
        while let Ok(command) = self.inbox.try_recv() {
            match command {
                Command::Submit(request) => self.submit(*request),
                Command::SubmitAll(requests) => self.submit_all(requests),
                _ => {}
            }
        }
    }

    /// Rejects all requests until the service shuts down.
    pub(super) fn reject_until_stop(&mut self, end: &FinishReason) {
        let untrace = |replica: &Self| {
            let number = replica.number;
            replica.shared.update(number, |state| state.tracing = false);
        };
        untrace(self);
        while let Ok(command) = self.inbox.recv() {
            match command {
                Command::Stop => return,
                Command::Trace(_) => untrace(self),
                Command::Submit(request) => self.reject(request.id, request.samples, end),
                Command::SubmitAll(requests) => {
                    for request in requests {
                        self.reject(request.id, request.samples, end);
                    }
                }
                _ => {}
            }
        }
    }
}
