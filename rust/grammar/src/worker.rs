//! The threads that compile: each compiles a grammar in its compiler process first, then in this process.

use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::error::GrammarError;
use crate::grammar::Grammar;
use crate::limits::CompilerCommand;
use crate::pending::CompiledGrammar;
use crate::process::{Failure, Process};
use crate::shared::{Job, Shared};
use crate::threads;

/// What has become of a job.
enum Outcome {
    Settled(Result<Arc<CompiledGrammar>, GrammarError>),
    /// It takes longer than others should wait for.
    Slow,
    /// Nothing waits for it.
    Abandoned,
}

/// Starts the threads, which end when the sender is dropped.
pub(crate) fn start(shared: &Arc<Shared>) -> io::Result<SyncSender<Job>> {
    let limits = shared.settings.limits;
    // No more than may wait are sent, so that sending never waits.
    let (slow, slow_jobs) = sync_channel(limits.waiting);
    let (jobs, received) = sync_channel(limits.waiting);
    let received = Arc::new(Mutex::new(received));
    for _ in 0..limits.threads.get() {
        let worker = Worker::new(shared, Some(slow.clone()));
        let jobs = Arc::clone(&received);
        threads::spawn("pie-grammar", limits.own_stack(), move || worker.run(&jobs))?;
    }
    let worker = Worker::new(shared, None);
    let slow_jobs = Mutex::new(slow_jobs);
    threads::spawn("pie-grammar-slow", limits.own_stack(), move || {
        worker.run(&slow_jobs);
    })?;
    Ok(jobs)
}

/// What a thread works with.
struct Worker {
    shared: Arc<Shared>,
    /// Where grammars go that take long; `None` for the thread that compiles these.
    slow: Option<SyncSender<Job>>,
    /// Started by the first grammar, and again after one that it did not survive.
    process: Option<Process>,
}

impl Worker {
    fn new(shared: &Arc<Shared>, slow: Option<SyncSender<Job>>) -> Self {
        Self {
            shared: Arc::clone(shared),
            slow,
            process: None,
        }
    }

    fn run(mut self, jobs: &Mutex<Receiver<Job>>) {
        while let Some(job) = threads::next(jobs) {
            let compile = AssertUnwindSafe(|| self.compile(&job));
            let kind = job.grammar.kind();
            let outcome = panic::catch_unwind(compile)
                .unwrap_or(Outcome::Settled(Err(GrammarError::Panicked { kind })));
            match outcome {
                Outcome::Settled(result) => job.pending.resolve(result),
                Outcome::Slow => self.pass_on(job),
                Outcome::Abandoned => {}
            }
            if self.slow.is_none() {
                // Few grammars are slow: the next one does not come soon.
                self.process = None;
            }
        }
    }

    /// Leaves a job to the thread of slow ones.
    fn pass_on(&self, job: Job) {
        let limits = self.shared.settings.limits;
        let sent = self.slow.as_ref().map(|slow| slow.try_send(job));
        if let Some(Err(error)) = sent {
            let (TrySendError::Full(job) | TrySendError::Disconnected(job)) = error;
            job.pending.resolve(Err(limits.busy()));
        }
    }

    fn compile(&mut self, job: &Job) -> Outcome {
        if self.shared.is_abandoned(job) {
            return Outcome::Abandoned;
        }
        // Nothing of this grammar is the client's.
        let is_trusted = matches!(job.grammar, Grammar::JsonObject);
        if let Some(command) = self.shared.settings.process.clone()
            && !is_trusted
            && let Err(outcome) = self.try_out(&command, job)
        {
            return outcome;
        }
        let kind = job.grammar.kind();
        let compiled = match self.shared.model() {
            Ok(model) => model.compile(&job.grammar),
            Err(reason) => Err(GrammarError::Wrong {
                kind,
                reason: reason.clone(),
            }),
        };
        if let Ok(compiled) = &compiled {
            self.shared.report(compiled);
        }
        Outcome::Settled(compiled.map(Arc::new))
    }

    /// Has the grammar compiled where it may do any harm.
    fn try_out(&mut self, command: &CompilerCommand, job: &Job) -> Result<(), Outcome> {
        let kind = job.grammar.kind();
        let limits = self.shared.settings.limits;
        let shared = Arc::clone(&self.shared);
        loop {
            let time = self.time();
            let process = self.process(command).map_err(|error| {
                let reason = error.to_string();
                Outcome::Settled(Err(GrammarError::NoCompiler { kind, reason }))
            })?;
            let is_fresh = process.is_fresh;
            let until = (Instant::now() + time).min(job.pending.deadline());
            let is_abandoned = || shared.is_abandoned(job);
            let failure = match process.compile(&job.grammar, until, &is_abandoned) {
                Ok(()) => return Ok(()),
                Err(Failure::Grammar(error)) => return Err(Outcome::Settled(Err(error))),
                Err(failure) => failure,
            };
            self.process = None;
            match failure {
                // It may have ended for another reason, as what earlier grammars left in its memory.
                Failure::Ended(_) if !is_fresh => {}
                Failure::Ended(error) | Failure::Grammar(error) => {
                    return Err(Outcome::Settled(Err(error)));
                }
                Failure::TooSlow if self.slow.is_some() && limits.slow < limits.compile_time => {
                    return Err(Outcome::Slow);
                }
                Failure::TooSlow => {
                    let limit = limits.compile_time;
                    return Err(Outcome::Settled(Err(GrammarError::TooSlow { kind, limit })));
                }
                Failure::Abandoned => return Err(Outcome::Abandoned),
            }
        }
    }

    /// How long this thread may have a grammar compiled.
    fn time(&self) -> Duration {
        let limits = self.shared.settings.limits;
        match self.slow {
            Some(_) => limits.slow.min(limits.compile_time),
            None => limits.compile_time,
        }
    }

    fn process(&mut self, command: &CompilerCommand) -> io::Result<&mut Process> {
        let process = if let Some(process) = self.process.take() {
            process
        } else {
            Process::start(command, &self.shared.vocabulary, &self.shared.settings)?
        };
        Ok(self.process.insert(process))
    }
}
